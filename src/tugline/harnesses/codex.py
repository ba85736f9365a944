"""Codex CLI (npm ``@openai/codex``), which speaks Responses only.

A model name it does not know restricts it to plain function tools; without
``unbounded_connection_retries = false`` it waits forever when the gateway is gone; with the feature
switches below it looks up no host name; it compacts its history by ``model_context_window``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tugline.harnesses.base import Launch, LaunchContext
from tugline.harnesses.preset import ExtensiblePreset, McpServer, Window

_CONFIG = Path(__file__).with_name("codex.toml").read_text(encoding="utf-8")
_KEY = "TUGLINE_KEY"
_OFF = (
    "plugins", "remote_plugin", "apps", "tool_suggest", "skill_search", "goals", "shell_snapshot",
    "unbounded_connection_retries",
)  # fmt: skip


@dataclass(kw_only=True, eq=False)
class Codex(ExtensiblePreset):
    """`sub_agents` lets it start agents of its own, which run beside it in the same session.

    `context_window` is the engine's, in tokens; `args` are further options of ``codex exec``.
    """

    name = "codex"
    npm_package = "@openai/codex"
    log_globs = (".codex/sessions/**/*.jsonl",)
    skills_folder = ".codex/skills"
    crash_patterns = ((r"thread '.*' panicked at", "it panicked"),)

    version: str = "0.169.0"
    sub_agents: bool = False
    context_window: Window = 131072

    def configure(self, context: LaunchContext) -> Launch:
        """``codex exec``, unattended, its own sandbox off: the runtime is the sandbox."""
        unattended = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        return Launch(
            argv=("exec", "--json", *unattended, *self.args, "-"),
            env={"CODEX_HOME": f"{context.home}/.codex", _KEY: context.key},
            files={".codex/config.toml": self._make_config(context), **self.skill_files},
        )

    def _make_config(self, context: LaunchContext) -> str:
        features = dict.fromkeys(_OFF, False) | {"multi_agent": self.sub_agents}
        switches = "\n".join(f"{name} = {_toml(on)}" for name, on in features.items())
        return _CONFIG.format(
            model=_toml(context.model),
            window=self.context_window,
            base_url=_toml(f"{context.base_url}/v1"),
            key=_KEY,
            switches=switches,
            servers="".join(_format_server(*each) for each in self.servers.items()),
        )


def _format_server(name: str, server: McpServer) -> str:
    if server.url is not None:
        fields = {"url": _toml(server.url), "http_headers": _toml_table(server.headers)}
    else:
        fields = {
            "command": _toml(server.command),
            "args": _toml(server.args),
            "env": _toml_table(server.env),
        }
    lines = "".join(f"{key} = {value}\n" for key, value in fields.items())
    return f"\n[mcp_servers.{name}]\n{lines}"


def _toml_table(values: Mapping[str, str]) -> str:
    pairs = (f"{_toml(key)} = {_toml(value)}" for key, value in values.items())
    return f"{{{', '.join(pairs)}}}"


def _toml(value: object) -> str:
    """JSON strings and lists are TOML, except for surrogate pairs and a bare DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
