"""End a run whose nodes cannot run sessions, with the reason."""

import asyncio
from collections.abc import Callable

from tugline import log
from tugline.errors import ServerError
from tugline.protocol import NodeState, ResultView
from tugline.server.store import nodes
from tugline.server.store.database import Database
from tugline.types import is_by_agent

_log = log.get("launch")


class NodeWatch:
    """Whether a run has a node that can run sessions."""

    def __init__(self) -> None:
        self.patience_s = 600.0
        """Seconds for which no node may be able to, once one was."""
        self.report: Callable[[str], object] = _log.warning
        """Prints the reason at the start of that time."""
        self._worked = False
        self._unable_since: float | None = None

    def note_result(self, view: ResultView) -> None:
        """Take notice of a result."""
        if is_by_agent(view.status, view.failure):
            self._worked = True
            self._unable_since = None

    async def check(self, database: Database) -> None:
        """Raise `ServerError` if no node is able to, and none ever was or for too long."""
        views = await database.read(nodes.list_views)
        faults = [view.fault for view in views if view.state is NodeState.LIVE]
        if not faults or not all(faults):
            self._unable_since = None
            return
        problem = f"no session can run on this machine: {faults[0]}"
        now = asyncio.get_running_loop().time()
        if self._unable_since is None:
            self._unable_since = now
            if self._worked:
                self.report(f"{problem}; waiting up to {self.patience_s / 60:.0f} minutes for it")
        if not self._worked or now - self._unable_since > self.patience_s:
            raise ServerError(problem)
