"""How much of everything there is, for the metrics page; each answer costs what it counts.

Lists that only grow are not counted: of callbacks those that wait and those that were given up, of
unread results no more than `MOST`.
"""

from __future__ import annotations

from typing import NamedTuple

from tugline.protocol import Control
from tugline.server.store import events, nodes, sessions
from tugline.server.store.base import Tx

MOST = 100_000
"""What is looked through at once."""


class Depths(NamedTuple):
    """One look at the store."""

    sessions: dict[str, int]
    """By status."""
    queued: dict[str, int]
    """By tenant."""
    tasks_open: int
    nodes: dict[str, int]
    """By state."""
    slots: int
    """Of live nodes."""
    unread: dict[str, int]
    """Results that a consumer has not acknowledged, by its name."""
    outbox: dict[str, int]
    """Callbacks by state, without those that arrived."""
    position: int
    control: Control


def look(tx: Tx) -> Depths:
    """All of it, at one moment."""
    [(tasks_open,)] = tx.all("SELECT COUNT(*) FROM tasks WHERE released IS NULL")
    readers = tx.all("SELECT name, acked FROM consumers")
    return Depths(
        sessions=sessions.tally(tx),
        queued=_counts(
            tx, "SELECT tenant, COUNT(*) FROM sessions WHERE status = 'queued' GROUP BY tenant"
        ),
        tasks_open=int(tasks_open),
        nodes=_counts(tx, "SELECT state, COUNT(*) FROM nodes GROUP BY state"),
        slots=nodes.capacity(tx)[1],
        unread={name: _unread(tx, acked) for name, acked in readers},
        outbox=_counts(
            tx,
            "SELECT 'pending', COUNT(*) FROM outbox WHERE state = 'pending'"
            " UNION ALL SELECT 'dead', COUNT(*) FROM outbox WHERE state = 'dead'",
        ),
        position=events.latest(tx),
        control=nodes.control(tx),
    )


def before(tx: Tx, moment: float) -> int:
    """The position after which all events since `moment` stand, or the last `MOST` of them."""
    [(first,)] = tx.all(
        "SELECT MIN(position) FROM (SELECT position, created FROM events"
        " ORDER BY position DESC LIMIT :most) AS recent WHERE created >= :moment",
        most=MOST,
        moment=moment,
    )
    return int(first) - 1 if first is not None else events.latest(tx)


def _unread(tx: Tx, acked: int) -> int:
    [(count,)] = tx.all(
        "SELECT COUNT(*) FROM (SELECT 1 FROM results WHERE position > :acked LIMIT :most) AS later",
        acked=acked,
        most=MOST,
    )
    return int(count)


def _counts(tx: Tx, sql: str) -> dict[str, int]:
    return {str(name): int(count) for name, count in tx.all(sql)}
