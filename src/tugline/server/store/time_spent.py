"""Where the time of sessions goes: sums by run, version and minute, kept with every result.

Reading them costs as much as there are versions and minutes, not sessions.
"""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import asdict

from tugline.protocol import ResultView, TimeAxis, TimeParts, TimePoint, TimeQuery, TimeSpent
from tugline.server.store.base import Row, Tx
from tugline.types import Status

_NAMES = TimeParts.__struct_fields__
_COLUMNS = ", ".join(_NAMES)
_UNMEASURED = -1
"""Version of the sums that only count results of older releases."""
_STAGES = (Status.INIT, Status.READY, Status.RUN, Status.EVAL)
"""Stages that have a part of their own."""


def count_other(seconds: Mapping[str, float], attempt_s: float) -> float:
    """Return the seconds of an attempt in none of the stages that have a part of their own."""
    return max(0.0, attempt_s - sum(seconds.get(stage.value, 0.0) for stage in _STAGES))


def split(result: ResultView) -> TimeParts:
    """Split the time of a session, without that in which no server was running.

    It depends on the result alone, so that what was added to the sums can be subtracted.
    """
    of = result.seconds.get
    run_s = of(Status.RUN.value, 0.0)
    engine_s = None if result.engine_s is None else min(result.engine_s, run_s)
    return TimeParts(
        sessions=1,
        waiting_s=(result.queued_s or 0.0) + of(Status.READY.value, 0.0),
        sandbox_s=of(Status.INIT.value, 0.0),
        engine_s=engine_s or 0.0,
        agent_s=0.0 if engine_s is None else run_s - engine_s,
        unsplit_s=run_s if engine_s is None else 0.0,
        evaluation_s=of(Status.EVAL.value, 0.0),
        other_s=result.other_s or 0.0,
    )


def add(tx: Tx, result: ResultView) -> None:
    """Add a result to the sums; one without a node is left out."""
    if not result.seconds:
        return
    changes = ", ".join(f"{name} = time_spent.{name} + excluded.{name}" for name in _NAMES)
    values = ", ".join(f":{name}" for name in _NAMES)
    tx.run(
        f"INSERT INTO time_spent (run, version, minute, {_COLUMNS})"  # noqa: S608 - constants
        f" VALUES (:run, :version, :minute, {values})"
        f" ON CONFLICT (run, version, minute) DO UPDATE SET {changes}",
        **_row(result),
    )


def subtract(tx: Tx, result: ResultView) -> None:
    """Subtract a result from the sums that it was added to, if they still exist."""
    if not result.seconds:
        return
    changes = ", ".join(f"{name} = {name} - :{name}" for name in _NAMES)
    tx.run(
        f"UPDATE time_spent SET {changes} WHERE run = :run AND version = :version"  # noqa: S608 - constants
        " AND minute = :minute AND sessions > 0",
        **_row(result),
    )


def _row(result: ResultView) -> dict[str, object]:
    """Return the row of a result alone."""
    known = result.queued_s is not None
    return {
        "run": result.run or "",
        "version": (result.version or 0) if known else _UNMEASURED,
        "minute": int(result.created // 60) if known else 0,
        **asdict(split(result) if known else TimeParts(sessions=1)),
    }


def read(tx: Tx, query: TimeQuery) -> TimeSpent:
    """Return the sums of the sessions of a query, and of at most `query.points` parts of them."""
    column = "version" if query.by is TimeAxis.VERSION else "minute"
    where = "version >= :first AND version <= :last AND minute >= :since AND minute < :until"
    values: dict[str, object] = {
        "first": query.first or 0,
        "last": 2**63 - 1 if query.last is None else query.last,
        "since": (query.since or 0) // 60,
        "until": 2**53 if query.until is None else -(-query.until // 60),
    }
    if query.run is not None:
        where += " AND run = :run"
        values["run"] = query.run
    ends = "MIN(version), MAX(version), MIN(minute), MAX(minute)"
    [found] = tx.all(f"SELECT {ends} FROM time_spent WHERE {where}", **values)  # noqa: S608 - constants
    *_, first_minute, last_minute = found
    low, high, *_ = found if column == "version" else found[2:]
    width = 1 if low is None else -(-(high - low + 1) // query.points)
    sums = ", ".join(f"SUM({name})" for name in _NAMES)
    rows = tx.all(
        f"SELECT ({column} - :low) / :width, {sums} FROM time_spent WHERE {where}"  # noqa: S608 - constants
        " GROUP BY 1 ORDER BY 1",
        low=low or 0,
        width=width,
        **values,
    )
    unit = 1 if query.by is TimeAxis.VERSION else 60
    points = [TimePoint(at=unit * ((low or 0) + row[0] * width), **_parts(row)) for row in rows]
    total = {name: sum(getattr(point, name) for point in points) for name in _NAMES}
    return TimeSpent(
        total=TimeParts(**total),
        points=tuple(point for point in points if point.sessions),
        width=unit * width,
        unmeasured=_count_unmeasured(tx, query.run),
        since=None if first_minute is None else 60.0 * first_minute,
        until=None if last_minute is None else 60.0 * (last_minute + 1),
    )


def _parts(row: Row) -> dict[str, Any]:
    """Return the sums of a row; differences of sums may leave rounding errors below 0."""
    sums = {name: max(0.0, float(value)) for name, value in zip(_NAMES, row[1:], strict=True)}
    return {**sums, "sessions": int(sums["sessions"])}


def _count_unmeasured(tx: Tx, run: str | None) -> int:
    where = "" if run is None else " AND run = :run"
    query = f"SELECT SUM(sessions) FROM time_spent WHERE version = :version{where}"  # noqa: S608 - constants
    named = {} if run is None else {"run": run}
    return max(0, int(tx.fetch_value(query, version=_UNMEASURED, **named) or 0))


def trim(tx: Tx, before: float) -> None:
    """Delete sums of results before that time whose run is not registered any more.

    Those from the first kept session of the run on stay, so that its result can be subtracted.
    """
    names = tx.column(
        "SELECT DISTINCT run FROM time_spent WHERE minute < :minute"
        " AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.name = time_spent.run)",
        minute=int(before // 60),
    )
    for name in names:
        where = "run = :run" if name else "run IS NULL"
        # A session with a result was last updated when it ended.
        query = f"SELECT MIN(updated) FROM sessions WHERE {where} AND status <> 'queued'"  # noqa: S608 - constants
        kept = tx.fetch_value(query, **({"run": name} if name else {}))
        tx.run(
            "DELETE FROM time_spent WHERE run = :run AND version >= :version AND minute < :minute",
            run=name,
            version=_UNMEASURED if kept is None else 0,
            minute=int((before if kept is None else min(before, kept)) // 60),
        )
