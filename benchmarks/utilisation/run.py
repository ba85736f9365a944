"""How much of an engine a node keeps busy, and what each of its mechanisms is worth.

The node, its pools and the server are the real ones; agents, evaluations and the engine only take
time (see `workload`). Compared are workers that do one session after the other (one for each
engine slot), the node without READY, and the node as it is; `ideal` is computed, with agents that
are always ready. Busy is the share of the engine's slots in use, from when all agents are at work
to when no session is left that has not begun. `docs/benchmarks.md` says what each figure means.

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
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table
from workload import SCALE, Engine, Gateway, Marks, Parts, Rollouts, draw

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
"""Agents at once: the fewest that keep the engine full if all of them are always at work."""
JUDGES = 16
SAMPLES = 8
LONG = Limits(init_s=600.0, agent_s=600.0, eval_s=600.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run the workload; the defaults are the node as it is."""

    sessions: int = 320
    seed: int = 1
    slots: int = SLOTS
    ready: bool = True
    spare: bool = True
    admission: bool = True
    fits: int | None = None
    """Sessions whose KV the engine holds; None: all."""
    steps: int = 0
    """Batches of which each begins when the one before is over; 0: all sessions at once."""
    enough: int | None = None
    """Of the samples of a group, how many suffice."""


@dataclass
class Seen:
    """What came of it."""

    busy: float
    seconds: float
    judged_s: float = 0.0
    """Mean from the end of an agent to its verdict, in seconds of the workload."""
    sessions: int = 0


def a_task(name: str, case: Case, samples: int = SAMPLES) -> Task:
    """A group."""
    return Task(
        id=name,
        instruction="",
        harness=PluginSpec("simulated"),
        runtime=PluginSpec("simulated"),
        evaluator=PluginSpec("simulated"),
        samples=samples,
        limits=LONG,
        group=Group(min_usable=case.enough),
    )


