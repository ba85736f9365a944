"""How busy a node keeps an engine, and the effect of each of its mechanisms.

The node, its pools and the server are real; agents, evaluations and the engine are simulated and
only take time (see `workload`). The figures compare sequential workers (one for each engine slot),
the node without READY, and the complete node; `ideal` is computed for agents that are always ready.
Busy is the share of the engine's slots in use, from when all agents are running until the last
session has begun. `docs/benchmarks.md` explains each figure.

    python benchmarks/utilisation/run.py [--json] [--quick]
"""

# ruff: noqa: INP001 - a program, not a package
from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table
from workload import SCALE, Engine, Gateway, Parts, Rollouts, SessionTimes, draw_session

from tugline import log
from tugline.node.admission import POLL_S, Admission
from tugline.node.app import Node
from tugline.node.settings import NodeSettings
from tugline.protocol import TaskQuery, TaskState
from tugline.rollout.rollout import roll_out
from tugline.server.blobs import open_blobs
from tugline.server.control import ControlPlane
from tugline.server.store import tasks
from tugline.server.store.database import open_database
from tugline.types import Group, Limits, PluginSpec, Session, Task

ENGINE = 32
"""Slots of the engine."""
SLOTS = 52
"""Concurrent agents: the fewest that keep the engine full if all of them are always ready."""
EVALUATORS = 16
SAMPLES = 8
LONG = Limits(init_s=600.0, agent_s=600.0, eval_s=600.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run the workload; the defaults are those of the complete node."""

    sessions: int = 320
    seed: int = 1
    slots: int = SLOTS
    ready: bool = True
    prewarm_evaluator: bool = True
    admission: bool = True
    fits: int | None = None
    """Sessions whose KV fits into the engine; None means all."""
    steps: int = 0
    """Batches, each submitted after the end of the previous one; 0 means a single batch."""
    min_usable: int | None = None
    """`Group.min_usable` of each task."""


@dataclass
class Result:
    """Figures of one case."""

    busy: float
    seconds: float
    evaluation_s: float = 0.0
    """Mean time from the end of an agent to its verdict, in seconds of the workload."""
    sessions: int = 0


def make_task(name: str, case: Case, samples: int = SAMPLES) -> Task:
    """Make the task of one group."""
    return Task(
        id=name,
        instruction="",
        harness=PluginSpec("simulated"),
        runtime=PluginSpec("simulated"),
        evaluator=PluginSpec("simulated"),
        samples=samples,
        limits=LONG,
        group=Group(min_usable=case.min_usable),
    )


# --------------------------------------------------------------------------- the node
@contextlib.asynccontextmanager
async def run_node(case: Case, engine: Engine, rollouts: Rollouts) -> AsyncIterator[ControlPlane]:
    """Run a server and a node in a temporary folder."""
    settings = NodeSettings(
        name="bench",
        slots=case.slots,
        max_initializing=case.slots,
        ready_max=case.slots if case.ready else 0,
        max_evaluating=EVALUATORS,
        memory_floor_mb=0,
        disk_floor_gb=0.0,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        database = open_database(f"sqlite:{folder / 'server.db'}")
        async with ControlPlane(database, open_blobs(str(folder)), folder=folder) as control:
            node = Node(control.dispatcher, Gateway(), Parts(rollouts), folder / "node", settings)
            if case.admission:
                node.pools.admission = Admission(engine.poll, waiting=ENGINE // 2)
                node.pools.admission.every_s = POLL_S * SCALE
            task = asyncio.create_task(node.run())
            try:
                yield control
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


async def run_on_node(case: Case) -> Result:
    """Submit all sessions at once; measure until the last one has begun."""
    engine = Engine(ENGINE, fits=case.fits)
    rollouts = Rollouts(engine, case.seed, prewarm_evaluator=case.prewarm_evaluator)
    times = rollouts.times
    async with run_node(case, engine, rollouts) as control:
        await control.submit([make_task(f"t{n}", case) for n in range(case.sessions // SAMPLES)])
        while len(times.began) < case.sessions:  # noqa: ASYNC110 - polls rarely
            await asyncio.sleep(0.05)
        return summarize(engine, times, SLOTS)


async def run_in_steps(case: Case) -> Result:
    """Submit one batch after another, as a synchronous trainer does."""
    engine = Engine(ENGINE)
    rollouts = Rollouts(engine, case.seed, prewarm_evaluator=case.prewarm_evaluator)
    async with run_node(case, engine, rollouts) as control:
        began = time.monotonic()
        for step in range(case.steps):
            count = case.sessions // case.steps // (2 * SAMPLES)
            groups = [make_task(f"s{step}-{n}", case, 2 * SAMPLES) for n in range(count)]
            await control.submit(groups)
            while (await control.database.read(tasks.page, TaskQuery(state=TaskState.OPEN))).tasks:  # noqa: ASYNC110 - polls rarely
                await asyncio.sleep(0.02)
        end = time.monotonic()
    return Result(engine.busy(began, end), end - began, sessions=len(rollouts.times.evaluated))


def summarize(engine: Engine, times: SessionTimes, at_once: int) -> Result:
    """Compute the figures of the time in which all agents were running."""
    begins = sorted(times.began.values())
    start, end = begins[at_once - 1], begins[-1]
    delays = [at - times.ended[name] for name, at in times.evaluated.items()]
    delay = statistics.fmean(delays) / SCALE if delays else 0.0
    return Result(engine.busy(start, end), end - start, delay, len(begins))


# --------------------------------------------------------------------------- baselines
async def run_sequential(case: Case) -> Result:
    """Run a worker for each engine slot, each with one session after another."""
    engine = Engine(ENGINE)
    rollouts = Rollouts(engine, case.seed, prewarm_evaluator=False)
    parts, gateway, left = Parts(rollouts), Gateway(), deque(range(case.sessions))

    async def worker(folder: Path) -> None:
        while left:
            session = Session(id=f"t-{left.popleft()}", task="t", sample=0)
            directory = folder / f"{session.id}.0"
            await roll_out(
                make_task("t", case), session, gateway=gateway, directory=directory, parts=parts
            )

    with tempfile.TemporaryDirectory() as name:
        workers = [asyncio.create_task(worker(Path(name))) for _ in range(ENGINE)]
        while len(rollouts.times.began) < case.sessions:  # noqa: ASYNC110 - polls rarely
            await asyncio.sleep(0.05)
        result = summarize(engine, rollouts.times, ENGINE)
        for each in workers:
            each.cancel()
        await asyncio.wait(workers)
    return result


def compute_ideal(case: Case) -> float:
    """Compute the busy share of an engine for `slots` agents that are always ready."""
    names = [f"t{n // SAMPLES}-{n % SAMPLES}" for n in range(case.sessions)]
    sessions = deque(draw_session(case.seed, name) for name in names)
    requests: list[tuple[float, int, list[tuple[float, float]]]] = []
    for number in range(case.slots):
        heapq.heappush(requests, (0.0, number, list(sessions.popleft().turns)))
    free = [0.0] * ENGINE
    used, last, number = [], 0.0, case.slots
    while requests and sessions:
        at, _, turns = heapq.heappop(requests)
        sampling, tool = turns.pop(0)
        began = max(at, heapq.heappop(free))
        heapq.heappush(free, began + sampling)
        used.append((began, began + sampling))
        if not turns:
            last = began + sampling + tool
            turns = list(sessions.popleft().turns)
        number += 1
        heapq.heappush(requests, (began + sampling + tool, number, turns))
    return sum(min(to, last) - min(at, last) for at, to in used) / (ENGINE * last)


# --------------------------------------------------------------------------- report
@dataclass
class Report:
    """The printed figures; shares are from 0 to 1."""

    sequential: float = 0.0
    staged: float = 0.0
    ours: float = 0.0
    ideal: float = 0.0
    noise: float = 0.0
    """Largest difference between runs of `ours` with different sessions."""
    mechanisms: list[dict[str, object]] = field(default_factory=list)

    def add(self, name: str, what: str, with_it: float, without: float) -> None:
        """Add a figure with all mechanisms, and without this one."""
        row = {"name": name, "what": what, "with": round(with_it, 3), "without": round(without, 3)}
        self.mechanisms.append(row)


async def measure(size: int, console: Console) -> Report:
    """Run all cases, one after another."""

    async def run(name: str, case: Awaitable[Result]) -> Result:
        result = await case
        console.print(
            f"{name}: {result.busy:.3f} busy, {result.seconds:.1f} s, {result.sessions} sessions"
        )
        return result

    report = Report(ideal=round(compute_ideal(Case(sessions=size)), 3))
    alone = await run("sequential", run_sequential(Case(sessions=size // 2)))
    plain = Case(sessions=size, ready=False, prewarm_evaluator=False, admission=False)
    staged = await run("staged", run_on_node(plain))
    runs = [await run("ours", run_on_node(Case(sessions=size, seed=seed))) for seed in (1, 2)]
    ours = runs[0]
    report.sequential, report.staged = round(alone.busy, 3), round(staged.busy, 3)
    report.ours = round(ours.busy, 3)
    report.noise = round(max(each.busy for each in runs) - min(each.busy for each in runs), 3)
    cold = await run("without READY", run_on_node(Case(sessions=size, ready=False)))
    report.add("prewarm", "busy", ours.busy, cold.busy)
    late = await run(
        "without prewarmed evaluators", run_on_node(Case(sessions=size, prewarm_evaluator=False))
    )
    report.add(
        "eval_prewarm", "seconds from agent to verdict", ours.evaluation_s, late.evaluation_s
    )
    full = {"sessions": size, "slots": 2 * SLOTS, "fits": 56}
    held = await run("small KV, admission", run_on_node(Case(**full)))
    crowd = await run("small KV, no admission", run_on_node(Case(**full, admission=False)))
    report.add("admission", "busy with useful work, KV for 56 of 104", held.busy, crowd.busy)
    batch = {"sessions": size // 2, "steps": 2}
    cut = await run("in steps, min_usable 12 of 16", run_in_steps(Case(**batch, min_usable=12)))
    waited = await run("in steps, without min_usable", run_in_steps(Case(**batch)))
    report.add("stragglers", "busy in steps of whole groups", cut.busy, waited.busy)
    report.add("stragglers", "seconds a step", cut.seconds / 2 / SCALE, waited.seconds / 2 / SCALE)
    return report


def make_tables(report: Report) -> Sequence[Table]:
    """Format the report as two tables."""
    shares = Table("case", "engine busy", title=f"engine of {ENGINE} slots, {SLOTS} agents")
    for name in ("sequential", "staged", "ours", "ideal"):
        shares.add_row(name, f"{100 * getattr(report, name):.1f} %")
    rows = Table("mechanism", "figure", "with", "without")
    for row in report.mechanisms:
        rows.add_row(*(str(row[key]) for key in ("name", "what", "with", "without")))
    return shares, rows


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="fewer sessions")
    options = parser.parse_args()
    log.configure(level="error")
    report = uvloop.run(measure(160 if options.quick else 280, Console(stderr=True)))
    if options.json:
        print(json.dumps(report.__dict__))  # noqa: T201 - a program
        return
    for each in make_tables(report):
        Console().print(each)
    Console().print(f"ours differs by {100 * report.noise:.1f} points between two seeds")


if __name__ == "__main__":
    main()
