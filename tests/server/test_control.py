from __future__ import annotations

import asyncio

import pytest

from leased import Idler, Open, a_task, result, until_waiting
from tugline.errors import Conflict, FencedError, Invalid, Missing, UsageError
from tugline.protocol import (
    CommitOutcome,
    EventKind,
    EventQuery,
    NodeRegistration,
    ResultQuery,
    SessionQuery,
    TaskQuery,
    TaskState,
)
from tugline.server.control import ControlPlane
from tugline.server.store import nodes, results, sessions, stats, tasks
from tugline.types import Boundary, Session, Status, Task


async def test_a_task_is_taken_in_once(control: ControlPlane) -> None:
    """The same again is fine and says so; another of its name is refused, with all beside it."""
    [first] = await control.submit([a_task("t", 2)])
    assert (first.sessions, first.new) == (("t-0", "t-1"), True)
    [again] = await control.submit([a_task("t", 2)])
    assert (again.sessions, again.new) == (("t-0", "t-1"), False)
    with pytest.raises(Conflict, match="'t' was submitted before with other content"):
        await control.submit([a_task("u"), a_task("t", 3)])
    with pytest.raises(Missing):
        await control.database.read(tasks.view, "u")
    assert await control.database.read(tasks.body, "t") == a_task("t", 2)


async def test_a_batch_is_taken_in_whole(control: ControlPlane) -> None:
    """A thousand at a time, with duplicates, each accepted once."""
    batch = [a_task(f"t{n}") for n in range(1000)]
    accepted = await control.submit([*batch, batch[0]])
    assert [one.new for one in accepted[:3]] == [True] * 3
    assert len(accepted) == 1001
    counts = await control.database.read(stats.counts)
    assert (counts.sessions, counts.tasks_open) == ({"queued": 1000}, 1000)


async def test_what_cannot_be_run_is_refused_with_its_number(open_control: Open) -> None:
    """The check's own field is kept behind the number of the task."""

    def check(task: Task) -> None:
        if task.id == "field":
            msg = "agent_s is -1, must be positive"
            raise Invalid(msg, field="limits.agent_s")
        if task.id == "usage":
            msg = "no harness of that name"
            raise UsageError(msg)

    async with open_control(check=check) as control:
        for name, field in (("field", "1.limits.agent_s"), ("usage", "1")):
            with pytest.raises(Invalid) as caught:
                await control.submit([a_task("t"), a_task(name)])
            assert caught.value.field == field
        with pytest.raises(Invalid, match="samples is 0") as caught:
            await control.submit([a_task("t", 0)])
        assert caught.value.field == "0.samples"
        assert (await control.database.read(stats.counts)).tasks_open == 0


async def test_lists_are_read_in_pages(control: ControlPlane) -> None:
    """Every task once, in order of submission, whatever the filter."""
    names = [f"t{n}" for n in range(25)]
    tags = {"kind": 'a"b', "odd": "yes"}
    for n, name in enumerate(names):
        fields = {"tags": tags} if n % 2 else {"tags": {"kind": "A"}, "tenant": "x"}
        await control.submit([a_task(name, 2, **fields)])
    await control.database.write(results.cancel_task, "t3", by="me")

    async def read(**chosen: object) -> list[str]:
        seen: list[str] = []
        after = None
        while True:
            page = await control.database.read(
                tasks.page, TaskQuery(**chosen, after=after, limit=4)
            )
            seen += [task.id for task in page.tasks]
            after = page.next
            if after is None:
                return seen

    assert await read() == names
    assert await read(tenant="x") == names[::2]
    assert await read(tag='kind=a"b') == names[1::2]
    assert await read(tag="kind=A") == names[::2]
    assert await read(tag="kind=a") == []
    assert await read(state=TaskState.RELEASED) == ["t3"]
    assert len(await read(state=TaskState.OPEN, tag="odd=yes")) == 11
    with pytest.raises(Invalid) as caught:
        await control.database.read(tasks.page, TaskQuery(after="x"))
    assert caught.value.field == "after"


async def test_sessions_are_found(control: ControlPlane) -> None:
    """By task, by status and by node, in pages."""
    node = await Idler.at_work(control, a_task("t", 4), a_task("u", 4), room=3)
    of_node = await control.database.read(sessions.page, SessionQuery(node=node.node))
    assert [one.id for one in of_node.sessions] == ["t-0", "t-1", "t-2"]
    queued = await control.database.read(sessions.page, SessionQuery(status=Status.QUEUED, limit=3))
    assert [one.id for one in queued.sessions] == ["t-3", "u-0", "u-1"]
    rest = await control.database.read(
        sessions.page, SessionQuery(status=Status.QUEUED, limit=3, after=queued.next)
    )
    assert ([one.id for one in rest.sessions], rest.next) == (["u-2", "u-3"], None)
    assert len((await control.database.read(sessions.page, SessionQuery(task="u"))).sessions) == 4
    assert (await control.database.read(sessions.get, "t-1")).node == node.node
    with pytest.raises(Missing, match="no session 'x'"):
        await control.database.read(sessions.get, "x")


