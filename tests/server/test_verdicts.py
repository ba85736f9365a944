"""Verdicts on sessions: their history, the one in force, and what consumers get."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from support.control_plane import IdleNode, Open, pass_time, session_ids
from support.tasks import make_task
from tugline.errors import Invalid, Missing
from tugline.protocol import (
    DeliveryQuery,
    DeliveryState,
    EventKind,
    RejudgeRequest,
    ResultQuery,
    RunKind,
    RunStart,
    TaskQuery,
    TaskState,
    VerdictView,
)
from tugline.recording.trajectories import unpack
from tugline.server.control import ControlPlane
from tugline.server.store import events, results, runs, sessions, tasks
from tugline.types import Callback, Cause, PluginSpec, Status

PATCH = {"patch": "a" * 64, "seconds": {"eval": 1.0}}
"""What the result of an evaluated session has."""
OTHER = PluginSpec("session_completed")


async def start(control: ControlPlane, name: str = "again") -> None:
    """Register a run that judges."""
    given = RunStart(kind=RunKind.REJUDGE, by="ann@here")
    await control.database.write(runs.start, name, given)


async def request(
    control: ControlPlane, *ids: str, run: str = "again", rounds: int = 1
) -> set[str]:
    """Have sessions judged by another evaluator; the ids of the judging sessions."""
    asked = RejudgeRequest(run=run, sessions=ids, evaluator=OTHER, rounds=rounds)
    answer = await control.verdicts.rejudge(asked)
    assert not answer.refused
    return {f"{task}-0" for each in answer.tasks.values() for task in each}


async def judge(control: ControlPlane, node: IdleNode, session: str, reward: float) -> int:
    """Have a session judged with this reward; the number of the verdict."""
    names = await request(control, session, rounds=1)
    orders = await node.ask()
    assert set(session_ids(orders.work)) == names
    [name] = names
    await node.commit(name, reward=reward, report={"new": True})
    return len(await control.verdicts.read(session))


async def use(control: ControlPlane, **numbers: int) -> None:
    """Put verdicts in force; underscores stand for dashes."""
    await control.verdicts.use({name.replace("_", "-"): n for name, n in numbers.items()})


def summarize(history: list[VerdictView]) -> list[tuple[int, bool, float | None]]:
    """Number, whether it is in force, and reward."""
    return [(v.number, v.in_force, v.reward.value if v.reward else None) for v in history]


async def test_judging_adds_to_the_history_only(control: ControlPlane) -> None:
    """The verdict in force is chosen explicitly; every verdict stays readable."""
    node = await IdleNode.at_work(control, make_task("t"))
    await node.commit("t-0", reward=0.0, report={"old": True}, **PATCH)
    await start(control)
    assert await judge(control, node, "t-0", 1.0) == 2
    assert summarize(await control.verdicts.read("t-0")) == [(1, True, 0.0), (2, False, 1.0)]
    before = await control.database.read(results.get, "t-0")
    assert (before.reward, before.revision) == (0.0, 0)
    await use(control, t_0=2)
    history = await control.verdicts.read("t-0")
    assert summarize(history) == [(1, False, 0.0), (2, True, 1.0)]
    assert (history[0].report, history[1].report) == ({"old": True}, {"new": True})
    assert (history[1].by, history[1].run, history[1].evaluator) == (
        "ann@here",
        "again",
        OTHER.name,
    )
    view = await control.database.read(results.get, "t-0")
    trajectory = unpack(await control.trajectory("t-0"))
    assert (view.reward, view.revision) == (1.0, 1)
    assert view.position > before.position
    assert trajectory.reward is not None
    assert (trajectory.reward.value, trajectory.report, trajectory.revision) == (
        1.0,
        {"new": True},
        1,
    )
    await use(control, t_0=2)  # again, which changes nothing
    assert await control.database.read(results.get, "t-0") == view
    await use(control, t_0=1)
    assert summarize(await control.verdicts.read("t-0")) == [(1, True, 0.0), (2, False, 1.0)]
    assert unpack(await control.trajectory("t-0")).revision == 2


async def test_an_equal_reward_is_no_revision(control: ControlPlane) -> None:
    """Consumers get a result again only if its reward has changed."""
    node = await IdleNode.at_work(control, make_task("t"))
    await node.commit("t-0", reward=1.0, **PATCH)
    await start(control)
    before = await control.database.read(results.get, "t-0")
    await use(control, t_0=await judge(control, node, "t-0", 1.0))
    view = await control.database.read(results.get, "t-0")
    assert (view.position, view.revision) == (before.position, 0)
    assert summarize(await control.verdicts.read("t-0"))[1] == (2, True, 1.0)


async def test_work_is_queued_once(control: ControlPlane) -> None:
    """The same sessions, evaluator and round are judged once, whatever run asks for it."""
    node = await IdleNode.at_work(control, make_task("t", 2))
    for name in ("t-0", "t-1"):
        await node.commit(name, **PATCH)
    await start(control)
    await start(control, "later")
    first = await request(control, "t-0")
    assert await request(control, "t-0", "t-1", run="later") >= first
    assert len(await request(control, "t-0", rounds=2)) == 2
    assert len((await node.ask()).work) == 3
    assert not (await node.ask(wait_s=0)).work
    page = await control.database.read(tasks.page, TaskQuery(run="later"))
    assert [view.judges for view in page.tasks] == ["t-1"]


async def test_consumers_do_not_get_judging_sessions(control: ControlPlane) -> None:
    """Only who asks for a run or a task of judging gets its results."""
    node = await IdleNode.at_work(control, make_task("t"))
    await node.commit("t-0", **PATCH)
    await start(control)
    await judge(control, node, "t-0", 0.5)
    assert [item.session for item in (await control.results(ResultQuery())).items] == ["t-0"]
    groups = await control.results(ResultQuery(groups=True))
    assert [group.id for group in groups.groups] == ["t"]
    for query in (ResultQuery(run="again"), ResultQuery(run="again", groups=True)):
        assert [item.judges for item in (await control.results(query)).items] == ["t-0"]


async def test_refused_sessions_are_named(control: ControlPlane) -> None:
    """What cannot be judged is said before any work is queued."""
    node = await IdleNode.at_work(control, make_task("t", 4), room=3)
    await node.commit("t-0", **PATCH)
    await node.commit("t-1", seconds={"eval": 1.0})
    await node.commit("t-2", failure=Cause.ENGINE, seconds={"run": 1.0})
    await start(control)
    asked = RejudgeRequest(run="again", sessions=("t-0", "t-1", "t-2", "t-3"))
    answer = await control.verdicts.rejudge(asked)
    assert list(answer.tasks) == ["t-0"]
    assert answer.refused == {
        "t-1": "it was recorded by a version that stored no patches",
        "t-2": "it was not evaluated: it broke",
        "t-3": "it has no result yet: it is queued",
    }
    [judging] = answer.tasks["t-0"]
    again = await control.verdicts.rejudge(replace(asked, sessions=(f"{judging}-0",)))
    assert again.refused == {f"{judging}-0": "it judges session t-0"}
    with pytest.raises(Missing, match="unknown session 'x'"):
        await control.verdicts.rejudge(replace(asked, sessions=("x",)))
    with pytest.raises(Missing, match="unknown run 'nothing'"):
        await control.verdicts.rejudge(replace(asked, run="nothing", sessions=("t-0",)))
    with pytest.raises(Missing, match="no verdict 7; the last is 1"):
        await use(control, t_0=7)


async def test_a_failed_evaluation_is_repaired(control: ControlPlane) -> None:
    """A session whose evaluation had failed counts once it has a verdict in force."""
    node = await IdleNode.at_work(control, make_task("t", 2))
    await node.commit("t-1", **PATCH)
    await node.commit("t-0", failure=Cause.EVALUATOR, **PATCH)
    await start(control)
    before = await control.database.read(tasks.view, "t")
    assert (before.missing, before.counts) == ((0,), {"completed": 1, "failed": 1})
    await use(control, t_0=await judge(control, node, "t-0", 1.0))
    view = await control.database.read(tasks.view, "t")
    assert (view.missing, view.counts, view.usable) == ((), {"completed": 2}, 2)
    assert view.state is TaskState.RELEASED
    trajectory = unpack(await control.trajectory("t-0"))
    assert (trajectory.status, trajectory.failure) == (Status.COMPLETED, None)
    assert (await control.verdicts.read("t-0"))[0].reward is None
    with pytest.raises(Invalid, match="verdict 1 on session 't-0' has no reward"):
        await use(control, t_0=1)


async def test_a_session_that_ran_again_has_no_old_verdicts(control: ControlPlane) -> None:
    """A verdict on its earlier recording is not added, even if both have the same patch."""
    node = await IdleNode.at_work(control, make_task("t"))
    await node.commit("t-0", failure=Cause.EVALUATOR, **PATCH)
    await start(control)
    [judging] = await request(control, "t-0")
    await node.ask()
    await control.database.write(results.run_again, "t", "me")
    await node.ask()
    await node.commit(judging, reward=1.0)
    await node.commit("t-0", reward=0.0, **PATCH)
    assert summarize(await control.verdicts.read("t-0")) == [(1, True, 0.0)]
    [again] = await request(control, "t-0")
    assert again != judging


async def test_the_work_goes_to_the_node_with_the_recording(control: ControlPlane) -> None:
    """Another node's work is not delayed; the next process of the node gets what it had."""
    home = await IdleNode.at_work(control, make_task("t", 2), name="home")
    for name in ("t-0", "t-1"):
        await home.commit(name, **PATCH)
    other = await IdleNode.join(control, "other", room=2)
    await start(control)
    names = await request(control, "t-0", "t-1")
    await control.submit([make_task("u", 2)])
    assert session_ids((await other.ask(wait_s=0.5)).work) == ["u-0", "u-1"]
    assert set(session_ids((await home.ask()).work)) == names
    home = await IdleNode.join(control, "home")
    assert set(session_ids((await home.ask()).work)) == names


