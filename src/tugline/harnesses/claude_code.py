"""Claude Code (npm ``@anthropic-ai/claude-code``), which speaks Anthropic Messages.

It is a native program: only npm needs Node. As root it refuses to skip permissions unless
``IS_SANDBOX=1``. For an unknown model it assumes a window of a million tokens unless one is set. By
default it sends a prompt of 50 KB and moves its cache markers with every turn; with `lean` the
prompt is a third of that, and each turn only appends.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tugline.harnesses.base import Launch, LaunchContext
from tugline.harnesses.preset import BUN_CRASHES, ExtensiblePreset, McpServer, Window
from tugline.schema import read_values

_ENV: dict[str, dict[str, str]] = read_values(Path(__file__).with_name("claude_code.toml"))
"""Environment variables that are set always, with `lean`, and with skills."""
_LEAN_TOOLS = ("Bash", "Edit", "Read", "Write")


@dataclass(kw_only=True, eq=False)
class ClaudeCode(ExtensiblePreset):
    """Runs Claude Code with the allow-list `tools` (None: four if `lean`, else all).

    `context_window` is the engine's, in tokens; `args` are further options.
    """

    name = "claude_code"
    npm_package = "@anthropic-ai/claude-code"
    setup_script = "install.cjs"
    log_globs = (".claude/projects/**/*.jsonl",)
    skills_folder = ".claude/skills"
    crash_patterns = BUN_CRASHES
    command_marks = ("/",)

    version: str = "2.1.332"
    lean: bool = True
    tools: Sequence[str] | None = None
    context_window: Window = 131072

    def configure(self, context: LaunchContext) -> Launch:
        """Return ``claude -p``, unattended, with events as JSON lines."""
        tools = self.tools
        if tools is None and self.lean:
            tools = (*_LEAN_TOOLS, *(("Skill",) if self.skills else ()))
        servers = {name: _format_server(server) for name, server in self.servers.items()}
        return Launch(
            argv=(
                # `--tools` takes all following words, so another option must come next.
                *(("--tools", ",".join(tools)) if tools is not None else ()),
                *(*self.args, "-p", "--verbose"),
                *("--mcp-config", f"{context.home}/mcp.json", "--strict-mcp-config"),
                *("--output-format", "stream-json", "--dangerously-skip-permissions"),
            ),
            env={
                "CLAUDE_CONFIG_DIR": f"{context.home}/.claude",
                "ANTHROPIC_BASE_URL": context.base_url,
                "ANTHROPIC_API_KEY": context.key,
                "ANTHROPIC_MODEL": context.model,
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": context.model,
                "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(self.context_window),
                **_ENV["always"],
                **(_ENV["lean"] if self.lean else {}),
                **(_ENV["skills"] if self.skills else {}),
            },
            files={"mcp.json": json.dumps({"mcpServers": servers}, indent=1), **self.skill_files},
        )


def _format_server(server: McpServer) -> dict[str, object]:
    if server.url is not None:
        return {"type": "http", "url": server.url, "headers": server.headers}
    return {"type": "stdio", "command": server.command, "args": server.args, "env": server.env}
