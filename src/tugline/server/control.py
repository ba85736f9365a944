"""The rollout server without HTTP: the parts that share one store.

Everything is in the database before it is acknowledged, so a server that is killed continues where
it was (I3); nothing kept in memory could not be lost. Whoever waits (for work, results, events, a
log) sleeps until it is notified and has a deadline. A node in the same process uses `dispatcher`.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from tugline import log
from tugline.errors import Missing, StoreError
from tugline.protocol import Accepted, Barrier, Control, Event, EventKind, PauseMode, Results
from tugline.server.blobs import Blobs
from tugline.server.dispatch import ServerDispatcher
from tugline.server.logs import LogPart, Logs
from tugline.server.store import events, leases, nodes, results, sessions, tasks
from tugline.server.store.base import Tx
from tugline.server.store.database import Database
from tugline.server.validation import compute_digest, pack_tasks
from tugline.server.webhooks import WebhookSender
from tugline.types import Status, Task

LEASE_S = 30.0
KEEP_EVENTS_S = 30 * 86_400.0
WITHIN_S = 60.0
"""How long a barrier waits by default."""
ORPHAN_S = 3600.0
"""Age at which a blob without a row is removed; writing the row takes seconds."""
_SWEPT = 1000
"""Blobs that are looked up at once."""
_DAY_S = 86_400.0
_log = log.get("server")


class ControlPlane:
    """The parts of one rollout server; an async context manager.

    `folder` is for files of its own, such as logs. `tenants` are weights, 1 for those that are not
    named. `check` refuses tasks that could not be run. `secret` signs callbacks, which go to
    `callback_hosts` only, if any are named. What is read and written without waiting goes straight
    to `database`, with the operations of `tugline.server.store`.
    """

    def __init__(  # noqa: PLR0913 - its settings, named
        self,
        database: Database,
        blobs: Blobs,
        *,
        folder: Path,
        lease_s: float = LEASE_S,
        tenants: Mapping[str, float] = {},
        check: Callable[[Task], None] = lambda _task: None,
        secret: bytes = b"",
        callback_hosts: Collection[str] | None = None,
        keep_events_s: float = KEEP_EVENTS_S,
        keep_tasks_s: float = math.inf,
    ) -> None:
        hosts = None if callback_hosts is None else frozenset(callback_hosts)
        self.database, self.blobs = database, blobs
        self.logs = Logs(folder / "logs")
        self.dispatcher = ServerDispatcher(database, blobs, self.logs, lease_s=lease_s)
        self.weights = Weights(database)
        self._tenants, self._check = tenants, check
        self._webhooks = WebhookSender(database, secret, hosts=hosts)
        self._expiry = Expiry(database, lease_s=lease_s)
        self._retention = Retention(
            database, blobs, keep_events_s=keep_events_s, keep_tasks_s=keep_tasks_s
        )

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.database)
            await self.database.write(sessions.set_weights, self._tenants)
            await self._expiry.extend_all()
            parts = (self.logs, self.dispatcher, self._webhooks, self._expiry, self._retention)
            await stack.enter_async_context(run_beside(*(part.run() for part in parts)))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._stack.aclose()

    async def submit(self, batch: Sequence[Task]) -> list[Accepted]:
        """Store these tasks, all or none; those that exist already are left as they are.

        Raises `Invalid` and `Conflict`, with a field such as ``3.limits.agent_s``.
        """
        return await self.database.write(tasks.submit, await pack_tasks(batch, self._check_task))

    async def results(
        self,
        *,
        consumer: str | None = None,
        after: int | None = None,
        limit: int = 100,
        wait_s: float = 0.0,
        tasks: Sequence[str] | None = None,
        groups: bool = False,
    ) -> Results:
        """Results after a cursor, or after what the consumer acknowledged, or from the beginning.

        With `groups`, whole groups in the order of their release.
        """

        def read(tx: Tx) -> Results:
            start = after
            if start is None:
                start = results.read_acked(tx, consumer) if consumer is not None else 0
            return (results.groups if groups else results.page)(tx, start, limit, tasks)

        topics = [f"task:{task}" for task in tasks or ()] or ["releases" if groups else "results"]
        return await self.database.poll(read, topics, wait_s, lambda page: bool(page.items))

    async def trajectory(self, session: str) -> bytes:
        """The result of a session, encoded and compressed.

        Raises `Missing`, also for a blob that is not what was committed.
        """
        name, digest = await self.database.read(results.get_blob, session)
        data = await self.blobs.get(name)
        if await compute_digest(data) != digest:
            msg = f"the result of {session} is damaged: blob {name!r} has not the SHA-256 {digest}"
            raise Missing(msg)
        return data

    async def events(
        self, *, after: int, limit: int = 100, wait_s: float = 0.0, task: str | None = None
    ) -> list[Event]:
        """Events after a position, of one task or of all."""
        topics = [f"task:{task}" if task else "events"]
        return await self.database.poll(
            lambda tx: events.page(tx, after, limit, task), topics, wait_s, bool
        )

    async def read_log(
        self, session: str, *, offset: int = 0, limit: int = 65_536, wait_s: float = 0.0
    ) -> LogPart:
        """Part of a session's log; waits up to `wait_s` for more of it. Raises `Missing`."""
        entry = await self.database.read(sessions.get, session)
        ended = not entry.leased and entry.status != Status.QUEUED
        if entry.node is not None and session not in self.logs.followed():
            self.database.hub.notify([f"node:{entry.node}"])
        return await self.logs.read(session, offset=offset, limit=limit, wait_s=wait_s, ended=ended)

    def _check_task(self, task: Task) -> None:
        self._check(task)
        self._webhooks.check(task)


