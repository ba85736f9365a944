"""Gemini CLI (npm ``@google/gemini-cli``), which speaks Google's ``generateContent``.

Facts this file stands on: a model must be named, or it asks another one which to take; it gives up
and asks again when headers take 60 s; its exit code after an error is the HTTP status modulo 256,
and 0 after SIGTERM. It has no setting for the context window and assumes a million tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tugline.harnesses.base import Launch, Seat
from tugline.harnesses.npm import Npm

_SETTINGS = {
    "security": {"auth": {"selectedType": "gemini-api-key"}},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"enableAutoUpdate": False, "disableAutoUpdate": True, "disableUpdateNag": True},
}


class GeminiCli:
    """`args` are further options of its command line."""

    name = "gemini_cli"

    def __init__(self, *, version: str = "0.61.0", args: Sequence[str] = ()) -> None:
        self.version: str | None = version
        self._args = args
        self._package = Npm("gemini_cli", "@google/gemini-cli", version, "bundle/gemini.js")

    async def install(self) -> None:
        """Find Node and install this version of Gemini CLI unless it is there."""
        await self._package.install()

    def launch(self, seat: Seat) -> Launch:
        """``gemini -p``, unattended."""
        return Launch(
            argv=(
                *(*self._package.command, "--yolo", "-m", seat.model),
                *("--output-format", "json", *self._args, f"--prompt={seat.instruction}"),
            ),
            env={
                "HOME": seat.home,
                "GOOGLE_GEMINI_BASE_URL": seat.base_url,
                "GEMINI_API_KEY": seat.key,
                "GEMINI_CLI_TRUST_WORKSPACE": "true",
                **self._package.env,
            },
            files={".gemini/settings.json": json.dumps(_SETTINGS, indent=1)},
        )
