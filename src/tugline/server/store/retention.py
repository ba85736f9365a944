"""Tasks that everybody is done with leave, and their sessions and results with them.

Nothing is forgotten that a consumer has not acknowledged or that a callback still has to tell (I3).
What has been counted stays counted; an id that was forgotten may be used again.
"""

from __future__ import annotations

from tugline.server.store import events
from tugline.server.store.base import Tx
from tugline.server.store.tasks import among

_SOME = 100


def forget(tx: Tx, before: float) -> int:
    """Forget some tasks that were over before that time; how many, 0 when it is done."""
    [(acked,)] = tx.all("SELECT MIN(acked) FROM consumers")
    rows = tx.all(
        "SELECT id FROM tasks WHERE released <= :acked"
        " AND id NOT IN (SELECT task FROM outbox WHERE state <> 'delivered')"
        " AND NOT EXISTS (SELECT 1 FROM sessions WHERE task = tasks.id AND updated >= :before)"
        " ORDER BY released LIMIT :limit",
        acked=events.latest(tx) if acked is None else acked,
        before=before,
        limit=_SOME,
    )
    if not rows:
        return 0
    named, values = among(task for (task,) in rows)
    for table, column in (("results", "task"), ("sessions", "task"), ("tasks", "id")):
        tx.run(f"DELETE FROM {table} WHERE {column} IN ({named})", **values)  # noqa: S608 - constants
    return len(rows)
