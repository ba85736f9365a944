"""Codex CLI (npm ``@openai/codex``), which speaks Responses only.

With an unknown model name it uses plain function tools only. Without
``unbounded_connection_retries = false`` it waits forever if the gateway is gone. With the feature
switches in ``codex.toml`` it resolves no host name. It compacts its history according to
``model_context_window``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tugline.harnesses.base import Launch, LaunchContext
from tugline.harnesses.preset import ExtensiblePreset, McpServer, Window

_CONFIG = Path(__file__).with_name("codex.toml").read_text(encoding="utf-8")
_KEY = "TUGLINE_KEY"


@dataclass(kw_only=True, eq=False)
class Codex(ExtensiblePreset):
    """Runs Codex CLI. With `sub_agents` it may start agents of its own in the same session.

    `context_window` is the engine's, in tokens; `args` are further options of ``codex exec``.
    """

    name = "codex"
    npm_package = "@openai/codex"
    log_globs = (".codex/sessions/**/*.jsonl",)
    skills_folder = ".codex/skills"
    crash_patterns = ((r"thread '.*' panicked at", "it panicked"),)

    version: str = "0.171.0"
    sub_agents: bool = False
    context_window: Window = 131072

    def configure(self, context: LaunchContext) -> Launch:
        """Return ``codex exec``, unattended, without Codex's own sandbox."""
        unattended = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        return Launch(
            argv=("exec", "--json", *unattended, *self.args, "-"),
            env={"CODEX_HOME": f"{context.home}/.codex", _KEY: context.key},
            files={".codex/config.toml": self._make_config(context), **self.skill_files},
        )

    def _make_config(self, context: LaunchContext) -> str:
        return _CONFIG.format(
            model=_toml(context.model),
            window=self.context_window,
            base_url=_toml(f"{context.base_url}/v1"),
            key=_KEY,
            sub_agents=_toml(self.sub_agents),
            servers="".join(_format_server(*each) for each in self.servers.items()),
        )


def _format_server(name: str, server: McpServer) -> str:
    if server.url is not None:
        fields: dict[str, object] = {"url": server.url, "http_headers": server.headers}
    else:
        fields = {"command": server.command, "args": server.args, "env": server.env}
    lines = "".join(f"{key} = {_toml(value)}\n" for key, value in fields.items())
    return f"\n[mcp_servers.{name}]\n{lines}"


def _toml(value: object) -> str:
    """Return a value as TOML: JSON strings and lists are TOML, except for surrogates and DEL."""
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_toml(key)} = {_toml(own)}" for key, own in value.items())
        return f"{{{pairs}}}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
