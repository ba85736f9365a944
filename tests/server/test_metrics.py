from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import aiohttp
import pytest
from msgspec.structs import replace

from observed import observed, read, task, until
from served import TOKENS
from tugline.protocol import EventQuery, LeaseRequest, LeaseResponse, NodeRegistration, Release
from tugline.recording.trajectories import pack
from tugline.server.control import ControlPlane
from tugline.server.http.app import Api, serve_api
from tugline.server.metrics import ServerMetrics
from tugline.server.store import events, results
from tugline.types import Boundary, Callback, Failure, Ledger, Reward, Status, Trajectory

Served = Callable[[], AbstractAsyncContextManager[tuple[ControlPlane, ServerMetrics]]]


@pytest.fixture
def server(open_control: Callable[..., AbstractAsyncContextManager[ControlPlane]]) -> Served:
    """A control plane and its metrics, on each kind of store."""

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[tuple[ControlPlane, ServerMetrics]]:
        async with open_control() as control:
            started = await control.database.read(events.latest)
            yield control, ServerMetrics(control.database, started)

    return opened


async def leased(control: ControlPlane, room: int) -> tuple[str, LeaseResponse]:
    """A node that has taken so much work."""
    welcome = await control.dispatcher.register(NodeRegistration(name="n", slots=3, capacity=9))
    ask = LeaseRequest(capacity=room, wait_s=5, applied=welcome.control.generation)
    return welcome.node, await control.dispatcher.lease(welcome.node, ask)


def result(session: str, sample: int, failure: Failure | None = None) -> bytes:
    """What a node commits."""
    trajectory = Trajectory(
        session=session,
        task="a",
        sample=sample,
        status=Status.FAILED if failure else Status.COMPLETED,
        traces=(),
        ledger=Ledger(sampled=10, trained=0 if failure else 7),
        reward=None if failure else Reward(1.0),
        failure=failure,
    )
    return pack(trajectory)


async def test_what_there_is_now(server: Served) -> None:
    """Queue by tenant, sessions by status, nodes, unread results, callbacks, weights."""
    async with server() as (control, metrics):
        await control.announce(4)
        callback = Callback("http://127.0.0.1:9/")
        await control.submit([replace(task("a", samples=3), callback=callback)])
        await control.submit([task("b", samples=2, tenant="other")])
        _, orders = await leased(control, 2)
        session = orders.work[0].session
        await control.dispatcher.commit(
            session.id, session.epoch, result(session.id, session.sample)
        )
        await control.database.write(results.ack, "trainer", 0)
        found = read(await metrics.page())
    assert found["tugline_queue"] == {("default",): 2, ("other",): 1}
    assert found["tugline_sessions"]["queued",] == 3
    assert found["tugline_sessions"]["completed",] == 1
    assert found["tugline_nodes"] == {("live",): 1, ("draining",): 0, ("gone",): 0}
    assert found["tugline_slots"][()] == 3
    assert found["tugline_results_unread"] == {("trainer",): 1}
    assert found["tugline_callbacks"]["pending",] <= 1
    assert found["tugline_tasks_open"][()] == 2
    assert found["tugline_weights_version"][()] == 4
    assert found["tugline_weights_paused"][()] == 0
    (commits,) = found["tugline_store_commit_seconds_count"].values()
    assert commits > 5


async def test_what_has_happened(server: Served) -> None:
    """Leases, requeues by their reason, results, failures and tokens, as they were committed."""
    async with server() as (control, metrics):
        await control.submit([task("a", samples=4)])
        _, orders = await leased(control, 4)
        one, two, three, four = (work.session for work in orders.work)
        back = Release(epoch=one.epoch, reason="drained")
        await control.dispatcher.release(one.id, back)
        broken = Release(epoch=two.epoch, reason="no disk", boundary=Boundary.INFRASTRUCTURE)
        await control.dispatcher.release(two.id, broken)
        await control.dispatcher.commit(three.id, three.epoch, result(three.id, three.sample))
        failure = Failure(Boundary.ENGINE, "it overflowed: twice")
        await control.dispatcher.commit(four.id, four.epoch, result(four.id, four.sample, failure))
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


async def test_each_event_is_counted_once(server: Served) -> None:
    """Pages one after the other and at the same time, more events than are read at once."""
    async with server() as (control, metrics):
        for first in range(0, 3000, 1000):
            await control.submit([task(f"t{n}") for n in range(first, first + 1000)])
            await asyncio.gather(metrics.page(), metrics.page())
        found = read(await metrics.page())
        assert found["tugline_events_total"]["task.accepted",] == 3000


async def test_a_server_counts_from_its_start(server: Served) -> None:
    """What an earlier process did is not counted again, so that a rate has no jump."""
    async with server() as (control, _):
        await control.submit([task("a")])
    await asyncio.sleep(0.01)
    async with server() as (control, metrics):
        assert len(await control.events(EventQuery(after=0))) == 1
        await control.submit([task("b")])
        found = read(await metrics.page())
    assert found["tugline_events_total"]["task.accepted",] == 1


async def test_requests_are_told_by_route(server: Served) -> None:
    """Route and class of the status are labels; ids are not."""
    async with server() as (_, metrics):
        metrics.count_request("GET /v1/tasks/{id}", 200, 0.003)
        metrics.count_request("GET /v1/tasks/{id}", 404, 0.02)
        found = read(await metrics.page())
    assert found["tugline_http_seconds_count"] == {
        ("GET /v1/tasks/{id}", "2xx"): 1,
        ("GET /v1/tasks/{id}", "4xx"): 1,
    }
    assert found["tugline_http_seconds_bucket"]["0.005", "GET /v1/tasks/{id}", "2xx"] == 1


async def test_one_page_has_the_server_and_its_node(tmp_path: Path) -> None:
    """In one process one address tells all of it, every metric once."""
    async with observed(tmp_path) as rig:
        await rig.run(task("a"))
        page = await rig.pages.page()
    names = [line.split()[2] for line in page.decode().splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert {"tugline_sessions", "tugline_node_sessions", "tugline_gateway_calls_total"} <= {*names}


async def test_open_long_answers_are_counted(tmp_path: Path) -> None:
    """One that waits over HTTP is on the page, and gone from it with its client."""
    async with observed(tmp_path) as rig:
        app = Api(rig.control, TOKENS, rig.pages)
        headers = {"authorization": f"Bearer {TOKENS.read}"}
        async with serve_api(app) as url, aiohttp.ClientSession(headers=headers) as http:
            asking = asyncio.ensure_future(http.get(f"{url}/v1/results?wait_s=20"))
            await until(lambda: app.waits.open == 1)
            async with http.get(f"{url}/metrics") as answer:
                found = read(await answer.read())
            asking.cancel()
            await until(lambda: app.waits.open == 0)
    assert found["tugline_waiting"][()] == 1
