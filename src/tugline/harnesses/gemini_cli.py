"""Gemini CLI (npm ``@google/gemini-cli``), which speaks Google's ``generateContent``.

Facts this file stands on: a model must be named, or it asks another one which to take; it gives up
and asks again when headers take 60 s; its exit code after an error is the HTTP status modulo 256,
and 0 after SIGTERM. It has no setting for the context window and assumes a million tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tugline.harnesses.base import Launch, LaunchContext, plain, reading
from tugline.harnesses.extensions import mcp_settings, servers
from tugline.harnesses.extensions import skills as skill_files
from tugline.harnesses.npm import Npm
from tugline.harnesses.preset import NODE_SAYS, Preset

_SETTINGS = {
    "security": {"auth": {"selectedType": "gemini-api-key"}},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"enableAutoUpdate": False, "disableAutoUpdate": True, "disableUpdateNag": True},
}


class GeminiCli(Preset):
    """`mcp` are servers and `skills` texts of SKILL.md, by name; `args` are further options."""

    name = "gemini_cli"
    keeps = (".gemini/tmp/*/chats/*.json*",)
    says = NODE_SAYS
    codes = ((52, "it refused its settings"),)

    def __init__(
        self,
        *,
        version: str = "0.61.0",
        mcp: Mapping[str, Any] | None = None,
        skills: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
    ) -> None:
        self.version: str | None = version
        self._args = args
        self._settings = {**_SETTINGS, "mcpServers": mcp_settings(servers("gemini_cli", mcp))}
        self._skills = skill_files("gemini_cli", skills, ".gemini/skills")
        self.package = Npm("gemini_cli", "@google/gemini-cli", version, "bundle/gemini.js")

    def launch(self, seat: LaunchContext) -> Launch:
        """``gemini``, unattended: what it reads on stdin is its prompt as it is."""
        return Launch(
            argv=reading(
                f"{seat.home}/instruction.txt",
                *(*self.package.command, "--yolo", "-m", seat.model),
                *("--output-format", "json", *self._args),
            ),
            env={
                "HOME": seat.home,
                "GOOGLE_GEMINI_BASE_URL": seat.base_url,
                "GEMINI_API_KEY": seat.key,
                "GEMINI_CLI_TRUST_WORKSPACE": "true",
                "GEMINI_CLI_NO_RELAUNCH": "true",
                **self.package.env,
            },
            files={
                "instruction.txt": plain(seat.instruction),
                ".gemini/settings.json": json.dumps(self._settings, indent=1),
                **self._skills,
            },
        )
