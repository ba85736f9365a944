"""opencode (npm ``opencode-ai``), which speaks all four dialects through the providers it bundles.

Facts this file stands on: it is a native program (npm needs Node, opencode does not); an
instruction given as an argument reaches the model in double quotes, so it goes to stdin; unless
`title` is off it asks for a title beside the first turn. It would install a package for plug-ins
into its settings folder at every start; a folder that looks as if it had been keeps it from npm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tugline.harnesses.base import Launch, LaunchContext, chosen, reading
from tugline.harnesses.extensions import Server, servers
from tugline.harnesses.extensions import skills as skill_files
from tugline.harnesses.npm import Npm
from tugline.harnesses.preset import BUN_SAYS, Preset, Window

_PROVIDER = "tugline"
_PROVIDERS = {
    "openai_chat": ("@ai-sdk/openai-compatible", "/v1"),
    "openai_responses": ("@ai-sdk/openai", "/v1"),
    "anthropic": ("@ai-sdk/anthropic", "/v1"),
    "google": ("@ai-sdk/google", "/v1beta"),
}
"""Dialect to the provider that speaks it and what its base URL ends with."""
_SETTINGS = ".config/opencode"
_AS_INSTALLED = {
    f"{_SETTINGS}/node_modules/.keep": "",
    f"{_SETTINGS}/package-lock.json": json.dumps(
        {"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}
    ),
}


class Opencode(Preset):
    """`title` leaves the request for a session title on; `args` are further options.

    `context_window` is the engine's, in tokens; `mcp` are servers and `skills` texts of SKILL.md,
    by name.
    """

    name = "opencode"
    offers_tools = True
    keeps = (".data/opencode/log/*.log", ".data/opencode/*.db*")
    says = BUN_SAYS

    def __init__(  # noqa: PLR0913 - options of a task
        self,
        *,
        version: str = "1.18.33",
        dialect: str = "openai_chat",
        title: bool = False,
        context_window: Window = 131072,
        mcp: Mapping[str, Any] | None = None,
        skills: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
    ) -> None:
        self.version: str | None = version
        self._provider, self._path = chosen("opencode", "dialect", dialect, _PROVIDERS)
        self._title, self._window, self._args = title, context_window, args
        self._servers = servers("opencode", mcp)
        self._skills = skill_files("opencode", skills, f"{_SETTINGS}/skills")
        self.package = Npm(
            "opencode", "opencode-ai", version, "bin/opencode.exe", setup="postinstall.mjs"
        )

    def launch(self, seat: LaunchContext) -> Launch:
        """``opencode run``, unattended, telling what it does as lines of JSON."""
        folders = {
            f"XDG_{kind}_HOME": f"{seat.home}/.{kind.lower()}"
            for kind in ("CONFIG", "DATA", "CACHE", "STATE")
        }
        return Launch(
            argv=reading(
                f"{seat.home}/instruction.txt",
                *(*self.package.command, "run", "--format", "json"),
                *("-m", f"{_PROVIDER}/{seat.model}", *self._args),
            ),
            env={
                "HOME": seat.home,
                "OPENCODE_DISABLE_AUTOUPDATE": "1",
                "OPENCODE_DISABLE_MODELS_FETCH": "1",
                "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
                "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
                **folders,
            },
            files={
                "instruction.txt": seat.instruction,
                f"{_SETTINGS}/opencode.json": self._config(seat),
                **_AS_INSTALLED,
                **self._skills,
            },
        )

    def _config(self, seat: LaunchContext) -> str:
        model = {
            "name": seat.model,
            "tool_call": True,
            "reasoning": True,
            "limit": {"context": self._window, "output": 16384},
        }
        provider = {
            "npm": self._provider,
            "name": _PROVIDER,
            "options": {"baseURL": f"{seat.base_url}{self._path}", "apiKey": seat.key},
            "models": {seat.model: model},
        }
        config = {
            "autoupdate": False,
            "share": "disabled",
            "model": f"{_PROVIDER}/{seat.model}",
            "small_model": f"{_PROVIDER}/{seat.model}",
            "agent": {"title": {"disable": not self._title}},
            "permission": {"*": "allow"},
            "enabled_providers": [_PROVIDER],
            "provider": {_PROVIDER: provider},
            "mcp": {name: _server(server) for name, server in self._servers.items()},
        }
        return json.dumps(config, indent=1)


def _server(server: Server) -> dict[str, object]:
    if server.url is not None:
        return {"type": "remote", "url": server.url, "headers": server.headers}
    command = [server.command, *server.args]
    return {"type": "local", "command": command, "environment": server.env}
