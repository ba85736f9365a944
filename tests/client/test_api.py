"""The client against a real server: what is asked is done, what comes breaks off nowhere."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from house import House, commit, held, task
from served import TOKENS, spoil
from tugline.client.api import Client
from tugline.client.nodes import NodeClient
from tugline.errors import Conflict, FencedError, Invalid, Missing, ServerError, UsageError
from tugline.protocol import EventKind, LeaseRequest, NodeRegistration, Renewal, TaskState
from tugline.types import Limits, Status


async def test_a_task_is_submitted_once(client: Client) -> None:
    """The same task again is the same task; another one of its name is a conflict."""
    (first,) = await client.submit(task(samples=2))
    (again,) = await client.submit([task(samples=2)])
    assert first.new
    assert not again.new
    assert first.sessions == again.sessions
    with pytest.raises(Conflict):
        await client.submit(task(samples=3))
    assert await client.task_body("t") == task(samples=2)


async def test_many_tasks_go_in_batches(client: Client) -> None:
    """More tasks than a request may hold; an error names the place among all of them."""
    tasks = [task(f"t{n}") for n in range(1005)]
    accepted = await client.submit(tasks)
    assert [one.task for one in accepted] == [one.id for one in tasks]
    assert [view.id async for view in client.tasks()] == [one.id for one in tasks]
    bad = [*tasks, task("bad", limits=Limits(agent_s=-1.0))]
    with pytest.raises(Invalid, match=r"agent_s") as raised:
        await client.submit(bad)
    assert raised.value.field == "1005.limits.agent_s"


async def test_what_is_not_there_is_missing(client: Client) -> None:
    """An unknown id has an error of its own."""
    for asking in (client.task("x/.."), client.session("x-0?"), client.trajectory("x-0")):
        with pytest.raises(Missing):
            await asking
    with pytest.raises(Missing):
        await client.cancel(task="x")


async def test_a_wrong_token_is_refused_at_once(house: House) -> None:
    """No retries for what will not change."""
    async with Client(house.url, "wrong", deadline_s=30.0) as client, asyncio.timeout(20):
        with pytest.raises(ServerError, match="token") as raised:
            await client.status()
    assert raised.value.status == 401


async def test_nobody_waits_for_a_server_that_is_not_there() -> None:
    """A call ends at its deadline and says what it tried."""
    async with asyncio.timeout(20), Client("http://127.0.0.1:9", "t", deadline_s=0.5) as client:
        with pytest.raises(
            ServerError, match=r"127\.0\.0\.1:9 cannot be reached: Connection refused$"
        ):
            await client.status()
    with pytest.raises(UsageError, match="not open"):
        await client.status()


async def test_results_come_with_their_trajectories(house: House, client: Client) -> None:
    """In order, and again from where the consumer acknowledged."""
    await client.submit(task(samples=3))
    await house.finish(t_1=0.5)
    got = [one async for one in client.results("trainer", follow=False)]
    assert [one.view.session for one in got] == ["t-0", "t-1", "t-2"]
    trajectory = got[1].trajectory
    assert trajectory is not None
    assert trajectory.reward is not None
    assert trajectory.reward.value == 0.5
    assert (await client.trajectory("t-1")).session == "t-1"
    await client.ack("trainer", got[1].cursor)
    left = [one async for one in client.results("trainer", follow=False)]
    assert [one.view.session for one in left] == ["t-2"]
    assert [one.name for one in await client.consumers()] == ["trainer"]
    await client.delete_consumer("trainer")
    assert await client.consumers() == []
    with pytest.raises(Missing, match="trainer"):
        await client.delete_consumer("trainer")


async def test_auto_ack_counts_what_the_loop_is_done_with(house: House, client: Client) -> None:
    """A result whose loop body broke comes again; those before it do not."""
    await client.submit(task(samples=3))
    await house.finish()

    async def learn() -> None:
        async with aclosing(client.results("trainer", auto_ack=True)) as results:
            async for one in results:
                if one.view.sample == 1:
                    msg = "out of memory"
                    raise MemoryError(msg)

    with pytest.raises(MemoryError):
        await learn()
    left = client.results("trainer", auto_ack=True, follow=False)
    assert [one.view.sample async for one in left] == [1, 2]
    assert [one async for one in client.results("trainer", follow=False)] == []
    with pytest.raises(UsageError, match="consumer"):
        await anext(client.results(auto_ack=True))


async def test_a_stream_goes_on_over_a_restart(house: House, client: Client) -> None:
    """The server goes down and comes back: nothing is lost, nothing comes twice."""
    await client.submit([task("a", samples=2), task("b", samples=2)])
    await house.finish(limit=2)
    got: list[str] = []

    async def read() -> None:
        async with aclosing(client.results()) as results:
            async for one in results:
                got.append(one.view.session)
                if len(got) == 4:
                    return

    async with asyncio.timeout(30):
        reading = asyncio.create_task(read())
        while len(got) < 2:  # noqa: ASYNC110 - the stream fills it
            await asyncio.sleep(0.01)
        await house.stop()
        await house.start()
        await house.finish()
        await reading
    assert got == ["a-0", "a-1", "b-0", "b-1"]


async def test_a_lost_trajectory_stops_no_reader(house: House, client: Client) -> None:
    """Its result comes without it, as does that of a damaged one; what follows is whole."""
    await client.submit([task("a", samples=3), task("b")])
    await house.finish()
    spoil(house.folder, "a-0", "a-1")
    read = {one.view.session: one async for one in client.results(follow=False)}
    assert [name for name, one in read.items() if one.trajectory] == ["a-2", "b-0"]
    assert read["a-0"].view.bytes > 0
    groups = [one async for one in client.groups(follow=False)]
    assert [[bool(one.packed) for one in group.results] for group in groups] == [
        [False, False, True],
        [True],
    ]


async def test_a_call_rides_out_a_restart(house: House, client: Client) -> None:
    """Submitted while the server is away, kept when it is back."""
    await house.stop()
    submitting = asyncio.create_task(client.submit(task()))
    await asyncio.sleep(0.2)
    await house.start()
    (accepted,) = await submitting
    assert accepted.new


async def test_groups_come_whole(house: House, client: Client) -> None:
    """One by one, with all their samples, in the order of release."""
    await client.submit([task("a", samples=2), task("b", samples=3)])
    await house.finish()
    groups = [one async for one in client.groups("trainer", follow=False)]
    assert [(one.view.id, len(one.results)) for one in groups] == [("a", 2), ("b", 3)]
    assert [one.view.sample for one in groups[1].results] == [0, 1, 2]
    await client.ack("trainer", groups[0].cursor)
    left = [one.view.id async for one in client.groups("trainer", follow=False)]
    assert left == ["b"]


async def test_waiting_ends_with_the_release(house: House, client: Client) -> None:
    """For one that is over and one that is not; in the order that was asked for."""
    await client.submit(task("a"))
    await house.finish()
    await client.submit(task("b"))
    async with asyncio.timeout(20):
        waiting = asyncio.create_task(client.wait(["b", "a"]))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await house.finish()
        views = await waiting
    assert [(view.id, view.state) for view in views] == [
        ("b", TaskState.RELEASED),
        ("a", TaskState.RELEASED),
    ]
    assert [view.status async for view in client.sessions(task="a")] == [Status.COMPLETED]


async def test_events_go_on_over_a_restart(house: House, client: Client) -> None:
    """By the position of the last one that came."""
    kinds: list[EventKind] = []
    await client.submit(task("a"))

    async def read() -> None:
        async with aclosing(client.events(after=0)) as events:
            async for event in events:
                kinds.append(event.kind)
                if kinds.count(EventKind.ACCEPTED) == 2:
                    return

    reading = asyncio.create_task(read())
    while not kinds:  # noqa: ASYNC110 - the stream fills it
        await asyncio.sleep(0.01)
    await house.stop()
    await house.start()
    await client.submit(task("b"))
    async with asyncio.timeout(20):
        await reading
    assert kinds == [EventKind.ACCEPTED, EventKind.ACCEPTED]


async def test_a_log_is_followed_to_the_end_of_its_session(house: House, client: Client) -> None:
    """Also over a restart of the server; the tail alone if asked for."""
    await client.submit(task())
    async with NodeClient(house.url, TOKENS.join) as node, asyncio.timeout(30):
        welcome = await node.register(NodeRegistration(name="n", slots=1, capacity=1))
        (work,) = (await node.lease(welcome.node, LeaseRequest(capacity=1, wait_s=5.0))).work
        epoch = work.session.epoch
        assert await node.log("t-0", epoch, 0, b"one\n") == 4

        async def read() -> bytes:
            return b"".join([piece async for piece in client.log("t-0", follow=True)])

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.2)
        await house.stop()
        await house.start()
        await node.log("t-0", epoch, 4, b"two\n")
        await commit(node, work)
        assert await reading == b"one\ntwo\n"
    assert [piece async for piece in client.log("t-0", tail=4)] == [b"two\n"]


async def test_cancelling_reaches_the_node(house: House, client: Client) -> None:
    """What waits ends at once; what runs is stopped by its node."""
    await client.submit([task("a"), task("b")])
    async with NodeClient(house.url, TOKENS.join) as node, asyncio.timeout(20):
        welcome = await node.register(NodeRegistration(name="n", slots=1, capacity=1))
        (work,) = (await node.lease(welcome.node, LeaseRequest(capacity=1, wait_s=5.0))).work
        polling = asyncio.create_task(
            node.lease(
                welcome.node, LeaseRequest(capacity=0, held=held(work), applied=0, wait_s=10.0)
            )
        )
        assert (await client.cancel(task="b", by="me")).ended == ("b-0",)
        assert (await client.cancel(session="a-0", by="me")).stopping == ("a-0",)
        (stop,) = (await polling).stop
        assert (stop.session, stop.by) == ("a-0", "cancelled by me")
    with pytest.raises(UsageError, match="either"):
        await client.cancel()


async def test_weights_change_behind_a_barrier(house: House, client: Client) -> None:
    """Paused until the block ends; a node that does not answer is named, and calls go on."""
    async with client.paused(within_s=1.0) as barrier:
        assert barrier.missing == ()
        assert (await client.weights()).paused is not None
    assert (await client.announce(3)).version == 3
    assert (await client.weights()).paused is None
    async with NodeClient(house.url, TOKENS.join) as node:
        welcome = await node.register(NodeRegistration(name="deaf", slots=1, capacity=1))

        async def hear_late() -> None:
            await asyncio.sleep(0.5)
            now = await client.weights()
            await node.renew(welcome.node, Renewal(applied=now.generation))

        hearing = asyncio.create_task(hear_late())
        with pytest.raises(ServerError, match="deaf"):
            async with client.paused(within_s=0.1):
                pass
        await hearing
        assert (await client.weights()).paused is None


async def test_a_node_that_was_given_up_is_fenced(house: House) -> None:
    """Its token is gone: whatever it says is a lost lease, not a wrong password."""
    async with NodeClient(house.url, TOKENS.join) as old, NodeClient(house.url, TOKENS.join) as new:
        welcome = await old.register(NodeRegistration(name="n", slots=1, capacity=1))
        await new.register(NodeRegistration(name="n", slots=1, capacity=1))
        with pytest.raises(FencedError):
            await old.lease(welcome.node, LeaseRequest(capacity=1, wait_s=0.0))
        with pytest.raises(FencedError):
            await old.drain(welcome.node)
    async with NodeClient(house.url, TOKENS.read) as wrong:
        with pytest.raises(ServerError, match="join") as raised:
            await wrong.register(NodeRegistration(name="n", slots=1, capacity=1))
    assert raised.value.status == 403
