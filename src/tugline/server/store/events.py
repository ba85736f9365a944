"""Events, numbered in commit order.

Taking a position locks its row until the transaction ends, so a reader that has seen position N
never finds a new event at or before N (I3).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tugline.protocol import Event, EventKind
from tugline.server.store.base import Tx, to_struct

_COLUMNS = "position, kind, created, task, session, node, detail"
_TRIM = 1000
"""Events deleted at once, so that other writes need not wait long."""


class Note(NamedTuple):
    """Subject and details of an event."""

    task: str | None = None
    session: str | None = None
    node: str | None = None
    detail: Mapping[str, str | int | float] = MappingProxyType({})


def add(
    tx: Tx,
    kind: EventKind,
    *,
    task: str | None = None,
    session: str | None = None,
    node: str | None = None,
    detail: Mapping[str, str | int | float] = {},
) -> int:
    """Record an event; notifies ``events`` and ``task:ID``. Returns its position."""
    return add_all(tx, kind, [Note(task, session, node, detail)])


def add_all(tx: Tx, kind: EventKind, notes: Sequence[Note]) -> int:
    """Record an event for each of `notes`; returns the last position."""
    [(last,)] = tx.all(
        "UPDATE positions SET at = at + :n WHERE name = 'events' RETURNING at", n=len(notes)
    )
    tx.many(
        "INSERT INTO events (position, kind, task, session, node, detail, created)"
        " VALUES (:position, :kind, :task, :session, :node, :detail, :created)",
        [
            {
                "position": position,
                "kind": kind.value,
                "task": note.task,
                "session": note.session,
                "node": note.node,
                "detail": json.dumps(dict(note.detail)),
                "created": tx.now,
            }
            for position, note in enumerate(notes, last - len(notes) + 1)
        ],
    )
    tx.notify("events", *(f"task:{note.task}" for note in notes if note.task is not None))
    return int(last)


def latest(tx: Tx) -> int:
    """Position of the last event, 0 before the first."""
    [(position,)] = tx.all("SELECT at FROM positions WHERE name = 'events'")
    return int(position)


def page(tx: Tx, after: int, limit: int, task: str | None = None) -> list[Event]:
    """Up to `limit` events after a position, of one task or of all."""
    where, values = ("", {}) if task is None else ("AND task = :task", {"task": task})
    rows = tx.all(
        f"SELECT {_COLUMNS} FROM events WHERE position > :after {where}"  # noqa: S608 - constants
        " ORDER BY position LIMIT :limit",
        after=after,
        limit=limit,
        **values,
    )
    return [to_struct(Event, _COLUMNS, row, detail=json.loads(row[-1])) for row in rows]


def trim(tx: Tx, before: float) -> int:
    """Delete some of the oldest events from before that time; how many, 0 when done."""
    return tx.run(
        "DELETE FROM events WHERE created < :before"
        " AND position IN (SELECT position FROM events ORDER BY position LIMIT :limit)",
        before=before,
        limit=_TRIM,
    )
