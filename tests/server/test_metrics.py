from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from leased import Idler, Open, a_task
from observed import read
from tugline.protocol import EventQuery
from tugline.server.control import ControlPlane
from tugline.server.metrics import ServerMetrics
from tugline.server.store import events, results
from tugline.types import Boundary, Callback, Ledger


@contextlib.asynccontextmanager
async def open_metrics(open_control: Open) -> AsyncIterator[tuple[ControlPlane, ServerMetrics]]:
    """A control plane and its metrics since it was opened."""
    async with open_control() as control:
        started = await control.database.read(events.latest)
        yield control, ServerMetrics(control.database, started)


async def test_gauges_show_the_current_state(open_control: Open) -> None:
    """Queue by tenant, sessions by status, nodes, unread results, callbacks, weights."""
    async with open_metrics(open_control) as (control, metrics):
        await control.announce(4)
        told = a_task("a", 3, callback=Callback("http://127.0.0.1:9/"))
        node = await Idler.at_work(control, told, a_task("b", 2, tenant="other"), room=2)
        await node.commit("a-0")
        await control.database.write(results.ack, "trainer", 0)
        found = read(await metrics.page())
    assert found["tugline_queue"] == {("default",): 2, ("other",): 1}
    assert found["tugline_sessions"]["queued",] == 3
    assert found["tugline_sessions"]["completed",] == 1
    assert found["tugline_nodes"] == {("live",): 1, ("draining",): 0, ("gone",): 0}
    assert found["tugline_slots"][()] == 2
    assert found["tugline_results_unread"] == {("trainer",): 1}
    assert found["tugline_callbacks"]["pending",] <= 1
    assert found["tugline_tasks_open"][()] == 2
    assert found["tugline_weights_version"][()] == 4
    assert found["tugline_weights_paused"][()] == 0
    (commits,) = found["tugline_store_commit_seconds_count"].values()
    assert commits > 5


async def test_counters_count_committed_events(open_control: Open) -> None:
    """Leases, requeues by reason, results, failures and tokens."""
    async with open_metrics(open_control) as (control, metrics):
        node = await Idler.at_work(control, a_task("a", 4))
        await node.release("a-0")
        await node.release("a-1", "no disk", Boundary.INFRASTRUCTURE)
        await node.commit("a-2", ledger=Ledger(sampled=10, trained=7))
        await node.commit("a-3", failure=Boundary.ENGINE, ledger=Ledger(sampled=10))
        found = read(await metrics.page())
    kinds = found["tugline_events_total"]
    assert kinds["session.leased",] == 4
    assert kinds["node.joined",] == 1
    assert kinds["node.lost",] == 0
    assert found["tugline_requeued_total"] == {("released",): 1, ("infrastructure",): 1}
    assert found["tugline_results_total"] == {("completed",): 1, ("failed",): 1}
    assert found["tugline_failures_total"] == {("engine",): 1}
    assert found["tugline_tokens_total"] == {("sampled",): 20, ("trained",): 7}
    assert found["tugline_queue_seconds_count"][()] == 4
    assert 0 < found["tugline_queue_seconds_sum"][()] < 20


async def test_each_event_is_counted_once(open_control: Open) -> None:
    """With consecutive and concurrent pages, and more events than are read at once."""
    async with open_metrics(open_control) as (control, metrics):
        for first in range(0, 3000, 1000):
            await control.submit([a_task(f"t{n}") for n in range(first, first + 1000)])
            await asyncio.gather(metrics.page(), metrics.page())
        found = read(await metrics.page())
        assert found["tugline_events_total"]["task.accepted",] == 3000


async def test_counters_begin_at_the_start_of_the_server(open_control: Open) -> None:
    """Events of an earlier process are not counted again."""
    async with open_metrics(open_control) as (control, _):
        await control.submit([a_task("a")])
    await asyncio.sleep(0.01)
    async with open_metrics(open_control) as (control, metrics):
        assert len(await control.events(EventQuery(after=0))) == 1
        await control.submit([a_task("b")])
        found = read(await metrics.page())
    assert found["tugline_events_total"]["task.accepted",] == 1
