from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pretend_node import Bench, Server, task
from tugline.errors import ServerError
from tugline.node import app
from tugline.node.logs import CHUNK
from tugline.protocol import Control, PauseMode, StopKind
from tugline.types import Boundary, Status


async def test_a_node_does_its_work(tmp_path: Path) -> None:
    """What was submitted is rolled out, judged and committed, and the node holds nothing then."""
    bench = Bench(tmp_path)
    async with bench.working() as server:
        names = server.submit(task(samples=20))
        await server.until(lambda: len(server.results) == 20)
        await server.until(lambda: not bench.node.crew.live)
    assert set(server.results) == set(names)
    for result in server.results.values():
        assert result.status is Status.COMPLETED
        assert result.reward is not None
        assert result.ledger.trained == 2
    assert server.logs["t-3"] == b"I am t-3\n"
    assert bench.node.stats.committed == 20
    assert not list((tmp_path / "journal").iterdir())


async def test_work_is_asked_for_as_there_is_room(tmp_path: Path) -> None:
    """No more run than there are slots, one more is ready, and no more is asked for."""
    bench = Bench(tmp_path, slots=2, ready_max=1)
    async with bench.working() as server:
        server.submit(task(what="hang", samples=9))
        await server.until(lambda: bench.script.now["run"] == 2 and len(server.queue) == 6)
        await asyncio.sleep(0.05)
        stages = bench.node.stages
        assert (stages.held, stages.early, stages.room()) == (3, 1, 0)
        assert len(server.queue) == 6
    assert bench.script.most["run"] == 2


async def test_the_oldest_group_goes_first(tmp_path: Path) -> None:
    """Whole groups finish: samples that came later wait for those of the task before."""
    bench = Bench(tmp_path, slots=1, ready_max=8, inits=8, run=0.02)
    bench.node.stages.times[Status.INIT].add(8.0)
    bench.node.stages.times[Status.RUN].add(1.0)
    async with bench.working() as server:
        server.submit(task("a"), task("b", samples=3), task("c", samples=3))
        server.queue = [server.queue[n] for n in (0, 1, 4, 2, 5, 3, 6)]
        server.wake()
        await server.until(lambda: len(server.results) == 7)
    assert bench.script.order == ["a-0", "b-0", "b-1", "b-2", "c-0", "c-1", "c-2"]


async def test_a_cancelled_session_keeps_what_it_sampled(tmp_path: Path) -> None:
    """Its agent is ended at once; its calls are built and its ledger is committed."""
    bench = Bench(tmp_path)
    async with bench.working() as server:
        server.submit(task(what="hang"))
        await server.until(lambda: bench.script.now["run"])
        server.stop("t-0", StopKind.CANCELLED)
        await server.until(lambda: server.results)
    result = server.results["t-0"]
    assert (result.status, result.failure, result.reward) == (Status.CANCELLED, None, None)
    assert result.ledger.trained == 2
    assert bench.script.ended == ["t-0"]


@pytest.mark.parametrize("times", [{"init": 60.0}, {"eval": 60.0}])
async def test_it_can_be_cancelled_in_any_stage(times: dict[str, float], tmp_path: Path) -> None:
    """Not only an agent: also what is made ready for it, or judges it."""
    bench = Bench(tmp_path, **times)
    (stage,) = times
    async with bench.working() as server:
        server.submit(task())
        await server.until(lambda: bench.script.now[stage])
        server.stop("t-0", StopKind.CANCELLED)
        await server.until(lambda: server.results)
    assert server.results["t-0"].status is Status.CANCELLED
    assert bench.script.now["boxes"] == 0


async def test_a_stale_session_is_handed_back(tmp_path: Path) -> None:
    """Nothing of it is committed."""
    bench = Bench(tmp_path)
    async with bench.working() as server:
        server.submit(task(what="hang"))
        await server.until(lambda: bench.script.now["run"])
        server.stop("t-0", StopKind.STALE)
        await server.until(lambda: server.backs)
    [(name, back)] = server.backs
    assert (name, back.epoch, back.boundary) == ("t-0", 1, None)
    assert not server.results


async def test_a_lost_node_drops_all_and_joins_again(tmp_path: Path) -> None:
    """Its sessions are another's; the same one may come back to it under a new lease."""
    bench = Bench(tmp_path, slots=1, ready_max=0)
    async with bench.working() as server:
        server.submit(task(what="hang"))
        await server.until(lambda: bench.script.now["run"])
        server.lose()
        await server.until(lambda: len(bench.script.order) == 2)
        [live] = bench.node.crew.live.values()
    assert bench.script.ended[0] == "t-0"
    assert live.epoch == 2
    assert server.said.count("register") == 2
    assert bench.node.stats.rejoined == 1


