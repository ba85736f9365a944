"""pi (npm ``@earendil-works/pi-coding-agent``), a coding agent with read, bash, edit and write.

It starts in 0.4 s, sends a prompt of 6 KB and speaks four dialects, which makes it the harness
of the demo and of our tests. In text mode its exit code is 0 or 1 and means something (with
``--mode json`` it is always 0); a small ``contextWindow`` makes pi ask for answers of one token, so
a large one is declared and the gateway enforces the true window; ``-p`` connects to nothing but the
model. It has no MCP client.
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
"""Dialect to pi's name for it and the end of its base URL."""


@dataclass(kw_only=True, eq=False)
class Pi(preset.Preset):
    """`tools` is pi's allow-list (None: all four); `args` are further options of its command line.

    The default `args` exclude AGENTS.md files of the folders *above* the task's files. `reasoning`
    makes pi ask for it and send its system prompt as a developer message. `context_window` is what
    pi is configured with, in tokens; `skills` are texts of SKILL.md by name.
    """

    name = "pi"
    npm_package = "@earendil-works/pi-coding-agent"
    log_globs = (".pi/agent/sessions/**/*.jsonl",)
    crash_patterns = preset.NODE_CRASHES
    command_marks = ("@",)

    version: str = "0.87.1"
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
        """``pi -p``, with the gateway as its only provider and no connections of its own."""
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
        """As an argument where it fits: pi strips white space around what it reads on stdin."""
        return ("--", instruction) if preset.fits_argument(instruction) else None
