"""opencode (npm ``opencode-ai``), which speaks all four dialects through the providers it bundles.

Facts this file stands on: it is a native program (npm needs Node, opencode does not); an
instruction given as an argument reaches the model in double quotes, so it goes to stdin; unless
`title` is off it asks for a title beside the first turn. It would install a package for plug-ins
into its settings folder at every start; a folder that looks as if it had been keeps it from npm.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tugline.harnesses.base import Launch, Seat, chosen, reading
from tugline.harnesses.npm import Npm

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


class Opencode:
    """`title` leaves the request for a session title on; `args` are further options.

    `context_window` is the engine's, in tokens.
    """

    name = "opencode"
    offers_tools = True

    def __init__(
        self,
        *,
        version: str = "1.18.33",
        dialect: str = "openai_chat",
        title: bool = False,
        context_window: int = 131072,
        args: Sequence[str] = (),
    ) -> None:
        self.version: str | None = version
        self._provider, self._path = chosen("opencode", "dialect", dialect, _PROVIDERS)
        self._title, self._window, self._args = title, context_window, args
        self._package = Npm("opencode", "opencode-ai", version, "bin/opencode.exe")

    async def install(self) -> None:
        """Install this version of opencode unless it is there."""
        await self._package.install()

    def launch(self, seat: Seat) -> Launch:
        """``opencode run``, unattended, telling what it does as lines of JSON."""
        folders = {
            f"XDG_{kind}_HOME": f"{seat.home}/.{kind.lower()}"
            for kind in ("CONFIG", "DATA", "CACHE", "STATE")
        }
        return Launch(
            argv=reading(
                f"{seat.home}/instruction.txt",
                *(*self._package.command, "run", "--format", "json"),
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
            },
        )

    def _config(self, seat: Seat) -> str:
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
        }
        return json.dumps(config, indent=1)