async def test_work_goes_on_without_the_server(tmp_path: Path) -> None:
    """Results wait for it on disk, and are committed once when it is back."""
    bench = Bench(tmp_path, run=0.1)
    async with bench.working() as server:
        server.submit(task(samples=4))
        await server.until(lambda: bench.script.now["run"] == 4)
        server.away = True
        await server.until(lambda: len(list((tmp_path / "journal").glob("*.result"))) == 4)
        assert not server.results
        server.away = False
        await server.until(lambda: len(server.results) == 4)
        await server.until(lambda: not list((tmp_path / "journal").iterdir()))
    assert bench.node.stats.outages >= 1
    assert bench.node.stats.fenced == 0


async def test_a_new_process_offers_what_the_old_one_had_finished(tmp_path: Path) -> None:
    """Results in the journal are committed before the node's name is taken over."""
    bench = Bench(tmp_path)
    async with bench.working() as server:
        await server.commits.acquire()
        server.commits._value = 0
        server.submit(task())
        await server.until(lambda: "commit" in server.said)
    assert len(list((tmp_path / "journal").glob("*.result"))) == 1
    server.said.clear()
    server.commits = asyncio.Semaphore(1)
    bench.node = bench.another()
    async with bench.working():
        await server.until(lambda: server.results)
        await server.until(lambda: "register" in server.said)
    assert server.said[:3] == ["commit", "committed", "register"]
    assert bench.script.order == ["t-0"]


async def test_draining_finishes_what_runs_and_returns_the_rest(tmp_path: Path) -> None:
    """Nothing is lost or begun, and `run` comes to its end."""
    bench = Bench(tmp_path, slots=1, ready_max=1, run=0.2)
    async with bench.working() as server:
        server.submit(task(samples=3))
        await server.until(lambda: bench.script.now["run"] and bench.node.stages.held == 2)
        bench.node.drain()
        assert bench.running is not None
        await asyncio.wait_for(asyncio.shield(bench.running), 5)
    assert list(server.results) == ["t-0"]
    assert [name for name, _ in server.backs] == ["t-1"]
    assert "drain" in server.said
    assert len(server.queue) == 1


async def test_a_drain_has_an_end(tmp_path: Path) -> None:
    """What still runs after the grace is handed back without costing an attempt."""
    bench = Bench(tmp_path, grace_s=0.1)
    async with bench.working() as server:
        server.submit(task(what="hang"))
        await server.until(lambda: bench.script.now["run"])
        server.draining = True
        server.wake()
        assert bench.running is not None
        await asyncio.wait_for(asyncio.shield(bench.running), 5)
    [(name, back)] = server.backs
    assert (name, back.boundary) == ("t-0", None)


async def test_a_drain_does_not_wait_for_a_server_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be told stays in the journal; the node ends all the same."""
    monkeypatch.setattr(app, "_LEAVE_S", 0.1)
    bench = Bench(tmp_path, grace_s=0.3, run=0.1)
    async with bench.working() as server:
        server.submit(task())
        await server.until(lambda: bench.script.now["run"])
        server.away = True
        bench.node.drain()
        assert bench.running is not None
        await asyncio.wait_for(asyncio.shield(bench.running), 5)
    assert [path.name for path in (tmp_path / "journal").iterdir()] == ["t-0.1.result"]
    assert not server.results


async def test_a_node_that_never_joined_can_be_stopped(tmp_path: Path) -> None:
    """At once, as there is nothing to finish."""
    bench = Bench(tmp_path)
    bench.server.away = True
    async with bench.working() as server:
        await server.until(lambda: server.said)
        bench.node.drain()
        assert bench.running is not None
        await asyncio.wait_for(asyncio.shield(bench.running), 5)


async def test_a_pause_is_on_nobodys_clock(tmp_path: Path) -> None:
    """While no model call is answered an agent's time stands still; the barrier is told at once."""
    bench = Bench(tmp_path, run=0.2)
    async with bench.working() as server:
        await server.until(lambda: server.node)
        server.order(Control(generation=1, paused=PauseMode.WAIT))
        await server.until(lambda: server.applied == 1)
        server.order(Control(generation=2, paused=None, version=7))
        await server.until(lambda: server.applied == 2)
        server.order(Control(generation=3, paused=PauseMode.ABORT, version=7))
        await server.until(lambda: server.applied == 3)
        server.submit(task(agent_s=0.4))
        await server.until(lambda: bench.script.now["run"])
        await asyncio.sleep(0.5)
        server.order(Control(generation=4, version=8))
        await server.until(lambda: server.results)
    assert server.results["t-0"].status is Status.COMPLETED
    assert bench.gateway.did == [("pause", "wait"), 7, "resume", ("pause", "abort"), 8, "resume"]


