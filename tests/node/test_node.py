"""A node at work on a real control plane."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from support.node import Bench, make_simulated_task, open_bench, open_plane
from support.polling import until
from tugline.errors import ServerError
from tugline.node.active_sessions import CHUNK
from tugline.node.housekeeping import COMMITTED
from tugline.protocol import NodeRegistration, PauseMode
from tugline.server.store import leases, nodes, results
from tugline.types import Boundary, Cause, Group, Stale, Status


async def test_sessions_are_rolled_out_evaluated_and_committed(tmp_path: Path) -> None:
    """Afterwards the node holds no session and its journal is empty."""
    async with open_bench(tmp_path) as bench:
        await bench.control.submit([make_simulated_task(samples=20)])
        results = await bench.wait_for_results(20)
        await until(lambda: not bench.node.runner.sessions)
        log = await bench.control.read_log("t-3")
        assert bench.journal == []
    assert set(results) == {f"t-{n}" for n in range(20)}
    for result in results.values():
        assert result.status is Status.COMPLETED
        assert result.reward is not None
        assert result.ledger.trained == 2
    assert log.data == b"I am t-3\n"
    assert bench.node.stats.committed == 20


async def test_leases_follow_the_free_slots(tmp_path: Path) -> None:
    """As many sessions run as there are slots, one more is ready, and no more are leased."""
    async with open_bench(tmp_path, slots=2, ready_max=1) as bench:
        await bench.begin(make_simulated_task(what="hang", samples=9), 2)
        pools = bench.node.pools
        await until(lambda: len(pools.members) == 3)
        assert (pools.count({None, Status.INIT}), pools.count_room()) == (1, 0)
        assert (await bench.count_by_status())["queued"] == 6
    assert bench.script.most["run"] == 2


async def test_the_oldest_group_goes_first(tmp_path: Path) -> None:
    """Ready samples wait for those of earlier tasks, so that whole groups finish."""
    async with open_bench(tmp_path, slots=1, ready_max=8, max_initializing=8) as bench:
        bench.node.pools.mean_s[Status.INIT].add(8.0)
        bench.node.pools.mean_s[Status.RUN].add(1.0)
        bench.script.hold("run")
        await bench.control.submit(
            [
                make_simulated_task("a"),
                make_simulated_task("b", samples=3),
                make_simulated_task("c", samples=3),
            ]
        )
        await until(lambda: bench.node.pools.by_stage[Status.RUN].waiting == 6)
        bench.script.release("run")
        await bench.wait_for_results(7)
    assert bench.script.order == ["a-0", "b-0", "b-1", "b-2", "c-0", "c-1", "c-2"]


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
async def test_a_session_can_be_cancelled_in_any_stage(stage: str, tmp_path: Path) -> None:
    """Programs end at once; recorded calls are built and the ledger is committed."""
    async with open_bench(tmp_path) as bench:
        bench.script.hold(stage)
        await bench.control.submit([make_simulated_task()])
        await bench.wait_in(stage)
        await bench.control.database.write(results.cancel_task, "t", "a test")
        result = (await bench.wait_for_results(1))["t-0"]
    assert (result.status, result.failure, result.reward) == (Status.CANCELLED, None, None)
    assert result.ledger.trained == (0 if stage == "init" else 2)
    assert bench.script.cancelled == (["t-0"] if stage == "run" else [])
    assert bench.script.now["sandboxes"] == 0


async def test_a_stale_session_is_released(tmp_path: Path) -> None:
    """Nothing of a stale session is committed, and it restarts with the new weights."""
    group = Group(max_staleness=0, on_stale=Stale.ABORT)
    async with open_bench(tmp_path) as bench:
        await bench.begin(make_simulated_task(what="hang", group=group))
        epoch = await bench.read_epoch()
        await bench.control.announce(1)
        await until(lambda: len(bench.script.order) == 2)
        assert await bench.read_epoch() > epoch
        assert await bench.statuses() == {}
    assert bench.node.stats.released == 1
    assert (tmp_path / "sessions" / f"t-0.{epoch}" / COMMITTED).exists(), "it counts for the quota"


async def test_a_fenced_node_drops_its_sessions_and_registers_again(tmp_path: Path) -> None:
    """A fenced node may get the same session again under a new lease."""
    async with open_bench(tmp_path, slots=1, ready_max=0) as bench:
        await bench.begin(make_simulated_task(what="hang"))
        epoch = await bench.read_epoch()
        instance = (tmp_path / "instance").read_text()
        twin = NodeRegistration(name="n", slots=1, capacity=1, instance=instance)
        await bench.control.dispatcher.register(twin)
        await until(lambda: len(bench.script.order) == 2)
        [session] = bench.node.runner.sessions.values()
    assert bench.script.cancelled[0] == "t-0"
    assert session.epoch > epoch
    assert bench.link.requests.count("register") == 2
    assert bench.node.stats.rejoined == 1
    assert (tmp_path / "sessions" / f"t-0.{epoch}" / COMMITTED).exists(), "it counts for the quota"


async def test_sessions_continue_without_the_server(tmp_path: Path) -> None:
    """Results wait on disk, and are committed once when the server is back."""
    async with open_bench(tmp_path, lease_s=60.0) as bench:
        bench.script.hold("run")
        await bench.begin(make_simulated_task(samples=4), 4)
        bench.link.away = True
        bench.script.release("run")
        await until(lambda: len(bench.journal) == 4 and bench.node.stats.outages)
        assert await bench.statuses() == {}
        bench.link.away = False
        await bench.wait_for_results(4)
        await until(lambda: not bench.journal)
    assert (bench.node.stats.fenced, bench.node.stats.rejoined) == (0, 0)
    assert len(bench.script.order) == 4


@pytest.mark.parametrize("server_first", [True, False])
async def test_a_restarted_node_commits_its_journal_first(
    tmp_path: Path,
    server_first: bool,  # noqa: FBT001
) -> None:
    """The journal is committed before the node takes over its name, which would fence it.

    The order is the same when the node is back before its server.
    """
    async with open_plane(tmp_path, lease_s=60.0) as control:
        bench = Bench(tmp_path, control)
        bench.link.commits.clear()
        async with bench.working():
            await control.submit([make_simulated_task()])
            await until(lambda: "commit" in bench.link.requests)
        epoch = await bench.read_epoch()
        assert bench.journal == [f"t-0.{epoch}.result"]
        bench.link.requests.clear()
        bench.link.commits.set()
        bench.link.away = not server_first
        bench.node = bench.make_node()
        async with bench.working():
            if not server_first:
                await until(lambda: len(bench.link.requests) == 4)
            bench.link.away = False
            await until(lambda: "register" in bench.link.requests)
        assert await bench.statuses() == {"t-0": Status.COMPLETED}
    before = bench.link.requests[: bench.link.requests.index("register")]
    assert set(before) == {"commit"}
    assert bench.script.order == ["t-0"]


async def test_a_drain_finishes_running_sessions_and_releases_others(tmp_path: Path) -> None:
    """Nothing is lost or begun, and `run` returns."""
    async with open_bench(tmp_path, slots=1, ready_max=1) as bench:
        bench.script.hold("run")
        await bench.control.submit([make_simulated_task(samples=3)])
        await until(lambda: bench.script.now["run"] and len(bench.node.pools.members) == 2)
        bench.node.drain()
        await until(lambda: bench.node.stats.released)
        bench.script.release("run")
        await bench.wait_until_ended()
        assert await bench.statuses() == {"t-0": Status.COMPLETED}
        assert await bench.count_by_status() == {"completed": 1, "queued": 2}
        assert (await bench.read_session("t-1")).attempt == 0
    assert "drain" in bench.link.requests


@pytest.mark.parametrize("gently", [True, False])
async def test_the_next_node_finishes_what_is_left(tmp_path: Path, gently: bool) -> None:  # noqa: FBT001
    """After a drain without grace, or a crash, every sample ends once."""
    async with open_plane(tmp_path) as control:
        bench = Bench(tmp_path, control, slots=2, grace_s=0.0 if gently else 60.0)
        async with bench.working():
            bench.script.hang = frozenset({"t-2", "t-3"})
            await control.submit([make_simulated_task(samples=6)])
            await bench.wait_in("run", 2)
            await bench.wait_for_results(2)
            if gently:
                await control.dispatcher.drain(bench.node.id)
                await bench.wait_until_ended()
                assert (await bench.read_session("t-2")).attempt == 0
        bench.script.hang = frozenset()
        bench.node = bench.make_node()
        async with bench.working():
            results = await bench.wait_for_results(6)
        assert {one.status for one in results.values()} == {Status.COMPLETED}


async def test_a_drain_does_not_wait_for_an_unreachable_server(tmp_path: Path) -> None:
    """Uncommitted results stay in the journal."""
    async with open_bench(tmp_path, grace_s=0.2) as bench:
        bench.node.leave_s = 0.1
        bench.script.hold("run")
        await bench.begin(make_simulated_task())
        bench.link.away = True
        bench.script.release("run")
        bench.node.drain()
        await bench.wait_until_ended()
        epoch = await bench.read_epoch()
        assert bench.journal == [f"t-0.{epoch}.result"]
        assert await bench.statuses() == {}


async def test_a_node_that_never_registered_can_be_stopped(tmp_path: Path) -> None:
    """The node ends at once, as there is nothing to finish."""
    async with open_bench(tmp_path) as bench:
        bench.node.leave_s = 60.0
        bench.link.away = True
        await until(lambda: bench.link.requests)
        bench.node.drain()
        await bench.wait_until_ended()


async def test_a_pause_stops_every_agents_timeout(tmp_path: Path) -> None:
    """Time stands still for running and new sessions, and the barrier returns at once."""
    async with open_bench(tmp_path) as bench:
        await until(lambda: bench.node.id)
        bench.script.hold("run")
        await bench.begin(make_simulated_task("a"))
        barrier = await bench.control.pause(PauseMode.ABORT, within_s=5)
        assert (barrier.applied, barrier.missing) == (("n",), ())
        await bench.begin(make_simulated_task("b"), 2)
        slots = [session.slots for session in bench.node.runner.sessions.values()]
        assert [one.paused for one in slots] == [True, True]
        await bench.control.announce(3)
        after = await bench.control.resume()
        assert (after.applied, after.version, after.paused) == (("n",), 3, None)
        assert [one.paused for one in slots] == [False, False]
        bench.script.release("run")
        results = await bench.wait_for_results(2)
    assert {one.status for one in results.values()} == {Status.COMPLETED}
    assert bench.gateway.actions == [("pause", "abort"), 3, ("pause", "abort"), "resume"]


async def test_total_time_is_bounded(tmp_path: Path) -> None:
    """`total_s` ends waiting and running sessions; only the latter is the agent's failure."""
    async with open_bench(tmp_path, slots=1, ready_max=1) as bench:
        await bench.control.submit(
            [
                make_simulated_task("a", what="hang", total_s=1.0),
                make_simulated_task("b", total_s=0.2),
            ]
        )
        ran = (await bench.wait_for_results(2))["a-0"]
    assert ran.status is Status.TIMED_OUT
    assert ran.failure is not None
    assert ran.failure.boundary is Boundary.AGENT
    assert ran.ledger.trained == 2
    assert bench.node.stats.failures[Boundary.INFRASTRUCTURE] >= 1


