"""The rollout server without HTTP: the parts that share one store.

Everything is in the database before it is acknowledged, so a server that is killed continues where
it was (I3); nothing kept in memory could not be lost. Whoever waits (for work, results, events, a
log) sleeps until it is notified and has a deadline. A node in the same process uses `dispatcher`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec

from tugline.errors import Invalid
from tugline.protocol import Accepted, Barrier, Control, Event, EventKind, Pause, PauseMode, Results
from tugline.server.background import Expiry, Retention
from tugline.server.blobs import Blobs
from tugline.server.dispatch import ServerDispatcher
from tugline.server.logs import LogPart, Logs
from tugline.server.store import events, leases, nodes, results, sessions, tasks
from tugline.server.store.base import Tx
from tugline.server.store.database import Database
from tugline.server.validation import pack_tasks
from tugline.server.webhooks import WebhookSender
from tugline.types import Status, Task

LEASE_S = 30.0
KEEP_EVENTS_S = 30 * 86_400.0


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
            for part in (
                self.logs,
                self._expiry,
                self.dispatcher,
                self._webhooks,
                self._retention,
            ):
                await stack.enter_async_context(part)
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
        """The result of a session, encoded and compressed. Raises `Missing`."""
        return await self.blobs.get(await self.database.read(results.get_blob, session))

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


WITHIN_S = 60.0
"""How long a barrier waits by default."""


class Weights:
    """Changes of the state that all nodes share."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def announce(self, version: int) -> Barrier:
        """Announce new weights; sessions too far behind restart if their task says so.

        Raises `Invalid`.
        """
        if version < 0:
            msg = f"version is {version}, must be 0 or more"
            raise Invalid(msg, field="version")
        control = await self._database.write(_announce, version)
        return await self._barrier(control, WITHIN_S)

    async def pause(self, pause: Pause) -> Barrier:
        """Hold model calls on all nodes; waits for them, at most `within_s`."""
        control = await self._database.write(
            lambda tx: _change(tx, EventKind.PAUSED, paused=pause.mode)
        )
        return await self._barrier(control, pause.within_s)

    async def resume(self) -> Barrier:
        """Let model calls through again."""
        control = await self._database.write(lambda tx: _change(tx, EventKind.RESUMED, paused=None))
        return await self._barrier(control, WITHIN_S)

    async def _barrier(self, control: Control, within_s: float) -> Barrier:
        until = asyncio.get_running_loop().time() + within_s
        with self._database.hub.subscribe("applied") as subscription:
            while True:
                applied, missing = await self._database.read(nodes.list_applied, control.generation)
                if not missing or not await subscription.wait(until):
                    break
        return Barrier(
            generation=control.generation,
            paused=control.paused,
            version=control.version,
            applied=applied,
            missing=missing,
        )


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