async def test_time_in_ready_is_on_nobodys_clock(tmp_path: Path) -> None:
    """A session that waits for a slot longer than it may run still has all its time."""
    bench = Bench(tmp_path, slots=1, ready_max=2, run=0.3)
    async with bench.working() as server:
        server.submit(task(samples=2, agent_s=0.4, init_s=0.4))
        await server.until(lambda: len(server.results) == 2)
    assert {one.status for one in server.results.values()} == {Status.COMPLETED}
    assert server.results["t-1"].seconds["ready"] > 0.1


async def test_the_sum_of_all_times_is_bounded(tmp_path: Path) -> None:
    """`total_s` ends a session that waits, and one that runs; the first is tried again."""
    bench = Bench(tmp_path, slots=1, ready_max=1)
    async with bench.working() as server:
        server.submit(task("a", what="hang", total_s=0.6), task("b", total_s=0.2))
        await server.until(lambda: len(server.results) == 2)
    ran, waited = server.results["a-0"], server.results["b-0"]
    assert (ran.status, waited.status) == (Status.TIMED_OUT, Status.TIMED_OUT)
    assert ran.failure is not None
    assert waited.failure is not None
    assert ran.failure.boundary is Boundary.AGENT
    assert ran.ledger.trained == 2
    assert waited.failure.boundary is Boundary.INFRASTRUCTURE


async def test_slow_evaluations_do_not_hold_up_agents(tmp_path: Path) -> None:
    """A slot is free as soon as its agent has ended; evaluations have places of their own."""
    bench = Bench(tmp_path, slots=2, evals=1, run=0.01, eval=0.15)
    async with bench.working() as server:
        server.submit(task(samples=4))
        await server.until(lambda: len(bench.script.order) == 4)
        assert len(server.results) <= 1
        await server.until(lambda: len(server.results) == 4)
    assert bench.script.most["eval"] == 1


async def test_logs_are_sent_while_somebody_reads(tmp_path: Path) -> None:
    """A followed log comes before its session ends."""
    bench = Bench(tmp_path)
    async with bench.working() as server:
        server.submit(task(what="hang"))
        await server.until(lambda: bench.script.now["run"])
        assert not server.logs
        server.followed = ("t-0",)
        await server.until(lambda: server.logs)
        server.followed = ()
    assert server.logs == {"t-0": b"I am t-0\n"}


async def test_of_a_long_log_the_end_is_kept(tmp_path: Path) -> None:
    """64 KiB of what nobody followed; of a followed one, from there on all."""
    bench = Bench(tmp_path)
    async with bench.working() as server:
        server.submit(task("a", what="hang"))
        await server.until(lambda: bench.script.now["run"])
        [live] = bench.node.crew.live.values()
        assert live.slots.agent_log is not None
        text = b"".join(b"%07d\n" % number for number in range(20_000))
        live.slots.agent_log.write_bytes(text)
        server.followed = ("a-0",)
        await server.until(lambda: server.logs)
        with live.slots.agent_log.open("ab") as file:
            file.write(text)
        await server.until(lambda: len(server.logs["a-0"]) > len(text))
        server.stop("a-0", StopKind.CANCELLED)
        await server.until(lambda: server.results)
    assert server.logs["a-0"] == text[-CHUNK:] + text


async def test_a_server_that_refuses_the_node_is_told_to_the_caller(tmp_path: Path) -> None:
    """A wrong token is nothing to wait out."""

    class Closed(Server):
        async def register(self, hello: object) -> object:
            msg = "the join token is wrong"
            raise ServerError(msg, status=401)

    bench = Bench(tmp_path, Closed())
    with pytest.raises(ServerError, match="join token"):
        await asyncio.wait_for(bench.node.run(), 5)


async def test_a_broken_rollout_is_a_result(tmp_path: Path) -> None:
    """Whatever a part does, it is one session's failure and the node goes on."""
    bench = Bench(tmp_path)
    bench.script.install = None  # type: ignore[method-assign, assignment]

    async with bench.working() as server:
        server.submit(task("a"))
        await server.until(lambda: server.results)
        del bench.script.install
        server.submit(task("b"))
        await server.until(lambda: len(server.results) == 2)
    failure = server.results["a-0"].failure
    assert failure is not None
    assert failure.boundary is Boundary.INFRASTRUCTURE
    assert server.results["b-0"].status is Status.COMPLETED
