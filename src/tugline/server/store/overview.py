"""The whole at a glance."""

from __future__ import annotations

from tugline.protocol import Counts
from tugline.server.store import events, nodes, outbox, sessions, tasks
from tugline.server.store.base import Tx


def counts(tx: Tx) -> Counts:
    """How much there is of everything, in a time that does not grow with what is over."""
    control = nodes.control(tx)
    live, slots = nodes.capacity(tx)
    return Counts(
        sessions=sessions.tally(tx),
        tasks_open=tasks.open_count(tx),
        nodes=live,
        slots=slots,
        position=events.latest(tx),
        version=control.version,
        paused=control.paused is not None,
        dead_deliveries=outbox.dead_count(tx),
    )
