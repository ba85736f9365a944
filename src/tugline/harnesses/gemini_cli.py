"""Gemini CLI (npm ``@google/gemini-cli``) and its descendant Qwen Code (``@qwen-code/qwen-code``).

Gemini CLI speaks Google's ``generateContent``. A model must be named, or it asks another model
which to take; it retries when headers take 60 s; its exit code after an error is the HTTP status
modulo 256, and 0 after SIGTERM. It has no setting for the context window and assumes a million
tokens. Of skills it knows only those that the task gives.

Qwen Code speaks OpenAI Chat. With these settings it looks up no host name; it retries when headers
take 120 s; unless disabled, it asks the model what to remember when it is done; the same call with
the same arguments five times ends the session.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from tugline.harnesses import preset
from tugline.harnesses.base import Launch, LaunchContext

_SETTINGS = {
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"enableAutoUpdate": False, "disableAutoUpdate": True, "disableUpdateNag": True},
}
_MEMORY = ("enableManagedAutoMemory", "enableManagedAutoDream", "enableAutoSkill")


class _SettingsFile(preset.ExtensiblePreset):
    """What both have in common: one file of settings, MCP servers included."""

    crash_patterns = preset.NODE_CRASHES
    command_marks = ("/",)

    def write_settings(self, folder: str, own: Mapping[str, object]) -> dict[str, str]:
        """Settings in `folder`, with `own` among them, and skills."""
        servers = {name: _format_server(server) for name, server in self.servers.items()}
        settings = {**_SETTINGS, **own, "mcpServers": servers}
        return {f"{folder}/settings.json": json.dumps(settings, indent=1), **self.skill_files}


def _format_server(server: preset.McpServer) -> dict[str, object]:
    if server.url is not None:
        return {"httpUrl": server.url, "headers": server.headers, "trust": True}
    return {"command": server.command, "args": server.args, "env": server.env, "trust": True}


@dataclass(kw_only=True, eq=False)
class GeminiCli(_SettingsFile):
    """`args` are further options."""

    name = "gemini_cli"
    npm_package = "@google/gemini-cli"
    log_globs = (".gemini/tmp/*/chats/*.json*",)
    skills_folder = ".gemini/skills"
    crash_codes = {52: "it refused its settings"}  # noqa: RUF012 - never changed

    version: str = "0.61.0"

    def configure(self, context: LaunchContext) -> Launch:
        """``gemini``, unattended: its prompt is what it reads on stdin."""
        builtin = {"antigravity-support", "skill-creator"}  # listed in another order each time
        settings = {
            "security": {"auth": {"selectedType": "gemini-api-key"}},
            "skills": {"disabled": sorted(builtin - {*(self.skills or ())})},
        }
        return Launch(
            argv=("--yolo", "-m", context.model, "--output-format", "json", *self.args),
            env={
                "GOOGLE_GEMINI_BASE_URL": context.base_url,
                "GEMINI_API_KEY": context.key,
                "GEMINI_CLI_TRUST_WORKSPACE": "true",
                "GEMINI_CLI_NO_RELAUNCH": "true",
            },
            files=self.write_settings(".gemini", settings),
        )


@dataclass(kw_only=True, eq=False)
class QwenCode(_SettingsFile):
    """`context_window` is the engine's, in tokens; `args` are further options."""

    name = "qwen_code"
    npm_package = "@qwen-code/qwen-code"
    log_globs = (".qwen/projects/**/*.jsonl",)
    skills_folder = ".qwen/skills"

    version: str = "0.24.4"
    context_window: preset.Window = 131072

    def configure(self, context: LaunchContext) -> Launch:
        """``qwen -p``, unattended."""
        settings = {
            "usageStatisticsEnabled": False,
            "model": {"generationConfig": {"contextWindowSize": self.context_window}},
            "memory": dict.fromkeys(_MEMORY, False),
        }
        return Launch(
            argv=("--yolo", "--auth-type", "openai", "--output-format", "json", *self.args),
            env={
                "OPENAI_BASE_URL": f"{context.base_url}/v1",
                "OPENAI_API_KEY": context.key,
                "OPENAI_MODEL": context.model,
                "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
                "QWEN_CODE_NO_RELAUNCH": "true",
            },
            files=self.write_settings(".qwen", settings),
        )

    def pass_instruction(self, instruction: str) -> tuple[str, ...] | None:
        """As an argument where it fits: Qwen Code appends two line ends to what is on stdin."""
        return (f"--prompt={instruction}",) if preset.fits_argument(instruction) else None
