from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from support.control_plane import (
    IdleNode,
    Open,
    make_result,
    on_postgres,
    pass_time,
    record_statements,
    session_ids,
)
from support.tasks import make_task
from tugline.errors import Conflict, FencedError
from tugline.protocol import (
    CommitOutcome,
    EventKind,
    EventQuery,
    HeldSession,
    PauseMode,
    Release,
    Renewal,
    ResultQuery,
    StopKind,
)
from tugline.server.control import ControlPlane, expire
from tugline.server.store import leases, nodes, results, sessions, stats
from tugline.server.store.base import Tx
from tugline.types import Boundary, Cause, Failure, Group, Stale, Status


async def test_samples_of_a_task_stay_together(control: ControlPlane) -> None:
    """Nodes that wait at the same time get whole tasks, as far as their capacity allows."""
    a, b = await IdleNode.join(control, "a", room=4), await IdleNode.join(control, "b", room=4)
    asking = [await a.start_asking(), await b.start_asking()]
    await control.submit([make_task("s", 4), make_task("t", 4)])
    answers = await asyncio.wait_for(asyncio.gather(*asking), 20)
    got = [sorted(session_ids(orders.work)) for orders in answers]
    assert sorted(got) == [["s-0", "s-1", "s-2", "s-3"], ["t-0", "t-1", "t-2", "t-3"]]


async def test_a_cancelled_lease_request_loses_no_work(control: ControlPlane) -> None:
    """Work granted to a client that hung up is in its next response."""
    node = await IdleNode.join(control)
    for n in range(10):
        asking = asyncio.ensure_future(node.ask(wait_s=20))
        await asyncio.sleep(0.02)
        await control.submit([make_task(f"t{n}")])
        asking.cancel()
        await asyncio.wait([asking])
    async with asyncio.timeout(20):
        while len(node.held) < 8:  # the node's room
            await node.ask(wait_s=0.3)
    assert len(node.held) == 8


async def test_a_lost_nodes_sessions_go_to_others(control: ControlPlane) -> None:
    """Another node gets the sessions after the lease; the lost node's messages are refused."""
    dead = await IdleNode.at_work(control, make_task("t"), name="dead")
    alive = await IdleNode.join(control, "alive")
    await pass_time(control, 20.0)
    asking = await alive.start_asking()
    await pass_time(control, 20.0)
    await asyncio.wait_for(asking, 10)
    assert alive.held["t-0"].epoch > dead.held["t-0"].epoch
    assert alive.held["t-0"].attempt == 0
    with pytest.raises(FencedError):
        await dead.commit("t-0")
    for says in (dead.ask, dead.renew):
        with pytest.raises(FencedError, match="register again"):
            await says()
    assert (await alive.commit("t-0")).outcome is CommitOutcome.COMMITTED
    kinds = [event.kind for event in await control.events(EventQuery(after=0))]
    assert kinds.index(EventKind.LOST) < kinds.index(EventKind.REQUEUED)


async def test_a_wiped_store_refuses_leases_from_before(
    open_control: Open, wipe_store: Callable[[], None]
) -> None:
    """A task with the same id has a new epoch: late results, logs and releases are fenced."""
    async with open_control() as control:
        old = (await IdleNode.at_work(control, make_task("t"))).held["t-0"]
    wipe_store()
    async with open_control(ahead_s=1.0) as control:
        node = await IdleNode.at_work(control, make_task("t"), name="another")
        again, epoch = control.dispatcher, old.epoch
        assert node.held["t-0"].epoch > epoch
        for late in (
            again.commit("t-0", epoch, make_result(old, reward=0.0)),
            again.release("t-0", Release(epoch=epoch, reason="late")),
            again.log("t-0", epoch, 0, b"late"),
        ):
            with pytest.raises(FencedError):
                await late
        held = HeldSession("t-0", epoch, Status.RUN)
        answer = await again.renew(node.node, Renewal(held=(held,), applied=0))
        assert [stop.epoch for stop in answer.stop] == [epoch]
        assert (await node.commit("t-0", reward=1.0)).outcome is CommitOutcome.COMMITTED


