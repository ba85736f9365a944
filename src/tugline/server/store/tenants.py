"""Fair queue: stride scheduling over tenants, one queue of sessions within each.

A tenant's `pass` grows by ``1 / weight`` with each session leased, and the lowest pass is served
first, so tenants with work share the nodes by their weights at any load. A tenant that gets work
again starts level with the others: time without work earns nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from tugline.server.store.base import Row, Tx


def set_weights(tx: Tx, weights: Mapping[str, float]) -> None:
    """Set the weights of these tenants, and 1 for all others."""
    tx.run("UPDATE tenants SET weight = 1")
    tx.many(
        "INSERT INTO tenants (name, weight, pass) VALUES (:name, :weight, 0)"
        " ON CONFLICT (name) DO UPDATE SET weight = excluded.weight",
        [{"name": name, "weight": weight} for name, weight in weights.items()],
    )


def list_waiting(tx: Tx) -> list[Row]:
    """Tenants with queued sessions: ``(name, weight, pass)``."""
    # With EXISTS, PostgreSQL would join, and look through all that is queued.
    return tx.all(
        "SELECT name, weight, pass FROM tenants WHERE (SELECT 1 FROM sessions"
        " WHERE sessions.tenant = tenants.name AND sessions.status = 'queued' LIMIT 1) = 1"
    )


def activate(tx: Tx, tenant: str) -> None:
    """Prepare a tenant for new work: if it had none, it starts level with those that have."""
    tx.run(
        "INSERT INTO tenants (name, weight, pass) VALUES (:name, 1, 0) ON CONFLICT DO NOTHING",
        name=tenant,
    )
    passes = {name: at for name, _, at in list_waiting(tx)}
    if tenant in passes:
        return
    # Where nobody has work, level with whoever was given most.
    [(most,)] = tx.all("SELECT MAX(pass) FROM tenants")
    level = min(passes.values(), default=most)
    tx.run(
        "UPDATE tenants SET pass = :level WHERE name = :name AND pass < :level",
        name=tenant,
        level=level,
    )


def take(tx: Tx, n: int) -> list[Row]:
    """The next `n` queued sessions, fairly: ``id task sample attempt epoch avoid home updated``."""
    weights, queues, heap = {}, {}, []
    for name, weight, at in list_waiting(tx):
        weights[name], queues[name] = weight, iter(_read_queue(tx, name, n))
        heap.append((at, name))
    heapq.heapify(heap)
    taken: list[Row] = []
    passes: dict[str, float] = {}
    while heap and len(taken) < n:
        at, name = heapq.heappop(heap)
        first = next(queues[name], None)
        if first is not None:
            taken.append(first)
            passes[name] = at + 1 / weights[name]
            heapq.heappush(heap, (passes[name], name))
    tx.many(
        "UPDATE tenants SET pass = :at WHERE name = :name",
        [{"name": name, "at": at} for name, at in passes.items()],
    )
    return taken


def _read_queue(tx: Tx, tenant: str, n: int) -> list[Row]:
    return tx.all(
        "SELECT s.id, s.task, s.sample, s.attempt, s.epoch, s.avoid, t.home, s.updated"
        " FROM sessions s JOIN tasks t ON t.id = s.task"
        " WHERE s.tenant = :tenant AND s.status = 'queued' ORDER BY s.turn, s.place LIMIT :n",
        tenant=tenant,
        n=n,
    )
