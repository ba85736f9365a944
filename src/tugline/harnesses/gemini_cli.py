"""Gemini CLI (npm ``@google/gemini-cli``) and its descendant Qwen Code (``@qwen-code/qwen-code``).

Gemini CLI speaks Google's ``generateContent``. Without a model name it asks another model to choose
one. It retries if headers take longer than 60 s. Its exit code after an error is the HTTP status
modulo 256, and 0 after SIGTERM. It has no setting for the context window and assumes a million
tokens. Only the task's skills are enabled.

Qwen Code speaks OpenAI Chat. With these settings it resolves no host name. It retries if headers
take longer than 120 s. Unless disabled, it asks the model at the end for facts to remember. Five
equal tool calls in a row end the session.
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
    """Base of both presets, which have one settings file that includes MCP servers."""

    crash_patterns = preset.NODE_CRASHES
    command_marks = ("/",)

    def write_settings(self, folder: str, own: Mapping[str, object]) -> dict[str, str]:
        """Return the settings file in `folder`, with the settings `own`, and the skills."""
        servers = {name: _format_server(server) for name, server in self.servers.items()}
        settings = {**_SETTINGS, **own, "mcpServers": servers}
        return {f"{folder}/settings.json": json.dumps(settings, indent=1), **self.skill_files}


def _format_server(server: preset.McpServer) -> dict[str, object]:
    if server.url is not None:
        return {"httpUrl": server.url, "headers": server.headers, "trust": True}
    return {"command": server.command, "args": server.args, "env": server.env, "trust": True}


@dataclass(kw_only=True, eq=False)
class GeminiCli(_SettingsFile):
    """Runs Gemini CLI. `args` are further options."""

    name = "gemini_cli"
    npm_package = "@google/gemini-cli"
    log_globs = (".gemini/tmp/*/chats/*.json*",)
    skills_folder = ".gemini/skills"
    crash_codes = {52: "it rejected its settings"}  # noqa: RUF012 - never changed

    version: str = "0.61.0"

    def configure(self, context: LaunchContext) -> Launch:
        """Return ``gemini``, unattended, which reads its prompt from stdin."""
        builtin = {"antigravity-support", "skill-creator"}  # their order in prompts varies
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
    """Runs Qwen Code. `context_window` is the engine's, in tokens; `args` are further options."""

    name = "qwen_code"
    npm_package = "@qwen-code/qwen-code"
    log_globs = (".qwen/projects/**/*.jsonl",)
    skills_folder = ".qwen/skills"

    version: str = "0.24.4"
    context_window: preset.Window = 131072

    def configure(self, context: LaunchContext) -> Launch:
        """Return ``qwen -p``, unattended."""
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
        """Pass it as an argument if it fits: Qwen Code appends two newlines to text from stdin."""
        return (f"--prompt={instruction}",) if preset.fits_argument(instruction) else None