async def test_a_second_node_of_the_same_name_is_refused(control: ControlPlane) -> None:
    """A restart takes over at once, another instance only after the lease has expired."""
    first = await IdleNode.join(control, "a", instance="one")
    with pytest.raises(Conflict, match=r"'a' is already active; .* ends in 30 s"):
        await IdleNode.join(control, "a", instance="two")
    again = await IdleNode.join(control, "a", instance="one")
    with pytest.raises(FencedError):
        await first.renew()
    await again.renew()
    await pass_time(control, 31.0)
    await IdleNode.join(control, "a", instance="two")


async def test_orders_answer_a_waiting_lease_request_once(control: ControlPlane) -> None:
    """A stop answers the waiting request; later requests wait, and renewals repeat the stop."""
    node = await IdleNode.at_work(control, make_task("t"))
    asking = await node.start_asking()
    await control.database.write(results.cancel_session, "t-0", by="me")
    [stop] = (await asyncio.wait_for(asking, 20)).stop
    assert (stop.session, stop.reason, stop.by) == ("t-0", StopKind.CANCELLED, "cancelled by me")
    waiting = await node.start_asking()
    assert not waiting.done()
    waiting.cancel()
    assert (await node.renew()).stop == (stop,)


async def test_a_draining_node_gets_no_work(control: ControlPlane) -> None:
    """The node learns of the drain at once; sessions that it releases keep their attempts."""
    node = await IdleNode.at_work(control, make_task("t"), name="a")
    asking = await node.start_asking()
    await control.dispatcher.drain(node.node)
    assert (await asyncio.wait_for(asking, 20)).draining
    await control.submit([make_task("u")])
    assert (await node.ask(wait_s=0.2)).work == ()
    await node.release("t-0")
    other = await IdleNode.join(control, "b")
    await other.ask()
    assert other.held["t-0"].attempt == 0
    assert other.held["t-0"].epoch > node.held["t-0"].epoch
    assert set(other.held) == {"t-0", "u-0"}


@pytest.mark.parametrize(
    ("boundary", "tries"),
    [(Boundary.HARNESS, 2), (Boundary.ENGINE, 1), (Boundary.AGENT, 1), (Boundary.EVALUATOR, 1)],
)
async def test_the_failed_boundary_decides_about_retries(
    control: ControlPlane, boundary: Boundary, tries: int
) -> None:
    """A harness is tried twice; failures of policy, engine and evaluator are final."""
    node = await IdleNode.join(control)
    await control.submit([make_task("t", group=Group(attempts=3))])
    for attempt in range(tries):
        [work] = (await node.ask()).work
        assert work.session.attempt == attempt
        commit = await node.commit("t-0", failure=boundary)
        final = attempt == tries - 1
        assert commit.outcome is (CommitOutcome.COMMITTED if final else CommitOutcome.REQUEUED)
    view = await control.database.read(results.get, "t-0")
    assert (view.status, view.attempt) == (Status.FAILED, tries - 1)
    assert view.failure == Failure(boundary, "it broke")
    assert view.reward is None


async def test_infrastructure_failures_cost_no_attempt(control: ControlPlane) -> None:
    """Sessions are retried at once, then with growing pauses, until `retry_s` is over."""
    node = await IdleNode.join(control)
    await control.submit([make_task("t", group=Group(attempts=2, retry_s=100.0))])
    for pause_s in (0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0):
        if pause_s:
            assert (await node.ask(wait_s=0.05)).work == ()
        for _ in range(4):
            await pass_time(control, pause_s / 4)
            await node.renew()
        [work] = (await node.ask()).work
        assert work.session.attempt == 0
        outcome = (await node.commit("t-0", failure=Boundary.RUNTIME)).outcome
        final = CommitOutcome.COMMITTED if pause_s == 60.0 else CommitOutcome.REQUEUED
        assert outcome is final, pause_s
    view = await control.database.read(results.get, "t-0")
    assert (view.status, view.attempt) == (Status.FAILED, 0)


