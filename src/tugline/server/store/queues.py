"""Queues of the tenants.

The queue uses stride scheduling over tenants. A tenant's `pass` grows by ``1 / weight`` with each
leased session, and the tenant with the lowest pass is next, so tenants with queued sessions share
the nodes by their weights at any load. A tenant with new work after idle time starts at the pass of
the others: idle time gives no advantage.
"""

import functools
import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from tugline.server.settings import ServerSettings
from tugline.server.store.base import Row, Tx

_LEASED = "SELECT tenant, COUNT(*) FROM sessions WHERE node IS NOT NULL GROUP BY tenant"


class QueuedRow(NamedTuple):
    """A queued session, in the order of its tenant's queue."""

    turn: float
    place: int
    id: str
    task: str
    sample: int
    attempt: int
    epoch: int
    avoid: str | None
    home: str | None
    updated: float
    pinned: str
    """Name of the only node that may run it; empty: any."""


def list_waiting(tx: Tx) -> list[Row]:
    """Return the tenants with queued sessions: ``(name, pass)``."""
    # With EXISTS, PostgreSQL would join, and scan all queued sessions.
    return tx.all(
        "SELECT name, pass FROM tenants WHERE (SELECT 1 FROM sessions"
        " WHERE sessions.tenant = tenants.name AND sessions.status = 'queued' LIMIT 1) = 1"
    )


def activate_tenant(tx: Tx, tenant: str) -> None:
    """Prepare a tenant for new work; an idle tenant gets the lowest pass of the others."""
    tx.run(
        "INSERT INTO tenants (name, weight, pass) VALUES (:name, 1, 0) ON CONFLICT DO NOTHING",
        name=tenant,
    )
    passes: dict[str, float] = dict(list_waiting(tx))
    if tenant in passes:
        return
    # If no tenant has work, use the highest pass.
    level = min(passes.values(), default=tx.fetch_value("SELECT MAX(pass) FROM tenants"))
    tx.run(
        "UPDATE tenants SET pass = :level WHERE name = :name AND pass < :level",
        name=tenant,
        level=level,
    )


def list_pins(tx: Tx, tenant: str) -> Iterator[str]:
    """Yield the names of nodes to which queued sessions of a tenant are pinned."""
    query = (
        "SELECT MIN(pinned) FROM sessions WHERE tenant = :tenant AND status = 'queued'"
        " AND pinned > :last"
    )
    last = ""
    while (name := tx.fetch_value(query, tenant=tenant, last=last)) is not None:
        yield name
        last = name


def take_queued(
    tx: Tx,
    n: int,
    settings: ServerSettings,
    waiting: Sequence[Row],
    pins: Mapping[str, Sequence[str]],
    free: Mapping[str, int],
) -> list[QueuedRow]:
    """Take the next `n` queued sessions of the `waiting` tenants.

    `pins` are the nodes to which sessions of each tenant are pinned, `free` the capacities by node.
    Of the sessions that are pinned to a node, as many are taken as it has capacity for. A tenant at
    its limit is skipped, without an advantage afterwards.
    """
    room = dict(free)
    tenants = {}
    queues = {}
    heap = []
    full = []
    # Counted once, and only if a tenant has a limit.
    leased = functools.cache(lambda: {name: int(n) for name, n in tx.all(_LEASED)})
    for name, at in waiting:
        tenants[name] = tenant = settings.find_tenant(name)
        left = min(n, tenant.sessions - leased().get(name, 0)) if tenant.sessions else n
        queues[name] = _read_queue(tx, name, max(0, left), pins[name], free)
        heap.append((at, name))
    heapq.heapify(heap)
    taken: list[QueuedRow] = []
    passes: dict[str, float] = {}
    while heap and len(taken) < n:
        at, name = heapq.heappop(heap)
        first = next(queues[name], None)
        if first is not None and first.pinned and not room[first.pinned]:
            heapq.heappush(heap, (at, name))  # another tenant's session takes the node
        elif first is not None:
            if first.pinned:
                room[first.pinned] -= 1
            taken.append(first)
            passes[name] = at + 1 / tenants[name].weight
            heapq.heappush(heap, (passes[name], name))
        elif tenants[name].sessions:
            full.append(name)
    passes |= dict.fromkeys(full, heap[0][0]) if heap else {}
    tx.many(
        "UPDATE tenants SET pass = :at WHERE name = :name",
        [{"name": name, "at": at} for name, at in passes.items()],
    )
    return taken


def _read_queue(
    tx: Tx, tenant: str, n: int, pins: Sequence[str], free: Mapping[str, int]
) -> Iterator[QueuedRow]:
    """Return up to `n` queued sessions of a tenant that some node with capacity may run."""
    sizes = {"": n} | {name: min(n, free.get(name, 0)) for name in pins}
    rows = (_read_pinned(tx, tenant, name, size) for name, size in sizes.items() if size)
    return itertools.islice(heapq.merge(*rows, key=itemgetter(slice(2))), n)


def _read_pinned(tx: Tx, tenant: str, pinned: str, n: int) -> list[QueuedRow]:
    rows = tx.all(
        "SELECT s.turn, s.place, s.id, s.task, s.sample, s.attempt, s.epoch, s.avoid, t.home,"
        " s.updated, s.pinned FROM sessions s JOIN tasks t ON t.id = s.task"
        " WHERE s.tenant = :tenant AND s.status = 'queued' AND s.pinned = :pinned"
        " AND s.retry_at IS NULL ORDER BY s.turn, s.place LIMIT :n",
        tenant=tenant,
        pinned=pinned,
        n=n,
    )
    return [QueuedRow(*row) for row in rows]
