"""Ends of sessions and of their groups: last result, enough usable ones, deadline, cancellation.

Every accepted session ends here, exactly once, with a result; a task is released when all of its
sessions have ended. Running sessions of a closed group are stopped, but their partial result is
stored (I3, I5).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from tugline.protocol import Cancelled, EventKind, ResultView, StopKind
from tugline.server.store import events, outbox, results, sessions, tasks
from tugline.server.store.base import Tx
from tugline.server.store.sessions import SessionRow
from tugline.types import Failure, Status


class End(NamedTuple):
    """Outcome of a session. The defaults are those of one that never ran."""

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


def finish(tx: Tx, entry: SessionRow, end: End) -> None:
    """Store the result of a session, and release its task if it was the last."""
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
        created=tx.now,
    )
    usable = int(end.reward is not None)
    position = results.insert(tx, view, end.digest, end.blob)
    tx.run(
        "UPDATE sessions SET status = :status, usable = :usable, node = NULL, stop = NULL,"
        " stop_by = '', stop_at = NULL, updated = :now WHERE id = :id",
        id=entry.id,
        status=end.status.value,
        usable=usable,
        now=tx.now,
    )
    tx.run("UPDATE positions SET at = at + 1 WHERE name = :status", status=end.status.value)
    [(samples, ended, have, min_usable, reason, callback)] = tx.all(
        "UPDATE tasks SET ended = ended + 1, usable = usable + :usable WHERE id = :task"
        " RETURNING samples, ended, usable, min_usable, reason, callback",
        task=entry.task,
        usable=usable,
    )
    if callback:
        outbox.add(tx, position, entry.task, EventKind.RESULT, callback)
    tx.notify("results")
    if ended == samples:
        _release(tx, entry.task, have, callback)
    elif min_usable is not None and have >= min_usable and not reason:
        close(tx, entry.task, "min_usable")


def close(tx: Tx, task: str, reason: str) -> Cancelled:
    """End the rest of a task early; the first reason given is stored."""
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
    return _cancel(tx, left, reason)


def cancel_task(tx: Tx, task: str, by: str) -> Cancelled:
    """Cancel the unfinished sessions of a task. Raises `Missing`."""
    before = tasks.view(tx, task)
    cancelled = close(tx, task, f"cancelled by {by}")
    over = before.samples - len(cancelled.ended) - len(cancelled.stopping)
    return Cancelled(ended=cancelled.ended, stopping=cancelled.stopping, final=over)


def cancel_session(tx: Tx, session: str, by: str) -> Cancelled:
    """Cancel one session. Raises `Missing`."""
    entry = sessions.get(tx, session)
    if entry.leased or entry.status == Status.QUEUED:
        return _cancel(tx, [entry], f"cancelled by {by}")
    return Cancelled(ended=(), stopping=(), final=1)


def list_due(tx: Tx) -> list[str]:
    """Tasks past their deadline."""
    rows = tx.all(
        "SELECT id FROM tasks WHERE released IS NULL AND deadline IS NOT NULL AND reason = ''"
        " AND deadline <= :now ORDER BY deadline LIMIT 100",
        now=tx.now,
    )
    return [task for (task,) in rows]


def _cancel(tx: Tx, entries: list[SessionRow], by: str) -> Cancelled:
    queued = [entry for entry in entries if not entry.leased]
    running = [entry for entry in entries if entry.leased]
    unasked = [entry for entry in running if entry.stop != StopKind.CANCELLED]
    sessions.stop(tx, unasked, StopKind.CANCELLED, by)
    for entry in queued:
        finish(tx, entry, CANCELLED)
    return Cancelled(
        ended=tuple(entry.id for entry in queued),
        stopping=tuple(entry.id for entry in running),
        final=0,
    )


def _release(tx: Tx, task: str, usable: int, callback: str | None) -> None:
    position = events.add(tx, EventKind.RELEASED, task=task, detail={"usable": usable})
    tx.run("UPDATE tasks SET released = :position WHERE id = :task", task=task, position=position)
    tx.run("UPDATE positions SET at = at + 1 WHERE name = 'released'")
    tx.notify("releases")
    if callback:
        outbox.add(tx, position, task, EventKind.RELEASED, callback)
