"""mini-swe-agent (PyPI ``mini-swe-agent``), one bash tool, through LiteLLM; it never streams.

LiteLLM needs ``mcp`` at run time without declaring it, and without it every call fails before it is
sent; any refusal but 401, 403 and 404 is retried ten times with waits of up to a minute unless that
is limited; a turn without a tool call is deleted from its history.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tugline.errors import ConfigError
from tugline.harnesses.base import MAX_ARGUMENT, LaunchContext, choose
from tugline.harnesses.preset import Preset, fits_argument
from tugline.harnesses.python import Python

_MODELS = {
    "openai_chat": ("openai/", ()),
    "openai_responses": ("openai/", ("--model-class", "litellm_response")),
    "anthropic": ("anthropic/", ()),
}
"""Dialect to LiteLLM's provider and further options."""


@dataclass(kw_only=True, eq=False)
class MiniSweAgent(Preset):
    """`args` are further options of its command line; ``-c`` names its prompts and limits."""

    name = "mini_swe_agent"
    spent_status = 401
    """It retries ten times after a 400."""
    log_globs = ("trajectory.json",)

    version: str = "2.4.6"
    dialect: str = "openai_chat"
    args: Sequence[str] = ("-c", "mini.yaml")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._provider, self._options = choose(self.name, "dialect", self.dialect, _MODELS)

    def make_package(self) -> Python:
        """The package with the versions of LiteLLM and mcp that work with it."""
        pins = ("litellm==1.106.2", "mcp==2.3.0")
        return Python(self.name, "mini-swe-agent", self.version, "minisweagent", also=pins)

    def make_arguments(self, context: LaunchContext) -> tuple[str, ...]:
        """``mini -y``, unattended, its trajectory in its home."""
        return (
            *("-y", "--exit-immediately", *self._options, *self.args),
            *("-m", f"{self._provider}{context.model}", "-o", f"{context.home}/trajectory.json"),
        )

    def pass_instruction(self, instruction: str) -> tuple[str, ...]:
        """As an argument. Raises `ConfigError` for one that is too long."""
        if not fits_argument(instruction):
            msg = (
                f"harness 'mini_swe_agent': instruction is {len(instruction.encode())} bytes "
                f"long, must be at most {MAX_ARGUMENT}, as its program takes it as an argument"
            )
            raise ConfigError(msg)
        return ("-t", instruction)

    def make_env(self, context: LaunchContext) -> dict[str, str]:
        """Addresses, keys and retries."""
        return {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_GLOBAL_CONFIG_DIR": f"{context.home}/.mini",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENAI_API_BASE": f"{context.base_url}/v1",
            "OPENAI_API_KEY": context.key,
            "ANTHROPIC_BASE_URL": context.base_url,
            "ANTHROPIC_API_KEY": context.key,
        }
