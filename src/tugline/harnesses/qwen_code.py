"""Qwen Code (npm ``@qwen-code/qwen-code``), which speaks OpenAI Chat.

Facts this file stands on: with these settings it looks up no host name; it gives up and asks again
when headers take 120 s; unless told not to, it asks the model what to remember when it is done; the
same call with the same arguments five times ends the session.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tugline.harnesses.base import Launch, LaunchContext, is_long, plain, reading
from tugline.harnesses.extensions import mcp_settings, servers
from tugline.harnesses.extensions import skills as skill_files
from tugline.harnesses.npm import Npm
from tugline.harnesses.preset import NODE_SAYS, Preset, Window

_MEMORY = ("enableManagedAutoMemory", "enableManagedAutoDream", "enableAutoSkill")


class QwenCode(Preset):
    """`context_window` is the engine's, in tokens; `args` are further options.

    `mcp` are servers and `skills` texts of SKILL.md, by name.
    """

    name = "qwen_code"
    keeps = (".qwen/projects/**/*.jsonl",)
    says = NODE_SAYS

    def __init__(
        self,
        *,
        version: str = "0.24.4",
        context_window: Window = 131072,
        mcp: Mapping[str, Any] | None = None,
        skills: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
    ) -> None:
        self.version: str | None = version
        self._window, self._args = context_window, args
        self._servers = servers("qwen_code", mcp)
        self._skills = skill_files("qwen_code", skills, ".qwen/skills")
        self.package = Npm(
            "qwen_code", "@qwen-code/qwen-code", version, "cli-entry.js", oldest_node=(22, 0)
        )

    def launch(self, seat: LaunchContext) -> Launch:
        """``qwen -p``, unattended."""
        argv = (
            *(*self.package.command, "--yolo", "--auth-type", "openai"),
            *("--output-format", "json", *self._args),
        )
        prompt, long = plain(seat.instruction), is_long(seat.instruction)
        return Launch(
            # It puts two ends of line after what it reads on stdin.
            argv=reading(f"{seat.home}/instruction.txt", *argv)
            if long
            else (*argv, f"--prompt={prompt}"),
            env={
                "HOME": seat.home,
                "OPENAI_BASE_URL": f"{seat.base_url}/v1",
                "OPENAI_API_KEY": seat.key,
                "OPENAI_MODEL": seat.model,
                "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
                "QWEN_CODE_NO_RELAUNCH": "true",
                **self.package.env,
            },
            files={
                ".qwen/settings.json": self._settings(),
                **({"instruction.txt": prompt} if long else {}),
                **self._skills,
            },
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
            "memory": dict.fromkeys(_MEMORY, False),
            "mcpServers": mcp_settings(self._servers),
        }
        return json.dumps(settings, indent=1)