# --------------------------------------------------------------------------- weights
class Weights:
    """Changes of the state that all nodes share."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def announce(self, version: int) -> Barrier:
        """Announce new weights; sessions too far behind restart if their task says so."""
        control = await self._database.write(_announce, version)
        return await self._barrier(control, WITHIN_S)

    async def pause(
        self, mode: PauseMode = PauseMode.WAIT, *, within_s: float = WITHIN_S
    ) -> Barrier:
        """Hold model calls on all nodes; waits for them, at most `within_s`."""
        control = await self._database.write(lambda tx: _change(tx, EventKind.PAUSED, paused=mode))
        return await self._barrier(control, within_s)

    async def resume(self) -> Barrier:
        """Let model calls through again."""
        control = await self._database.write(lambda tx: _change(tx, EventKind.RESUMED, paused=None))
        return await self._barrier(control, WITHIN_S)

    async def _barrier(self, control: Control, within_s: float) -> Barrier:
        applied, missing = await self._database.poll(
            lambda tx: nodes.list_applied(tx, control.generation),
            ["applied"],
            within_s,
            lambda names: not names[1],
        )
        return Barrier(**msgspec.structs.asdict(control), applied=applied, missing=missing)


def _announce(tx: Tx, version: int) -> Control:
    control = _change(tx, EventKind.VERSION, version=version)
    leases.abort_stale(tx, version)
    return control


def _change(tx: Tx, kind: EventKind, **fields: int | PauseMode | None) -> Control:
    """Start a new generation of the shared state, unless nothing changes."""
    old = nodes.control(tx)
    new = msgspec.structs.replace(old, **fields)
    if new == old:
        return old
    new = msgspec.structs.replace(new, generation=old.generation + 1)
    nodes.set_control(tx, new)
    mode = new.paused.value if new.paused else ""
    events.add(tx, kind, detail={"version": new.version, "mode": mode})
    return new


# --------------------------------------------------------------------------- background
@contextlib.asynccontextmanager
async def run_beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` while the block lasts, then cancel it and wait for its end."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class Expiry:
    """Expire leases, group deadlines and stop orders when they are due.

    One task sleeps until the nearest deadline and is woken when a nearer one comes up. When the
    server itself was away (restarted, suspended, without its database), no node could renew: then
    all deadlines restart instead of punishing healthy nodes. Waking `asleep_s` late counts as away.
    """

    def __init__(
        self, database: Database, *, lease_s: float, asleep_s: float = 5.0, retry_s: float = 0.5
    ) -> None:
        self._database, self._lease_s = database, lease_s
        self._asleep_s, self._retry_s = asleep_s, retry_s

    async def run(self) -> None:
        """Do so until it is cancelled."""
        away = False
        with self._database.hub.subscribe("timers") as timers:
            while True:
                try:
                    if away:
                        await self.extend_all()
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

    async def extend_all(self) -> None:
        """Restart all deadlines."""
        await self._database.write(nodes.extend_all, self._lease_s)

    def _next_due(self, tx: Tx) -> float | None:
        """The nearest deadline."""
        [(lease, group, stop, *pauses)] = tx.all(
            "SELECT (SELECT MIN(deadline) FROM nodes WHERE state <> 'gone'),"
            " (SELECT MIN(deadline) FROM tasks"
            "  WHERE released IS NULL AND deadline IS NOT NULL AND reason = ''),"
            " (SELECT MIN(stop_at) FROM sessions WHERE stop IS NOT NULL),"
            " (SELECT MIN(retry_at) FROM sessions WHERE retry_at IS NOT NULL),"
            " (SELECT MIN(blocked_until) FROM nodes WHERE blocked_until IS NOT NULL)"
        )
        stop = None if stop is None else stop + self._lease_s
        return min((at for at in (lease, group, stop, *pauses) if at is not None), default=None)


def expire(tx: Tx, *, lease_s: float) -> None:
    """Expire everything that is due at `Tx.now`."""
    for node in nodes.list_expired(tx):
        leases.expire_node(tx, node, f"no heartbeat for {lease_s:g} s")
    for task in results.list_due(tx):
        results.close(tx, task, "deadline")
    leases.end_unstopped(tx, tx.now - lease_s)
    sessions.end_pauses(tx)
    nodes.end_blocks(tx)


class Retention:
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

    async def run(self) -> None:
        """Do so until it is cancelled."""
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


async def sweep(blobs: Blobs, database: Database, *, older_s: float = ORPHAN_S) -> int:
    """Delete the blobs that no result refers to; returns how many."""
    deleted = 0
    async for names in blobs.list_older(time.time() - older_s):
        for start in range(0, len(names), _SWEPT):
            some = names[start : start + _SWEPT]
            for name in set(some) - await database.read(results.list_blobs, some):
                await blobs.delete(name)
                deleted += 1
    return deleted
