"""Callbacks that are to be sent: a row each, written together with what it tells of (I3).

A row is claimed for a while before it is sent, so several servers share the work and a server that
dies in the middle leaves a row that falls due again. Hosts are claimed apart: one that does not
answer keeps no other waiting. Each step costs O(hosts + rows taken), however long the list is.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from tugline.errors import Missing
from tugline.protocol import Delivery, DeliveryState, EventKind
from tugline.server.store import events
from tugline.server.store.base import Row, Tx

_COLUMNS = "id, task, kind, url, state, tries, next_try, error"
_ERROR = 300
"""Characters that are kept of an error."""
_TRIM = 2000
"""Rows that go in one step."""


def host_of(url: str) -> str:
    """Host and port of a URL, without a user's name or password."""
    return urlsplit(url).netloc.rpartition("@")[2].lower()


def add(tx: Tx, *, id: int, task: str, kind: EventKind, url: str, now: float) -> None:  # noqa: A002 - as in Delivery
    """Tell `url` of the event at position `id`. Wakes who listens to ``outbox``."""
    tx.run(
        "INSERT INTO outbox (id, task, kind, url, host, state, next_try)"
        " VALUES (:id, :task, :kind, :url, :host, 'pending', :now)",
        id=id,
        task=task,
        kind=kind.value,
        url=url,
        host=host_of(url),
        now=now,
    )
    tx.wake("outbox")


def hosts(tx: Tx) -> dict[str, float]:
    """When the next callback to each host is due; hosts for which there is none are left out."""
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


def claim(tx: Tx, host: str, *, now: float, until: float, limit: int) -> list[Delivery]:
    """Take up to `limit` due callbacks of a host; unless settled, they are due again at `until`."""
    rows = tx.all(
        "UPDATE outbox SET next_try = :until WHERE id IN (SELECT id FROM outbox"  # noqa: S608 - constants
        " WHERE state = 'pending' AND host = :host AND next_try <= :now"
        " ORDER BY next_try LIMIT :limit)"
        f" RETURNING {_COLUMNS}",
        host=host,
        now=now,
        until=until,
        limit=limit,
    )
    return [_delivery(row) for row in rows]


def delivered(tx: Tx, id: int) -> None:  # noqa: A002 - as in Delivery
    """It arrived."""
    tx.run(
        "UPDATE outbox SET state = 'delivered', tries = tries + 1, error = '' WHERE id = :id", id=id
    )


def failed(tx: Tx, id: int, error: str, next_try: float) -> None:  # noqa: A002 - as in Delivery
    """It did not arrive, and is tried again."""
    tx.run(
        "UPDATE outbox SET tries = tries + 1, error = :error, next_try = :next_try"
        " WHERE id = :id AND state = 'pending'",
        id=id,
        error=error[:_ERROR],
        next_try=next_try,
    )


def dead(tx: Tx, id: int, error: str) -> None:  # noqa: A002 - as in Delivery
    """Give it up, and say so. Nothing happens where it was settled in the meantime."""
    rows = tx.all(
        "UPDATE outbox SET state = 'dead', tries = tries + 1, error = :error"
        " WHERE id = :id AND state = 'pending' RETURNING task, host, tries",
        id=id,
        error=error[:_ERROR],
    )
    for task, host, tries in rows:
        detail = {"delivery": id, "host": host, "tries": tries, "error": error[:_ERROR]}
        events.add(tx, EventKind.DEAD, task=task, detail=detail)


def again(tx: Tx, id: int, now: float) -> Delivery:  # noqa: A002 - as in Delivery
    """Send it once more, with all its tries, whatever became of it. Raises `Missing`."""
    rows = tx.all(
        "UPDATE outbox SET state = 'pending', tries = 0, next_try = :now"  # noqa: S608 - constants
        f" WHERE id = :id RETURNING {_COLUMNS}",
        id=id,
        now=now,
    )
    if not rows:
        msg = f"no delivery {id}"
        raise Missing(msg)
    tx.wake("outbox")
    return _delivery(rows[0])


def page(tx: Tx, *, state: DeliveryState | None, after: int, limit: int) -> list[Delivery]:
    """Up to `limit` callbacks with an id above `after`, in one state or in any."""
    where = f"AND state = '{DeliveryState(state)}'" if state is not None else ""
    rows = tx.all(
        f"SELECT {_COLUMNS} FROM outbox WHERE id > :after {where} ORDER BY id LIMIT :limit",  # noqa: S608 - constants
        after=after,
        limit=limit,
    )
    return [_delivery(row) for row in rows]


def dead_count(tx: Tx) -> int:
    """How many were given up."""
    [(count,)] = tx.all("SELECT COUNT(*) FROM outbox WHERE state = 'dead'")
    return int(count)


def trim(tx: Tx) -> int:
    """Forget some of what was delivered and whose event is forgotten; how many, 0 at the end."""
    return tx.run(
        "DELETE FROM outbox WHERE id IN (SELECT id FROM outbox WHERE state = 'delivered'"
        " AND id < (SELECT MIN(position) FROM events) ORDER BY id LIMIT :limit)",
        limit=_TRIM,
    )


def _delivery(row: Row) -> Delivery:
    at, task, kind, url, state, tries, next_try, error = row
    return Delivery(
        id=at,
        task=task,
        kind=EventKind(kind),
        url=url,
        state=DeliveryState(state),
        tries=tries,
        next_try=next_try,
        error=error,
    )
