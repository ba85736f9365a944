"""Background tasks of the server: expiry of leases and deadlines, and retention."""

from __future__ import annotations

import asyncio
import math
import time

from tugline import log
from tugline.errors import StoreError
from tugline.server.blobs import Blobs, sweep
from tugline.server.store import events, leases, nodes, results, tasks
from tugline.server.store.base import Tx
from tugline.server.store.database import Database

_DAY_S = 86_400.0
_log = log.get("server")


class _Background:
    """A task that runs while the context manager is open."""

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def __aexit__(self, *_exc: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        raise NotImplementedError


class Expiry(_Background):
    """Expire leases, group deadlines and stop orders when they are due.

    One task sleeps until the nearest deadline and is woken when a nearer one comes up. When the
    server itself was away (restarted, suspended, without its database), no node could renew: then
    all deadlines restart instead of punishing healthy nodes. Waking `asleep_s` late counts as away.
    """

    def __init__(
        self,
        database: Database,
        *,
        lease_s: float,
        asleep_s: float = 5.0,
        retry_s: float = 0.5,
    ) -> None:
        self._database, self._lease_s = database, lease_s
        self._asleep_s, self._retry_s = asleep_s, retry_s

    async def __aenter__(self) -> None:
        await self._extend_all()
        await super().__aenter__()

    async def _run(self) -> None:
        away = False
        with self._database.hub.subscribe("timers") as timers:
            while True:
                try:
                    if away:
                        await self._extend_all()
                        away = False
                    due = await self._database.read(self._next_due)
                    if due is not None and due <= time.time():
                        await self._database.write(expire, lease_s=self._lease_s)
                        continue
                    loop = asyncio.get_running_loop()
                    await timers.wait(None if due is None else loop.time() + due - time.time())
                    away = due is not None and time.time() > due + self._asleep_s
                except Exception as error:  # noqa: BLE001 - without this task nothing ever expires
                    known = isinstance(error, StoreError)
                    _log.error("deadlines not checked", error=str(error), exc_info=not known)
                    away = True
                    await asyncio.sleep(self._retry_s)

    async def _extend_all(self) -> None:
        await self._database.write(nodes.extend_all, self._lease_s)

    def _next_due(self, tx: Tx) -> float | None:
        """The nearest deadline."""
        [(lease, group, stop)] = tx.all(
            "SELECT (SELECT MIN(deadline) FROM nodes WHERE state <> 'gone'),"
            " (SELECT MIN(deadline) FROM tasks"
            "  WHERE released IS NULL AND deadline IS NOT NULL AND reason = ''),"
            " (SELECT MIN(stop_at) FROM sessions WHERE stop IS NOT NULL)"
        )
        stop = None if stop is None else stop + self._lease_s
        return min((at for at in (lease, group, stop) if at is not None), default=None)


def expire(tx: Tx, *, lease_s: float) -> None:
    """Expire everything that is due at `Tx.now`."""
    for node in nodes.list_expired(tx):
        leases.expire_node(tx, node, f"no heartbeat for {lease_s:g} s")
    for task in results.list_due(tx):
        results.close(tx, task, "deadline")
    leases.end_unstopped(tx, tx.now - lease_s)


class Retention(_Background):
    """Delete old tasks, events and nodes, and blobs without a result: at the start, then hourly."""

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        *,
        keep_events_s: float,
        keep_tasks_s: float = math.inf,
        every_s: float = 3600.0,
    ) -> None:
        self._database, self._blobs = database, blobs
        self._keep_events_s, self._keep_tasks_s = keep_events_s, keep_tasks_s
        self._every_s = every_s

    async def _run(self) -> None:
        while True:
            try:
                await self.run_once(time.time())
            except StoreError as error:
                _log.warning("old data not deleted", error=str(error))
            await asyncio.sleep(self._every_s)

    async def run_once(self, now: float) -> None:
        """Delete what is too old at `now`. Raises `StoreError`."""
        write = self._database.write_relaxed
        if self._keep_tasks_s < math.inf:
            while await write(tasks.delete_finished, now - self._keep_tasks_s):
                pass
        await sweep(self._blobs, self._database)
        while await write(events.trim, now - self._keep_events_s):
            pass
        await write(nodes.trim, now - _DAY_S)
