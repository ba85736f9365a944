"""Choose the best runtime of this machine: bubblewrap where it works, else plain processes.

The choice is logged once, on first use. A task that must not run without isolation names
`bubblewrap` or `container` itself.
"""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

from tugline import log
from tugline.sandbox.base import Runtime, Sandbox, SandboxSpec
from tugline.sandbox.bubblewrap import Bubblewrap
from tugline.sandbox.local import LocalRuntime
from tugline.types import Workspace

_log = log.get("sandbox")


class Auto(Runtime):
    """Opens sandboxes of `Bubblewrap`, or of `LocalRuntime` where that does not work.

    `options` are those of `Bubblewrap`; those that `LocalRuntime` does not have are then ignored.
    """

    def __init__(self, **options: Any) -> None:
        self._bubblewrap = Bubblewrap(**options)
        fit = inspect.signature(LocalRuntime).parameters
        self._local = LocalRuntime(
            **{name: value for name, value in options.items() if name in fit}
        )
        self._ignored = sorted(options.keys() - fit.keys())
        self._chosen: Runtime | None = None
        self._choosing = threading.Lock()

    @contextlib.asynccontextmanager
    async def open(
        self, directory: Path, spec: SandboxSpec | None = None
    ) -> AsyncIterator[Sandbox]:
        """Open a sandbox of the chosen runtime."""
        runtime = await asyncio.to_thread(self._choose)
        async with runtime.open(directory, spec) as sandbox:
            yield sandbox

    async def prefetch(self, workspaces: Iterable[Workspace]) -> list[str]:
        """Fill the caches of the chosen runtime."""
        runtime = await asyncio.to_thread(self._choose)
        return await runtime.prefetch(workspaces)

    def reap(self, directory: Path) -> int:
        """End what either left: another choice may have been made before."""
        return self._local.reap(directory) + self._bubblewrap.reap(directory)

    def list_weaknesses(self) -> Sequence[str]:
        """Return those of the chosen runtime."""
        return self._choose().list_weaknesses()

    def _choose(self) -> Runtime:
        """Blocks the first time."""
        with self._choosing:
            if self._chosen is None:
                problem = self._bubblewrap.check_available()
                self._chosen = self._local if problem else self._bubblewrap
                if problem:
                    weaknesses = "; ".join(self._local.list_weaknesses())
                    ignored = {"ignored": self._ignored} if self._ignored else {}
                    _log.warning("no isolation here", problem=problem, so=weaknesses, **ignored)
            return self._chosen
