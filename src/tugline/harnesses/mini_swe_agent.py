"""mini-swe-agent (PyPI ``mini-swe-agent``), one bash tool, through LiteLLM; it never streams.

Facts this file stands on: LiteLLM needs ``mcp`` at run time without saying so, and without it every
call fails before it is sent; any refusal but 401, 403 and 404 is tried ten times with waits of up
to a minute unless that is limited; a turn without a tool call is deleted from its history.
"""

from __future__ import annotations

from collections.abc import Sequence

from tugline.errors import ConfigError
from tugline.harnesses.base import LONGEST_ARGUMENT, Launch, LaunchContext, chosen, is_long
from tugline.harnesses.preset import Preset
from tugline.harnesses.python import Python

_MODELS = {
    "openai_chat": ("openai/", ()),
    "openai_responses": ("openai/", ("--model-class", "litellm_response")),
    "anthropic": ("anthropic/", ()),
}
"""Dialect to LiteLLM's provider and further options."""


class MiniSweAgent(Preset):
    """`args` are further options of its command line; ``-c`` names its prompts and limits."""

    name = "mini_swe_agent"
    spent_status = 401
    """It tries again ten times after a 400."""
    keeps = ("trajectory.json",)

    def __init__(
        self,
        *,
        version: str = "2.4.6",
        dialect: str = "openai_chat",
        args: Sequence[str] = ("-c", "mini.yaml"),
    ) -> None:
        self.version: str | None = version
        self._provider, options = chosen("mini_swe_agent", "dialect", dialect, _MODELS)
        self._options = (*options, *args)
        self.package = Python(
            "mini_swe_agent",
            "mini-swe-agent",
            version,
            "minisweagent",
            also=("litellm==1.106.2", "mcp==2.3.0"),
        )

    def launch(self, seat: LaunchContext) -> Launch:
        """``mini -y``, unattended, its trajectory in its home."""
        if is_long(seat.instruction):
            msg = (
                f"harness 'mini_swe_agent': instruction is {len(seat.instruction.encode())} bytes "
                f"long, must be at most {LONGEST_ARGUMENT}, as its program takes it as an argument"
            )
            raise ConfigError(msg)
        return Launch(
            argv=(
                *(*self.package.command, "-y", "--exit-immediately", *self._options),
                *("-m", f"{self._provider}{seat.model}", "-o", f"{seat.home}/trajectory.json"),
                *("-t", seat.instruction),
            ),
            env={
                "HOME": seat.home,
                "MSWEA_CONFIGURED": "true",
                "MSWEA_GLOBAL_CONFIG_DIR": f"{seat.home}/.mini",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "MSWEA_SILENT_STARTUP": "1",
                "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "OPENAI_API_BASE": f"{seat.base_url}/v1",
                "OPENAI_API_KEY": seat.key,
                "ANTHROPIC_BASE_URL": seat.base_url,
                "ANTHROPIC_API_KEY": seat.key,
            },
        )
