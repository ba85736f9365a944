"""The client against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from support.server import (
    TOKENS,
    RestartableServer,
    commit,
    damage_results,
    lease_sessions,
    list_held,
)
from support.tasks import make_task
from tugline.client.api import Client
from tugline.client.nodes import NodeClient
from tugline.errors import FencedError, Invalid, Missing, ServerError, UsageError
from tugline.protocol import LeaseRequest, NodeRegistration, Renewal, TaskState
from tugline.types import Limits, Reward, Status


@pytest.fixture
async def client(live: RestartableServer) -> AsyncIterator[Client]:
    """A client that may submit."""
    async with live.client(deadline_s=10.0) as made:
        yield made


async def test_many_tasks_are_submitted_in_batches(client: Client) -> None:
    """More tasks than a request may hold are accepted; an error has the index among them all."""
    tasks = [make_task(f"t{n}") for n in range(1005)]
    accepted = await client.submit(tasks)
    assert [one.task for one in accepted] == [one.id for one in tasks]
    assert [view.id async for view in client.tasks()] == [one.id for one in tasks]
    bad = [*tasks, make_task("bad", limits=Limits(agent_s=-1.0))]
    with pytest.raises(Invalid, match=r"agent_s") as raised:
        await client.submit(bad)
    assert raised.value.field == "1005.limits.agent_s"


async def test_unknown_ids_are_missing(client: Client) -> None:
    """An unknown id is an error, also one that must be quoted in a URL."""
    for asking in (client.task("x/.."), client.session("x-0?"), client.trajectory("x-0")):
        with pytest.raises(Missing):
            await asking
    with pytest.raises(Missing):
        await client.cancel(task="x")


async def test_calls_to_an_unreachable_server_end() -> None:
    """Calls end at their deadline with the reason; a client that is not open refuses them."""
    refused = r"127\.0\.0\.1:9 cannot be reached: Connection refused$"
    async with asyncio.timeout(20), Client("http://127.0.0.1:9", "t", deadline_s=0.5) as client:
        with pytest.raises(ServerError, match=refused):
            await client.status()
    with pytest.raises(UsageError, match="not open"):
        await client.status()


async def test_a_stream_survives_a_restart(live: RestartableServer, client: Client) -> None:
    """After a restart no result is lost and none comes twice."""
    await client.submit([make_task("a", samples=2), make_task("b", samples=2)])
    await live.finish(limit=2)
    async with aclosing(client.results()) as results, asyncio.timeout(30):
        got = [(await anext(results)).view.session for _ in range(2)]
        waiting = asyncio.ensure_future(anext(results))
        await asyncio.sleep(0.1)
        await live.stop()
        await live.start()
        await live.finish()
        got += [one.view.session for one in (await waiting, await anext(results))]
    assert got == ["a-0", "a-1", "b-0", "b-1"]


async def test_a_call_rides_out_a_restart(live: RestartableServer, client: Client) -> None:
    """A task that is submitted while the server is away is accepted when it is back."""
    await live.stop()
    submitting = asyncio.create_task(client.submit(make_task()))
    await asyncio.sleep(0.2)
    await live.start()
    (accepted,) = await submitting
    assert accepted.new


async def test_a_lost_trajectory_does_not_stop_readers(
    live: RestartableServer, client: Client
) -> None:
    """A lost or damaged result comes without its trajectory; later results are whole.

    All results can be read, or those of some tasks.
    """
    await client.submit([make_task("a", samples=3), make_task("b"), make_task("c")])
    await live.finish()
    damage_results(live.folder, "a-0", "a-1")
    some = client.results(tasks=("a", "c"), follow=False)
    read = {one.view.session: one async for one in some}
    assert [name for name, one in read.items() if one.trajectory] == ["a-2", "c-0"]
    assert read["a-0"].view.bytes > 0
    groups = [group async for group in client.groups(follow=False)]
    kept = [[bool(one.packed) for one in group.results] for group in groups]
    assert kept == [[False, False, True], [True], [True]]


async def test_results_come_with_their_trajectories(
    live: RestartableServer, client: Client
) -> None:
    """Results come in order, and again from the acknowledged position."""
    await client.submit(make_task(samples=3))
    await live.finish(t_1=0.5)
    got = [one async for one in client.results("trainer", follow=False)]
    assert [one.view.session for one in got] == ["t-0", "t-1", "t-2"]
    trajectory = await client.trajectory("t-1")
    assert got[1].trajectory == trajectory
    assert trajectory.reward == Reward(0.5)
    await client.ack("trainer", got[1].cursor)
    left = [one async for one in client.results("trainer", follow=False)]
    assert [one.view.session for one in left] == ["t-2"]
    assert [one.name for one in await client.consumers()] == ["trainer"]
    await client.delete_consumer("trainer")
    assert await client.consumers() == []


async def test_auto_ack_covers_finished_loop_bodies(
    live: RestartableServer, client: Client
) -> None:
    """A result whose loop body was left comes again; results before it do not."""
    await client.submit(make_task(samples=3))
    await live.finish()
    async with aclosing(client.results("trainer", auto_ack=True)) as results:
        async for one in results:
            if one.view.sample == 1:
                break
    left = client.results("trainer", auto_ack=True, follow=False)
    assert [one.view.sample async for one in left] == [1, 2]
    assert [one async for one in client.results("trainer", follow=False)] == []
    with pytest.raises(UsageError, match="consumer"):
        await anext(client.results(auto_ack=True))


async def test_waiting_ends_with_the_release(live: RestartableServer, client: Client) -> None:
    """Waiting returns views in the order of the ids, whether tasks end before or during it."""
    await client.submit([make_task("a"), make_task("b")])
    await live.finish(limit=1)
    waiting = asyncio.create_task(client.wait(["b", "a"]))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await live.finish()
    views = await asyncio.wait_for(waiting, 20)
    assert [view.id for view in views] == ["b", "a"]
    assert {view.state for view in views} == {TaskState.RELEASED}
    assert [view.status async for view in client.sessions(task="a")] == [Status.COMPLETED]


async def test_events_are_followed_from_a_position(client: Client) -> None:
    """Past and new events come once each."""
    await client.submit(make_task("a"))
    async with aclosing(client.events(after=0)) as events, asyncio.timeout(20):
        assert (await anext(events)).task == "a"
        await client.submit(make_task("b"))
        assert (await anext(events)).task == "b"


async def test_a_log_is_followed_to_its_end(live: RestartableServer, client: Client) -> None:
    """A restart of the server does not end the log; `tail` reads the end alone."""
    await client.submit(make_task())
    async with lease_sessions(live.url) as (node, _, work), asyncio.timeout(30):
        epoch = work.session.epoch
        assert await node.log("t-0", epoch, 0, b"one\n") == 4
        async with aclosing(client.log("t-0", follow=True)) as log:
            assert await anext(log) == b"one\n"
            await live.stop()
            await live.start()
            await node.log("t-0", epoch, 4, b"two\n")
            await commit(node, work)
            assert [piece async for piece in log] == [b"two\n"]
    assert [piece async for piece in client.log("t-0", tail=4)] == [b"two\n"]


async def test_cancelling_reaches_the_node(live: RestartableServer, client: Client) -> None:
    """Queued sessions end at once; running ones are stopped by their node."""
    await client.submit([make_task("a"), make_task("b")])
    async with lease_sessions(live.url) as (node, name, work), asyncio.timeout(20):
        ask = LeaseRequest(capacity=0, held=list_held(work), wait_s=10.0)
        polling = asyncio.create_task(node.lease(name, ask))
        assert (await client.cancel(task="b", by="me")).ended == ("b-0",)
        assert (await client.cancel(session="a-0", by="me")).stopping == ("a-0",)
        (stop,) = (await polling).stop
        assert (stop.session, stop.by) == ("a-0", "cancelled by me")
    with pytest.raises(UsageError, match="either"):
        await client.cancel()


async def test_a_pause_names_nodes_that_do_not_apply_it(
    live: RestartableServer, client: Client
) -> None:
    """The block of such a pause is not entered, and calls continue."""
    assert (await client.announce(3)).version == 3
    async with NodeClient(live.url, TOKENS.join) as node:
        welcome = await node.register(NodeRegistration(name="deaf", slots=1, capacity=1))

        async def apply_late() -> None:
            await asyncio.sleep(0.5)
            now = await client.weights()
            await node.renew(welcome.node, Renewal(applied=now.generation))

        hearing = asyncio.create_task(apply_late())
        with pytest.raises(ServerError, match="deaf"):
            async with client.paused(within_s=0.1):
                pass
        await hearing
        assert (await client.weights()).paused is None


async def test_a_replaced_node_is_fenced(live: RestartableServer) -> None:
    """Requests of the old node fail as a lost lease; a wrong token is another error."""
    hello = NodeRegistration(name="n", slots=1, capacity=1)
    async with NodeClient(live.url, TOKENS.join) as old, NodeClient(live.url, TOKENS.join) as new:
        welcome = await old.register(hello)
        await new.register(hello)
        for late in (old.renew(welcome.node, Renewal()), old.drain(welcome.node)):
            with pytest.raises(FencedError):
                await late
    async with NodeClient(live.url, TOKENS.read) as wrong:
        with pytest.raises(ServerError, match="join") as raised:
            await wrong.register(hello)
    assert raised.value.status == 403