async def test_slow_evaluations_do_not_block_agents(tmp_path: Path) -> None:
    """A slot is free as soon as its agent has ended; evaluations have slots of their own."""
    async with open_bench(tmp_path, slots=2, max_evaluating=1) as bench:
        bench.script.hold("eval")
        await bench.control.submit([make_simulated_task(samples=4)])
        await until(lambda: len(bench.script.order) == 4)
        assert await bench.statuses() == {}
        bench.script.release("eval")
        await bench.wait_for_results(4)
    assert bench.script.most["eval"] == 1


async def test_logs_are_sent_while_they_are_read(tmp_path: Path) -> None:
    """The last 64 KiB of the log so far are sent, then all that follows."""
    async with open_bench(tmp_path) as bench:
        await bench.begin(make_simulated_task(what="hang"))
        [session] = bench.node.runner.sessions.values()
        assert session.slots.agent_log is not None
        text = b"".join(b"%07d\n" % number for number in range(20_000))
        session.slots.agent_log.write_bytes(text)

        async def read() -> bytes:
            data = b""
            while (part := await bench.control.read_log("t-0", offset=len(data), wait_s=0.1)).data:
                data += part.data
            return data

        async def follow(size: int) -> bool:
            return len(await read()) >= size

        await until(lambda: follow(CHUNK))
        with session.slots.agent_log.open("ab") as file:
            file.write(text)
        await until(lambda: follow(CHUNK + len(text)))
        assert await read() == text[-CHUNK:] + text


