"""Sessions like those of software-engineering agents, drawn from a seed, and an engine for them.

Times are heavy-tailed (log-normal, cut off): INIT 1 to 60 s, three to a hundred turns a session,
each some seconds of sampling and some of tools, then an evaluation of up to three minutes. All of
it is scaled down by `SCALE`, so that a run takes seconds; the shares do not depend on that as long
as the node's own work stays small against the scaled times.
"""

# ruff: noqa: INP001 - parts of a program, not a package
from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.gateway.engine import SessionState
from tugline.harnesses.base import Harness, Launch, LaunchContext
from tugline.node.admission import EngineLoad
from tugline.recording.records import RecordedResult
from tugline.rollout.parts import Parts as Made
from tugline.sandbox.base import (
    MAX_READ_BYTES,
    Content,
    Exit,
    PausableTimeout,
    Runtime,
    Sandbox,
    SandboxSpec,
    enforce_timeout,
)
from tugline.sandbox.patch import Patch, PatchLimits
from tugline.types import (
    Call,
    Finish,
    PluginSpec,
    Reward,
    Sampling,
    Session,
    Task,
    Timings,
    VersionSpan,
)

SCALE = 1 / 50
"""Seconds that pass for each second of the workload."""
OPEN_S = 6.0
"""What opening a box for an evaluation takes, in seconds of the workload."""


@dataclass(frozen=True)
class Draw:
    """What one session does, in seconds that really pass."""

    init: float
    turns: tuple[tuple[float, float], ...]
    """Sampling and tool time of each."""
    judging: float

    @property
    def sampling(self) -> float:
        """Seconds of an engine slot that it needs."""
        return sum(turn for turn, _ in self.turns)


def draw(seed: int, session: str) -> Draw:
    """The same for the same seed and session, whoever asks."""
    dice = random.Random(f"{seed}/{session}")

    def heavy(median: float, sigma: float, least: float, most: float) -> float:
        return min(most, max(least, median * math.exp(dice.gauss(0.0, sigma))))

    count = round(heavy(16, 0.7, 3, 100))
    turns = [(heavy(3.0, 0.8, 0.3, 40), heavy(1.2, 1.0, 0.1, 30)) for _ in range(count)]
    return Draw(
        heavy(15.0, 0.9, 1, 60) * SCALE,
        tuple((turn * SCALE, tool * SCALE) for turn, tool in turns),
        heavy(25.0, 0.8, 4, 180) * SCALE,
    )


class Engine:
    """A fixed number of slots, first come first served, and how much of them was in use.

    With `fits`, the KV memory holds so many sessions: beyond that a turn may find that its prefix
    was pushed out, and sampling it takes twice as long; the second half is no use to anybody.
    """

    def __init__(self, slots: int, *, fits: int | None = None) -> None:
        self.slots, self.fits = slots, fits
        self.sessions = 0
        """Agents that are at work."""
        self._free = asyncio.Semaphore(slots)
        self.waiting = 0
        self._useful: list[tuple[float, float]] = []
        """Begin and end of what was sampled, without what was sampled twice."""
        self._dice = random.Random(0)

    async def turn(self, seconds: float) -> None:
        """Sample for so long, once a slot is free."""
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        began = time.monotonic()
        try:
            lost = self._lost() * seconds
            await asyncio.sleep(lost)
            began = time.monotonic()
            await asyncio.sleep(seconds)
        finally:
            self._useful.append((began, time.monotonic()))
            self._free.release()

    def _lost(self) -> bool:
        crowd = 0 if self.fits is None else 1 - self.fits / max(self.sessions, self.fits)
        return self._dice.random() < crowd

    async def poll(self) -> Sequence[EngineLoad]:
        """As its metrics page would say it."""
        kv = 0.0 if self.fits is None else min(1.0, self.sessions / self.fits)
        return [EngineLoad(self.waiting, kv)]

    def busy(self, start: float, end: float) -> float:
        """Share of its slots that were usefully in use from `start` to `end`."""
        inside = sum(max(0.0, min(to, end) - max(at, start)) for at, to in self._useful)
        return inside / (self.slots * (end - start))


@dataclass
class Marks:
    """When sessions began to run, had ended running, and were judged."""

    began: dict[str, float] = field(default_factory=dict)
    ran: dict[str, float] = field(default_factory=dict)
    judged: dict[str, float] = field(default_factory=dict)


