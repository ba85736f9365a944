"""Who reads results, and how far each has come. What is acknowledged never moves back (I3)."""

from __future__ import annotations

from tugline.errors import Invalid
from tugline.protocol import Consumer
from tugline.server.store import events
from tugline.server.store.base import Tx


def acked(tx: Tx, name: str) -> int:
    """The position up to which everything is safe with this consumer; 0 for a new one."""
    row = tx.one("SELECT acked FROM consumers WHERE name = :name", name=name)
    return int(row[0]) if row else 0


def ack(tx: Tx, name: str, cursor: int, now: float) -> Consumer:
    """Note how far a consumer is; an older cursor than the one it gave before changes nothing.

    Raises `Invalid` for a cursor that nobody can have been given yet.
    """
    latest = events.latest(tx)
    if not 0 <= cursor <= latest:
        msg = f"cursor is {cursor}, the latest position is {latest}: acknowledge what was received"
        raise Invalid(msg, field="cursor")
    tx.run(
        "INSERT INTO consumers (name, acked, updated) VALUES (:name, :cursor, :now)"
        " ON CONFLICT (name) DO UPDATE SET acked = excluded.acked, updated = excluded.updated"
        " WHERE excluded.acked > consumers.acked",
        name=name,
        cursor=cursor,
        now=now,
    )
    [row] = tx.all("SELECT name, acked, updated FROM consumers WHERE name = :name", name=name)
    return Consumer(name=row[0], acked=row[1], updated=row[2])


def all(tx: Tx) -> list[Consumer]:  # noqa: A001 - reads as consumers.all
    """Everybody, by name."""
    rows = tx.all("SELECT name, acked, updated FROM consumers ORDER BY name")
    return [Consumer(name=name, acked=acked, updated=updated) for name, acked, updated in rows]
