"""Who is next: stride scheduling over tenants, one line of sessions within each.

A tenant's `pass` grows by ``1 / weight`` with each session it is given, and the lowest pass is
served first, so tenants with work share the nodes by their weights at any load. One that comes back
starts level with the others: time without work earns nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from tugline.server.store.base import Row, Tx


def weigh(tx: Tx, weights: Mapping[str, float]) -> None:
    """Give these tenants their weights and all others 1."""
    tx.run("UPDATE tenants SET weight = 1")
    tx.many(
        "INSERT INTO tenants (name, weight, pass) VALUES (:name, :weight, 0)"
        " ON CONFLICT (name) DO UPDATE SET weight = excluded.weight",
        [{"name": name, "weight": weight} for name, weight in weights.items()],
    )


def waiting(tx: Tx) -> list[Row]:
    """Tenants that have sessions in line: ``(name, weight, pass)``."""
    # With EXISTS, PostgreSQL would join, and look through all that is queued.
    return tx.all(
        "SELECT name, weight, pass FROM tenants WHERE (SELECT 1 FROM sessions"
        " WHERE sessions.tenant = tenants.name AND sessions.status = 'queued' LIMIT 1) = 1"
    )


def activate(tx: Tx, tenant: str) -> None:
    """Work comes in for this tenant: if it had none, it starts level with those that have."""
    tx.run(
        "INSERT INTO tenants (name, weight, pass) VALUES (:name, 1, 0) ON CONFLICT DO NOTHING",
        name=tenant,
    )
    passes = {name: at for name, _, at in waiting(tx)}
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
    weights, lines, heap = {}, {}, []
    for name, weight, at in waiting(tx):
        weights[name], lines[name] = weight, iter(_line(tx, name, n))
        heap.append((at, name))
    heapq.heapify(heap)
    taken: list[Row] = []
    passes: dict[str, float] = {}
    while heap and len(taken) < n:
        at, name = heapq.heappop(heap)
        first = next(lines[name], None)
        if first is not None:
            taken.append(first)
            passes[name] = at + 1 / weights[name]
            heapq.heappush(heap, (passes[name], name))
    tx.many(
        "UPDATE tenants SET pass = :at WHERE name = :name",
        [{"name": name, "at": at} for name, at in passes.items()],
    )
    return taken


def _line(tx: Tx, tenant: str, n: int) -> list[Row]:
    return tx.all(
        "SELECT s.id, s.task, s.sample, s.attempt, s.epoch, s.avoid, t.home, s.updated"
        " FROM sessions s JOIN tasks t ON t.id = s.task"
        " WHERE s.tenant = :tenant AND s.status = 'queued' ORDER BY s.turn, s.place LIMIT :n",
        tenant=tenant,
        n=n,
    )
