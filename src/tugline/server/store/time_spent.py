"""Where the time of sessions goes: sums by run, version and minute, kept with every result.

Reading them costs as much as there are versions and minutes, not sessions.
"""

from collections.abc import Mapping
from typing import Any

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


def add(tx: Tx, result: ResultView, *, sign: int = 1) -> None:
    """Add a result to the sums, or with `sign` -1 subtract it; one without a node is left out."""
    if not result.seconds:
        return
    known = result.queued_s is not None
    parts = split(result) if known else TimeParts(sessions=1)
    changes = ", ".join(f"{name} = time_spent.{name} + excluded.{name}" for name in _NAMES)
    values = ", ".join(f":{name}" for name in _NAMES)
    tx.run(
        f"INSERT INTO time_spent (run, version, minute, {_COLUMNS})"  # noqa: S608 - constants
        f" VALUES (:run, :version, :minute, {values})"
        f" ON CONFLICT (run, version, minute) DO UPDATE SET {changes}",
        run=result.run or "",
        version=(result.version or 0) if known else _UNMEASURED,
        minute=int(result.created // 60) if known else 0,
        **{name: sign * getattr(parts, name) for name in _NAMES},
    )


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
    sums = dict(zip(_NAMES, map(float, row[1:]), strict=True))
    sessions = int(sums.pop("sessions"))
    return {"sessions": sessions} | {name: max(0.0, value) for name, value in sums.items()}


def _count_unmeasured(tx: Tx, run: str | None) -> int:
    where = "" if run is None else " AND run = :run"
    query = f"SELECT SUM(sessions) FROM time_spent WHERE version = :version{where}"  # noqa: S608 - constants
    named = {} if run is None else {"run": run}
    return int(tx.fetch_value(query, version=_UNMEASURED, **named) or 0)


def trim(tx: Tx, before: float) -> None:
    """Delete sums of results before that time whose run is not registered any more."""
    tx.run(
        "DELETE FROM time_spent WHERE minute < :minute"
        " AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.name = time_spent.run)",
        minute=int(before // 60),
    )
