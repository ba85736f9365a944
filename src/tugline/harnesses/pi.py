"""pi (npm ``@earendil-works/pi-coding-agent``), a coding agent with read, bash, edit and write.

It starts in 0.4 s, sends a prompt of 6 KB and speaks all four dialects, which makes it the harness
of the demo and of our tests. Facts this file stands on: in text mode the exit code is 0 or 1 and
means something (with ``--mode json`` it is always 0); a small ``contextWindow`` makes pi ask for
answers of one token, so a large one is declared and the gateway enforces the true window; ``-p``
makes no connection but to the model. It knows no MCP servers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tugline.harnesses.base import Launch, LaunchContext, chosen, is_long, reading
from tugline.harnesses.extensions import skills as skill_files
from tugline.harnesses.npm import Npm
from tugline.harnesses.preset import NODE_SAYS, Preset, Window

_PROVIDER = "tugline"
_APIS = {
    "openai_chat": ("openai-completions", "/v1"),
    "openai_responses": ("openai-responses", "/v1"),
    "anthropic": ("anthropic-messages", ""),
    "google": ("google-generative-ai", "/v1beta"),
}
"""Dialect to pi's name for it and what its base URL ends with."""


class Pi(Preset):
    """`tools` is pi's allow-list (None: all four); `args` are further options of its command line.

    The default `args` keep out AGENTS.md files of the folders *above* the task's files. `reasoning`
    makes pi ask for it and send its system prompt as a developer message. `context_window` is what
    pi is told, in tokens; `skills` are texts of SKILL.md by name.
    """

    name = "pi"
    keeps = (".pi/agent/sessions/**/*.jsonl",)
    says = NODE_SAYS

    def __init__(  # noqa: PLR0913 - options of a task
        self,
        *,
        version: str = "0.87.1",
        dialect: str = "openai_chat",
        reasoning: bool = False,
        tools: Sequence[str] | None = None,
        context_window: Window = 131072,
        skills: Mapping[str, str] | None = None,
        args: Sequence[str] = ("--no-context-files",),
    ) -> None:
        self.version: str | None = version
        self._api, self._path = chosen("pi", "dialect", dialect, _APIS)
        self._reasoning, self._window = reasoning, context_window
        self._skills = skill_files("pi", skills, ".pi/agent/skills")
        self._options = [*(["--tools", ",".join(tools)] if tools is not None else []), *args]
        self.package = Npm(
            "pi",
            "@earendil-works/pi-coding-agent",
            version,
            "dist/bundle/cli.js",
            oldest_node=(22, 19),
        )

    def launch(self, seat: LaunchContext) -> Launch:
        """``node cli.js -p``, with the gateway as its only provider."""
        # pi would take a message that starts with '@' for a file to include.
        prompt = f" {seat.instruction}" if seat.instruction.startswith("@") else seat.instruction
        argv = (
            *(*self.package.command, "--provider", _PROVIDER, "--model", seat.model),
            *(*self._options, "-p"),
        )
        long = is_long(seat.instruction)
        return Launch(
            # It leaves out white space around what it reads on stdin.
            argv=reading(f"{seat.home}/instruction.txt", *argv) if long else (*argv, "--", prompt),
            env={
                "HOME": seat.home,
                "PI_CODING_AGENT_DIR": f"{seat.home}/.pi/agent",
                "PI_OFFLINE": "1",
                "PI_SKIP_VERSION_CHECK": "1",
                "PI_TELEMETRY": "0",
                **self.package.env,
            },
            files={
                ".pi/agent/models.json": self._models(seat),
                **({"instruction.txt": prompt} if long else {}),
                **self._skills,
            },
        )

    def _models(self, seat: LaunchContext) -> str:
        model = {
            "id": seat.model,
            "name": seat.model,
            "reasoning": self._reasoning,
            "input": ["text"],
            "contextWindow": self._window,
            "maxTokens": 16384,
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        }
        provider = {
            "baseUrl": f"{seat.base_url}{self._path}",
            "api": self._api,
            "apiKey": seat.key,
            "models": [model],
        }
        return json.dumps({"providers": {_PROVIDER: provider}}, indent=1)
