"""Codex CLI (npm ``@openai/codex``), which speaks Responses only.

Facts this file stands on: a model name it does not know keeps it to plain function tools; without
``unbounded_connection_retries = false`` it waits for ever when the gateway is gone; the feature
switches below are the set with which it looks up no host name; it compacts its history by
``model_context_window``, so that is told.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tugline.harnesses.base import Launch, Seat, reading
from tugline.harnesses.npm import Npm

_KEY = "TUGLINE_KEY"
_OFF = (
    "plugins", "remote_plugin", "apps", "tool_suggest", "skill_search", "goals", "shell_snapshot",
    "unbounded_connection_retries",
)  # fmt: skip


class Codex:
    """`sub_agents` lets it start agents of its own, which run beside it in the same session.

    `context_window` is the engine's, in tokens; `args` are further options of ``codex exec``.
    """

    name = "codex"

    def __init__(
        self,
        *,
        version: str = "0.169.0",
        sub_agents: bool = False,
        context_window: int = 131072,
        args: Sequence[str] = (),
    ) -> None:
        self.version: str | None = version
        self._sub_agents, self._window, self._args = sub_agents, context_window, args
        self._package = Npm("codex", "@openai/codex", version, "bin/codex.js")

    async def install(self) -> None:
        """Find Node and install this version of Codex unless it is there."""
        await self._package.install()

    def launch(self, seat: Seat) -> Launch:
        """``codex exec``, unattended, its own sandbox off: the runtime is the sandbox."""
        return Launch(
            argv=reading(
                f"{seat.home}/instruction.txt",
                *(*self._package.command, "exec", "--json", "--skip-git-repo-check"),
                *("--dangerously-bypass-approvals-and-sandbox", *self._args, "-"),
            ),
            env={
                "HOME": seat.home,
                "CODEX_HOME": f"{seat.home}/.codex",
                _KEY: seat.key,
                **self._package.env,
            },
            files={"instruction.txt": seat.instruction, ".codex/config.toml": self._config(seat)},
        )

    def _config(self, seat: Seat) -> str:
        features = dict.fromkeys(_OFF, False) | {"multi_agent": self._sub_agents}
        switches = "\n".join(f"{name} = {json.dumps(on)}" for name, on in features.items())
        return f"""\
model = {json.dumps(seat.model)}
model_provider = "tugline"
model_context_window = {self._window}
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.tugline]
name = "tugline"
base_url = {json.dumps(f"{seat.base_url}/v1")}
env_key = "{_KEY}"
wire_api = "responses"

[analytics]
enabled = false

[feedback]
enabled = false

[features]
{switches}
"""
