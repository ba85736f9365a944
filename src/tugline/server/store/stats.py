"""Counts for the status and the metrics page, and figures of trainers by run and step.

A count reads each counted row. Of tables that only grow, a part is counted: pending and dead
webhook deliveries, and up to `MAX_SCAN` unread results.
"""

from collections import Counter

import msgspec
from msgspec.structs import replace

from tugline.histogram import Values
from tugline.protocol import Counts, EventKind, NodeState, RunStep, RunView, StepQuery
from tugline.server.store import events, nodes
from tugline.server.store.base import Tx, to_struct
from tugline.types import TERMINAL, Status

MAX_SCAN = 100_000
"""Maximum number of scanned rows."""
_MAX_RUNS = 1000
"""Maximum number of listed runs."""


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
    later = "SELECT 1 FROM results WHERE position > :after LIMIT :most"
    query = f"SELECT COUNT(*) FROM ({later}) AS later"  # noqa: S608 - constants
    return int(tx.fetch_value(query, after=position, most=MAX_SCAN))


# --------------------------------------------------------------------------- trainers
def report_step(tx: Tx, run: str, given: RunStep) -> None:
    """Add figures and notes to a step; those of the same names are replaced."""
    if given.rewound:
        tx.run("DELETE FROM run_steps WHERE run = :run AND step > :step", run=run, step=given.step)
    known = next(iter(list_steps(tx, run, StepQuery(after=given.step - 1, limit=1))), given)
    merged = known if known.step == given.step else given
    tx.run(
        "INSERT INTO run_steps VALUES (:run, :step, :figures, :notes, :now)"
        " ON CONFLICT (run, step)"
        " DO UPDATE SET figures = :figures, notes = :notes, updated = :now",
        run=run,
        step=given.step,
        figures=msgspec.json.encode(merged.figures | given.figures).decode(),
        notes=msgspec.json.encode(merged.notes | given.notes).decode(),
        now=tx.now,
    )
    events.add(tx, EventKind.STEP, events.Note(detail={"run": run, "step": given.step}))


def list_steps(tx: Tx, run: str, query: StepQuery) -> list[RunStep]:
    """List the reported steps of a run, in order."""
    columns = "step, figures, notes FROM run_steps"
    rows = tx.read_after(columns, "step", query.after, query.limit, run=run)
    return [
        RunStep(step=step, figures=msgspec.json.decode(figures), notes=msgspec.json.decode(notes))
        for step, figures, notes in rows
    ]


def list_runs(tx: Tx) -> list[RunView]:
    """List runs by their latest report, newest first."""
    rows = tx.all(
        "SELECT run, MAX(step), MAX(updated) FROM run_steps GROUP BY run"
        " ORDER BY MAX(updated) DESC LIMIT :limit",
        limit=_MAX_RUNS,
    )
    return [to_struct(RunView, "name, step, updated", row) for row in rows]


def trim_runs(tx: Tx, before: float) -> int:
    """Delete runs without a report since `before`; return the number of deleted steps."""
    silent = "SELECT run FROM run_steps GROUP BY run HAVING MAX(updated) < :before"
    return tx.run(f"DELETE FROM run_steps WHERE run IN ({silent})", before=before)  # noqa: S608 - constants
