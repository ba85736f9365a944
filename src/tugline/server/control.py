"""Rollout server without HTTP: the components that share a store.

State is in the database before it is acknowledged, so a killed server loses nothing (I3); memory
holds only what may be lost. Requests that wait for work, results, events or a log have a deadline
and are woken by notifications. A node in the same process uses `dispatcher`.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Self

import msgspec

from tugline import log, protocol
from tugline.aio import run_beside
from tugline.errors import Invalid, QuotaExceeded, StoreError
from tugline.server.blobs import Blobs, read_blob
from tugline.server.dispatch import ServerDispatcher
from tugline.server.logs import LogPart, Logs
from tugline.server.rejudge import Verdicts, hash_options
from tugline.server.settings import ServerSettings
from tugline.server.store import (
    events,
    leases,
    nodes,
    results,
    runs,
    sessions,
    tasks,
    telemetry,
    time_spent,
)
from tugline.server.store.base import Tx, read_sql
from tugline.server.store.database import Database, uptime
from tugline.server.validation import pack_tasks
from tugline.server.webhooks import WebhookSender
from tugline.types import PluginSpec, Status, Task

WITHIN_S = 60.0
"""Default timeout of a barrier."""
ORPHAN_S = 3600.0
"""Age from which a blob without a row is removed; the row is normally written within seconds."""
_SWEEP_BATCH = 1000
"""Number of blobs per lookup."""
_DAY_S = 86_400.0
_NEXT_DUE = read_sql("next_due")
_LATE_S = 5.0
_RETRY_S = 0.5
_RETENTION_EVERY_S = 3600.0
_log = log.get("server")


class ControlPlane:
    """Components of a rollout server; an async context manager.

    `folder` is for files such as logs. `check` raises for tasks that cannot be run, `fingerprint`
    returns the digest of an evaluator, and `secret` signs callbacks. Callers that need not
    wait read and write `database` directly, with the operations of `tugline.server.store`.
    """

    def __init__(  # noqa: PLR0913 - its data, settings, and what the layers above it know
        self,
        database: Database,
        blobs: Blobs,
        *,
        folder: Path,
        settings: ServerSettings = ServerSettings(),  # noqa: B008 - immutable
        check: Callable[[Task], None] = lambda _task: None,
        fingerprint: Callable[[PluginSpec], str] = hash_options,
        secret: bytes = b"",
    ) -> None:
        self.database = database
        self.blobs = blobs
        self.folder = folder
        self.logs = Logs(folder / "logs")
        self.dispatcher = ServerDispatcher(database, blobs, self.logs, settings)
        self._settings = settings
        self._check = check
        self.verdicts = Verdicts(database, blobs, settings, check, fingerprint)
        self._buckets: dict[tuple[Hashable, str], tuple[float, float]] = {}
        """Token buckets by caller and tenant entry: submissions left, and time of that count."""
        self._webhooks = WebhookSender(database, secret, hosts=settings.callback_hosts)

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.database)
            await self.database.write(events.skip_positions)
            await self.database.write(nodes.extend_leases, self._settings.lease_s)
            parts = (self.logs.run(), self.dispatcher.run(), self._webhooks.run())
            expiry = run_expiry(self.database, self._settings.lease_s)
            await stack.enter_async_context(run_beside(*parts, expiry, self._run_retention()))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._stack.aclose()

    async def submit(
        self, batch: Sequence[Task], run: str | None = None
    ) -> list[protocol.Accepted]:
        """Store tasks of a run, all or none; existing tasks are not changed.

        Raises `Invalid`, `Conflict` and `QuotaExceeded`, with a field such as
        ``3.limits.agent_s``, and `Missing` for an unknown run.
        """
        for number, task in enumerate(batch):
            if task.judges is not None:
                msg = f"{number}.judges is set; recorded sessions are judged by POST /v1/rejudge"
                raise Invalid(msg, field=f"{number}.judges")
        packed = await asyncio.to_thread(pack_tasks, batch, self._check_task)
        return await self.database.write(tasks.submit, packed, self._settings, run)

    async def results(self, query: protocol.ResultQuery) -> protocol.Results:
        """Return results after a cursor, else after the consumer's position, else from the start.

        With `groups`, return whole groups in the order of their release.
        """
        task_ids = query.task or None

        def read(tx: Tx) -> protocol.Results:
            start = query.after
            if start is None:
                start = results.read_acked(tx, query.consumer) if query.consumer else 0
            events.check_position(tx, start)
            return (results.groups if query.groups else results.page)(
                tx, start, query.limit, task_ids, query.run
            )

        everything = "releases" if query.groups else "results"
        topics = [f"task:{task}" for task in query.task] or [everything]
        return await self.database.poll(read, topics, query.wait_s, lambda page: bool(page.items))

    async def trajectory(self, session: str, revision: int | None = None) -> bytes:
        """Return the trajectory of a session, encoded and compressed.

        Raises `Missing`, also for a blob that differs from the committed one, and `Conflict` if
        there is a later revision than `revision`.
        """
        found = await self.database.read(results.get_blob, session, revision)
        return await read_blob(self.blobs, *found)

    async def events(self, query: protocol.EventQuery) -> list[protocol.Event]:
        """Return events after a position, of one task or of all."""
        after = query.after or 0

        def read(tx: Tx) -> list[protocol.Event]:
            events.check_position(tx, after)
            return events.page(tx, after, query.limit, query.task)

        topic = f"task:{query.task}" if query.task else "events"
        return await self.database.poll(read, [topic], query.wait_s, bool)

    async def read_log(self, session: str, *, offset: int = 0, wait_s: float = 0.0) -> LogPart:
        """Read part of a session's log; wait up to `wait_s` for new output. Raises `Missing`."""
        entry = await self.database.read(sessions.get, session)
        ended = not entry.leased and entry.status != Status.QUEUED
        if entry.node is not None and session not in self.logs.followed():
            self.database.hub.notify([f"node:{entry.node}"])
        return await self.logs.read(session, offset=offset, wait_s=wait_s, ended=ended)

    def count_request(self, caller: Hashable, tenant: str) -> None:
        """Count a submission in the caller's token bucket, in memory. Raises `QuotaExceeded`."""
        most = self._settings.find_tenant(tenant).requests_per_minute
        now = self.database.clock()
        if most is not None:
            key = (caller, tenant if tenant in self._settings.tenants else "default")
            left, at = self._buckets.get(key, (most, now))
            left = min(most, left + (now - at) * most / 60) - 1
            if left < 0:
                wait_s = math.ceil(-left * 60 / most)
                msg = (
                    f"tenant is {tenant!r}, whose limit is {most} submissions a minute for "
                    "each token"
                )
                error = QuotaExceeded(f"{msg}; submit again in {wait_s} s", field="tenant")
                error.retry_s = wait_s
                raise error
            self._buckets[key] = left, now

    def _check_task(self, task: Task) -> None:
        self._check(task)
        self._webhooks.check(task)

    # ------------------------------------------------------------------ weights
    async def announce(self, version: int) -> protocol.Barrier:
        """Announce new weights; restart stale sessions whose task requests that."""
        control = await self.database.write(_change, protocol.EventKind.VERSION, version=version)
        return await self._barrier(control, WITHIN_S)

    async def pause(
        self, mode: protocol.PauseMode = protocol.PauseMode.WAIT, *, within_s: float = WITHIN_S
    ) -> protocol.Barrier:
        """Pause model calls on all nodes; wait up to `within_s` for the nodes to confirm."""
        control = await self.database.write(_change, protocol.EventKind.PAUSED, paused=mode)
        return await self._barrier(control, within_s)

    async def resume(self) -> protocol.Barrier:
        """Resume model calls on all nodes."""
        control = await self.database.write(_change, protocol.EventKind.RESUMED, paused=None)
        return await self._barrier(control, WITHIN_S)

    async def _barrier(self, control: protocol.Control, within_s: float) -> protocol.Barrier:
        applied, missing = await self.database.poll(
            lambda tx: nodes.list_applied(tx, control.generation),
            ["applied"],
            within_s,
            lambda names: not names[1],
        )
        return protocol.Barrier(**msgspec.structs.asdict(control), applied=applied, missing=missing)

    # ------------------------------------------------------------------ retention
    async def _run_retention(self) -> None:
        """Delete old data at the start, then hourly, until cancelled."""
        while True:
            try:
                await self.delete_old(self.database.clock())
            except StoreError as error:
                _log.warning("old data not deleted", error=str(error))
            await asyncio.sleep(_RETENTION_EVERY_S)

    async def delete_old(self, now: float) -> None:
        """Delete tasks, events and nodes that have expired at `now`, and blobs without a result.

        Samples of the load are thinned.

        Raises `StoreError`.
        """
        write = self.database.write_relaxed
        settings = self._settings
        if settings.keep_tasks_days is not None:
            before = now - settings.keep_tasks_days * _DAY_S
            alive = now - (settings.keep_consumers_days or math.inf) * _DAY_S
            while await write(tasks.delete_finished, before, alive):
                pass
            await write(runs.trim, before)
            await write(time_spent.trim, before)
        await sweep(self.blobs, self.database)
        while await write(events.trim, now - settings.keep_events_days * _DAY_S):
            pass
        while await write(events.trim_deliveries):
            pass
        await write(nodes.trim, now - _DAY_S)
        node: str | None = ""
        while node is not None:
            node = await write(telemetry.thin, now, settings.keep_events_days * _DAY_S, node)


