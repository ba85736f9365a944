"""Figures that trainers report, by run and step."""

import msgspec

from tugline.protocol import EventKind, RunStep, RunView, StepQuery
from tugline.server.store import events
from tugline.server.store.base import Tx, to_struct

_MOST_RUNS = 1000
"""Of which are listed."""


def report(tx: Tx, run: str, given: RunStep) -> None:
    """Add to what is known of a step; what was known under the same names is replaced."""
    if given.rewound:
        tx.run("DELETE FROM run_steps WHERE run = :run AND step > :step", run=run, step=given.step)
    known = next(iter(steps(tx, run, StepQuery(after=given.step - 1, limit=1))), given)
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


def steps(tx: Tx, run: str, query: StepQuery) -> list[RunStep]:
    """What is known of each step, in order."""
    rows = tx.read_after(
        "step, figures, notes FROM run_steps", "step", query.after, query.limit, run=run
    )
    return [
        RunStep(step=step, figures=msgspec.json.decode(figures), notes=msgspec.json.decode(notes))
        for step, figures, notes in rows
    ]


def list_views(tx: Tx) -> list[RunView]:
    """All runs, the one that reported last first."""
    rows = tx.all(
        "SELECT run, MAX(step), MAX(updated) FROM run_steps GROUP BY run"
        " ORDER BY MAX(updated) DESC LIMIT :limit",
        limit=_MOST_RUNS,
    )
    return [to_struct(RunView, "name, step, updated", row) for row in rows]


def trim(tx: Tx, before: float) -> int:
    """Delete runs that have reported nothing since; how many steps."""
    return tx.run(
        "DELETE FROM run_steps WHERE run IN"
        " (SELECT run FROM run_steps GROUP BY run HAVING MAX(updated) < :before)",
        before=before,
    )
