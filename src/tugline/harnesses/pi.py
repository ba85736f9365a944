"""pi (npm ``@earendil-works/pi-coding-agent``), a coding agent with read, bash, edit and write.

It starts in 0.4 s, sends a prompt of 6 KB and speaks four dialects, so the demo and the tests use
it. In text mode its exit code reports errors (0 or 1); with ``--mode json`` it is always 0. A small
``contextWindow`` makes pi request answers of one token, so a large one is declared and the gateway
enforces the true window. With ``-p`` it connects only to the model. It has no MCP client.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tugline.harnesses import preset
from tugline.harnesses.base import Launch, LaunchContext

_PROVIDER = "tugline"
_APIS = {
    "openai_chat": ("openai-completions", "/v1"),
    "openai_responses": ("openai-responses", "/v1"),
    "anthropic": ("anthropic-messages", ""),
    "google": ("google-generative-ai", "/v1beta"),
}
"""Pi's name of each dialect, and the suffix of its base URL."""


@dataclass(kw_only=True, eq=False)
class Pi(preset.Preset):
    """Runs pi with the allow-list `tools` (None: all four); `args` are further options.

    The default `args` exclude AGENTS.md files of the folders *above* the task's files. `reasoning`
    makes pi request it and send its system prompt as a developer message. `context_window` is the
    window in pi's settings, in tokens; `skills` are texts of SKILL.md by name.
    """

    name = "pi"
    npm_package = "@earendil-works/pi-coding-agent"
    log_globs = (".pi/agent/sessions/**/*.jsonl",)
    crash_patterns = preset.NODE_CRASHES
    command_marks = ("@",)

    version: str = "1.6.0"
    dialect: preset.Dialect = "openai_chat"
    reasoning: bool = False
    tools: Sequence[str] | None = None
    context_window: preset.Window = 131072
    skills: Mapping[str, str] | None = None
    args: Sequence[str] = ("--no-context-files",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._skills = preset.parse_skills(self.name, self.skills, ".pi/agent/skills")

    def configure(self, context: LaunchContext) -> Launch:
        """Return ``pi -p``, with the gateway as only provider and no other connections."""
        tools = ("--tools", ",".join(self.tools)) if self.tools is not None else ()
        api, path = _APIS[self.dialect]
        model = {
            "id": context.model,
            "name": context.model,
            "reasoning": self.reasoning,
            "input": ["text"],
            "contextWindow": self.context_window,
            "maxTokens": 16384,
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        }
        provider = {
            "baseUrl": f"{context.base_url}{path}",
            "api": api,
            "apiKey": context.key,
            "models": [model],
        }
        models = json.dumps({"providers": {_PROVIDER: provider}}, indent=1)
        return Launch(
            argv=("--provider", _PROVIDER, "--model", context.model, *tools, *self.args, "-p"),
            env={
                "PI_CODING_AGENT_DIR": f"{context.home}/.pi/agent",
                "PI_OFFLINE": "1",
                "PI_SKIP_VERSION_CHECK": "1",
                "PI_TELEMETRY": "0",
            },
            files={".pi/agent/models.json": models, **self._skills},
        )

    def pass_instruction(self, instruction: str) -> tuple[str, ...] | None:
        """Pass it as an argument if it fits: pi strips white space around a prompt from stdin."""
        return ("--", instruction) if preset.fits_argument(instruction) else None
