"""Where the time of sessions goes: sums that are kept with every result, on each store."""

from __future__ import annotations

import time
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from support.control_plane import Earlier, IdleNode, Open, finish, pass_time, submit
from support.tasks import make_task
from tugline.protocol import Control, RunKind, RunStart, TimeAxis, TimeParts, TimeQuery, TimeSpent
from tugline.server.control import ControlPlane
from tugline.server.store import leases, nodes, results, runs, sessions, tasks, time_spent
from tugline.server.store.base import Tx
from tugline.types import Cause

STAGES = {"init": 2.0, "ready": 1.0, "run": 6.0, "build": 0.5, "eval": 20.0}


async def read(control: ControlPlane, **query: object) -> TimeSpent:
    """The sums of a query."""
    return await control.database.read(time_spent.read, TimeQuery(**query))


async def work_for(node: IdleNode, seconds: float) -> None:
    """Let time pass while a node renews its lease."""
    for _ in range(int(seconds // 10)):
        await pass_time(node.control, 10.0)
        await node.renew()
    await pass_time(node.control, seconds % 10)


async def run_one(
    control: ControlPlane, task: str, *, run: str | None = None, waits: float = 0.0, **result: Any
) -> None:
    """Submit a session, lease it after `waits` seconds, and commit it 32 seconds later."""
    await control.submit([make_task(task)], run)
    await pass_time(control, waits)
    node = await IdleNode.join(control, f"node-{task}")
    await node.ask()
    await work_for(node, 32.0)
    await node.commit(f"{task}-0", **{"seconds": STAGES, "engine_s": 4.5, **result})


def rounded(parts: TimeParts) -> dict[str, float]:
    """Sums to half a second, without the time that the test itself takes on a busy machine."""
    return {name: round(2 * value) / 2 for name, value in asdict(parts).items()}


async def test_the_time_of_a_session_is_split(control: ControlPlane) -> None:
    """The parts are queue, stages and the time at the engine; together, all until the result."""
    await control.database.write(runs.start, "a", RunStart(kind=RunKind.EVAL))
    await run_one(control, "t", run="a", waits=8.0)
    spent = await read(control, run="a")
    assert rounded(spent.total) == {
        "sessions": 1, "waiting_s": 9.0, "sandbox_s": 2.0, "engine_s": 4.5, "agent_s": 1.5,
        "unsplit_s": 0.0, "evaluation_s": 20.0, "other_s": 3.0,
    }  # fmt: skip
    assert [point.at for point in spent.points] == [0.0]
    assert (await read(control)).total == spent.total
    assert (await read(control, run="b")) == TimeSpent(
        total=TimeParts(), points=(), width=1, unmeasured=0
    )


async def test_an_unknown_time_at_the_engine_is_not_zero(control: ControlPlane) -> None:
    """The stage of an agent whose node does not report it is not split."""
    await run_one(control, "t", engine_s=None)
    await run_one(control, "u", engine_s=99.0)
    spent = await read(control)
    assert rounded(spent.total)["unsplit_s"] == 6.0
    assert rounded(spent.total)["engine_s"] == 6.0, "no more than the agent's stage"
    assert rounded(spent.total)["agent_s"] == 0.0


async def test_sums_are_by_version_and_by_time(control: ControlPlane) -> None:
    """A range selects versions; few points join neighbours; times are to the minute."""
    for version in range(4):
        await control.database.write(nodes.set_control, Control(version=version))
        await run_one(control, f"t{version}")
    spent = await read(control)
    assert [(point.at, point.sessions) for point in spent.points] == [(v, 1) for v in range(4)]
    part = await read(control, first=1, last=2)
    assert [point.at for point in part.points] == [1.0, 2.0]
    assert part.total.sessions == 2
    joined = await read(control, points=2)
    assert [(point.at, point.sessions) for point in joined.points] == [(0.0, 2), (2.0, 2)]
    assert joined.width == 2
    over_time = await read(control, by=TimeAxis.TIME)
    assert over_time.total.sessions == 4
    assert all(point.at % 60 == 0 for point in over_time.points)
    last = int(over_time.points[-1].at)
    assert (over_time.since, over_time.until) == (over_time.points[0].at, last + 60.0)
    assert part.since is not None and part.since >= over_time.points[0].at  # noqa: PT018
    assert (await read(control, by=TimeAxis.TIME, since=last)).points == over_time.points[-1:]
    assert (await read(control, by=TimeAxis.TIME, until=last)).points == over_time.points[:-1]


async def test_a_session_that_runs_again_counts_once(control: ControlPlane) -> None:
    """Its first result is subtracted; one that never reached a node is in no sum."""
    await run_one(control, "t", failure=Cause.EVALUATOR)
    assert (await read(control)).total.sessions == 1
    assert await control.database.write(results.run_again, "t", "a test") == ("t-0",)
    spent = await read(control)
    assert rounded(spent.total) == rounded(TimeParts())
    assert spent.points == ()
    await control.database.write(results.cancel_task, "t", "a test")
    assert (await read(control)).total.sessions == 0


async def test_waits_of_all_attempts_are_summed(control: ControlPlane) -> None:
    """The queue counts before each attempt; the attempt that was lost is other time."""
    await control.submit([make_task("t")])
    await pass_time(control, 3.0)
    node = await IdleNode.join(control, "a")
    await node.ask()
    await work_for(node, 50.0)
    await control.database.write(leases.expire_node, node.node, "a test")
    await pass_time(control, 4.0)
    other = await IdleNode.join(control, "b")
    await other.ask()
    await other.commit("t-0", seconds={"run": 0.0}, engine_s=0.0)
    total = rounded((await read(control)).total)
    assert (total["waiting_s"], total["other_s"]) == (7.0, 50.0)


async def test_time_without_a_server_is_in_no_sum(open_control: Open) -> None:
    """A killed run that is resumed days later has neither waited nor worked in between."""
    days = 4 * 86_400.0
    async with open_control() as control:
        await control.submit([make_task("a")])
        await IdleNode.at_work(control, name="first")
        await control.submit([make_task("b")])
        await pass_time(control, 5.0)
    async with open_control(ahead_s=days) as control:
        await pass_time(control, 40.0)  # the lease of the first node expires
        second = await IdleNode.join(control, "second")
        await second.ask()
        await pass_time(control, 3.0)
        for session in ("a-0", "b-0"):
            await second.commit(session, seconds={"run": 2.0}, engine_s=1.0)
        total = rounded((await read(control)).total)
        assert total["sessions"] == 2
        assert total["other_s"] == pytest.approx(42.0, abs=1.0), "the lost attempt, and 1 s each"
        assert total["waiting_s"] == pytest.approx(40.0, abs=1.0), "since the restart"


async def test_a_session_that_runs_again_starts_at_zero(control: ControlPlane) -> None:
    """Neither its first result nor the days until it was run again count."""
    await run_one(control, "t", waits=8.0, failure=Cause.EVALUATOR)
    await pass_time(control, 86_400.0)
    assert await control.database.write(results.run_again, "t", "a test") == ("t-0",)
    await pass_time(control, 3.0)
    node = await IdleNode.join(control, "other")
    await node.ask()
    await work_for(node, 8.0)
    await node.commit("t-0", seconds={"run": 6.0}, engine_s=6.0)
    total = rounded((await read(control)).total)
    assert (total["sessions"], total["waiting_s"], total["other_s"]) == (1, 3.0, 2.0)


async def test_the_wait_for_a_node_that_is_away_is_queue(control: ControlPlane) -> None:
    """A queued session that is queued again keeps the seconds that it has waited."""
    await control.submit([make_task("t")])
    await pass_time(control, 5.0)

    def requeue(tx: Tx) -> float:
        sessions.requeue(tx, [sessions.get(tx, "t-0")], "a test", ())
        return sessions.get(tx, "t-0").queued_s

    assert await control.database.write(requeue) == pytest.approx(5.0, abs=0.5)


async def test_results_of_older_releases_are_unknown(
    open_earlier: Earlier, open_control: Open
) -> None:
    """They are counted beside the sums, until their sessions run again."""
    async with open_earlier(7) as database:
        await database.write(submit, make_task("early", samples=3))
        for sample in range(2):
            await database.write(finish, f"early-{sample}", 1.0, blob=f"early-{sample}.1.x")
        await database.write(finish, "early-2")
    async with open_control() as control:
        await run_one(control, "t")
        spent = await read(control)
        assert (spent.total.sessions, spent.unmeasured) == (1, 2)
        view = await control.database.read(results.get, "early-0")
        old = replace(view, queued_s=None, seconds=STAGES)
        await control.database.write(time_spent.subtract, old)
        assert (await read(control)).unmeasured == 1


async def test_sums_of_deleted_runs_are_deleted(open_control: Open) -> None:
    """Those of a run stay as long as the run, others as long as tasks."""
    async with open_control(keep_tasks_days=1.0) as control:
        await control.database.write(runs.start, "a", RunStart(kind=RunKind.EVAL))
        await run_one(control, "t", run="a")
        await run_one(control, "u")
        await control.delete_old(control.database.clock() + 86_400 / 2)
        assert (await read(control)).total.sessions == 2
        await control.database.write(tasks.delete_finished, time.time() + 1e9)
        await control.delete_old(control.database.clock() + 2 * 86_400)
        assert (await read(control)).total.sessions == 0


async def test_sums_of_kept_results_are_kept(open_control: Open) -> None:
    """A consumer keeps an old task without a run: its result can still be subtracted."""
    async with open_control(keep_tasks_days=1.0) as control:
        await control.database.write(results.ack, "trainer", 0)
        await run_one(control, "t", failure=Cause.EVALUATOR)
        await control.delete_old(control.database.clock() + 5 * 86_400)
        assert (await read(control)).total.sessions == 1
        await run_one(control, "u")
        assert await control.database.write(results.run_again, "t", "a test") == ("t-0",)
        spent = await read(control)
        assert (spent.total.sessions, [point.sessions for point in spent.points]) == (1, [1])


async def test_sums_that_do_not_exist_stay_at_zero(control: ControlPlane) -> None:
    """A result whose sums were deleted is not subtracted from those of other results."""
    await run_one(control, "t")
    view = await control.database.read(results.get, "t-0")
    await control.database.write(lambda tx: tx.run("DELETE FROM time_spent"))
    for old in (view, replace(view, queued_s=None)):
        await control.database.write(time_spent.subtract, old)
    spent = await read(control)
    assert (spent.total, spent.points, spent.unmeasured) == (TimeParts(), (), 0)
    await control.database.write(time_spent.add, view)
    assert (await read(control)).total.sessions == 1


def fill(tx: Tx) -> None:
    """Store the sums of 100,000 sessions: ten days of a training with 500 versions."""
    minutes = 10 * 1440
    parts = dict.fromkeys(TimeParts.__struct_fields__, 1.0)
    row = {**parts, "run": "big", "sessions": 100_000 // minutes}
    rows = [row | {"version": n * 500 // minutes, "minute": n} for n in range(minutes)]
    rows[0] = rows[0] | {"sessions": 100_000 - (minutes - 1) * (100_000 // minutes)}
    tx.insert("time_spent", *rows)


@pytest.mark.slow
async def test_sums_of_100_000_sessions_are_read_within_100_ms(control: ControlPlane) -> None:
    """The time of a read does not grow with the sessions, only with minutes."""
    await control.database.write(fill)
    taken = []
    for _ in range(40):
        for by in TimeAxis:
            began = time.perf_counter()
            spent = await read(control, run="big", by=by)
            taken.append(time.perf_counter() - began)
            assert spent.total.sessions == 100_000
    p95 = sorted(taken)[int(0.95 * len(taken))]
    assert p95 < 0.1, f"{control.database.name}: {1000 * p95:.1f} ms"
