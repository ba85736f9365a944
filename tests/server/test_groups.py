from __future__ import annotations

import asyncio

import pytest

from support.control_plane import IdleNode, Open, session_ids
from support.tasks import make_task
from tugline.errors import Missing
from tugline.protocol import Cancelled, ResultQuery, StopKind, TaskState
from tugline.server.control import ControlPlane
from tugline.server.store import results, sessions, tasks
from tugline.types import Boundary, Group, Status


async def test_a_task_is_released_with_its_last_session(control: ControlPlane) -> None:
    """`missing` lists samples without a usable result; groups are ordered by release."""
    node = await IdleNode.at_work(control, make_task("t", 3), make_task("u"))
    await node.commit("t-1")
    await node.commit("t-0", failure=Boundary.AGENT)
    view = await control.database.read(tasks.view, "t")
    assert (view.state, view.usable) == (TaskState.OPEN, 1)
    assert view.counts == {"completed": 1, "failed": 1, "init": 1}
    await node.commit("u-0")
    await node.commit("t-2", reward=None)
    view = await control.database.read(tasks.view, "t")
    assert (view.state, view.usable, view.reason) == (TaskState.RELEASED, 1, "")
    assert view.missing == (0, 2)
    page = await control.results(ResultQuery(groups=True))
    assert [group.id for group in page.groups] == ["u", "t"]
    assert [item.session for item in page.items] == ["u-0", "t-0", "t-1", "t-2"]


async def test_enough_usable_samples_end_a_group(control: ControlPlane) -> None:
    """Queued samples are cancelled, running ones are stopped, finished ones are kept."""
    node = await IdleNode.at_work(control, make_task("t", 5, group=Group(min_usable=1)), room=3)
    await node.commit("t-0", failure=Boundary.AGENT)
    assert (await control.database.read(tasks.view, "t")).reason == ""
    await node.commit("t-1")
    view = await control.database.read(tasks.view, "t")
    assert (view.reason, view.state) == ("min_usable", TaskState.OPEN)
    assert view.counts == {"failed": 1, "completed": 1, "cancelled": 2, "init": 1}
    [stop] = (await node.renew()).stop
    assert (stop.session, stop.reason, stop.by) == ("t-2", StopKind.CANCELLED, "min_usable")
    await node.commit("t-2", status=Status.CANCELLED, reward=None)
    view = await control.database.read(tasks.view, "t")
    assert (view.state, view.missing) == (TaskState.RELEASED, (0, 2, 3, 4))


async def test_a_deadline_releases_a_group(open_control: Open) -> None:
    """The group is released within a second; samples of a lost node do not delay it."""
    async with open_control(lease_s=0.5) as control:
        await IdleNode.at_work(control, make_task("t", 3, group=Group(deadline_s=0.4)), room=1)
        page = await asyncio.wait_for(control.results(ResultQuery(groups=True, wait_s=20)), 20)
        [view] = page.groups
        assert (view.reason, view.usable, view.missing) == ("deadline", 0, (0, 1, 2))
        assert {item.status for item in page.items} == {Status.CANCELLED}


async def test_cancelling_a_task(control: ControlPlane) -> None:
    """The response counts ended, stopping and final sessions; a repetition is harmless."""
    node = await IdleNode.at_work(control, make_task("t", 4), room=2)
    await node.commit("t-0")
    expected = Cancelled(ended=("t-2", "t-3"), stopping=("t-1",), final=1)
    assert await control.database.write(results.cancel_task, "t", by="me") == expected
    again = await control.database.write(results.cancel_task, "t", by="you")
    assert again == Cancelled(ended=(), stopping=("t-1",), final=3)
    assert (await control.database.read(sessions.get, "t-1")).stop_by == "cancelled by me"
    await node.commit("t-1", status=Status.CANCELLED, reward=None)
    view = await control.database.read(tasks.view, "t")
    assert (view.state, view.reason) == (TaskState.RELEASED, "cancelled by me")
    assert view.counts == {"completed": 1, "cancelled": 3}
    for cancel in (results.cancel_task, results.cancel_session):
        with pytest.raises(Missing, match="nothing"):
            await control.database.write(cancel, "nothing", by="me")


async def test_cancelling_a_session(control: ControlPlane) -> None:
    """Other sessions are not affected; a final session stays as it is."""
    node = await IdleNode.at_work(control, make_task("t", 3), room=1)
    write, cancel = control.database.write, results.cancel_session
    assert (await write(cancel, "t-2", by="me")).ended == ("t-2",)
    assert (await write(cancel, "t-0", by="me")).stopping == ("t-0",)
    assert (await write(cancel, "t-2", by="me")).final == 1
    assert (await control.database.read(results.get, "t-2")).status is Status.CANCELLED
    await node.commit("t-0", status=Status.CANCELLED, reward=None)
    assert session_ids((await node.ask()).work) == ["t-1"]
    await node.commit("t-1")
    assert (await write(results.cancel_task, "t", by="me")).final == 3
    assert (await control.database.read(tasks.view, "t")).reason == "", "nothing ended it early"
