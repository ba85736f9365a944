"""MCP servers and skills of a task; each preset writes them in its program's own format.

Servers are started by the agent, so a `command` must exist in the sandbox (such as a script among
the task's files) and a `url` must be reachable from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tugline.errors import ConfigError


class McpServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An MCP server: a `command` that speaks over stdin and stdout, or a `url` (HTTP)."""

    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    url: str | None = None
    headers: dict[str, str] = {}


def parse_servers(harness: str, option: Mapping[str, Any] | None) -> dict[str, McpServer]:
    """The option `mcp`: servers by name. Raises `ConfigError`."""
    servers = {}
    for name, value in (option or {}).items():
        where = f"harness {harness!r}: mcp[{name!r}]"
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name):
            msg = f"{where}: a name has letters, digits, '_' and '-' only, and at most 40"
            raise ConfigError(msg)
        try:
            server = msgspec.convert(value, McpServer)
        except msgspec.ValidationError as error:
            msg = f"{where} is {value!r}: {error}"
            raise ConfigError(msg) from error
        if (server.command is None) == (server.url is None):
            msg = f"{where} is {value!r}, must have either command (and args, env) or url"
            raise ConfigError(msg)
        servers[name] = server
    return servers


def parse_skills(harness: str, option: Mapping[str, str] | None, folder: str) -> dict[str, str]:
    """The option `skills` (name to the text of its SKILL.md) as files below `folder`."""
    files = {}
    for name, text in (option or {}).items():
        where = f"harness {harness!r}: skills[{name!r}]"
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
            msg = f"{where}: a name has small letters, digits and '-' only"
            raise ConfigError(msg)
        head = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL) if isinstance(text, str) else None
        if not head or not {"name", "description"} <= set(re.findall(r"(?m)^\w+", head[1])):
            msg = (
                f"{where} must be the text of a SKILL.md, which starts with '---', lines "
                "'name: ...' and 'description: ...', and '---'"
            )
            raise ConfigError(msg)
        files[f"{folder}/{name}/SKILL.md"] = text
    return files


def format_for_gemini(servers: Mapping[str, McpServer]) -> dict[str, dict[str, object]]:
    """``mcpServers`` of settings.json, as Gemini CLI and its descendant Qwen Code read it."""
    return {
        name: {"httpUrl": server.url, "headers": server.headers, "trust": True}
        if server.url is not None
        else {"command": server.command, "args": server.args, "env": server.env, "trust": True}
        for name, server in servers.items()
    }
