"""Results, one per session, and the consumers that read them in commit order or by group.

A row has what is listed and the name of the encoded trajectory, never tokens (I7). The position of
a result is that of its event, so one cursor serves both. What a consumer has acknowledged never
moves back (I3).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from tugline.errors import Invalid, Missing
from tugline.protocol import Consumer, EventKind, Results, ResultView
from tugline.server.store import events
from tugline.server.store.base import Tx
from tugline.server.store.tasks import bind_names, views

_view = msgspec.msgpack.Decoder(ResultView)


def insert(tx: Tx, view: ResultView, digest: str, blob: str) -> int:
    """Store a session's result with its event; returns the position of both."""
    detail: dict[str, str | int | float] = {
        "status": view.status.value,
        "sample": view.sample,
        "attempt": view.attempt,
        "sampled": view.sampled,
        "trained": view.trained,
    }
    if view.failure is not None:
        detail["boundary"] = view.failure.boundary.value
    if view.reward is not None:
        detail["reward"] = view.reward
    position = events.add(tx, EventKind.RESULT, task=view.task, session=view.session, detail=detail)
    tx.run(
        "INSERT INTO results (position, session, task, digest, blob, view)"
        " VALUES (:position, :session, :task, :digest, :blob, :view)",
        position=position,
        session=view.session,
        task=view.task,
        digest=digest,
        blob=blob,
        view=msgspec.msgpack.encode(msgspec.structs.replace(view, position=position)),
    )
    return position


def digest_of(tx: Tx, session: str) -> str | None:
    """Digest of its encoded trajectory; None without a result."""
    row = tx.fetch_one("SELECT digest FROM results WHERE session = :session", session=session)
    return row[0] if row else None


def get_blob(tx: Tx, session: str) -> str:
    """Name of its trajectory's blob. Raises `Missing`, also if the session never ran."""
    row = tx.fetch_one("SELECT blob FROM results WHERE session = :session", session=session)
    if row is None:
        raise _no_result(session)
    if not row[0]:
        msg = f"session {session!r} never ran: it has no trajectory"
        raise Missing(msg)
    return str(row[0])


def get(tx: Tx, session: str) -> ResultView:
    """The result of a session. Raises `Missing`."""
    row = tx.fetch_one("SELECT view FROM results WHERE session = :session", session=session)
    if row is None:
        raise _no_result(session)
    return _view.decode(row[0])


def get_at(tx: Tx, position: int) -> ResultView:
    """The result that was committed at a position. Raises `Missing`."""
    row = tx.fetch_one("SELECT view FROM results WHERE position = :position", position=position)
    if row is None:
        msg = f"no result at position {position}"
        raise Missing(msg)
    return _view.decode(row[0])


def _no_result(session: str) -> Missing:
    msg = f"session {session!r} has no result, or is unknown"
    return Missing(msg)


def list_blobs(tx: Tx, blobs: Sequence[str]) -> set[str]:
    """Those of the named blobs that a result refers to. A blob's name begins with its session."""
    sessions = [name.rsplit(".", 2)[0] for name in blobs]
    condition, values = _is_among("session", sessions)
    rows = tx.all(f"SELECT blob FROM results WHERE {condition}", **values)  # noqa: S608 - constants
    return {blob for (blob,) in rows}


def page(tx: Tx, after: int, limit: int, tasks: Sequence[str] | None = None) -> Results:
    """Up to `limit` results after a position, of these tasks or of all, in commit order."""
    condition, values = _is_among("task", tasks)
    rows = tx.all(
        f"SELECT view FROM results WHERE position > :after AND {condition}"  # noqa: S608 - constants
        " ORDER BY position LIMIT :limit",
        after=after,
        limit=limit,
        **values,
    )
    items = tuple(_view.decode(view) for (view,) in rows)
    return Results(items=items, cursor=items[-1].position if items else after)


def groups(tx: Tx, after: int, limit: int, tasks: Sequence[str] | None = None) -> Results:
    """Whole groups released after a position: as many as fit into `limit` results, at least one.

    The results of a group stand together, by sample; `TaskView.missing` names unusable samples.
    """
    released = _list_released(tx, after, limit, tasks)
    if not released:
        return Results(items=(), cursor=after)
    chosen = views(tx, released)
    condition, values = _is_among("task", released)
    rows = tx.all(f"SELECT view FROM results WHERE {condition}", **values)  # noqa: S608 - constants
    order = {task: place for place, task in enumerate(released)}
    items = sorted(
        (_view.decode(view) for (view,) in rows),
        key=lambda item: (order[item.task], item.sample),
    )
    return Results(items=tuple(items), groups=tuple(chosen), cursor=chosen[-1].released or after)


def _list_released(tx: Tx, after: int, limit: int, tasks: Sequence[str] | None) -> list[str]:
    condition, values = _is_among("id", tasks)
    rows = tx.all(
        f"SELECT id, samples FROM tasks WHERE released > :after AND {condition}"  # noqa: S608 - constants
        " ORDER BY released LIMIT :limit",
        after=after,
        limit=limit,
        **values,
    )
    fit = [total <= limit for total in itertools.accumulate(samples for _, samples in rows)]
    return [task for task, _ in rows[: max(sum(fit), 1)]]


def _is_among(column: str, names: Sequence[str] | None) -> tuple[str, dict[str, str]]:
    """A condition on `column`, and its values; None does not restrict."""
    if names is None:
        return "1 = 1", {}
    parameters, values = bind_names(names)
    return f"{column} IN ({parameters})" if values else "1 = 0", values


# --------------------------------------------------------------------------- consumers
def read_acked(tx: Tx, consumer: str) -> int:
    """The position that a consumer has acknowledged; 0 for a new one."""
    row = tx.fetch_one("SELECT acked FROM consumers WHERE name = :name", name=consumer)
    return int(row[0]) if row else 0


def ack(tx: Tx, consumer: str, cursor: int) -> Consumer:
    """Record a consumer's position; a cursor older than its last one changes nothing.

    Raises `Invalid` for a cursor beyond the latest position.
    """
    latest = events.latest(tx)
    if not 0 <= cursor <= latest:
        msg = f"cursor is {cursor}, the latest position is {latest}: acknowledge what was received"
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


def list_consumers(tx: Tx) -> list[Consumer]:
    """All consumers, by name."""
    rows = tx.all("SELECT name, acked, updated FROM consumers ORDER BY name")
    return [Consumer(name=name, acked=acked, updated=updated) for name, acked, updated in rows]
