from __future__ import annotations

import asyncio

from support.control_plane import IdleNode, Open
from support.deployment import read_samples
from support.tasks import make_task
from tugline.protocol import EventQuery
from tugline.server.control import ControlPlane
from tugline.server.metrics import ServerMetrics
from tugline.server.store import events, results
from tugline.types import Boundary, Callback, Ledger


async def test_gauges_show_the_current_state(control: ControlPlane) -> None:
    """Queue, sessions, nodes, unread results, callbacks and weights have their present values.

    The gauges are one page, so that they are checked in one state.
    """
    metrics = ServerMetrics(control.database)
    await control.announce(4)
    notified = make_task("a", 3, callback=Callback("http://127.0.0.1:9/"))
    node = await IdleNode.at_work(control, notified, make_task("b", 2, tenant="other"), room=2)
    await node.commit("a-0")
    await control.database.write(results.ack, "trainer", 0)
    samples = read_samples(await metrics.page())
    assert samples["tugline_queue"] == {("default",): 2, ("other",): 1}
    assert samples["tugline_sessions"]["queued",] == 3
    assert samples["tugline_sessions"]["completed",] == 1
    assert samples["tugline_nodes"] == {("live",): 1, ("draining",): 0, ("gone",): 0}
    assert samples["tugline_slots"][()] == 2
    assert samples["tugline_results_unread"] == {("trainer",): 1}
    assert samples["tugline_callbacks"]["pending",] <= 1
    assert samples["tugline_tasks_open"][()] == 2
    assert samples["tugline_weights_version"][()] == 4
    assert samples["tugline_weights_paused"][()] == 0
    (commits,) = samples["tugline_store_commit_seconds_count"].values()
    assert commits > 5


async def test_counters_count_committed_events(control: ControlPlane) -> None:
    """Leases, requeues by reason, results, failures and tokens are counted.

    The counters are one page, so that they are checked for the same events.
    """
    metrics = ServerMetrics(control.database)
    node = await IdleNode.at_work(control, make_task("a", 4))
    await node.release("a-0")
    await node.release("a-1", "no disk", Boundary.INFRASTRUCTURE)
    await node.commit("a-2", ledger=Ledger(sampled=10, trained=7))
    await node.commit("a-3", failure=Boundary.ENGINE, ledger=Ledger(sampled=10))
    samples = read_samples(await metrics.page())
    kinds = samples["tugline_events_total"]
    assert kinds["session.leased",] == 4
    assert kinds["node.joined",] == 1
    assert kinds["node.lost",] == 0
    assert samples["tugline_requeued_total"] == {("released",): 1, ("infrastructure",): 1}
    assert samples["tugline_results_total"] == {("completed",): 1, ("failed",): 1}
    assert samples["tugline_failures_total"] == {("engine",): 1}
    assert samples["tugline_tokens_total"] == {("sampled",): 20, ("trained",): 7}
    assert samples["tugline_queue_seconds_count"][()] == 4
    assert 0 < samples["tugline_queue_seconds_sum"][()] < 20


async def test_each_event_is_counted_once(control: ControlPlane) -> None:
    """Consecutive and concurrent pages count each event once, also beyond one batch."""
    metrics = ServerMetrics(control.database)
    for first in range(0, 3000, 1000):
        await control.submit([make_task(f"t{n}") for n in range(first, first + 1000)])
        await asyncio.gather(metrics.page(), metrics.page())
    samples = read_samples(await metrics.page())
    assert samples["tugline_events_total"]["task.accepted",] == 3000


async def test_counters_begin_at_the_start_of_the_server(open_control: Open) -> None:
    """Events of an earlier process are not counted again."""
    async with open_control() as control:
        await control.submit([make_task("a")])
    await asyncio.sleep(0.01)
    async with open_control() as control:
        metrics = ServerMetrics(control.database, await control.database.read(events.latest))
        assert len(await control.events(EventQuery(after=0))) == 1
        await control.submit([make_task("b")])
        samples = read_samples(await metrics.page())
    assert samples["tugline_events_total"]["task.accepted",] == 1