async def test_work_of_a_lost_node_ends_with_its_name(open_control: Open) -> None:
    """It waits for the node within the task's time of retries, then says where the recording is."""
    async with open_control() as control:
        home = await IdleNode.at_work(control, make_task("t"), name="home")
        await home.commit("t-0", **PATCH)
        await start(control)
        [judging] = await request(control, "t-0")
        await pass_time(control, 31)
        other = await IdleNode.join(control, "other")
        for _ in range(12):
            assert not (await other.ask(wait_s=0.2)).work
            await pass_time(control, 61)
            other = await IdleNode.join(control, "other")
        assert (await control.database.read(sessions.get, judging)).status == "queued"
        await pass_time(control, 3600)
        other = await IdleNode.join(control, "other")
        await other.ask(wait_s=0.5)
        view = await control.database.read(results.get, judging)
        assert view.failure is not None
        assert (
            "session 't-0' is recorded on node 'home', which takes no work" in view.failure.message
        )


async def test_callbacks_are_sent_again(control: ControlPlane) -> None:
    """A changed result and its group have new deliveries, in place of those not delivered yet."""
    task = make_task("t", callback=Callback("http://127.0.0.1:9/"))
    node = await IdleNode.at_work(control, task)
    await node.commit("t-0", reward=0.0, **PATCH)
    before = await control.database.read(events.list_deliveries, DeliveryQuery())
    await control.database.write(events.settle, before[0].id, DeliveryState.DELIVERED)
    await start(control)
    await use(control, t_0=await judge(control, node, "t-0", 1.0))
    after = await control.database.read(events.list_deliveries, DeliveryQuery())
    assert [(each.kind, each.state) for each in after] == [
        (EventKind.RESULT, DeliveryState.DELIVERED),
        (EventKind.RESULT, DeliveryState.PENDING),
        (EventKind.RELEASED, DeliveryState.PENDING),
    ]
    assert (await control.database.read(results.get_at, after[1].id)).revision == 1