async def test_a_refused_node_ends(tmp_path: Path) -> None:
    """A wrong token is not retried."""
    async with open_plane(tmp_path) as control:
        bench = Bench(tmp_path, control)
        bench.link.refusal = ServerError("the join token is wrong", status=401)
        with pytest.raises(ServerError, match="join token"):
            await asyncio.wait_for(bench.node.run(), 20)


async def test_an_exception_of_a_plugin_fails_one_session(tmp_path: Path) -> None:
    """The session is retried as an infrastructure failure, and the node goes on."""
    async with open_bench(tmp_path) as bench:
        bench.script.spent_status = property()  # type: ignore[assignment]
        bench.script.find_crash = None  # type: ignore[method-assign, assignment]
        await bench.control.submit([make_simulated_task("a")])
        await until(lambda: bench.node.stats.failures[Boundary.INFRASTRUCTURE])
        del bench.script.find_crash
        result = (await bench.wait_for_results(1))["a-0"]
    assert result.status is Status.COMPLETED


@pytest.mark.parametrize(
    "refusal",
    [
        pytest.param(ServerError("too large", status=413), id="413"),
        pytest.param(ServerError("no such field", status=422), id="422"),
        pytest.param(OverflowError("int too large to convert"), id="a fault of the store"),
    ],
)
async def test_a_refused_result_ends_its_session(tmp_path: Path, refusal: Exception) -> None:
    """The session ends with the cause and its tokens instead of being leased for ever.

    The result, the journal and the files are those of one refusal.
    """
    async with open_bench(tmp_path) as bench:
        bench.link.refused["a-0"] = refusal
        await bench.control.submit([make_simulated_task("a"), make_simulated_task("b")])
        results = await bench.wait_for_results(2)
        await until(lambda: not bench.node.runner.sessions)
        epoch = (await bench.read_session("a-0")).epoch
        assert bench.journal == []
    failure = results["a-0"].failure
    assert failure is not None
    assert failure.cause is Cause.RESULT
    assert str(refusal) in failure.message
    assert results["a-0"].ledger.sampled == 2
    assert results["a-0"].ledger.balanced
    assert results["b-0"].status is Status.COMPLETED
    assert sorted(bench.script.order) == ["a-0", "b-0"]
    assert (tmp_path / "sessions" / f"a-0.{epoch}" / "result.refused").exists()


