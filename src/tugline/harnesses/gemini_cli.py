"""Gemini CLI (npm ``@google/gemini-cli``), which speaks Google's ``generateContent``.

A model must be named, or it asks another model which to take; it retries when headers take 60 s;
its exit code after an error is the HTTP status modulo 256, and 0 after SIGTERM. It has no setting
for the context window and assumes a million tokens.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tugline.harnesses.base import LaunchContext
from tugline.harnesses.extensions import format_for_gemini, parse_servers, parse_skills
from tugline.harnesses.npm import Npm
from tugline.harnesses.preset import NODE_CRASHES, Preset

_SETTINGS = {
    "security": {"auth": {"selectedType": "gemini-api-key"}},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"enableAutoUpdate": False, "disableAutoUpdate": True, "disableUpdateNag": True},
}


@dataclass(kw_only=True, eq=False)
class GeminiCli(Preset):
    """`mcp` are servers and `skills` texts of SKILL.md, by name; `args` are further options."""

    name = "gemini_cli"
    log_globs = (".gemini/tmp/*/chats/*.json*",)
    crash_patterns = NODE_CRASHES
    crash_codes = {52: "it refused its settings"}  # noqa: RUF012 - never changed
    command_marks = ("/",)

    version: str = "0.61.0"
    mcp: Mapping[str, Any] | None = None
    skills: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._servers = parse_servers(self.name, self.mcp)
        self._skills = parse_skills(self.name, self.skills, ".gemini/skills")

    def make_package(self) -> Npm:
        """The npm package."""
        return Npm(self.name, "@google/gemini-cli", self.version, "bundle/gemini.js")

    def make_arguments(self, context: LaunchContext) -> tuple[str, ...]:
        """``gemini``, unattended: its prompt is what it reads on stdin."""
        return ("--yolo", "-m", context.model, "--output-format", "json", *self.args)

    def make_env(self, context: LaunchContext) -> dict[str, str]:
        """Address and key."""
        return {
            "GOOGLE_GEMINI_BASE_URL": context.base_url,
            "GEMINI_API_KEY": context.key,
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
            "GEMINI_CLI_NO_RELAUNCH": "true",
        }

    def make_files(self, context: LaunchContext) -> dict[str, str]:
        """Settings and skills."""
        settings = {**_SETTINGS, "mcpServers": format_for_gemini(self._servers)}
        return {".gemini/settings.json": json.dumps(settings, indent=1), **self._skills}
