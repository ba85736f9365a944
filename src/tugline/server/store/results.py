"""One result per session, read in the order of commits or as whole groups.

A row has what is listed and where the encoded trajectory lies, never tokens (I7). The position of a
result is that of its event, so one cursor serves both, and it is safe: see `events`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from tugline.protocol import EventKind, Results, ResultView
from tugline.server.store import events
from tugline.server.store.base import Tx
from tugline.server.store.tasks import among, views

_view = msgspec.msgpack.Decoder(ResultView)


def put(tx: Tx, view: ResultView, digest: str, blob: str) -> int:
    """Keep a session's result and tell of it; returns its position, which `view` then has, too."""
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
    """Of its encoded trajectory; None while there is no result."""
    row = tx.one("SELECT digest FROM results WHERE session = :session", session=session)
    return row[0] if row else None


def blob_of(tx: Tx, session: str) -> str | None:
    """Where its trajectory lies: empty if it never ran, None while there is no result."""
    row = tx.one("SELECT blob FROM results WHERE session = :session", session=session)
    return row[0] if row else None


def one(tx: Tx, session: str) -> ResultView | None:
    """The result of a session, if it has one."""
    row = tx.one("SELECT view FROM results WHERE session = :session", session=session)
    return _view.decode(row[0]) if row else None


def at(tx: Tx, position: int) -> ResultView | None:
    """The result that was committed at a position, if one was."""
    row = tx.one("SELECT view FROM results WHERE position = :position", position=position)
    return _view.decode(row[0]) if row else None


def known(tx: Tx, blobs: Sequence[str]) -> set[str]:
    """Those of the named blobs that a result points to. A blob's name begins with its session."""
    sessions = [name.rsplit(".", 2)[0] for name in blobs]
    named, values = _among("session", sessions)
    rows = tx.all(f"SELECT blob FROM results WHERE {named}", **values)  # noqa: S608 - constants
    return {blob for (blob,) in rows}


def page(tx: Tx, after: int, limit: int, tasks: Sequence[str] | None = None) -> Results:
    """Up to `limit` results after a position, of these tasks or of all, in order of commit."""
    named, values = _among("task", tasks)
    rows = tx.all(
        f"SELECT view FROM results WHERE position > :after AND {named}"  # noqa: S608 - constants
        " ORDER BY position LIMIT :limit",
        after=after,
        limit=limit,
        **values,
    )
    items = tuple(_view.decode(view) for (view,) in rows)
    return Results(items=items, cursor=items[-1].position if items else after)


def groups(tx: Tx, after: int, limit: int, tasks: Sequence[str] | None = None) -> Results:
    """Whole groups released after a position: as many as fit into `limit` results, at least one.

    The results of a group stand together, by sample; `TaskView.missing` names those without use.
    """
    released = _released(tx, after, limit, tasks)
    if not released:
        return Results(items=(), cursor=after)
    chosen = views(tx, released)
    named, values = _among("task", released)
    rows = tx.all(f"SELECT view FROM results WHERE {named}", **values)  # noqa: S608 - constants
    order = {task: place for place, task in enumerate(released)}
    items = sorted(
        (_view.decode(view) for (view,) in rows),
        key=lambda item: (order[item.task], item.sample),
    )
    return Results(items=tuple(items), groups=tuple(chosen), cursor=chosen[-1].released or after)


def _released(tx: Tx, after: int, limit: int, tasks: Sequence[str] | None) -> list[str]:
    named, values = _among("id", tasks)
    rows = tx.all(
        f"SELECT id, samples FROM tasks WHERE released > :after AND {named}"  # noqa: S608 - constants
        " ORDER BY released LIMIT :limit",
        after=after,
        limit=limit,
        **values,
    )
    fit = [total <= limit for total in itertools.accumulate(samples for _, samples in rows)]
    return [task for task, _ in rows[: max(sum(fit), 1)]]


def _among(column: str, names: Sequence[str] | None) -> tuple[str, dict[str, str]]:
    """A condition on `column`, and its values; None does not restrict."""
    if names is None:
        return "1 = 1", {}
    named, values = among(names)
    return f"{column} IN ({named})" if values else "1 = 0", values
