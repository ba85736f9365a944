"""What happens because time passes: leases run out, groups fall due, what should stop must stop.

One task sleeps until the nearest of these moments and is woken when a nearer one comes up. When the
server itself was away (restarted, stopped, without its database), nobody could renew: then all
clocks start anew instead of punishing healthy nodes.
"""

from __future__ import annotations

import asyncio
import time

from tugline import log
from tugline.errors import StoreError
from tugline.server.store import groups, leases, nodes
from tugline.server.store.base import Tx
from tugline.server.store.database import Database

_ASLEEP_S = 5.0
"""Waking that much later than intended means that this process did not run."""
_PAUSE_S = 0.5
_log = log.get("server")


class Timers:
    """Makes due what is due; an async context manager, at the start of which all is right."""

    def __init__(self, database: Database, *, lease_s: float) -> None:
        self._database, self._lease_s = database, lease_s

    async def __aenter__(self) -> None:
        await self._spare()
        self._task = asyncio.create_task(self._watch())

    async def __aexit__(self, *_exc: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _watch(self) -> None:
        away = False
        with self._database.hub.listen("timers") as bell:
            while True:
                try:
                    if away:
                        await self._spare()
                        away = False
                    at = await self._database.read(self._next)
                    due_s = max(0.0, at - time.time()) if at is not None else None
                    if due_s is None or due_s > 0:
                        loop = asyncio.get_running_loop()
                        await bell.heard(None if due_s is None else loop.time() + due_s)
                        away = at is not None and time.time() > at + _ASLEEP_S
                    else:
                        await self._database.write(
                            lambda tx: expire(tx, time.time(), self._lease_s)
                        )
                except Exception as error:  # noqa: BLE001 - without clocks nothing ever falls due
                    known = isinstance(error, StoreError)
                    _log.error("clocks stand still", error=str(error), exc_info=not known)
                    away = True
                    await asyncio.sleep(_PAUSE_S)

    async def _spare(self) -> None:
        await self._database.write(lambda tx: nodes.spare(tx, time.time(), self._lease_s))

    def _next(self, tx: Tx) -> float | None:
        """The nearest moment at which something falls due."""
        [(lease, group, stop)] = tx.all(
            "SELECT (SELECT MIN(deadline) FROM nodes WHERE state <> 'gone'),"
            " (SELECT MIN(deadline) FROM tasks"
            "  WHERE released IS NULL AND deadline IS NOT NULL AND reason = ''),"
            " (SELECT MIN(stop_at) FROM sessions WHERE stop IS NOT NULL)"
        )
        stop = None if stop is None else stop + self._lease_s
        return min((at for at in (lease, group, stop) if at is not None), default=None)


def expire(tx: Tx, now: float, lease_s: float) -> None:
    """Do everything that is due by `now`."""
    for node in nodes.late(tx, now):
        leases.lose(tx, node, f"not heard of for {lease_s:g} s", now)
    for task in groups.due(tx, now):
        groups.close(tx, task, "deadline", now)
    leases.overdue(tx, now - lease_s, now)
