"""Counts for the status and the metrics page.

A count reads each counted row. Of tables that only grow, a part is counted: pending and dead
webhook deliveries, and up to `MAX_SCAN` unread results.
"""

from collections import Counter

from msgspec.structs import replace

from tugline.histogram import Values
from tugline.protocol import Counts, NodeState
from tugline.server.store import nodes
from tugline.server.store.base import Tx
from tugline.types import TERMINAL, Status

MAX_SCAN = 100_000
"""Maximum number of scanned rows."""


def gauges(tx: Tx) -> dict[str, Values]:
    """Return the metrics that are counted in the store, on one snapshot, by name."""
    summary = detailed_counts(tx)
    states: dict[str, int] = dict(tx.all("SELECT state, COUNT(*) FROM nodes GROUP BY state"))
    callbacks = {"pending": _count_deliveries(tx, "pending"), "dead": summary.dead_deliveries}
    return {
        "tugline_sessions": dict.fromkeys((item.value for item in Status), 0) | summary.sessions,
        "tugline_queue": summary.queue,
        "tugline_tasks_open": summary.tasks_open,
        "tugline_nodes": dict.fromkeys((item.value for item in NodeState), 0) | states,
        "tugline_slots": summary.slots,
        "tugline_results_unread": summary.unread,
        "tugline_callbacks": callbacks,
        "tugline_position": summary.position,
        "tugline_weights_version": summary.version,
        "tugline_weights_paused": summary.paused,
    }


def counts(tx: Tx) -> Counts:
    """Return the summary for clients. Finished sessions are counters, not scanned rows."""
    control = nodes.control(tx)
    live, slots = nodes.live_slots(tx)
    at: dict[str, int] = dict(tx.all("SELECT name, at FROM positions"))
    sessions: dict[str, int] = {status.value: at[status.value] for status in TERMINAL}
    sessions |= Counter(tx.column("SELECT status FROM sessions WHERE node IS NOT NULL"))
    sessions[Status.QUEUED.value] = at["sessions"] - sum(sessions.values())
    return Counts(
        sessions={name: n for name, n in sessions.items() if n},
        tasks_open=at["tasks"] - at["released"],
        nodes=live,
        slots=slots,
        position=at["events"],
        version=control.version,
        paused=control.paused is not None,
        dead_deliveries=_count_deliveries(tx, "dead"),
    )


def detailed_counts(tx: Tx) -> Counts:
    """Return the summary with counts of each tenant's queue and each consumer's unread results."""
    queued = "SELECT tenant, COUNT(*) FROM sessions WHERE status = 'queued' GROUP BY tenant"
    consumers = tx.all("SELECT name, acked FROM consumers")
    return replace(
        counts(tx),
        queue=dict(tx.all(queued)),
        unread={name: _count_results_after(tx, acked) for name, acked in consumers},
    )


def _count_deliveries(tx: Tx, state: str) -> int:
    return int(tx.fetch_value(f"SELECT COUNT(*) FROM outbox WHERE state = '{state}'"))  # noqa: S608 - constants


def _count_results_after(tx: Tx, position: int) -> int:
    later = "SELECT 1 FROM results WHERE position > :after AND judges IS NULL LIMIT :most"
    query = f"SELECT COUNT(*) FROM ({later}) AS later"  # noqa: S608 - constants
    return int(tx.fetch_value(query, after=position, most=MAX_SCAN))
