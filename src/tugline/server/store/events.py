"""Events, numbered in commit order, and the outbox of webhook deliveries.

Taking a position locks its row until the transaction ends, so a reader that has seen position N
never finds a new event at or before N (I3).

A delivery is written together with its event (I3) and claimed for a while before it is sent, so
several servers share the work, and one that a crashed server had claimed falls due again. Hosts are
claimed separately: one that does not answer delays no other. Each step costs O(hosts + rows taken),
however long the list is.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

from tugline.errors import Invalid, Missing
from tugline.protocol import Delivery, DeliveryQuery, DeliveryState, Event, EventKind
from tugline.server.store.base import Tx, read_sql, to_struct

_COLUMNS = "position, kind, created, task, session, node, detail"
_TRIM = 1000
"""Events deleted at once, so that other writes need not wait long."""
_DELIVERY = "id, task, kind, url, state, tries, next_try, error"
_MAX_ERROR = 300
"""Characters of an error that are stored."""
_NEXT_TRIES = read_sql("next_tries")
_TRIM_DELIVERIES = 2000
"""Rows deleted at once."""


class Note(NamedTuple):
    """Subject and details of an event."""

    task: str | None = None
    session: str | None = None
    node: str | None = None
    detail: Mapping[str, str | int | float] = MappingProxyType({})


def add(tx: Tx, kind: EventKind, *notes: Note) -> int:
    """Record an event for each of `notes`; notifies ``events`` and ``task:ID``.

    Returns the last position.
    """
    last = tx.advance("events", len(notes))
    rows = (
        note._asdict()
        | {"position": position, "kind": kind.value, "created": tx.now}
        | {"detail": json.dumps(dict(note.detail))}
        for position, note in enumerate(notes, last - len(notes) + 1)
    )
    tx.insert("events", *rows)
    tx.notify("events", *(f"task:{note.task}" for note in notes if note.task is not None))
    return last


def latest(tx: Tx) -> int:
    """Position of the last event, 0 before the first."""
    return int(tx.fetch_value("SELECT at FROM positions WHERE name = 'events'"))


def skip_positions(tx: Tx) -> None:
    """Go on at the present in milliseconds, beyond what a store gave out that this one replaces."""
    floor = int(tx.now * 1000)
    tx.run("UPDATE positions SET at = :floor WHERE name = 'events' AND at < :floor", floor=floor)


def check_position(tx: Tx, after: int) -> None:
    """Raises `Invalid` for a position that this store has never given out."""
    last = latest(tx)
    if after > last:
        msg = (
            f"after is {after}, the latest position is {last}: the store was replaced or restored"
            " from a backup; what it has stands from 0 on"
        )
        raise Invalid(msg, field="after")


def page(tx: Tx, after: int, limit: int, task: str | None = None) -> list[Event]:
    """Up to `limit` events after a position, of one task or of all."""
    rows = tx.read_after(f"{_COLUMNS} FROM events", "position", after, limit, task=task)
    return [to_struct(Event, _COLUMNS, row, detail=json.loads(row[-1])) for row in rows]


def trim(tx: Tx, before: float) -> int:
    """Delete some of the oldest events from before that time; how many, 0 when done."""
    return tx.run(
        "DELETE FROM events WHERE created < :before"
        " AND position IN (SELECT position FROM events ORDER BY position LIMIT :limit)",
        before=before,
        limit=_TRIM,
    )


# --------------------------------------------------------------------------- outbox
def host_of(url: str) -> str:
    """Host and port of a URL, without a user's name or password."""
    return urlsplit(url).netloc.rpartition("@")[2].lower()


def add_delivery(tx: Tx, position: int, task: str, kind: EventKind, url: str) -> None:
    """Queue a delivery of the event at `position`. Notifies ``outbox``."""
    row = {"id": position, "task": task, "kind": kind.value, "url": url, "host": host_of(url)}
    tx.insert("outbox", {**row, "state": DeliveryState.PENDING.value, "next_try": tx.now})
    tx.notify("outbox")


def next_tries(tx: Tx) -> dict[str, float]:
    """When the next delivery to each host is due; hosts without one are left out."""
    rows = tx.all(_NEXT_TRIES)
    return {host: float(at) for host, at in rows if at is not None}


def claim_deliveries(tx: Tx, host: str, *, for_s: float, limit: int) -> list[Delivery]:
    """Claim up to `limit` due deliveries to a host; unless settled, they are due after `for_s`."""
    rows = tx.all(
        "UPDATE outbox SET next_try = :until WHERE id IN (SELECT id FROM outbox"  # noqa: S608 - constants
        " WHERE state = 'pending' AND host = :host AND next_try <= :now"
        " ORDER BY next_try LIMIT :limit)"
        f" RETURNING {_DELIVERY}",
        host=host,
        now=tx.now,
        until=tx.now + for_s,
        limit=limit,
    )
    return [to_struct(Delivery, _DELIVERY, row) for row in rows]


def settle(
    tx: Tx, delivery: int, state: DeliveryState, error: str = "", after_s: float = 0
) -> None:
    """Record a try: it arrived, is PENDING again for `after_s`, or is given up, with an event.

    Does nothing if it was settled in the meantime.
    """
    rows = tx.all(
        "UPDATE outbox SET state = :state, tries = tries + 1, error = :error, next_try = :next_try"
        " WHERE id = :id AND state = 'pending' RETURNING task, host, tries",
        id=delivery,
        state=state.value,
        error=error[:_MAX_ERROR],
        next_try=tx.now + after_s,
    )
    for task, host, tries in rows if state is DeliveryState.DEAD else ():
        detail = {"delivery": delivery, "host": host, "tries": tries, "error": error[:_MAX_ERROR]}
        add(tx, EventKind.DEAD, Note(task, detail=detail))


def retry_delivery(tx: Tx, delivery: int) -> Delivery:
    """Send it again, with all its tries, whatever its state. Raises `Missing`."""
    row = tx.require_one(
        "UPDATE outbox SET state = 'pending', tries = 0, next_try = :now"  # noqa: S608 - constants
        f" WHERE id = :id RETURNING {_DELIVERY}",
        Missing(f"no delivery {delivery}"),
        id=delivery,
        now=tx.now,
    )
    tx.notify("outbox")
    return to_struct(Delivery, _DELIVERY, row)


def list_deliveries(tx: Tx, query: DeliveryQuery) -> list[Delivery]:
    """Deliveries, by id."""
    found = f"{_DELIVERY} FROM outbox"
    rows = tx.read_after(found, "id", query.after, query.limit, state=query.state)
    return [to_struct(Delivery, _DELIVERY, row) for row in rows]


def trim_deliveries(tx: Tx) -> int:
    """Delete some delivered rows whose event is deleted; how many, 0 when done."""
    return tx.run(
        "DELETE FROM outbox WHERE id IN (SELECT id FROM outbox WHERE state = 'delivered'"
        " AND id < (SELECT MIN(position) FROM events) ORDER BY id LIMIT :limit)",
        limit=_TRIM_DELIVERIES,
    )