# --------------------------------------------------------------------------- the node
@contextlib.asynccontextmanager
async def working(case: Case, engine: Engine, rollouts: Rollouts) -> AsyncIterator[ControlPlane]:
    """A server and its node, at work in a folder that is removed."""
    settings = NodeSettings(
        name="bench",
        slots=case.slots,
        max_initializing=case.slots,
        ready_max=case.slots if case.ready else 0,
        max_evaluating=JUDGES,
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


async def on_node(case: Case) -> Seen:
    """All sessions at once: until each has begun, and some time more for the verdicts."""
    engine = Engine(ENGINE, fits=case.fits)
    rollouts = Rollouts(engine, case.seed, spare=case.spare)
    marks = rollouts.marks
    async with working(case, engine, rollouts) as control:
        await control.submit([a_task(f"t{n}", case) for n in range(case.sessions // SAMPLES)])
        while len(marks.began) < case.sessions:  # noqa: ASYNC110 - seldom enough
            await asyncio.sleep(0.05)
        return seen(engine, marks, SLOTS)


async def in_steps(case: Case) -> Seen:
    """One batch after the other, as a trainer that waits for all of each."""
    engine = Engine(ENGINE)
    rollouts = Rollouts(engine, case.seed, spare=case.spare)
    async with working(case, engine, rollouts) as control:
        began = time.monotonic()
        for step in range(case.steps):
            count = case.sessions // case.steps // (2 * SAMPLES)
            groups = [a_task(f"s{step}-{n}", case, 2 * SAMPLES) for n in range(count)]
            await control.submit(groups)
            while (await control.database.read(tasks.page, TaskQuery(state=TaskState.OPEN))).tasks:  # noqa: ASYNC110 - the same
                await asyncio.sleep(0.02)
        end = time.monotonic()
    return Seen(engine.busy(began, end), end - began, sessions=len(rollouts.marks.judged))


def seen(engine: Engine, marks: Marks, at_once: int) -> Seen:
    """The figures of the time in which there was work for everybody."""
    begins = sorted(marks.began.values())
    start, end = begins[at_once - 1], begins[-1]
    judged = [at - marks.ran[name] for name, at in marks.judged.items()]
    late = statistics.fmean(judged) / SCALE if judged else 0.0
    return Seen(engine.busy(start, end), end - start, late, len(begins))


# --------------------------------------------------------------------------- the others
async def sequential(case: Case) -> Seen:
    """As many workers as the engine has slots, each with one session after the other."""
    engine = Engine(ENGINE)
    rollouts = Rollouts(engine, case.seed, spare=False)
    parts, gateway, left = Parts(rollouts), Gateway(), deque(range(case.sessions))

    async def worker(folder: Path) -> None:
        while left:
            session = Session(id=f"t-{left.popleft()}", task="t", sample=0)
            directory = folder / f"{session.id}.0"
            await roll_out(
                a_task("t", case), session, gateway=gateway, directory=directory, parts=parts
            )

    with tempfile.TemporaryDirectory() as name:
        workers = [asyncio.create_task(worker(Path(name))) for _ in range(ENGINE)]
        while len(rollouts.marks.began) < case.sessions:  # noqa: ASYNC110 - seldom enough
            await asyncio.sleep(0.05)
        found = seen(engine, rollouts.marks, ENGINE)
        for one in workers:
            one.cancel()
        await asyncio.wait(workers)
    return found


def ideal(case: Case) -> float:
    """The busy share when `slots` agents are always ready and nothing but the engine takes time."""
    names = [f"t{n // SAMPLES}-{n % SAMPLES}" for n in range(case.sessions)]
    sessions = deque(draw(case.seed, name) for name in names)
    asks: list[tuple[float, int, list[tuple[float, float]]]] = []
    for number in range(case.slots):
        heapq.heappush(asks, (0.0, number, list(sessions.popleft().turns)))
    free = [0.0] * ENGINE
    used, last, number = [], 0.0, case.slots
    while asks and sessions:
        at, _, turns = heapq.heappop(asks)
        sampling, tool = turns.pop(0)
        began = max(at, heapq.heappop(free))
        heapq.heappush(free, began + sampling)
        used.append((began, began + sampling))
        if not turns:
            last = began + sampling + tool
            turns = list(sessions.popleft().turns)
        number += 1
        heapq.heappush(asks, (began + sampling + tool, number, turns))
    return sum(min(to, last) - min(at, last) for at, to in used) / (ENGINE * last)


# --------------------------------------------------------------------------- all of it
@dataclass
class Report:
    """What is printed; shares from 0 to 1."""

    sequential: float = 0.0
    staged: float = 0.0
    ours: float = 0.0
    ideal: float = 0.0
    noise: float = 0.0
    """Largest difference between runs of ours, each with sessions of its own."""
    mechanisms: list[dict[str, object]] = field(default_factory=list)

    def add(self, name: str, what: str, with_it: float, without: float) -> None:
        """One mechanism: a figure with all, and with all but this one."""
        row = {"name": name, "what": what, "with": round(with_it, 3), "without": round(without, 3)}
        self.mechanisms.append(row)


async def measure(size: int, say: Console) -> Report:
    """Every case, one after the other."""

    async def told(name: str, running: asyncio.Future[Seen] | object) -> Seen:
        found: Seen = await running  # type: ignore[misc]
        say.print(
            f"{name}: {found.busy:.3f} busy, {found.seconds:.1f} s, {found.sessions} sessions"
        )
        return found

    report = Report(ideal=round(ideal(Case(sessions=size)), 3))
    alone = await told("sequential", sequential(Case(sessions=size // 2)))
    plain = Case(sessions=size, ready=False, spare=False, admission=False)
    staged = await told("staged", on_node(plain))
    runs = [await told("ours", on_node(Case(sessions=size, seed=seed))) for seed in (1, 2)]
    ours = runs[0]
    report.sequential, report.staged = round(alone.busy, 3), round(staged.busy, 3)
    report.ours = round(ours.busy, 3)
    report.noise = round(max(one.busy for one in runs) - min(one.busy for one in runs), 3)
    cold = await told("without READY", on_node(Case(sessions=size, ready=False)))
    report.add("prewarm", "busy", ours.busy, cold.busy)
    late = await told("without boxes ahead", on_node(Case(sessions=size, spare=False)))
    report.add("eval_prewarm", "seconds from agent to verdict", ours.judged_s, late.judged_s)
    full = {"sessions": size, "slots": 2 * SLOTS, "fits": 56}
    held = await told("small KV, admission", on_node(Case(**full)))
    crowd = await told("small KV, all let in", on_node(Case(**full, admission=False)))
    report.add("admission", "busy with useful work, KV for 56 of 104", held.busy, crowd.busy)
    batch = {"sessions": size // 2, "steps": 2}
    cut = await told("in steps, 12 of 16 are enough", in_steps(Case(**batch, enough=12)))
    waited = await told("in steps, all are waited for", in_steps(Case(**batch)))
    report.add("stragglers", "busy in steps of whole groups", cut.busy, waited.busy)
    report.add("stragglers", "seconds a step", cut.seconds / 2 / SCALE, waited.seconds / 2 / SCALE)
    return report


def table(report: Report) -> Sequence[Table]:
    """For people."""
    shares = Table("way", "engine busy", title=f"engine of {ENGINE} slots, {SLOTS} agents")
    for name in ("sequential", "staged", "ours", "ideal"):
        shares.add_row(name, f"{100 * getattr(report, name):.1f} %")
    rows = Table("mechanism", "figure", "with", "without")
    for row in report.mechanisms:
        rows.add_row(*(str(row[key]) for key in ("name", "what", "with", "without")))
    return shares, rows


def main() -> None:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="fewer sessions")
    given = parser.parse_args()
    log.configure(level="error")
    report = uvloop.run(measure(160 if given.quick else 280, Console(stderr=True)))
    if given.json:
        print(json.dumps(report.__dict__))  # noqa: T201 - its purpose
        return
    for one in table(report):
        Console().print(one)
    Console().print(f"ours differs by {100 * report.noise:.1f} points between two draws")


if __name__ == "__main__":
    main()
