"""Outbox of webhook deliveries: rows written together with their event (I3).

A row is claimed for a while before it is sent, so several servers share the work, and a row that
a crashed server had claimed falls due again. Hosts are claimed separately: one that does not
answer delays no other. Each step costs O(hosts + rows taken), however long the list is.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from tugline.errors import Missing
from tugline.protocol import Delivery, DeliveryState, EventKind
from tugline.server.store import events
from tugline.server.store.base import Tx, to_struct

_COLUMNS = "id, task, kind, url, state, tries, next_try, error"
_MAX_ERROR = 300
"""Characters of an error that are stored."""
_TRIM = 2000
"""Rows deleted at once."""


def host_of(url: str) -> str:
    """Host and port of a URL, without a user's name or password."""
    return urlsplit(url).netloc.rpartition("@")[2].lower()


def add(tx: Tx, position: int, task: str, kind: EventKind, url: str) -> None:
    """Queue a delivery of the event at `position`. Notifies ``outbox``."""
    tx.run(
        "INSERT INTO outbox (id, task, kind, url, host, state, next_try)"
        " VALUES (:id, :task, :kind, :url, :host, 'pending', :now)",
        id=position,
        task=task,
        kind=kind.value,
        url=url,
        host=host_of(url),
        now=tx.now,
    )
    tx.notify("outbox")


def next_tries(tx: Tx) -> dict[str, float]:
    """When the next delivery to each host is due; hosts without one are left out."""
    rows = tx.all(
        "WITH RECURSIVE waiting (host) AS ("
        " SELECT MIN(host) FROM outbox WHERE state = 'pending'"
        " UNION ALL SELECT (SELECT MIN(host) FROM outbox"
        "  WHERE state = 'pending' AND host > waiting.host)"
        " FROM waiting WHERE waiting.host IS NOT NULL)"
        " SELECT host, (SELECT MIN(next_try) FROM outbox"
        "  WHERE state = 'pending' AND host = waiting.host)"
        " FROM waiting WHERE host IS NOT NULL"
    )
    return {host: float(at) for host, at in rows if at is not None}


def claim(tx: Tx, host: str, *, for_s: float, limit: int) -> list[Delivery]:
    """Claim up to `limit` due deliveries to a host; unless settled, they are due after `for_s`."""
    rows = tx.all(
        "UPDATE outbox SET next_try = :until WHERE id IN (SELECT id FROM outbox"  # noqa: S608 - constants
        " WHERE state = 'pending' AND host = :host AND next_try <= :now"
        " ORDER BY next_try LIMIT :limit)"
        f" RETURNING {_COLUMNS}",
        host=host,
        now=tx.now,
        until=tx.now + for_s,
        limit=limit,
    )
    return [to_struct(Delivery, _COLUMNS, row) for row in rows]


def mark_delivered(tx: Tx, delivery: int) -> None:
    """Record that it arrived."""
    tx.run(
        "UPDATE outbox SET state = 'delivered', tries = tries + 1, error = '' WHERE id = :id",
        id=delivery,
    )


def mark_failed(tx: Tx, delivery: int, error: str, after_s: float) -> None:
    """Record a failed try; the next one is due after `after_s`."""
    tx.run(
        "UPDATE outbox SET tries = tries + 1, error = :error, next_try = :next_try"
        " WHERE id = :id AND state = 'pending'",
        id=delivery,
        error=error[:_MAX_ERROR],
        next_try=tx.now + after_s,
    )


def mark_dead(tx: Tx, delivery: int, error: str) -> None:
    """Give it up, with an event. Does nothing if it was settled in the meantime."""
    rows = tx.all(
        "UPDATE outbox SET state = 'dead', tries = tries + 1, error = :error"
        " WHERE id = :id AND state = 'pending' RETURNING task, host, tries",
        id=delivery,
        error=error[:_MAX_ERROR],
    )
    for task, host, tries in rows:
        detail = {"delivery": delivery, "host": host, "tries": tries, "error": error[:_MAX_ERROR]}
        events.add(tx, EventKind.DEAD, task=task, detail=detail)


def retry(tx: Tx, delivery: int) -> Delivery:
    """Send it again, with all its tries, whatever its state. Raises `Missing`."""
    rows = tx.all(
        "UPDATE outbox SET state = 'pending', tries = 0, next_try = :now"  # noqa: S608 - constants
        f" WHERE id = :id RETURNING {_COLUMNS}",
        id=delivery,
        now=tx.now,
    )
    if not rows:
        msg = f"no delivery {delivery}"
        raise Missing(msg)
    tx.notify("outbox")
    return to_struct(Delivery, _COLUMNS, rows[0])


def page(
    tx: Tx, *, state: DeliveryState | None = None, after: int = 0, limit: int = 100
) -> list[Delivery]:
    """Up to `limit` deliveries with an id above `after`, in one state or in any."""
    where = f"AND state = '{DeliveryState(state)}'" if state is not None else ""
    rows = tx.all(
        f"SELECT {_COLUMNS} FROM outbox WHERE id > :after {where} ORDER BY id LIMIT :limit",  # noqa: S608 - constants
        after=after,
        limit=limit,
    )
    return [to_struct(Delivery, _COLUMNS, row) for row in rows]


def trim(tx: Tx) -> int:
    """Delete some delivered rows whose event is deleted; how many, 0 when done."""
    return tx.run(
        "DELETE FROM outbox WHERE id IN (SELECT id FROM outbox WHERE state = 'delivered'"
        " AND id < (SELECT MIN(position) FROM events) ORDER BY id LIMIT :limit)",
        limit=_TRIM,
    )
