"""Events, numbered in commit order, and the outbox of webhook deliveries.

Taking a position locks its row until the transaction ends, so a reader that has seen position N
never finds a new event at or before N (I3).

A delivery is written together with its event (I3) and claimed for a limited time before it is sent,
so several servers share the work, and a delivery claimed by a crashed server becomes due again.
Deliveries are claimed per host: a host that does not answer does not delay others. Each step costs
O(hosts + claimed rows), independent of the length of the outbox.
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
"""Number of events deleted per transaction, to keep it short."""
_DELIVERY = "id, task, kind, url, state, tries, next_try, error"
_MAX_ERROR = 300
"""Maximum number of stored characters of an error."""
_NEXT_TRIES = read_sql("next_tries")
_TRIM_DELIVERIES = 2000
"""Number of rows deleted per transaction."""


class Note(NamedTuple):
    """Subject and details of an event."""

    task: str | None = None
    session: str | None = None
    node: str | None = None
    detail: Mapping[str, str | int | float] = MappingProxyType({})


def add(tx: Tx, kind: EventKind, *notes: Note) -> int:
    """Record an event for each of `notes`; notify ``events`` and ``task:ID``.

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
    """Return the position of the last event; 0 before the first."""
    return int(tx.fetch_value("SELECT at FROM positions WHERE name = 'events'"))


def skip_positions(tx: Tx) -> None:
    """Advance positions to the time in milliseconds, beyond those of a store that was replaced."""
    floor = int(tx.now * 1000)
    tx.run("UPDATE positions SET at = :floor WHERE name = 'events' AND at < :floor", floor=floor)


def check_position(tx: Tx, after: int) -> None:
    """Check a position. Raises `Invalid` if it is beyond the latest."""
    last = latest(tx)
    if after > last:
        msg = (
            f"after is {after}, but the latest position is {last}: the store was replaced or "
            "restored"
            " from a backup; read it again from position 0"
        )
        raise Invalid(msg, field="after")


def page(tx: Tx, after: int, limit: int, task: str | None = None) -> list[Event]:
    """Return up to `limit` events after a position, of one task or of all."""
    rows = tx.read_after(f"{_COLUMNS} FROM events", "position", after, limit, task=task)
    return [to_struct(Event, _COLUMNS, row, detail=json.loads(row[-1])) for row in rows]


def trim(tx: Tx, before: float) -> int:
    """Delete a batch of events older than `before`; return their number, 0 when done."""
    return tx.run(
        "DELETE FROM events WHERE created < :before"
        " AND position IN (SELECT position FROM events ORDER BY position LIMIT :limit)",
        before=before,
        limit=_TRIM,
    )


# --------------------------------------------------------------------------- outbox
def host_of(url: str) -> str:
    """Return host and port of a URL, without user name and password."""
    return urlsplit(url).netloc.rpartition("@")[2].lower()


def add_delivery(tx: Tx, position: int, task: str, kind: EventKind, url: str) -> None:
    """Queue a delivery of the event at `position`; notify ``outbox``."""
    row = {"id": position, "task": task, "kind": kind.value, "url": url, "host": host_of(url)}
    tx.insert("outbox", {**row, "state": DeliveryState.PENDING.value, "next_try": tx.now})
    tx.notify("outbox")


def replace_delivery(tx: Tx, old: int, position: int, task: str, kind: EventKind, url: str) -> None:
    """Queue a delivery in place of that of the event at `old`, unless that is delivered."""
    tx.run("DELETE FROM outbox WHERE id = :old AND state <> 'delivered'", old=old)
    add_delivery(tx, position, task, kind, url)


def next_tries(tx: Tx) -> dict[str, float]:
    """Return the time of the next delivery by host; hosts without one are left out."""
    rows = tx.all(_NEXT_TRIES)
    return {host: float(at) for host, at in rows if at is not None}


def claim_deliveries(tx: Tx, host: str, *, for_s: float, limit: int) -> list[Delivery]:
    """Claim up to `limit` due deliveries to a host for `for_s`; unsettled ones become due again."""
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
    """Record a try: delivered, PENDING again after `after_s`, or given up, with an event.

    Does nothing if the delivery is no longer pending.
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
    """Reset a delivery to pending, without earlier tries, from any state. Raises `Missing`."""
    row = tx.require_one(
        "UPDATE outbox SET state = 'pending', tries = 0, next_try = :now"  # noqa: S608 - constants
        f" WHERE id = :id RETURNING {_DELIVERY}",
        Missing(f"unknown delivery {delivery}"),
        id=delivery,
        now=tx.now,
    )
    tx.notify("outbox")
    return to_struct(Delivery, _DELIVERY, row)


def list_deliveries(tx: Tx, query: DeliveryQuery) -> list[Delivery]:
    """List deliveries by id."""
    columns = f"{_DELIVERY} FROM outbox"
    rows = tx.read_after(columns, "id", query.after, query.limit, state=query.state)
    return [to_struct(Delivery, _DELIVERY, row) for row in rows]


def trim_deliveries(tx: Tx) -> int:
    """Delete a batch of delivered rows whose event is deleted; return their number, 0 when done."""
    return tx.run(
        "DELETE FROM outbox WHERE id IN (SELECT id FROM outbox WHERE state = 'delivered'"
        " AND id < (SELECT MIN(position) FROM events) ORDER BY id LIMIT :limit)",
        limit=_TRIM_DELIVERIES,
    )
