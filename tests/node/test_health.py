"""A node's health: only its own canary decides it, whatever its sessions do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from support.engine import Play, reply_with
from support.gateway import open_session
from support.node import make_simulated_task, open_bench
from support.polling import until
from tugline.errors import SandboxError
from tugline.node import health
from tugline.node.health import SUSPICIOUS, Canary, Health
from tugline.rollout.failures import make_failure
from tugline.rollout.parts import Parts
from tugline.server.store import nodes
from tugline.testing import Reply
from tugline.types import Cause, Failure, Group, Ledger, Limits, PluginSpec, Status, Trajectory


@dataclass
class Bed:
    """A node's health with canaries that end as set up, and pauses that take no time."""

    ends: list[Failure | None]
    runtimes: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.health = Health(self._run, lambda: self.changes.append(self.health.problem))
        self.health.sleep = self._sleep

    async def _run(self, runtime: str) -> Failure | None:
        self.runtimes.append(runtime)
        return self.ends.pop(0)

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)

    def note(self, cause: Cause | None, runtime: str = "auto", *, began: float = 1e10) -> None:
        """A session ends, with a failure or completed."""
        task = replace(make_simulated_task(), runtime=PluginSpec(runtime))
        failure = None if cause is None else make_failure(cause, "it broke")
        status = Status.COMPLETED if failure is None else Status.FAILED
        result = Trajectory(
            session="s",
            task="t",
            sample=0,
            status=status,
            traces=(),
            ledger=Ledger(),
            failure=failure,
        )
        self.health.note_result(task, result, began)

    async def work(self) -> None:
        """Run the health until it waits for a suspicion."""
        running = asyncio.create_task(self.health.run())
        for _ in range(100):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running})


def broke(*causes: Cause) -> list[Failure | None]:
    """Failures of canaries; the one after them succeeds."""
    return [*(make_failure(cause, "no") for cause in causes), None]


@pytest.mark.parametrize("cause", list(Cause))
async def test_failures_of_sessions_only_lead_to_a_canary(cause: Cause) -> None:
    """However many sessions fail, the node has no problem if its canary succeeds."""
    bed = Bed([None])
    for _ in range(50):
        bed.note(cause)
    await bed.work()
    assert bed.runtimes == (["auto"] if cause in SUSPICIOUS else [])
    assert bed.changes == []


async def test_a_failed_canary_is_a_problem_until_one_succeeds() -> None:
    """The canary is repeated after pauses that double."""
    bed = Bed(broke(*[Cause.SANDBOX] * 8))
    bed.note(Cause.NODE)
    await bed.work()
    assert bed.changes == ["sandbox: no", ""]
    assert bed.pauses == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, health.AGAIN_S]


async def test_pauses_take_time() -> None:
    """Without a replacement, the pause between two canaries is that of asyncio."""
    health = Health(Bed([]).health._run_canary, lambda: None)
    await asyncio.wait_for(health.sleep(0.0), 5.0)
    assert health.problem == ""


async def test_a_canary_that_says_nothing_of_the_node_changes_nothing() -> None:
    """A canary without an engine is neither a problem nor the end of one."""
    bed = Bed([*broke(Cause.ENGINE_LOST)[:1], *broke(Cause.DISK, Cause.CRASH, Cause.ENGINE)])
    bed.note(Cause.NODE)
    await bed.work()
    assert bed.changes == []
    bed.note(Cause.NODE)
    await bed.work()
    assert bed.changes == ["disk: no", ""]


@pytest.mark.parametrize(
    ("worked", "failed", "tested"),
    [
        pytest.param([], "apptainer", "auto", id="never worked here"),
        pytest.param(["container"], "container", "container", id="has worked here"),
        pytest.param(["bad:Class"], "bad:Class", "auto", id="the class of a task"),
    ],
)
async def test_the_canary_is_in_a_runtime_of_the_node(
    worked: Iterable[str], failed: str, tested: str
) -> None:
    """A task cannot choose a runtime that is missing on this machine, or fails on purpose."""
    bed = Bed([None])
    for runtime in worked:
        bed.note(None, runtime)
    bed.note(Cause.SANDBOX, failed)
    await bed.work()
    assert bed.runtimes == [tested]


