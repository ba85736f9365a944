"""Qwen Code (npm ``@qwen-code/qwen-code``), which speaks OpenAI Chat.

With these settings it looks up no host name; it retries when headers take 120 s; unless disabled,
it asks the model what to remember when it is done; the same call with the same arguments five times
ends the session.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tugline.harnesses.base import LaunchContext
from tugline.harnesses.extensions import format_for_gemini, parse_servers, parse_skills
from tugline.harnesses.npm import Npm
from tugline.harnesses.preset import NODE_CRASHES, Preset, Window, fits_argument

_MEMORY = ("enableManagedAutoMemory", "enableManagedAutoDream", "enableAutoSkill")


@dataclass(kw_only=True, eq=False)
class QwenCode(Preset):
    """`context_window` is the engine's, in tokens; `args` are further options.

    `mcp` are servers and `skills` texts of SKILL.md, by name.
    """

    name = "qwen_code"
    log_globs = (".qwen/projects/**/*.jsonl",)
    crash_patterns = NODE_CRASHES
    command_marks = ("/",)

    version: str = "0.24.4"
    context_window: Window = 131072
    mcp: Mapping[str, Any] | None = None
    skills: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._servers = parse_servers(self.name, self.mcp)
        self._skills = parse_skills(self.name, self.skills, ".qwen/skills")

    def make_package(self) -> Npm:
        """The npm package."""
        package = "@qwen-code/qwen-code"
        return Npm(self.name, package, self.version, "cli-entry.js", min_node=(22, 0))

    def make_arguments(self, context: LaunchContext) -> tuple[str, ...]:
        """``qwen -p``, unattended."""
        return ("--yolo", "--auth-type", "openai", "--output-format", "json", *self.args)

    def pass_instruction(self, instruction: str) -> tuple[str, ...] | None:
        """As an argument where it fits: Qwen Code appends two line ends to what is on stdin."""
        return (f"--prompt={instruction}",) if fits_argument(instruction) else None

    def make_env(self, context: LaunchContext) -> dict[str, str]:
        """Address, key and model."""
        return {
            "OPENAI_BASE_URL": f"{context.base_url}/v1",
            "OPENAI_API_KEY": context.key,
            "OPENAI_MODEL": context.model,
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            "QWEN_CODE_NO_RELAUNCH": "true",
        }

    def make_files(self, context: LaunchContext) -> dict[str, str]:
        """Settings and skills."""
        settings = {
            "usageStatisticsEnabled": False,
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {
                "enableAutoUpdate": False,
                "disableAutoUpdate": True,
                "disableUpdateNag": True,
            },
            "model": {"generationConfig": {"contextWindowSize": self.context_window}},
            "memory": dict.fromkeys(_MEMORY, False),
            "mcpServers": format_for_gemini(self._servers),
        }
        return {".qwen/settings.json": json.dumps(settings, indent=1), **self._skills}