# --------------------------------------------------------------------------- weights
def _change(
    tx: Tx, /, kind: protocol.EventKind, **fields: int | protocol.PauseMode | None
) -> protocol.Control:
    """Start a new generation of the shared state, unless nothing changes."""
    old = nodes.control(tx)
    new = msgspec.structs.replace(old, **fields)
    if new == old:
        return old
    new = msgspec.structs.replace(new, generation=old.generation + 1)
    nodes.set_control(tx, new)
    if new.version != old.version:
        leases.abort_stale(tx, new.version)
    mode = new.paused.value if new.paused else ""
    events.add(tx, kind, events.Note(detail={"version": new.version, "mode": mode}))
    return new


# --------------------------------------------------------------------------- background
async def run_expiry(database: Database, lease_s: float) -> None:
    """Expire leases, group deadlines and stop orders when they are due, until cancelled.

    One task sleeps until the earliest deadline and is woken when an earlier one is added. While the
    server is down (restarting, suspended, without its database), no node can renew its lease, so
    nodes then get more time. A wake-up that is late by more than `_LATE_S` counts as downtime.
    """
    was_down = False
    with database.hub.subscribe("timers") as timers:
        while True:
            try:
                if was_down:
                    await database.write(nodes.extend_leases, lease_s)
                    was_down = False
                due = await database.read(_next_due, lease_s)
                left = math.inf if due is None else due - database.clock()
                if left <= 0:
                    await database.write(expire, lease_s=lease_s)
                    continue
                until = uptime() + left
                loop = asyncio.get_running_loop()
                await timers.wait(None if due is None else loop.time() + left)
                was_down = uptime() > until + _LATE_S
            except Exception as error:  # noqa: BLE001 - without this task nothing ever expires
                known = isinstance(error, StoreError)
                text = str(error) if known else log.describe_error(error)
                _log.error("deadlines not checked", error=text)
                was_down = True
                await asyncio.sleep(_RETRY_S)


def _next_due(tx: Tx, lease_s: float) -> float | None:
    """Return the earliest deadline; None if there is none."""
    [deadlines] = tx.all(_NEXT_DUE, lease_s=lease_s)
    return min((at for at in deadlines if at is not None), default=None)


def expire(tx: Tx, *, lease_s: float) -> None:
    """Expire leases, groups, stop orders, pauses and quarantines that are due at `Tx.now`."""
    for node in nodes.list_expired(tx):
        leases.expire_node(tx, node, f"no heartbeat for {lease_s:g} s")
    for task in results.list_due(tx):
        results.close(tx, task, "deadline")
    leases.end_unstopped(tx, tx.now - lease_s)
    sessions.end_pauses(tx)
    nodes.end_blocks(tx)


async def sweep(blobs: Blobs, database: Database, *, older_s: float = ORPHAN_S) -> None:
    """Delete blobs older than `older_s` that no result refers to."""
    async for names in blobs.list_older(time.time() - older_s):
        for start in range(0, len(names), _SWEEP_BATCH):
            batch = names[start : start + _SWEEP_BATCH]
            for name in set(batch) - await database.read(results.list_blobs, batch):
                await blobs.delete(name)
