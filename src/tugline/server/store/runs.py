"""Runs: who started what with which configuration, and the figures of trainers by step.

A run is registered before tasks are submitted to it. A report of a trainer that registers nothing
registers its run.
"""

from collections.abc import Set as AbstractSet

import msgspec

from tugline.errors import Conflict, Missing
from tugline.protocol import EventKind, RunKind, RunStart, RunStep, RunView, StepQuery
from tugline.server.store import events
from tugline.server.store.base import Row, Tx, to_struct

_MAX_RUNS = 1000
"""Maximum number of listed runs."""
_COLUMNS = "name, kind, created, updated, ended, parent, by, step"
_ROWS = (
    "name, kind, created, updated, ended, parent, started_by,"
    " (SELECT MAX(step) FROM run_steps WHERE run = runs.name)"
)


def start(tx: Tx, name: str, given: RunStart) -> RunView:
    """Register a run, or continue it with the given configuration.

    Raises `Conflict` for a run of another kind.
    """
    kind = tx.fetch_value("SELECT kind FROM runs WHERE name = :name", name=name)
    if kind is not None and kind != given.kind:
        msg = f"run {name!r} is of kind {kind!r}, not {given.kind.value!r}; use another name"
        raise Conflict(msg, field="kind")
    tx.run(
        "INSERT INTO runs (name, kind, configuration, parent, started_by, created, updated)"
        " VALUES (:name, :kind, :configuration, :parent, :by, :now, :now)"
        " ON CONFLICT (name) DO UPDATE SET configuration = excluded.configuration,"
        " parent = excluded.parent, started_by = excluded.started_by,"
        " updated = excluded.updated, ended = NULL",
        name=name,
        kind=given.kind.value,
        configuration=msgspec.json.encode(given.configuration).decode(),
        parent=given.parent,
        by=given.by,
        now=tx.now,
    )
    events.add(tx, EventKind.STARTED, events.Note(detail={"run": name, "kind": given.kind.value}))
    return get(tx, name)


def end(tx: Tx, name: str) -> RunView:
    """Record that a run has ended; the first time counts. Raises `Missing`."""
    view = get(tx, name)
    if view.ended is None:
        tx.run(
            "UPDATE runs SET ended = :now, updated = :now WHERE name = :name", name=name, now=tx.now
        )
        events.add(tx, EventKind.ENDED, events.Note(detail={"run": name}))
    return get(tx, name)


def require(tx: Tx, name: str) -> None:
    """Raise `Missing` for a run that is not registered."""
    tx.require_one("SELECT 1 FROM runs WHERE name = :name", _missing(name), name=name)


def get(tx: Tx, name: str) -> RunView:
    """Return a run with its configuration. Raises `Missing`."""
    query = f"SELECT {_ROWS}, configuration FROM runs WHERE name = :name"  # noqa: S608 - constants
    *row, configuration = tx.require_one(query, _missing(name), name=name)
    return _view(tuple(row), configuration=msgspec.json.decode(configuration))


def list_views(tx: Tx) -> list[RunView]:
    """List runs without their configuration, the last changed first."""
    rows = tx.all(f"SELECT {_ROWS} FROM runs ORDER BY updated DESC LIMIT :n", n=_MAX_RUNS)  # noqa: S608 - constants
    return [_view(row) for row in rows]


def _view(row: Row, **fields: object) -> RunView:
    return to_struct(RunView, _COLUMNS, row, **fields)


def _missing(name: str) -> Missing:
    return Missing(f"unknown run {name!r}")


def trim(tx: Tx, before: float) -> int:
    """Delete runs unchanged since `before` that have no tasks; return their number."""
    names = tx.column(
        "SELECT name FROM runs WHERE updated < :before"
        " AND NOT EXISTS (SELECT 1 FROM tasks WHERE tasks.run = runs.name)",
        before=before,
    )
    tx.run("DELETE FROM run_steps WHERE run IN :names", names=names)
    return tx.run("DELETE FROM runs WHERE name IN :names", names=names)


# --------------------------------------------------------------------------- steps of trainers
def report_step(tx: Tx, run: str, given: RunStep) -> None:
    """Add figures and notes to a step; those of the same names are replaced."""
    if not tx.run("UPDATE runs SET updated = :now WHERE name = :run", run=run, now=tx.now):
        start(tx, run, RunStart(kind=RunKind.TRAIN))
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
    """List the reported steps of a run, in order; only those with a figure of the query, if any."""
    columns = "step, figures, notes FROM run_steps"
    wanted = set(query.figure)
    listed: list[RunStep] = []
    after = query.after
    while len(listed) < query.limit:
        rows = tx.read_after(columns, "step", after, query.limit, run=run)
        listed += [step for row in rows if (step := _decode(row, wanted)) is not None]
        if len(rows) < query.limit:
            break
        after = rows[-1][0]
    return listed[: query.limit]


def _decode(row: Row, wanted: AbstractSet[str]) -> RunStep | None:
    """Return a step with only `wanted` figures unless empty; None if it has none of them."""
    step, encoded, notes = row
    figures = msgspec.json.decode(encoded)
    if not wanted:
        return RunStep(step=step, figures=figures, notes=msgspec.json.decode(notes))
    kept = {name: value for name, value in figures.items() if name in wanted}
    return RunStep(step=step, figures=kept) if kept else None