async def test_a_consumer_goes_on_where_it_acknowledged(open_control: Open) -> None:
    """Each result once, in order, over a restart of both; what is unacknowledged comes again."""
    async with open_control() as control:
        node = await Idler.at_work(control, a_task("t", 4))
        for n in (2, 0, 3):
            await node.commit(f"t-{n}")
        first = await control.results(ResultQuery(consumer="me", limit=2))
        assert [item.session for item in first.items] == ["t-2", "t-0"]
        await control.database.write(results.ack, "me", first.cursor)
    async with open_control() as control:
        node.control = control
        rest = await control.results(ResultQuery(consumer="me"))
        assert [item.session for item in rest.items] == ["t-3"]
        waiting = asyncio.ensure_future(
            control.results(ResultQuery(consumer="me", after=rest.cursor, wait_s=10))
        )
        await until_waiting(control, "results")
        await node.commit("t-1")
        found = await asyncio.wait_for(waiting, 20)
        assert [item.session for item in found.items] == ["t-1"]
        assert (await control.database.read(results.list_consumers))[0].acked == first.cursor


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "not a trajectory"),
        (b"nonsense", "not a trajectory"),
        (result(Session(id="other-0", task="t", sample=0)), "must name it"),
        (result(Session(id="t-0", task="t", sample=0), status=Status.RUN), "be final"),
        (result(Session(id="t-0", task="t", sample=0), status=Status.FAILED), "does not say why"),
    ],
)
async def test_what_is_no_result_is_refused(control: ControlPlane, data: bytes, match: str) -> None:
    """And the session goes on."""
    node = await Idler.at_work(control, a_task("t"))
    with pytest.raises(Invalid, match=match):
        await control.dispatcher.commit("t-0", node.held["t-0"].epoch, data)
    assert (await node.commit("t-0")).outcome is CommitOutcome.COMMITTED


async def test_a_token_opens_its_node_until_it_is_gone(control: ControlPlane) -> None:
    """Also where it was looked up before."""
    first = await control.dispatcher.register(NodeRegistration(name="a", slots=1, capacity=1))
    assert await control.database.read(nodes.find_by_token, first.token) == first.node
    second = await control.dispatcher.register(NodeRegistration(name="a", slots=1, capacity=1))
    assert await control.database.read(nodes.find_by_token, first.token) is None
    assert await control.database.read(nodes.find_by_token, second.token) == second.node
    assert await control.database.read(nodes.find_by_token, "x") is None


@pytest.mark.parametrize(
    ("hello", "field"),
    [
        (NodeRegistration(name="a b", slots=1, capacity=1), "name"),
        (NodeRegistration(name="", slots=1, capacity=1), "name"),
        (NodeRegistration(name="a", slots=0, capacity=1), "slots"),
        (NodeRegistration(name="a", slots=1, capacity=-1), "capacity"),
    ],
)
async def test_a_node_must_make_sense(
    control: ControlPlane, hello: NodeRegistration, field: str
) -> None:
    """The field is named."""
    with pytest.raises(Invalid) as caught:
        await control.dispatcher.register(hello)
    assert caught.value.field == field


async def test_nodes_are_listed_with_what_they_do(control: ControlPlane) -> None:
    """And the counts have their slots together."""
    node = await Idler.join(control, "b", room=2)
    await Idler.join(control, "a")
    await control.submit([a_task("t", 4)])
    await node.ask()
    shown = {
        view.name: (view.running, view.state.value)
        for view in await control.database.read(nodes.list_views)
    }
    assert shown == {"a": (0, "live"), "b": (2, "live")}
    counts = await control.database.read(stats.counts)
    assert (counts.nodes, counts.slots, counts.sessions) == (2, 10, {"init": 2, "queued": 2})


async def test_logs_come_from_who_holds_the_session(control: ControlPlane) -> None:
    """A node is asked for a log that somebody reads, and only it may write it."""
    node = await Idler.at_work(control, a_task("t"))
    asking = await node.start_asking()
    reading = asyncio.ensure_future(control.read_log("t-0", wait_s=10))
    assert (await asyncio.wait_for(asking, 20)).follow == ("t-0",)
    epoch = node.held["t-0"].epoch
    assert await control.dispatcher.log("t-0", epoch, 0, b"hello") == 5
    part = await asyncio.wait_for(reading, 20)
    assert (part.data, part.offset, part.ended) == (b"hello", 5, False)
    with pytest.raises(FencedError):
        await control.dispatcher.log("t-0", epoch + 1, 5, b"!")
    await node.commit("t-0")
    assert (await control.read_log("t-0", offset=5)).ended
    with pytest.raises(Missing):
        await control.read_log("x")


async def test_a_requeued_result_leaves_nothing_behind(control: ControlPlane) -> None:
    """What is tried again has no result and no trajectory."""
    node = await Idler.at_work(control, a_task("t"))
    await node.commit("t-0", failure=Boundary.RUNTIME)
    for op in (results.get, results.get_blob):
        with pytest.raises(Missing, match="has no result"):
            await control.database.read(op, "t-0")
    kinds = [event.kind for event in await control.events(EventQuery(after=0, task="t"))]
    assert kinds == [EventKind.ACCEPTED, EventKind.LEASED, EventKind.REQUEUED]


async def test_everything_is_there_right_after_the_start(open_control: Open) -> None:
    """With ten thousand sessions in it a server answers as soon as it is open."""
    async with open_control() as control:
        for n in range(5):
            await control.submit([a_task(f"t{n}-{k}", 2) for k in range(1000)])
    async with asyncio.timeout(20), open_control() as control:
        assert (await control.database.read(stats.counts)).sessions == {"queued": 10_000}
        node = await Idler.join(control, room=16)
        assert len((await node.ask()).work) == 16