async def test_a_result_that_cannot_be_encoded_ends_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report of objects, of which no copy was made, ends its session as a failure."""
    monkeypatch.setattr("tugline.evaluators.verdict.make_plain", lambda verdict: verdict)
    async with open_bench(tmp_path) as bench:
        bench.script.report = {"reason": object()}
        await bench.control.submit([make_simulated_task("a")])
        result = (await bench.wait_for_results(1))["a-0"]
    assert result.failure is not None
    assert result.failure.cause is Cause.EVALUATOR
    assert result.ledger.sampled == 2
    assert bench.script.order == ["a-0"]


async def test_a_session_begins_in_an_empty_folder(tmp_path: Path) -> None:
    """An old folder of the same epoch, as after a restored store, is emptied first."""
    async with open_bench(tmp_path) as bench:
        await until(lambda: bench.node.id)
        now = int(time.time()) - leases.EPOCHS_FROM
        for epoch in range(now, now + 60):
            (tmp_path / "sessions" / f"t-0.{epoch}" / "left").mkdir(parents=True)
        await bench.control.submit([make_simulated_task()])
        await bench.wait_for_results(1)
        begun = tmp_path / "sessions" / f"t-0.{await bench.read_epoch()}"
        await until((begun / COMMITTED).exists)
    assert (begun / "agent").is_dir()
    assert not (begun / "left").exists()


async def test_a_node_reports_missing_sandboxes_when_it_registers(tmp_path: Path) -> None:
    """Sandboxes are checked at each registration, and the server shows the reason."""
    async with open_plane(tmp_path) as control:
        bench = Bench(tmp_path, control)
        problems = iter(["bwrap is not on the PATH", None])
        bench.node.check = lambda: next(problems)
        async with bench.working():
            await until(lambda: bench.node.id)
            [view] = await control.database.read(nodes.list_views)
            assert view.fault == "bwrap is not on the PATH"
            bench.node.id = ""
            await control.database.write(leases.expire_node, view.id, "a test")
            await until(lambda: bench.node.id)
            views = await control.database.read(nodes.list_views)
            assert [one.fault for one in views if one.state == "live"] == [""]
