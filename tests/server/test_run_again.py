"""Sessions that ended for a reason outside the policy can run again."""

from __future__ import annotations

import pytest

from support.control_plane import IdleNode, session_ids
from support.tasks import make_task
from tugline.errors import Missing
from tugline.protocol import TaskState
from tugline.server.control import ControlPlane
from tugline.server.store import results, sessions, tasks
from tugline.types import Boundary, Status


async def test_failed_sessions_run_again(control: ControlPlane) -> None:
    """Only sessions without a reward whose failure is not the agent's run again.

    It is one scenario: the life of a session that runs again.
    """
    write, read = control.database.write, control.database.read
    node = await IdleNode.at_work(control, make_task("t", 3), room=3)
    await node.commit("t-0")
    await node.commit("t-1", status=Status.FAILED, reward=None, failure=Boundary.EVALUATOR)
    await node.commit("t-2", status=Status.FAILED, reward=None, failure=Boundary.AGENT)
    assert (await read(tasks.view, "t")).state is TaskState.RELEASED
    assert await write(results.run_again, "t", by="me") == ("t-1",)
    assert await write(results.run_again, "t", by="me") == ()
    assert (await read(tasks.view, "t")).state is TaskState.OPEN
    with pytest.raises(Missing):
        await read(results.get, "t-1")
    assert session_ids((await node.ask()).work) == ["t-1"]
    await node.commit("t-1")
    assert (await read(tasks.view, "t")).counts == {"completed": 2, "failed": 1}
    assert (await read(tasks.view, "t")).state is TaskState.RELEASED
    assert (await read(results.get, "t-1")).reward == 1.0
    assert (await read(sessions.get, "t-1")).attempt == 0
    assert await write(results.run_again, "t", by="me") == ()


async def test_a_task_that_was_ended_early_stays_ended(control: ControlPlane) -> None:
    """A cancelled task does not run again, since its cancellation is an order."""
    node = await IdleNode.at_work(control, make_task("t", 2), room=1)
    await node.commit("t-0", status=Status.FAILED, reward=None, failure=Boundary.EVALUATOR)
    await control.database.write(results.cancel_task, "t", by="me")
    assert await control.database.write(results.run_again, "t", by="me") == ()
    with pytest.raises(Missing):
        await control.database.write(results.run_again, "nothing", by="me")