class Rollouts(Harness, Runtime):
    """Harness and runtime whose programs only take time."""

    name = "simulated"

    def __init__(self, engine: Engine, seed: int, *, spare: bool = True) -> None:
        """With `spare` a box for the evaluator is opened while the agent runs."""
        self.engine, self.seed, self.spare = engine, seed, spare
        self.marks = Marks()

    # ------------------------------------------------------------------ harness
    def launch(self, context: LaunchContext) -> Launch:
        """The session is its own command."""
        return Launch(argv=(context.base_url,))

    # ------------------------------------------------------------------ runtime
    @contextlib.asynccontextmanager
    async def open(
        self, directory: Path, spec: SandboxSpec | None = None
    ) -> AsyncIterator[Sandbox]:
        """A box without folders of its own, after the time that it takes to open."""
        session = directory.parent.name.rpartition(".")[0]
        agent = directory.name == "agent"
        await asyncio.sleep(draw(self.seed, session).init if agent else OPEN_S * SCALE)
        yield _Sandbox(self, directory)

    def reap(self, directory: Path) -> int:
        """Nothing is ever left."""
        return 0

    def check_available(self) -> str | None:
        """It is everywhere."""
        return None

    def list_weaknesses(self) -> Sequence[str]:
        """Nothing runs in it."""
        return ()

    async def agent(self, session: str) -> None:
        """What its program does."""
        self.marks.began[session] = time.monotonic()
        self.engine.sessions += 1
        try:
            for sampling, tool in draw(self.seed, session).turns:
                await self.engine.turn(sampling)
                await asyncio.sleep(tool)
        finally:
            self.engine.sessions -= 1
            self.marks.ran[session] = time.monotonic()


class RolloutEvaluator(Evaluator):
    """The evaluator of `Rollouts`, which only takes time."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts, self.opens_sandbox = rollouts, rollouts.spare

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Half a point."""
        async with outcome.open_sandbox({}) as sandbox:
            session = sandbox.logs.parent.parent.name.rpartition(".")[0]
            await asyncio.sleep(draw(self._rollouts.seed, session).judging)
        self._rollouts.marks.judged[session] = time.monotonic()
        return Verdict(Reward(0.5), {})


class Parts(Made):
    """The one for every kind but the builder."""

    def __init__(self, rollouts: Rollouts) -> None:
        super().__init__()
        self._rollouts, self._evaluator = rollouts, RolloutEvaluator(rollouts)

    def _make(self, kind: str, part: PluginSpec, contract: type[Any]) -> Any:
        if kind == "builder":
            return super()._make(kind, part, contract)
        return self._evaluator if kind == "evaluator" else self._rollouts


@dataclass(frozen=True)
class _Door:
    base_url: str
    key: str


class _Sandbox(Sandbox):
    def __init__(self, rollouts: Rollouts, directory: Path) -> None:
        self.workdir, self.home = directory / "work", directory / "home"
        self.logs = directory / "logs"
        for folder in (self.workdir, self.home, self.logs):
            folder.mkdir(parents=True)
        (self.logs / "agent.log").touch()
        self._rollouts = rollouts

    async def put(self, root: PurePath, files: Mapping[str, Content]) -> None:
        """There are none."""

    async def get(self, path: PurePath, *, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
        """There are none."""
        return None

    async def diff(self, limits: PatchLimits | None = None) -> Patch:
        """Nothing was done."""
        return Patch()

    async def expose(self, url: str) -> str:
        """As it is."""
        return url

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | PausableTimeout,
        log_name: str = "agent",
    ) -> Exit:
        """The agent's turns, one after the other."""
        async with enforce_timeout(timeout_s):
            await self._rollouts.agent(argv[0])
        return Exit(0, timed_out=False, seconds=0.0)


class Gateway:
    """Every session has one call of two tokens."""

    url = ""

    @contextlib.asynccontextmanager
    async def open(
        self, session: Session, task: Task, *_terms: object, **_hang: object
    ) -> AsyncIterator[_Door]:
        """Its address is its name."""
        yield _Door(session.id, "")

    def read_calls(self, session: str) -> Sequence[Call]:
        """As a builder wants them."""
        two = np.array([1, 2], np.int32)
        return [
            Call(
                session=session,
                number=0,
                dialect="openai_chat",
                messages=(),
                sampling=Sampling(),
                prompt_ids=two,
                sampled_ids=two,
                logprobs=np.zeros(2, np.float32),
                versions=(VersionSpan(0, 0, 2),),
                finish=Finish.STOP,
                engine="simulated",
                timings=Timings(received=0.0),
            )
        ]

    async def write_result(self, session: str, result: RecordedResult) -> None:
        """Nothing is kept."""

    def describe(self, session: str) -> SessionState:
        """The engine never fails, and there are no budgets."""
        return SessionState(Path(session))

    async def pause(self, mode: str, *, within_s: float = 600.0) -> None:
        """Nothing is in flight."""

    async def resume(self) -> None:
        """It was not paused."""

    async def set_weights_version(self, version: int) -> None:
        """There are none."""