async def test_a_node_that_reports_a_problem_is_quarantined(control: ControlPlane) -> None:
    """The node gets one session after pauses that double, and all once it has no problem.

    Other nodes do all of the work meanwhile, and no task loses an attempt.
    """
    broken, sound = await IdleNode.join(control, "broken"), await IdleNode.join(control, "sound")
    await control.submit([make_task(f"t{n}") for n in range(12)])
    for session in session_ids((await broken.ask()).work):
        await broken.commit(session, failure=Cause.SANDBOX)
    broken.problem = "sandbox: it broke"
    assert (await broken.ask(wait_s=0.05)).work == ()
    for _ in range(2):
        for work in (await sound.ask()).work:
            assert work.session.attempt == 0
            await sound.commit(work.session.id)
    assert (await control.database.read(stats.counts)).sessions == {"completed": 12}
    for pause_s in (5.0, 10.0, 0.0):
        broken.problem = "sandbox: it broke" if pause_s else ""
        await asyncio.gather(broken.renew(), sound.renew())
        name = f"after{pause_s:g}"
        await control.submit([make_task(f"{name}.{n}") for n in range(3)])
        view, _ = await control.database.read(nodes.list_views)
        assert view.fault == broken.problem
        for _ in range(2):
            await pass_time(control, pause_s / 2)
            await asyncio.gather(broken.renew(), sound.renew())
        trial = session_ids((await broken.ask()).work)
        assert len(trial) == (1 if pause_s else 3)
        for session in trial:
            await broken.commit(session, failure=Cause.SANDBOX if pause_s else None)
        if pause_s:
            assert (await broken.ask(wait_s=0.05)).work == ()
        while rest := (await sound.ask(wait_s=0.05)).work:
            for work in rest:
                await sound.commit(work.session.id)


@pytest.mark.parametrize("cause", list(Cause))
async def test_no_failures_of_sessions_quarantine_a_node(
    control: ControlPlane, cause: Cause
) -> None:
    """A tenant could let its tasks fail on purpose, so neither number nor cause matters."""
    node = await IdleNode.join(control)
    for number in range(6):
        await control.submit([make_task(f"bad{number}", group=Group(attempts=1, retry_s=0.0))])
        for work in (await node.ask()).work:
            await node.commit(work.session.id, failure=cause)
    await control.submit([make_task("good")])
    assert "good-0" in session_ids((await node.ask()).work)
    [view] = await control.database.read(nodes.list_views)
    assert view.fault == ""


async def test_a_failed_session_moves_to_another_node(control: ControlPlane) -> None:
    """The session moves if another node has room; a node that is alone gets it again."""
    a = await IdleNode.at_work(control, make_task("t"), name="a")
    b = await IdleNode.join(control, "b", room=1)
    waiting = await a.start_asking(room=7)
    asking = await b.start_asking()
    await a.commit("t-0", failure=Boundary.RUNTIME)
    await asking
    waiting.cancel()
    assert set(b.held) == {"t-0"}
    await b.commit("t-0", failure=Boundary.RUNTIME)
    assert session_ids((await b.ask()).work) == ["t-0"]


async def test_a_crash_is_retried_on_the_same_node(control: ControlPlane) -> None:
    """Only causes that the table retries elsewhere move a session."""
    a = await IdleNode.at_work(control, make_task("t", 2), name="a", room=2)
    b = await IdleNode.join(control, "b", room=1)
    await a.commit("t-0", failure=Cause.CRASH)
    await asyncio.gather(a.ask(wait_s=0.5), b.ask(wait_s=0.5))
    assert (set(a.held), set(b.held)) == ({"t-0", "t-1"}, set())


async def test_the_last_attempt_of_a_lost_node_fails_the_session(control: ControlPlane) -> None:
    """A task that kills its nodes ends with a failure."""
    task = make_task("t", group=Group(attempts=2, retry_s=0.0))
    lost = [await IdleNode.at_work(control, task, name="a") for _ in range(2)]
    assert lost[1].held["t-0"].epoch > lost[0].held["t-0"].epoch, "its successor gets it at once"
    await IdleNode.join(control, "a")
    view = await control.database.read(results.get, "t-0")
    assert view.failure is not None
    assert view.failure.boundary is Boundary.INFRASTRUCTURE
    assert "(after 2 attempts)" in view.failure.message
    assert (view.bytes, view.reward) == (0, None)


