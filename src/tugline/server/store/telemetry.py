"""Load of nodes and engines over time, with less detail the older it is, so that it is bounded.

Per node or engine of a node, `thin` leaves about 360 samples of the last hour, 1,440 of the day
before, and 144 of each day before that.
"""

from itertools import groupby

from tugline.protocol import NodeSample, Telemetry, TelemetryQuery, TelemetrySeries
from tugline.server.store.base import Row, Tx

WIDTH_S = 10
"""Length of the shortest interval, in which one sample is kept."""
_THINNED = ((60, 3600.0), (600, 86_400.0))
"""Lengths of intervals in seconds, and the ages from which samples are thinned to them."""
_VALUES = (
    "cpu", "memory", "sessions", "agents", "running", "waiting", "kv", "prompt_tps", "sampled_tps",
)  # fmt: skip
_MEANS = ", ".join(f"AVG({name})" for name in _VALUES)
_HOUR_S = 3600


def add(tx: Tx, node: str, sample: NodeSample) -> None:
    """Store a sample of the node with this name; a second one of the same interval is dropped."""
    empty: dict[str, object] = dict.fromkeys(_VALUES)
    at = {"node": node, "width": WIDTH_S, "at": int(tx.now) // WIDTH_S * WIDTH_S}
    rows = [
        {**empty, **at, "engine": getattr(of, "engine", "")}
        | {name: getattr(of, name) for name in _VALUES if hasattr(of, name)}
        for of in (sample, *sample.engines)
    ]
    names = ", ".join(rows[0])
    values = ", ".join(f":{name}" for name in rows[0])
    tx.many(
        f"INSERT INTO telemetry ({names}) VALUES ({values}) ON CONFLICT DO NOTHING",  # noqa: S608 - constants
        rows,
    )


def read(tx: Tx, query: TelemetryQuery) -> Telemetry:
    """Return the load in a range, with at most `query.points` points for each series."""
    until = int(tx.now) + 1 if query.until is None else query.until
    since = until - _HOUR_S if query.since is None else query.since
    parts = -(-max(1, until - since) // WIDTH_S)
    width = WIDTH_S * -(-parts // query.points)
    where = "at >= :since AND at < :until"
    node = "CASE WHEN engine = '' THEN node ELSE '' END"
    named: dict[str, object] = {}
    if query.node is not None:
        where += " AND node = :node"
        node = "node"
        named["node"] = query.node
    rows = tx.all(
        f"SELECT {node}, engine, (at - :since) / :width, {_MEANS} FROM telemetry WHERE {where}"  # noqa: S608 - constants
        " GROUP BY 1, 2, 3 ORDER BY 1, 2, 3",
        since=since,
        until=until,
        width=width,
        **named,
    )
    series = [
        _make_series(name, engine, list(part), since, width)
        for (name, engine), part in groupby(rows, key=lambda row: (row[0], row[1]))
    ]
    return Telemetry(width_s=width, series=tuple(series))


def _make_series(
    node: str, engine: str, rows: list[Row], since: int, width: int
) -> TelemetrySeries:
    columns = zip(*(row[3:] for row in rows), strict=True)
    known = {name: tuple(column) for name, column in zip(_VALUES, columns, strict=True)}
    return TelemetrySeries(
        node=node,
        engine=engine,
        at=tuple(float(since + row[2] * width) for row in rows),
        values={
            name: column
            for name, column in known.items()
            if any(value is not None for value in column)
        },
    )


def thin(tx: Tx, now: float, keep_s: float, after: str) -> str | None:
    """Thin the samples of the next node after `after`; return its name, None if there is none.

    Old samples are replaced by means over longer intervals, those older than `keep_s` are deleted.
    """
    node: str | None = tx.fetch_value(
        "SELECT MIN(node) FROM telemetry WHERE node > :after", after=after
    )
    if node is None:
        return None
    names = ", ".join(_VALUES)
    for width, age_s in _THINNED:
        before = int(now - age_s) // width * width
        old = "node = :node AND width < :width AND at < :before"
        tx.run(
            f"INSERT INTO telemetry (node, engine, width, at, {names})"  # noqa: S608 - constants
            f" SELECT node, engine, {width}, at / {width} * {width}, {_MEANS} FROM telemetry"
            f" WHERE {old} GROUP BY 1, 2, 4 ON CONFLICT DO NOTHING",
            node=node,
            width=width,
            before=before,
        )
        tx.run(
            f"DELETE FROM telemetry WHERE {old}",  # noqa: S608 - constants
            node=node,
            width=width,
            before=before,
        )
    expired = "DELETE FROM telemetry WHERE node = :node AND at < :before"
    tx.run(expired, node=node, before=int(now - keep_s))
    return node
