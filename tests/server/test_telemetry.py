"""Load of nodes and engines over time, on each store."""

from __future__ import annotations

import time

from msgspec.structs import replace

from support.control_plane import Clock, IdleNode, Open, pass_time
from tugline.protocol import EngineSample, NodeSample, Renewal, Telemetry, TelemetryQuery
from tugline.server.control import ControlPlane
from tugline.server.store import telemetry
from tugline.server.store.base import Tx

ENGINE = EngineSample(engine="http://e:1", running=4, waiting=2, kv=0.5, sampled_tps=100.0)
SAMPLE = NodeSample(cpu=0.25, memory=0.5, sessions=3, agents=2, engines=(ENGINE,))
DAY_S = 86_400
BEGAN = (int(time.time()) // DAY_S + 5) * DAY_S
"""Later than what the server deletes by itself."""


async def read(control: ControlPlane, **query: object) -> Telemetry:
    """The load in a range."""
    return await control.database.read(telemetry.read, TelemetryQuery(**query))


async def test_samples_of_renewals_are_kept(control: ControlPlane) -> None:
    """There is a series for each node and one for each engine; what is unknown has no values."""
    for name in ("a", "b"):
        node = await IdleNode.join(control, name)
        cpu = 0.25 if name == "a" else 0.75
        renewal = Renewal(sample=replace(SAMPLE, cpu=cpu), applied=node.applied)
        await control.dispatcher.renew(node.node, renewal)
        await control.dispatcher.renew(node.node, Renewal(applied=node.applied))
    found = await read(control)
    assert [(series.node, series.engine) for series in found.series] == [
        ("", "http://e:1"), ("a", ""), ("b", ""),
    ]  # fmt: skip
    engine, first, second = found.series
    assert engine.values == {"running": (4,), "waiting": (2,), "kv": (0.5,), "sampled_tps": (100,)}
    assert first.values == {"cpu": (0.25,), "memory": (0.5,), "sessions": (3,), "agents": (2,)}
    assert second.values["cpu"] == (0.75,)
    own = await read(control, node="b")
    assert [(series.node, series.engine) for series in own.series] == [
        ("b", ""), ("b", "http://e:1"),
    ]  # fmt: skip


def fill(tx: Tx, seconds: int, since: int, *samples: NodeSample, node: str = "a") -> None:
    """Store samples every ten seconds."""
    tx.now = since
    for _ in range(seconds // 10):
        for sample in samples:
            telemetry.add(tx, node, sample)
        tx.now += 10


async def test_points_are_means_and_at_most_as_many_as_asked(control: ControlPlane) -> None:
    """Two samples of the same ten seconds count once."""
    await control.database.write(fill, 3600, BEGAN, SAMPLE, replace(SAMPLE, cpu=1.0))
    whole = await read(control, since=BEGAN, until=BEGAN + 3600, points=1000)
    assert whole.width_s == 10
    assert [len(series.at) for series in whole.series] == [360, 360]
    few = await read(control, since=BEGAN, until=BEGAN + 3600, points=7)
    assert few.width_s == 520
    assert few.series[1].at == tuple(BEGAN + 520.0 * n for n in range(7))
    assert few.series[1].values["cpu"] == (0.25,) * 7
    assert await read(control, since=0, until=1000) == Telemetry(width_s=10, series=())


async def test_old_samples_are_thinned_and_deleted(open_control: Open) -> None:
    """An hour is kept in full, a day by the minute, the rest by ten minutes; that is bounded."""
    now = BEGAN + 4 * DAY_S
    alone = replace(SAMPLE, engines=())
    async with open_control(keep_events_days=3.0) as control:
        await control.database.write(fill, 4 * DAY_S, now - 4 * DAY_S, alone)
        await control.database.write(fill, 60, now - 4 * DAY_S, SAMPLE, node="b")
        await control.database.write(fill, 60, now - 2 * DAY_S, SAMPLE, node="c")
        for _ in range(2):
            await control.delete_old(float(now))
        ranges = {
            "hour": (now - 3600, now, 360),
            "day": (now - DAY_S, now - 3600, 23 * 60),
            "older": (now - 3 * DAY_S, now - DAY_S, 2 * 144),
            "deleted": (now - 4 * DAY_S, now - 3 * DAY_S, 0),
        }
        for name, (since, until, expected) in ranges.items():
            count = await control.database.read(
                Tx.fetch_value,
                "SELECT COUNT(*) FROM telemetry WHERE node = 'a' AND at >= :since AND at < :until",
                since=since,
                until=until,
            )
            assert count == expected, name
        found = await read(control, since=now - 3 * DAY_S, until=now, points=300)
    engine, first, last = found.series
    assert (engine.engine, first.node, last.node) == ("http://e:1", "a", "c"), "b is deleted"
    assert len(first.at) <= 300
    assert set(first.values["cpu"]) == {0.25}
    [at] = last.at
    assert 0 <= BEGAN + 2 * DAY_S - at < found.width_s
    assert engine.at == last.at


async def test_a_node_that_was_lost_leaves_its_samples(control: ControlPlane) -> None:
    """They are those of its name, so that a restarted node continues the series."""
    assert isinstance(control.database.clock, Clock)
    for _ in range(2):
        node = await IdleNode.join(control, "a")
        await control.dispatcher.renew(node.node, Renewal(sample=SAMPLE, applied=node.applied))
        await pass_time(control, 60.0)
    found = await read(control)
    assert [(series.node, len(series.at)) for series in found.series] == [("", 2), ("a", 2)]
