"""What happened, in the one order of all commits.

Taking a position locks its row until the transaction ends, so whoever has read up to position N
will never find anything new at or before N (I3).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tugline.protocol import Event, EventKind
from tugline.server.store.base import Tx

_TRIM = 1000
"""Events that go in one step: a long list must not hold up what waits for the writer."""


class Note(NamedTuple):
    """What an event is about."""

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
    """Note what happened; wakes ``events`` and ``task:ID``. Returns its position."""
    return add_all(tx, kind, [Note(task, session, node, detail)])


def add_all(tx: Tx, kind: EventKind, notes: Sequence[Note]) -> int:
    """Note that this happened to several, one after the other; returns the last position."""
    [(last,)] = tx.all(
        "UPDATE positions SET at = at + :n WHERE name = 'events' RETURNING at", n=len(notes)
    )
    now = time.time()
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
                "created": now,
            }
            for position, note in enumerate(notes, last - len(notes) + 1)
        ],
    )
    tx.wake("events", *(f"task:{note.task}" for note in notes if note.task is not None))
    return int(last)


def latest(tx: Tx) -> int:
    """The position of the last event, 0 before the first."""
    [(position,)] = tx.all("SELECT at FROM positions WHERE name = 'events'")
    return int(position)


def page(tx: Tx, after: int, limit: int, task: str | None = None) -> list[Event]:
    """Up to `limit` events after a position, of one task or of all."""
    where = "" if task is None else "AND task = :task"
    rows = tx.all(
        "SELECT position, kind, created, task, session, node, detail FROM events"  # noqa: S608 - constants
        f" WHERE position > :after {where} ORDER BY position LIMIT :limit",
        after=after,
        limit=limit,
        **({} if task is None else {"task": task}),
    )
    return [
        Event(
            position=position,
            kind=EventKind(kind),
            created=created,
            task=of,
            session=session,
            node=node,
            detail=json.loads(detail),
        )
        for position, kind, created, of, session, node, detail in rows
    ]


def trim(tx: Tx, before: float) -> int:
    """Forget the oldest events if they are from before that time; how many, 0 when it is done."""
    return tx.run(
        "DELETE FROM events WHERE created < :before"
        " AND position IN (SELECT position FROM events ORDER BY position LIMIT :limit)",
        before=before,
        limit=_TRIM,
    )
