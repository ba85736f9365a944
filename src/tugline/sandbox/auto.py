"""The best place that this machine has: bubblewrap where it works, else plain processes.

What is chosen is said once, when it is first used. A task that must not run without a sandbox
names `bubblewrap` or `container` itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

from tugline import log
from tugline.errors import ConfigError
from tugline.sandbox.base import Runtime, Sandbox, SandboxSpec
from tugline.sandbox.bubblewrap.runtime import Bubblewrap
from tugline.sandbox.local import Local
from tugline.types import Workspace

_log = log.get("runtimes")


class Auto(Runtime):
    """Boxes of `Bubblewrap`, or of `Local` where there is none; `options` are those of the former.

    Options that `Local` does not have are dropped with it, and said to be.
    """

    def __init__(self, **options: Any) -> None:
        known = inspect.signature(Bubblewrap).parameters
        for name in options.keys() - known.keys():
            msg = f"runtime 'auto': no option {name!r} (its options: {', '.join(known)})"
            raise ConfigError(msg)
        self._sandbox = Bubblewrap(**options)
        fit = inspect.signature(Local).parameters
        self._plain = Local(**{name: value for name, value in options.items() if name in fit})
        self._dropped = sorted(options.keys() - fit.keys())
        self._chosen: Runtime | None = None
        self._choosing = threading.Lock()

    @contextlib.asynccontextmanager
    async def open(
        self, directory: Path, spec: SandboxSpec | None = None
    ) -> AsyncIterator[Sandbox]:
        """A box under `directory`."""
        runtime = await asyncio.to_thread(self._choose)
        async with runtime.open(directory, spec) as box:
            yield box

    async def prefetch(self, workspaces: Iterable[Workspace]) -> list[str]:
        """As what was chosen has it."""
        runtime = await asyncio.to_thread(self._choose)
        return await runtime.prefetch(workspaces)

    def reap(self, directory: Path) -> int:
        """What either left: another choice may have been made before."""
        return self._plain.reap(directory) + self._sandbox.reap(directory)

    def check_available(self) -> str | None:
        """Nothing: there is always this machine."""
        return None

    def list_weaknesses(self) -> Sequence[str]:
        """Those of what was chosen."""
        return self._choose().list_weaknesses()

    def _choose(self) -> Runtime:
        """Blocks the first time."""
        with self._choosing:
            if self._chosen is None:
                why = self._sandbox.check_available()
                self._chosen = self._plain if why else self._sandbox
                if why:
                    open_ = "; ".join(self._plain.list_weaknesses())
                    ignored = {"ignored": self._dropped} if self._dropped else {}
                    _log.warning("no sandbox here", why=why, so=open_, **ignored)
            return self._chosen
