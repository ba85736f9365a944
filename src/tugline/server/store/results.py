"""Results of sessions, release of their groups, and consumers of results.

Every accepted session ends exactly once, with a result; a task is released when all of its sessions
have ended. Running sessions of a closed group are stopped, but their partial results are stored
(I3, I5).

A row has the listed fields and the name of the encoded trajectory, no tokens (I7). A result has the
position of its event, so a cursor is valid for both. The position of a consumer never moves back
(I3).
"""

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from tugline.errors import Conflict, Invalid, Missing
from tugline.protocol import Cancelled, Consumer, EventKind, Results, ResultView, StopKind
from tugline.schema import copy_fields
from tugline.server.store import events, sessions, texts, time_spent, verdicts
from tugline.server.store.base import Tx, sum_seconds
from tugline.server.store.sessions import SessionRow, decode_view
from tugline.server.store.tasks import view, views
from tugline.types import Boundary, Failure, Reward, Status

_LENGTH = 300
"""Maximum characters of a failure's message in the event of its result."""


class End(msgspec.Struct, frozen=True):
    """Outcome of a session; the defaults are for a session that never ran."""

    status: Status
    failure: Failure | None = None
    reward: float | None = None
    sampled: int = 0
    trained: int = 0
    bytes: int = 0
    seconds: dict[str, float] = {}
    engine_s: float | None = None
    prompt_tokens: int | None = None
    digest: str = hashlib.sha256().hexdigest()
    blob: str = ""
    patch: str = ""
    verdict: Reward | None = None
    """The whole reward."""
    report: dict[str, Any] = {}
    """Details from the evaluator."""


CANCELLED = End(Status.CANCELLED)


def finish(tx: Tx, entry: SessionRow, end: End) -> None:
    """Store the result of a session; after the last session, release the task."""
    usable = int(end.reward is not None)
    position = _insert(tx, entry, end)
    numbers = {"reward": end.reward, "seconds": sum_seconds(end.seconds)}
    sessions.end_lease(tx, entry, end.status, usable=usable, **numbers)
    tx.advance(end.status.value)
    [(samples, ended, have, min_usable, reason, callback)] = tx.all(
        "UPDATE tasks SET ended = ended + 1, usable = usable + :usable WHERE id = :task"
        " RETURNING samples, ended, usable, min_usable, reason, callback",
        task=entry.task,
        usable=usable,
    )
    if entry.judges is not None and end.verdict is not None:
        verdicts.add(tx, entry, end.verdict, end.report)
    if callback:
        events.add_delivery(tx, position, entry.task, EventKind.RESULT, callback)
    tx.notify("results")
    if ended == samples:
        _release(tx, entry.task, have, callback)
    elif min_usable is not None and have >= min_usable and not reason:
        close(tx, entry.task, "min_usable")


def _insert(tx: Tx, entry: SessionRow, end: End) -> int:
    """Store a result with its event; return the position of both."""
    detail: dict[str, str | int | float] = {
        "status": end.status.value,
        "sample": entry.sample,
        "attempt": entry.attempt,
        "sampled": end.sampled,
        "trained": end.trained,
    }
    if end.failure is not None:
        detail |= {"boundary": end.failure.boundary.value, "message": end.failure.message[:_LENGTH]}
        texts.replace(tx, entry.place, f"{entry.note} {end.failure.message}")
    if end.reward is not None:
        detail["reward"] = end.reward
    position = events.add(tx, EventKind.RESULT, events.Note(entry.task, entry.id, detail=detail))
    attempt_s = tx.count_since(entry.leased_at) if entry.leased else 0.0
    other_s = entry.other_s + time_spent.count_other(end.seconds, attempt_s)
    own = {"position": position, "session": entry.id, "created": tx.now, "other_s": other_s}
    listed = copy_fields(ResultView, entry, end, **own)
    row = {"position": position, "session": entry.id, "task": entry.task, "digest": end.digest}
    row |= {"blob": end.blob, "run": entry.run, "judges": entry.judges}
    tx.insert("results", {**row, "view": msgspec.msgpack.encode(listed)})
    time_spent.add(tx, listed)
    return position