async def test_stale_sessions_are_restarted(control: ControlPlane) -> None:
    """Sessions that are too many versions behind restart, if their task asks for it."""
    node = await IdleNode.join(control)
    strict = Group(max_staleness=1, on_stale=Stale.ABORT)
    await control.submit([make_task("strict", group=strict), make_task("marked", group=Group())])
    await node.ask()
    node.applied = 2
    asking = await node.start_asking()
    await control.announce(1)
    announcing = asyncio.ensure_future(control.announce(2))
    [stop] = (await asyncio.wait_for(asking, 20)).stop
    assert (stop.session, stop.reason) == ("strict-0", StopKind.STALE)
    await announcing
    await node.release("strict-0", "stale")
    epoch = node.held.pop("strict-0").epoch
    [work] = (await node.ask()).work
    assert (work.session.id, work.session.attempt) == ("strict-0", 1)
    assert work.session.epoch > epoch
    assert (await control.database.read(sessions.get, "strict-0")).version == 2


async def test_a_session_that_ignores_its_stop_is_fenced(control: ControlPlane) -> None:
    """A node that renews without stopping the session loses it after one lease time."""
    node = await IdleNode.at_work(control, make_task("t"))
    await control.database.write(results.cancel_task, "t", by="me")
    for _ in range(2):
        await pass_time(control, 20.0)
        if not (await control.results(ResultQuery())).items:
            await node.renew()
    assert (await control.database.read(results.get, "t-0")).status is Status.CANCELLED
    [stop] = (await node.renew()).stop
    assert stop.reason is StopKind.FENCED


async def test_a_pause_waits_for_every_node(control: ControlPlane) -> None:
    """The pause returns when all nodes have applied it; waiting lease requests carry it."""
    node, late = await IdleNode.join(control, "a"), await IdleNode.join(control, "b")
    asking = await node.start_asking()
    pausing = asyncio.ensure_future(control.pause(within_s=10))
    orders = await asyncio.wait_for(asking, 20)
    assert orders.control.paused is PauseMode.WAIT
    for one in (node, late):
        assert not pausing.done()
        one.applied = orders.control.generation
        await one.renew()
    barrier = await asyncio.wait_for(pausing, 20)
    assert (barrier.applied, barrier.missing) == (("a", "b"), ())


async def test_a_pause_names_missing_nodes(control: ControlPlane) -> None:
    """The pause ends at its timeout; repeating the same pause makes no new generation."""
    await IdleNode.join(control, "slow")
    barrier = await control.pause(within_s=0.2)
    assert (barrier.missing, barrier.generation) == (("slow",), 1)
    assert (await control.pause(within_s=0.05)).generation == 1
    assert (await control.database.read(stats.counts)).paused


