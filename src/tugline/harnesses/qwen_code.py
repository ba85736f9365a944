"""Qwen Code (npm ``@qwen-code/qwen-code``), which speaks OpenAI Chat.

Facts this file stands on: with these settings it looks up no host name; it gives up and asks again
when headers take 120 s; the same call with the same arguments five times ends the session.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tugline.harnesses.base import Launch, Seat
from tugline.harnesses.npm import Npm


class QwenCode:
    """`context_window` is the engine's, in tokens; `args` are further options."""

    name = "qwen_code"

    def __init__(
        self,
        *,
        version: str = "0.24.4",
        context_window: int = 131072,
        args: Sequence[str] = (),
    ) -> None:
        self.version: str | None = version
        self._window, self._args = context_window, args
        self._package = Npm(
            "qwen_code", "@qwen-code/qwen-code", version, "cli-entry.js", oldest_node=(22, 0)
        )

    async def install(self) -> None:
        """Find Node and install this version of Qwen Code unless it is there."""
        await self._package.install()

    def launch(self, seat: Seat) -> Launch:
        """``qwen -p``, unattended."""
        return Launch(
            argv=(
                *(*self._package.command, "--yolo", "--auth-type", "openai"),
                *("--output-format", "json", *self._args, f"--prompt={seat.instruction}"),
            ),
            env={
                "HOME": seat.home,
                "OPENAI_BASE_URL": f"{seat.base_url}/v1",
                "OPENAI_API_KEY": seat.key,
                "OPENAI_MODEL": seat.model,
                "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
                **self._package.env,
            },
            files={".qwen/settings.json": self._settings()},
        )

    def _settings(self) -> str:
        settings = {
            "usageStatisticsEnabled": False,
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {
                "enableAutoUpdate": False,
                "disableAutoUpdate": True,
                "disableUpdateNag": True,
            },
            "model": {"generationConfig": {"contextWindowSize": self._window}},
        }
        return json.dumps(settings, indent=1)
