"""Simulated sessions of software-engineering agents, drawn from a seed, and a simulated engine.

Times are heavy-tailed (log-normal with bounds): INIT 1 to 60 s, three to a hundred turns per
session with some seconds of sampling and of tools each, then an evaluation of up to three minutes.
They are scaled by `SCALE`, so that a run takes seconds. This does not change the shares as long as
the node's own work is short compared with the scaled times.
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

from tugline.aio import PausableTimeout, enforce_timeout
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.gateway.terms import SessionState
from tugline.harnesses.base import Harness, Launch, LaunchContext
from tugline.node.admission import EngineLoad
from tugline.patch import Patch
from tugline.recording.records import RecordedResult
from tugline.rollout.parts import Parts as BaseParts
from tugline.sandbox.base import MAX_READ_BYTES, Content, Exit, Runtime, Sandbox, SandboxSpec
from tugline.sandbox.patch import PatchLimits
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
"""Real seconds for each second of the workload."""
OPEN_S = 6.0
"""Time to open a sandbox for an evaluation, in seconds of the workload."""


@dataclass(frozen=True)
class SessionPlan:
    """Times of one simulated session, in real seconds."""

    init: float
    turns: tuple[tuple[float, float], ...]
    """Sampling and tool time of each turn."""
    evaluation: float

    @property
    def sampling(self) -> float:
        """Total sampling time of the session."""
        return sum(turn for turn, _ in self.turns)


def draw_session(seed: int, session: str) -> SessionPlan:
    """Draw the times of a session; equal arguments give equal times."""
    rng = random.Random(f"{seed}/{session}")

    def heavy(median: float, sigma: float, least: float, most: float) -> float:
        return min(most, max(least, median * math.exp(rng.gauss(0.0, sigma))))

    count = round(heavy(16, 0.7, 3, 100))
    turns = [(heavy(3.0, 0.8, 0.3, 40), heavy(1.2, 1.0, 0.1, 30)) for _ in range(count)]
    return SessionPlan(
        heavy(15.0, 0.9, 1, 60) * SCALE,
        tuple((turn * SCALE, tool * SCALE) for turn, tool in turns),
        heavy(25.0, 0.8, 4, 180) * SCALE,
    )


class Engine:
    """An engine with a fixed number of slots, first come first served, that measures their use.

    With `fits`, its KV memory holds that many sessions. Beyond that, the prefix of a turn may have
    been evicted; the turn then takes twice as long, and half of that time is not useful.
    """

    def __init__(self, slots: int, *, fits: int | None = None) -> None:
        self.slots, self.fits = slots, fits
        self.sessions = 0
        """Agents that are running."""
        self._free = asyncio.Semaphore(slots)
        self.waiting = 0
        self._useful: list[tuple[float, float]] = []
        """Begin and end of each useful part of sampling."""
        self._rng = random.Random(0)

    async def turn(self, seconds: float) -> None:
        """Wait for a free slot, then sample for `seconds`."""
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        began = time.monotonic()
        try:
            recompute = self._is_evicted() * seconds
            await asyncio.sleep(recompute)
            began = time.monotonic()
            await asyncio.sleep(seconds)
        finally:
            self._useful.append((began, time.monotonic()))
            self._free.release()

    def _is_evicted(self) -> bool:
        share = 0 if self.fits is None else 1 - self.fits / max(self.sessions, self.fits)
        return self._rng.random() < share

    async def poll(self) -> Sequence[EngineLoad]:
        """Return the load, as from the engine's metrics."""
        kv = 0.0 if self.fits is None else min(1.0, self.sessions / self.fits)
        return [EngineLoad(self.waiting, kv)]

    def busy(self, start: float, end: float) -> float:
        """Share of its slots in useful use from `start` to `end`."""
        inside = sum(max(0.0, min(to, end) - max(at, start)) for at, to in self._useful)
        return inside / (self.slots * (end - start))


@dataclass
class SessionTimes:
    """When the agents of sessions began and ended, and when the sessions were evaluated."""

    began: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    evaluated: dict[str, float] = field(default_factory=dict)