# --------------------------------------------------------------------------- clocks and restarts
async def test_a_lost_node_expires_although_the_clock_is_set_back(
    open_control: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases are counted by a monotonic clock."""
    async with open_control(lease_s=0.3, ahead_s=None) as control:
        await IdleNode.join(control)
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() - 3600.0)
        await control.database.write(lambda tx: tx.notify("timers"))
        after = (await control.events(EventQuery()))[-1].position
        events = await control.events(EventQuery(after=after, wait_s=20.0))
        assert [event.kind for event in events] == [EventKind.LOST]


async def test_a_clock_set_back_during_a_restart_delays_nothing(open_control: Open) -> None:
    """Leases, pauses and quarantines are at most as long as one that begins at the start."""
    async with open_control() as control:
        node = await IdleNode.join(control)
        await control.submit([make_task(f"t{n}") for n in range(4)])
        for work in (await node.ask()).work[:-1]:
            await node.commit(work.session.id, failure=Cause.SANDBOX)
        node.problem = "it broke"
        await node.renew()
        await control.database.write(lambda tx: tx.run("UPDATE sessions SET retry_at = :at",
                                                       at=tx.now + 1.0))  # fmt: skip
    async with open_control(ahead_s=-3600.0) as control:
        await pass_time(control, 31.0)
        assert [view.state for view in await control.database.read(nodes.list_views)] == ["gone"]
        await pass_time(control, nodes.MAX_BLOCK_S)
        other = await IdleNode.join(control, "other")
        assert len((await other.ask()).work) == 4


async def test_repeated_restarts_do_not_keep_a_lost_node(open_control: Open) -> None:
    """Restarts give a lost node at most two leases in all, and a live node one lease each."""
    async with open_control() as control:
        await IdleNode.join(control, "dead")
        alive = await IdleNode.join(control, "alive")
    for start in range(1, 8):
        async with open_control(ahead_s=29.0 * start) as control:
            alive.control = control
            await pass_time(control, 28.0 if start == 1 else 4.0)
            await alive.renew()
            states = {
                one.name: one.state.value for one in await control.database.read(nodes.list_views)
            }
            assert states["alive"] == "live"
            if start == 1:
                assert states["dead"] == "live", "it may be on its way back"
    assert states["dead"] == "gone"


@on_postgres
async def test_a_second_server_does_not_extend_leases(open_control: Open) -> None:
    """Leases that have time left stay as they are."""
    async with open_control() as one:
        await IdleNode.join(one)
        [before] = await one.database.read(nodes.list_views)
        async with open_control() as other:
            [after] = await other.database.read(nodes.list_views)
    assert after.deadline == before.deadline


async def test_a_node_without_sandboxes_joins_in_quarantine(control: ControlPlane) -> None:
    """The node gets one session on trial; once that works, the node ends the quarantine."""
    node = await IdleNode.join(control, problem="bwrap is not on the PATH")
    await control.submit([make_task(f"t{n}") for n in range(3)])
    assert (await node.ask(wait_s=0.05)).work == ()
    [view] = await control.database.read(nodes.list_views)
    assert view.fault == "bwrap is not on the PATH"
    await pass_time(control, nodes.BLOCK_S)
    [trial] = session_ids((await node.ask()).work)
    await node.commit(trial)
    node.problem = ""
    assert len((await node.ask()).work) == 2


# --------------------------------------------------------------------------- many at once
async def test_expiring_a_node_takes_a_constant_number_of_statements(control: ControlPlane) -> None:
    """All sessions are returned to the queue together, not one by one."""
    counts = []
    for name, samples in (("small", 2), ("large", 64)):
        node = await IdleNode.at_work(control, make_task(name, samples), name=name, room=samples)
        assert len(node.held) == samples

        def expire_and_count(tx: Tx, node: str = node.node) -> int:
            with record_statements(tx) as seen:
                leases.expire_node(tx, node, "gone")
            return len(seen)

        counts.append(await control.database.write(expire_and_count))
    assert max(counts) < 16
    assert (await control.database.read(stats.counts)).sessions["queued"] == 66


async def test_lost_nodes_expire_a_few_at_a_time(control: ControlPlane) -> None:
    """Other nodes can renew in between; in the end all lost ones are gone, their work queued."""
    for n in range(45):
        await IdleNode.at_work(control, make_task(f"t{n}"), name=f"n{n}", room=1)
    control.database.clock.ahead_s += 100
    steps = []
    while due := await control.database.read(nodes.list_expired):
        steps.append(len(due))
        await control.database.write(expire, lease_s=30.0)
    assert steps[0] == max(steps) == 20
    assert len(steps) > 1
    assert (await control.database.read(stats.counts)).sessions["queued"] == 45


async def test_work_beyond_one_grant_is_granted_next(
    control: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound on a transaction leaves no node waiting beside a queue."""
    monkeypatch.setattr(leases, "_GRANT_BATCH", 3)
    waiting = [await IdleNode.join(control, name, room=3) for name in "abc"]
    asking = [await node.start_asking() for node in waiting]
    await control.submit([make_task(f"t{n}") for n in range(9)])
    answers = await asyncio.wait_for(asyncio.gather(*asking), 20)
    given = [name for answer in answers for name in session_ids(answer.work)]
    while len(given) < 9:
        for node in waiting:
            given += session_ids((await node.ask(wait_s=0.5)).work)
    assert sorted(given) == [f"t{n}-0" for n in range(9)]
