"""Claude Code (npm ``@anthropic-ai/claude-code``), which speaks Anthropic Messages.

Facts this file stands on: it is a native program (npm needs Node, Claude Code does not); as root it
refuses to skip permissions unless ``IS_SANDBOX=1``; for a model it does not know it assumes a
window of a million tokens unless it is told. By default it sends 50 KB and moves its cache markers
with every turn; `lean` sends a third of that and strictly appends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tugline.harnesses.base import Launch, LaunchContext, plain, reading
from tugline.harnesses.extensions import Server, servers
from tugline.harnesses.extensions import skills as skill_files
from tugline.harnesses.npm import Npm
from tugline.harnesses.preset import BUN_SAYS, Preset, Window

_QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    "IS_SANDBOX": "1",
}
_LEAN = {
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
    "DISABLE_PROMPT_CACHING": "1",
    "MAX_THINKING_TOKENS": "0",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8192",
    "CLAUDE_CODE_MAX_RETRIES": "2",
    "CLAUDE_CODE_DISABLE_BUNDLED_SKILLS": "1",
}
_SKILLED = {"SLASH_COMMAND_TOOL_CHAR_BUDGET": "16000"}
"""Room for what skills say of themselves; by default their names alone may be told."""
_LEAN_TOOLS = ("Bash", "Edit", "Read", "Write")


class ClaudeCode(Preset):
    """`tools` is its allow-list (None: four when `lean`, else all); `args` are further options.

    `context_window` is the engine's, in tokens; `mcp` are servers and `skills` texts of SKILL.md,
    by name.
    """

    name = "claude_code"
    keeps = (".claude/projects/**/*.jsonl",)
    says = BUN_SAYS

    def __init__(  # noqa: PLR0913 - options of a task
        self,
        *,
        version: str = "2.1.329",
        lean: bool = True,
        tools: Sequence[str] | None = None,
        context_window: Window = 131072,
        mcp: Mapping[str, Any] | None = None,
        skills: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
    ) -> None:
        self.version: str | None = version
        self._servers = servers("claude_code", mcp)
        self._skills = skill_files("claude_code", skills, ".claude/skills")
        lean_tools = (*_LEAN_TOOLS, *(("Skill",) if skills else ()))
        allowed = tools if tools is not None or not lean else lean_tools
        # `--tools` takes every word that follows it: another option must come next.
        self._options = [*(["--tools", ",".join(allowed)] if allowed is not None else []), *args]
        self._env = _QUIET | (_LEAN if lean else {}) | (_SKILLED if skills else {})
        self._window = context_window
        self.package = Npm(
            "claude_code",
            "@anthropic-ai/claude-code",
            version,
            "bin/claude.exe",
            setup="install.cjs",
        )

    def launch(self, seat: LaunchContext) -> Launch:
        """``claude -p``, unattended, telling what it does as lines of JSON."""
        return Launch(
            argv=reading(
                f"{seat.home}/instruction.txt",
                *(*self.package.command, *self._options, "-p", "--verbose"),
                *("--mcp-config", f"{seat.home}/mcp.json", "--strict-mcp-config"),
                *("--output-format", "stream-json", "--dangerously-skip-permissions"),
            ),
            env={
                "HOME": seat.home,
                "CLAUDE_CONFIG_DIR": f"{seat.home}/.claude",
                "ANTHROPIC_BASE_URL": seat.base_url,
                "ANTHROPIC_API_KEY": seat.key,
                "ANTHROPIC_MODEL": seat.model,
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": seat.model,
                "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(self._window),
                **self._env,
            },
            files={
                "instruction.txt": plain(seat.instruction),
                "mcp.json": json.dumps({"mcpServers": self._mcp()}, indent=1),
                **self._skills,
            },
        )

    def _mcp(self) -> dict[str, object]:
        return {name: _server(server) for name, server in self._servers.items()}


def _server(server: Server) -> dict[str, object]:
    if server.url is not None:
        return {"type": "http", "url": server.url, "headers": server.headers}
    return {"type": "stdio", "command": server.command, "args": server.args, "env": server.env}
