from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.control_plane import IdleNode, Open, make_result, read_pages
from support.tasks import make_task
from tugline.errors import Invalid, UsageError
from tugline.protocol import CommitOutcome, NodeRegistration, TaskQuery, TaskState
from tugline.server.control import ControlPlane
from tugline.server.store import results, stats, tasks
from tugline.types import Session, Status, Task


async def test_lists_are_read_in_pages(control: ControlPlane) -> None:
    """Every task is on the pages once, in order of submission, with every filter."""
    names = [f"t{n}" for n in range(25)]
    even: dict[str, Any] = {"tags": {"kind": "A"}, "tenant": "x"}
    odd = {"tags": {"kind": 'a"b', "odd": "yes"}}
    await control.submit([make_task(name, **(even, odd)[n % 2]) for n, name in enumerate(names)])
    await control.database.write(results.cancel_task, "t3", by="me")

    async def read(**chosen: Any) -> list[str]:
        return await read_pages(control, tasks.page, TaskQuery(**chosen, limit=4))

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


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "not a trajectory"),
        (b"nonsense", "not a trajectory"),
        (b"\x28\xb5\x2f\xfd garbage", "not a trajectory"),
        (make_result(Session(id="other-0", task="t", sample=0)), "the result is of other-0"),
        (
            make_result(Session(id="t-0", task="t", sample=0), status=Status.RUN),
            "must be of t-0 and final",
        ),
        (make_result(Session(id="t-0", task="t", sample=0), status=Status.FAILED), "must have one"),
    ],
)
async def test_invalid_results_are_refused(control: ControlPlane, data: bytes, match: str) -> None:
    """The session keeps running and can commit a valid result."""
    node = await IdleNode.at_work(control, make_task("t"))
    with pytest.raises(Invalid, match=match):
        await control.dispatcher.commit("t-0", node.held["t-0"].epoch, data)
    assert (await node.commit("t-0")).outcome is CommitOutcome.COMMITTED


async def test_a_large_store_opens_quickly(open_control: Open) -> None:
    """A server with ten thousand sessions leases work within seconds."""
    async with open_control() as control:
        for n in range(5):
            await control.submit([make_task(f"t{n}-{k}", 2) for k in range(1000)])
    async with asyncio.timeout(20), open_control() as control:
        assert (await control.database.read(stats.counts)).sessions == {"queued": 10_000}
        node = await IdleNode.join(control, room=16)
        assert len((await node.ask()).work) == 16


async def test_a_task_that_fails_the_check_is_refused_with_its_index(open_control: Open) -> None:
    """The index is there even if the check names no field; bounds of types are always checked."""

    def check(task: Task) -> None:
        if task.id == "odd":
            msg = "no harness of that name"
            raise UsageError(msg)

    async with open_control(check=check) as control:
        with pytest.raises(Invalid, match="no harness of that name") as caught:
            await control.submit([make_task("t"), make_task("odd")])
        assert caught.value.field == "1"
        with pytest.raises(Invalid, match="samples is 0") as caught:
            await control.submit([make_task("t", 0)])
        assert caught.value.field == "0.samples"


async def test_a_local_node_registration_is_validated(control: ControlPlane) -> None:
    """Errors name the fields, as for a node over HTTP."""
    with pytest.raises(Invalid) as caught:
        await control.dispatcher.register(NodeRegistration(name="a b", slots=0, capacity=1))
    assert [each.field for each in caught.value.problems] == ["name", "slots"]


async def test_reading_a_log_makes_its_node_send_it(control: ControlPlane) -> None:
    """The waiting lease request is answered at once, and so is the reader."""
    node = await IdleNode.at_work(control, make_task("t"))
    asking = await node.start_asking()
    reading = asyncio.ensure_future(control.read_log("t-0", wait_s=10))
    assert (await asyncio.wait_for(asking, 20)).follow == ("t-0",)
    assert await control.dispatcher.log("t-0", node.held["t-0"].epoch, 0, b"hello") == 5
    assert (await asyncio.wait_for(reading, 20)).data == b"hello"
    assert (await control.read_log("t-0", offset=5, wait_s=0.05)).data == b""
