"""How sessions end, and with them their task: enough samples, a deadline, a cancellation, the last.

Every session that was accepted ends here, exactly once, with a result; a task is released when all
of its sessions have. What nobody waits for any more is stopped, but what it has done until then is
kept (I3, I5).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from tugline.protocol import Cancelled, EventKind, ResultView, StopKind
from tugline.server.store import events, outbox, results, sessions, tasks
from tugline.server.store.base import Tx
from tugline.server.store.sessions import Entry
from tugline.types import Failure, Status


class End(NamedTuple):
    """How a session ended. The defaults are those of one that never ran."""

    status: Status
    failure: Failure | None = None
    reward: float | None = None
    sampled: int = 0
    trained: int = 0
    bytes: int = 0
    seconds: Mapping[str, float] = MappingProxyType({})
    digest: str = hashlib.sha256().hexdigest()
    blob: str = ""


CANCELLED = End(Status.CANCELLED)


def finish(tx: Tx, entry: Entry, end: End, now: float) -> None:
    """Keep the result of a session, and release its task if it was the last."""
    view = ResultView(
        position=0,
        session=entry.id,
        task=entry.task,
        tenant=entry.tenant,
        sample=entry.sample,
        attempt=entry.attempt,
        status=end.status,
        reward=end.reward,
        failure=end.failure,
        sampled=end.sampled,
        trained=end.trained,
        bytes=end.bytes,
        seconds=dict(end.seconds),
        created=now,
    )
    usable = int(end.reward is not None)
    position = results.put(tx, view, end.digest, end.blob)
    tx.run(
        "UPDATE sessions SET status = :status, usable = :usable, node = NULL, stop = NULL,"
        " stop_by = '', stop_at = NULL, updated = :now WHERE id = :id",
        id=entry.id,
        status=end.status.value,
        usable=usable,
        now=now,
    )
    tx.run("UPDATE positions SET at = at + 1 WHERE name = :status", status=end.status.value)
    [(samples, ended, have, enough, reason, callback)] = tx.all(
        "UPDATE tasks SET ended = ended + 1, usable = usable + :usable WHERE id = :task"
        " RETURNING samples, ended, usable, enough, reason, callback",
        task=entry.task,
        usable=usable,
    )
    if callback:
        outbox.add(tx, id=position, task=entry.task, kind=EventKind.RESULT, url=callback, now=now)
        tx.wake("outbox")
    tx.wake("results")
    if ended == samples:
        _release(tx, entry.task, have, callback, now)
    elif enough is not None and have >= enough and not reason:
        close(tx, entry.task, "enough", now)


def close(tx: Tx, task: str, reason: str, now: float) -> Cancelled:
    """End what is left of a task early; the first reason given is stored."""
    tx.run(
        "UPDATE tasks SET reason = :reason WHERE id = :task AND reason = ''",
        task=task,
        reason=reason,
    )
    left = sessions.select(
        tx,
        "task = :task AND status NOT IN ('completed', 'failed', 'timed_out', 'cancelled')"
        " ORDER BY sample",
        task=task,
    )
    return _cancel(tx, left, reason, now)


def cancel_task(tx: Tx, task: str, by: str, now: float) -> Cancelled:
    """Cancel all of a task that is not over. Raises `Missing`."""
    before = tasks.view(tx, task)
    cancelled = close(tx, task, f"cancelled by {by}", now)
    over = before.samples - len(cancelled.ended) - len(cancelled.stopping)
    return Cancelled(ended=cancelled.ended, stopping=cancelled.stopping, final=over)


def cancel_session(tx: Tx, session: str, by: str, now: float) -> Cancelled:
    """Cancel one session. Raises `Missing`."""
    entry = sessions.get(tx, session)
    if entry.leased or entry.status == Status.QUEUED:
        return _cancel(tx, [entry], f"cancelled by {by}", now)
    return Cancelled(ended=(), stopping=(), final=1)


def due(tx: Tx, now: float) -> list[str]:
    """Tasks whose deadline is over."""
    rows = tx.all(
        "SELECT id FROM tasks WHERE released IS NULL AND deadline IS NOT NULL AND reason = ''"
        " AND deadline <= :now ORDER BY deadline LIMIT 100",
        now=now,
    )
    return [task for (task,) in rows]


def _cancel(tx: Tx, entries: list[Entry], by: str, now: float) -> Cancelled:
    queued = [entry for entry in entries if not entry.leased]
    running = [entry for entry in entries if entry.leased]
    untold = [entry for entry in running if entry.stop != StopKind.CANCELLED]
    sessions.stop(tx, untold, StopKind.CANCELLED, by, now)
    for entry in queued:
        finish(tx, entry, CANCELLED, now)
    return Cancelled(
        ended=tuple(entry.id for entry in queued),
        stopping=tuple(entry.id for entry in running),
        final=0,
    )


def _release(tx: Tx, task: str, usable: int, callback: str | None, now: float) -> None:
    position = events.add(tx, EventKind.RELEASED, task=task, detail={"usable": usable})
    tx.run("UPDATE tasks SET released = :position WHERE id = :task", task=task, position=position)
    tx.run("UPDATE positions SET at = at + 1 WHERE name = 'released'")
    tx.wake("releases")
    if callback:
        outbox.add(tx, id=position, task=task, kind=EventKind.RELEASED, url=callback, now=now)
