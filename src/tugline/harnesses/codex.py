"""Codex CLI (npm ``@openai/codex``), which speaks Responses only.

Facts this file stands on: a model name it does not know keeps it to plain function tools; without
``unbounded_connection_retries = false`` it waits for ever when the gateway is gone; the feature
switches below are the set with which it looks up no host name; it compacts its history by
``model_context_window``, so that is told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tugline.harnesses.base import Launch, LaunchContext, reading
from tugline.harnesses.extensions import Server, servers
from tugline.harnesses.extensions import skills as skill_files
from tugline.harnesses.npm import Npm
from tugline.harnesses.preset import Preset, Window

_KEY = "TUGLINE_KEY"
_OFF = (
    "plugins", "remote_plugin", "apps", "tool_suggest", "skill_search", "goals", "shell_snapshot",
    "unbounded_connection_retries",
)  # fmt: skip


class Codex(Preset):
    """`sub_agents` lets it start agents of its own, which run beside it in the same session.

    `context_window` is the engine's, in tokens; `mcp` are servers and `skills` texts of SKILL.md,
    by name; `args` are further options of ``codex exec``.
    """

    name = "codex"
    keeps = (".codex/sessions/**/*.jsonl",)
    says = ((r"thread '.*' panicked at", "it panicked"),)

    def __init__(
        self,
        *,
        version: str = "0.169.0",
        sub_agents: bool = False,
        context_window: Window = 131072,
        mcp: Mapping[str, Any] | None = None,
        skills: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
    ) -> None:
        self.version: str | None = version
        self._sub_agents, self._window, self._args = sub_agents, context_window, args
        self._servers = servers("codex", mcp)
        self._skills = skill_files("codex", skills, ".codex/skills")
        self.package = Npm("codex", "@openai/codex", version, "bin/codex.js")

    def launch(self, seat: LaunchContext) -> Launch:
        """``codex exec``, unattended, its own sandbox off: the runtime is the sandbox."""
        return Launch(
            argv=reading(
                f"{seat.home}/instruction.txt",
                *(*self.package.command, "exec", "--json", "--skip-git-repo-check"),
                *("--dangerously-bypass-approvals-and-sandbox", *self._args, "-"),
            ),
            env={
                "HOME": seat.home,
                "CODEX_HOME": f"{seat.home}/.codex",
                _KEY: seat.key,
                **self.package.env,
            },
            files={
                "instruction.txt": seat.instruction,
                ".codex/config.toml": self._config(seat),
                **self._skills,
            },
        )

    def _config(self, seat: LaunchContext) -> str:
        features = dict.fromkeys(_OFF, False) | {"multi_agent": self._sub_agents}
        switches = "\n".join(f"{name} = {_toml(on)}" for name, on in features.items())
        return f"""\
model = {_toml(seat.model)}
model_provider = "tugline"
model_context_window = {self._window}
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.tugline]
name = "tugline"
base_url = {_toml(f"{seat.base_url}/v1")}
env_key = "{_KEY}"
wire_api = "responses"

[analytics]
enabled = false

[feedback]
enabled = false

[features]
{switches}
{"".join(_server(name, server) for name, server in self._servers.items())}"""


def _server(name: str, server: Server) -> str:
    """A table of its settings."""
    if server.url is not None:
        fields = {"url": _toml(server.url), "http_headers": _table(server.headers)}
    else:
        fields = {
            "command": _toml(server.command),
            "args": _toml(server.args),
            "env": _table(server.env),
        }
    lines = "".join(f"{key} = {value}\n" for key, value in fields.items())
    return f"\n[mcp_servers.{name}]\n{lines}"


def _table(values: Mapping[str, str]) -> str:
    pairs = (f"{_toml(key)} = {_toml(value)}" for key, value in values.items())
    return f"{{{', '.join(pairs)}}}"


def _toml(value: object) -> str:
    """JSON's texts and lists are TOML's too, but for its pairs of surrogates and a bare DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