def close(tx: Tx, task: str, reason: str) -> Cancelled:
    """End the remaining sessions of a task early; the first reason is stored."""
    tx.run(
        "UPDATE tasks SET reason = :reason WHERE id = :task AND reason = '' AND released IS NULL",
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
    before = view(tx, task)
    cancelled = close(tx, task, f"cancelled by {by}")
    final = before.samples - len(cancelled.ended) - len(cancelled.stopping)
    return Cancelled(ended=cancelled.ended, stopping=cancelled.stopping, final=final)


def cancel_session(tx: Tx, session: str, by: str) -> Cancelled:
    """Cancel a session. Raises `Missing`."""
    entry = sessions.get(tx, session)
    if entry.leased or entry.status == Status.QUEUED:
        return _cancel(tx, [entry], f"cancelled by {by}")
    return Cancelled(ended=(), stopping=(), final=1)


def run_again(tx: Tx, task: str, by: str) -> tuple[str, ...]:
    """Queue the sessions that ended for a reason outside the policy again; return their ids.

    Their results are deleted, with their retries spent so far. A task that was ended early is not
    changed. Raises `Missing`.
    """
    if view(tx, task).reason:
        return ()
    packed = tx.column("SELECT view FROM results WHERE task = :task", task=task)
    failed = [each for each in map(decode_view, packed) if _is_outside_policy(each)]
    if not failed:
        return ()
    ids = [each.session for each in failed]
    tx.run("DELETE FROM results WHERE session IN :ids", ids=ids)
    tx.run("DELETE FROM verdicts WHERE session IN :ids", ids=ids)
    tx.run(
        "UPDATE sessions SET attempt = 0, faults = 0, outages = 0, reward = NULL, seconds = NULL,"
        " queued_s = 0, other_s = 0 WHERE id IN :ids",
        ids=ids,
    )
    ended = sessions.select(tx, "id IN :ids ORDER BY sample", ids=ids)
    for each in failed:
        time_spent.subtract(tx, each)
    fresh = [entry._replace(failing_since=None) for entry in ended]
    sessions.requeue(tx, fresh, f"run again by {by}", ())
    for each in failed:
        tx.advance(each.status.value, -1)
    released = tx.fetch_value("SELECT released FROM tasks WHERE id = :task", task=task)
    if released is not None:
        tx.advance("released", -1)
    tx.run(
        "UPDATE tasks SET ended = ended - :count, released = NULL,"
        " deadline = deadline - created + :now WHERE id = :task",
        count=len(failed),
        now=tx.now,
        task=task,
    )
    return tuple(ids)


def _is_outside_policy(result: ResultView) -> bool:
    """Whether a session has no reward for a reason that is not its agent's."""
    failure = result.failure
    return result.reward is None and failure is not None and failure.boundary is not Boundary.AGENT


def list_due(tx: Tx) -> list[str]:
    """List tasks past their deadline."""
    return tx.column(
        "SELECT id FROM tasks WHERE released IS NULL AND deadline IS NOT NULL AND reason = ''"
        " AND deadline <= :now ORDER BY deadline LIMIT 100",
        now=tx.now,
    )


def _cancel(tx: Tx, entries: list[SessionRow], by: str) -> Cancelled:
    queued = [entry for entry in entries if not entry.leased]
    running = [entry for entry in entries if entry.leased]
    unstopped = [entry for entry in running if entry.stop != StopKind.CANCELLED]
    sessions.stop(tx, unstopped, StopKind.CANCELLED, by)
    for entry in queued:
        finish(tx, entry, CANCELLED)
    return Cancelled(
        ended=tuple(entry.id for entry in queued),
        stopping=tuple(entry.id for entry in running),
        final=0,
    )


def _release(tx: Tx, task: str, usable: int, callback: str | None) -> None:
    position = events.add(tx, EventKind.RELEASED, events.Note(task, detail={"usable": usable}))
    tx.update("tasks", task, released=position)
    tx.advance("released")
    tx.notify("releases")
    if callback:
        events.add_delivery(tx, position, task, EventKind.RELEASED, callback)


# --------------------------------------------------------------------------- reading
def read_digest(tx: Tx, session: str) -> str | None:
    """Return the digest of a session's encoded trajectory; None without a result."""
    query = "SELECT digest FROM results WHERE session = :session"
    digest: str | None = tx.fetch_value(query, session=session)
    return digest


def get_blob(tx: Tx, session: str, revision: int | None = None) -> tuple[str, str]:
    """Return name and digest of a trajectory's blob. Raises `Missing`, also if it never ran.

    Raises `Conflict` if there is a later revision than `revision`.
    """
    blob, digest, view = _get(tx, "session", session)
    if revision is not None and view.revision > revision:
        msg = f"revision is {revision}, but the result of session {session!r} has revision"
        raise Conflict(f"{msg} {view.revision}", field="revision")
    if not blob:
        raise Missing(f"session {session!r} has no trajectory, because it never ran")
    return blob, digest


def get(tx: Tx, session: str) -> ResultView:
    """Return the result of a session. Raises `Missing`."""
    return _get(tx, "session", session)[2]


def get_at(tx: Tx, position: int) -> ResultView:
    """Return the result at a position. Raises `Missing`."""
    return _get(tx, "position", position)[2]


def _get(tx: Tx, column: str, value: str | int) -> tuple[str, str, ResultView]:
    query = f"SELECT blob, digest, view FROM results WHERE {column} = :value"  # noqa: S608 - constants
    missing = Missing(f"{column} {value!r} is unknown, or has no result yet")
    blob, digest, packed = tx.require_one(query, missing, value=value)
    return blob, digest, decode_view(packed)


def list_digests(tx: Tx) -> dict[str, tuple[str, str]]:
    """Return name and digest of each session's blob."""
    rows = tx.all("SELECT session, blob, digest FROM results WHERE blob <> '' ORDER BY position")
    return {session: (blob, digest) for session, blob, digest in rows}


def list_blobs(tx: Tx, blobs: Sequence[str]) -> set[str]:
    """Return those of `blobs` that a result refers to. A blob's name starts with its session."""
    sessions = [name.rsplit(".", 2)[0] for name in blobs]
    return set(tx.column("SELECT blob FROM results WHERE session IN :sessions", sessions=sessions))


_DELIVERED = " AND judges IS NULL"
"""Condition of results and groups for consumers that ask for no task and no run."""


def page(
    tx: Tx, after: int, limit: int, tasks: Sequence[str] | None = None, run: str | None = None
) -> Results:
    """Return up to `limit` results after a position, in commit order, of these tasks or the run.

    Without either, results of judging sessions again are left out.
    """
    where = "" if tasks or run else _DELIVERED
    rows = tx.read_after(
        "view FROM results", "position", after, limit, where=where, task=tasks, run=run
    )
    items = tuple(decode_view(view) for (view,) in rows)
    return Results(items=items, cursor=items[-1].position if items else after)


def groups(
    tx: Tx, after: int, limit: int, tasks: Sequence[str] | None = None, run: str | None = None
) -> Results:
    """Return groups released after a position: as many as fit in `limit` results, at least one.

    The results of a group are adjacent, by sample; `TaskView.missing` lists unusable samples. The
    groups are chosen as in `page`.
    """
    where = "" if tasks or run else _DELIVERED
    rows = tx.read_after(
        "id, samples FROM tasks", "released", after, limit, where=where, id=tasks, run=run
    )
    fit = [total <= limit for total in itertools.accumulate(samples for _, samples in rows)]
    released = [task for task, _ in rows[: max(sum(fit), 1)]]
    if not released:
        return Results(items=(), cursor=after)
    chosen = views(tx, released)
    packed = tx.column("SELECT view FROM results WHERE task IN :tasks", tasks=released)
    order = {task: number for number, task in enumerate(released)}
    items = sorted(map(decode_view, packed), key=lambda item: (order[item.task], item.sample))
    return Results(items=tuple(items), groups=tuple(chosen), cursor=chosen[-1].released or after)


# --------------------------------------------------------------------------- consumers
def read_acked(tx: Tx, consumer: str) -> int:
    """Return the acknowledged position of a consumer; 0 for a new one."""
    return int(tx.fetch_value("SELECT acked FROM consumers WHERE name = :name", name=consumer) or 0)


def ack(tx: Tx, consumer: str, cursor: int) -> Consumer:
    """Record a consumer's position; an older cursor than the recorded one is ignored.

    Raises `Invalid` for a cursor beyond the latest position.
    """
    latest = events.latest(tx)
    if not 0 <= cursor <= latest:
        msg = f"cursor is {cursor}, must be the position of a received result (at most {latest})"
        raise Invalid(msg, field="cursor")
    tx.run(
        "INSERT INTO consumers (name, acked, updated) VALUES (:name, :cursor, :now)"
        " ON CONFLICT (name) DO UPDATE SET acked = excluded.acked, updated = excluded.updated"
        " WHERE excluded.acked > consumers.acked",
        name=consumer,
        cursor=cursor,
        now=tx.now,
    )
    return next(each for each in list_consumers(tx) if each.name == consumer)


def delete_consumer(tx: Tx, consumer: str) -> None:
    """Delete a consumer. Raises `Missing`."""
    if not tx.run("DELETE FROM consumers WHERE name = :name", name=consumer):
        raise Missing(f"unknown consumer {consumer!r}")


def list_consumers(tx: Tx) -> list[Consumer]:
    """List consumers by name."""
    rows = tx.all("SELECT name, acked, updated FROM consumers ORDER BY name")
    return [Consumer(name=name, acked=acked, updated=updated) for name, acked, updated in rows]