class Rollouts(Harness, Runtime):
    """Simulated harness and runtime; programs only take time."""

    name = "simulated"

    def __init__(self, engine: Engine, seed: int, *, prewarm_evaluator: bool = True) -> None:
        """With `prewarm_evaluator`, the evaluator's sandbox is opened while the agent runs."""
        self.engine, self.seed, self.prewarm_evaluator = engine, seed, prewarm_evaluator
        self.times = SessionTimes()

    # ------------------------------------------------------------------ harness
    def launch(self, context: LaunchContext) -> Launch:
        """Return the id of the session as the command line."""
        return Launch(argv=(context.base_url,))

    # ------------------------------------------------------------------ runtime
    @contextlib.asynccontextmanager
    async def open(
        self, directory: Path, spec: SandboxSpec | None = None
    ) -> AsyncIterator[Sandbox]:
        """Open a sandbox after the simulated time."""
        session = directory.parent.name.rpartition(".")[0]
        agent = directory.name == "agent"
        await asyncio.sleep(draw_session(self.seed, session).init if agent else OPEN_S * SCALE)
        yield _Sandbox(self, directory)

    def reap(self, directory: Path) -> int:
        """Return 0: nothing can be left behind."""
        return 0

    def check_available(self) -> str | None:
        """Return None: it is always available."""
        return None

    def list_weaknesses(self) -> Sequence[str]:
        """Return nothing: no program runs in it."""
        return ()

    async def agent(self, session: str) -> None:
        """Play the turns of a session."""
        self.times.began[session] = time.monotonic()
        self.engine.sessions += 1
        try:
            for sampling, tool in draw_session(self.seed, session).turns:
                await self.engine.turn(sampling)
                await asyncio.sleep(tool)
        finally:
            self.engine.sessions -= 1
            self.times.ended[session] = time.monotonic()


class RolloutEvaluator(Evaluator):
    """Simulated evaluator; it only takes time."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts, self.opens_sandbox = rollouts, rollouts.prewarm_evaluator

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Return the reward 0.5 after the simulated time."""
        async with outcome.open_sandbox({}) as sandbox:
            session = sandbox.logs.parent.parent.name.rpartition(".")[0]
            await asyncio.sleep(draw_session(self._rollouts.seed, session).evaluation)
        self._rollouts.times.evaluated[session] = time.monotonic()
        return Verdict(Reward(0.5), {})


class Parts(BaseParts):
    """Plug-ins of a session: simulated ones for every kind but the builder."""

    def __init__(self, rollouts: Rollouts) -> None:
        super().__init__()
        self._rollouts, self._evaluator = rollouts, RolloutEvaluator(rollouts)

    def _make(self, kind: str, part: PluginSpec, contract: type[Any]) -> Any:
        if kind == "builder":
            return super()._make(kind, part, contract)
        return self._evaluator if kind == "evaluator" else self._rollouts


@dataclass(frozen=True)
class _Endpoint:
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
        """Ignore the files."""

    async def get(self, path: PurePath, *, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
        """Return None: there are no files."""
        return None

    async def diff(self, limits: PatchLimits | None = None) -> Patch:
        """Return an empty patch."""
        return Patch()

    async def expose(self, url: str) -> str:
        """Return the URL unchanged."""
        return url

    async def run_program(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | PausableTimeout,
        log: Path,
    ) -> Exit:
        """Play the agent's turns."""
        async with enforce_timeout(timeout_s):
            await self._rollouts.agent(argv[0])
        return Exit(0, timed_out=False, seconds=0.0)


class Gateway:
    """Simulated gateway: every session has one call of two tokens."""

    url = ""

    @contextlib.asynccontextmanager
    async def open(
        self, session: Session, task: Task, *_terms: object, **_options: object
    ) -> AsyncIterator[_Endpoint]:
        """Yield an endpoint with the session id as its URL."""
        yield _Endpoint(session.id, "")

    def read_calls(self, session: str) -> Sequence[Call]:
        """Return the single call of a session."""
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
        """Ignore the result."""

    def forget(self, session: str) -> None:
        """Do nothing: nothing is kept."""

    def describe(self, session: str) -> SessionState:
        """Return a state without engine errors and limits."""
        return SessionState(Path(session))

    async def pause(self, mode: str, *, within_s: float = 600.0) -> None:
        """Do nothing: no call is in flight."""

    async def resume(self) -> None:
        """Do nothing."""

    async def set_weights_version(self, version: int) -> None:
        """Do nothing: there are no weights."""