async def test_a_session_that_works_ends_a_problem() -> None:
    """A session that began after the problem was found ends it; an earlier one does not."""
    bed = Bed([])
    bed.health.set_problem("bwrap is not on the PATH")
    bed.note(None, "local", began=0.0)
    assert bed.health.problem
    bed.note(None, "local")
    assert bed.changes == ["bwrap is not on the PATH", ""]


# --------------------------------------------------------------------------- real canaries
async def run_canary(tmp_path: Path, play: Play, parts: Parts | None = None) -> Failure | None:
    """A canary in bubblewrap, with a gateway; nothing is left of it."""
    async with open_session(tmp_path / "gateway", play) as model:
        before = sorted((tmp_path / "gateway").glob("*.rec"))
        failure = await Canary(model.gateway, parts or Parts(), tmp_path / "s").run("bubblewrap")
        assert sorted((tmp_path / "gateway").glob("*.rec")) == before
        assert model.gateway.traffic.calls.total() == (failure is None)
    assert list((tmp_path / "s").iterdir()) == []
    return failure


async def test_a_canary_opens_a_sandbox_and_makes_a_recorded_call(tmp_path: Path) -> None:
    """A canary succeeds on a node that works."""
    assert await run_canary(tmp_path, reply_with("Fine.")) is None


async def test_an_engine_that_is_down_is_not_the_nodes_problem(tmp_path: Path) -> None:
    """The canary fails for a cause that does not make the node suspect."""
    failure = await run_canary(tmp_path, lambda _prompt, _request: Reply((), status=400))
    assert failure is not None
    assert failure.cause not in SUSPICIOUS


async def test_broken_sandboxes_are_the_nodes_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canary fails for the sandbox, with the message of the broken program."""
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho no namespaces here >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    async with open_session(tmp_path / "gateway", reply_with("Fine.")) as model:
        failure = await Canary(model.gateway, Parts(), tmp_path / "s").run("bubblewrap")
    assert failure is not None
    assert failure.cause is Cause.SANDBOX
    assert "no namespaces here" in failure.message


async def test_a_runtime_that_needs_an_image_is_checked_without_a_session(tmp_path: Path) -> None:
    """The check asks anew whether the runtime's engine works."""
    async with open_session(tmp_path / "gateway", reply_with("Fine.")) as model:
        failure = await Canary(model.gateway, Parts(), tmp_path / "s").run("container")
    assert failure is None or failure.cause is Cause.SANDBOX


# --------------------------------------------------------------------------- at a node
async def test_a_node_with_a_broken_canary_is_quarantined_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that fails meanwhile costs no attempt, and completes once sandboxes work again."""
    async with open_bench(tmp_path) as bench:
        create, broken = bench.script._create, True

        async def fail(*args: object) -> object:
            if broken:
                msg = "no sandbox here"
                raise SandboxError(msg)
            return await create(*args)

        monkeypatch.setattr(bench.script, "_create", fail)
        bench.node.health.sleep = lambda _seconds: asyncio.sleep(0.05)
        await bench.control.submit([make_simulated_task()])

        async def read_fault() -> str:
            views = await bench.control.database.read(nodes.list_views)
            return "".join(view.fault for view in views)

        async def in_quarantine() -> bool:
            return await read_fault() == "sandbox: no sandbox here"

        await until(in_quarantine)
        broken = False
        await bench.wait_for_results(1)
        assert (await bench.read_session("t-0")).attempt == 0

        async def is_free() -> bool:
            return await read_fault() == ""

        await until(is_free)


async def test_one_tenants_impossible_limits_cost_others_nothing(tmp_path: Path) -> None:
    """Six tasks with `init_s: 0.001` fail again and again; the node stays with the others."""
    hostile = [
        replace(make_simulated_task(f"h{n}", group=Group(attempts=3)), limits=Limits(init_s=0.001))
        for n in range(6)
    ]
    async with open_bench(tmp_path, slots=2) as bench:
        bench.script.hold("init")
        await bench.control.submit(hostile)
        await until(lambda: bench.node.stats.requeued >= 6)
        bench.script.release("init")
        await bench.control.submit([make_simulated_task(f"g{n}") for n in range(6)])

        async def are_done() -> bool:
            done = await bench.statuses()
            return all(done.get(f"g{n}-0") is Status.COMPLETED for n in range(6))

        await until(are_done)
        [view] = await bench.control.database.read(nodes.list_views)
        assert view.fault == ""
