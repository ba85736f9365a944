"""One rollout: from an empty folder to a trajectory.

`roll_out` reads top to bottom like the life of a session: INIT, READY, RUN, BUILD, EVAL. It returns
a trajectory whatever happens (I5); only cancellation and the caller's own errors come out as
exceptions. The name of the boundary that was crossed comes from *where* something failed and from
what kind of error it was (`_failure`, `blame_others`).

An agent that runs out of time is still built and judged: a partial trajectory is data.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from tugline import log
from tugline.builders.base import Built
from tugline.capture.records import Result
from tugline.errors import (
    CaptureError,
    EngineError,
    EvaluatorError,
    HarnessError,
    RuntimeFault,
    TuglineError,
    UsageError,
)
from tugline.evaluators.base import Outcome, Verdict
from tugline.evaluators.patch import Patch, compare
from tugline.harnesses.base import Seat, offers_tools, spent_status
from tugline.node.parts import Parts
from tugline.runtimes.base import Box, Exit
from tugline.types import (
    Boundary,
    Call,
    Failure,
    Ledger,
    Session,
    Status,
    Task,
    Trajectory,
)

MODEL = "tugline-policy"
"""The model name that agents see: one that no harness knows, so that none adapts itself to it."""

_EVAL_GRACE_S = 10.0
_LOG_TAIL = 400
_log = log.get("node")

OnStage = Callable[[Status], None]
"""Told of each stage before it begins."""


class Endpoint(Protocol):
    """Where a session's model is."""

    @property
    def base_url(self) -> str:
        """Such as ``http://127.0.0.1:40123/s/<session>``, without ``/v1``."""
        ...

    @property
    def key(self) -> str:
        """The session's secret."""
        ...


class Gateway(Protocol):
    """What a rollout needs of the gateway."""

    def open(
        self,
        session: Session,
        task: Task,
        *,
        spent_status: int = 400,
        offers_tools: bool = False,
        workdir: str = "",
        home: str = "",
    ) -> AbstractAsyncContextManager[Endpoint]:
        """Take calls of this session; when left, no further call is taken and none is in flight.

        `spent_status` is the HTTP status that tells its harness of a spent budget, `offers_tools`
        whether a call of it without tools is beside the task; `workdir` and `home` are its folders.
        """
        ...

    def calls(self, session: str) -> Sequence[Call]:
        """What was recorded of a session that has been left."""
        ...

    async def conclude(self, session: str, result: Result) -> None:
        """Write down what became of a session that has been left, with its calls."""
        ...

    def failure(self, session: str) -> Failure | None:
        """Why its last call got no answer, if the engine's side is to blame; None otherwise."""
        ...


class _Ran(NamedTuple):
    """How the agent's program ended and what it left."""

    exit: Exit
    patch: Patch
    log_tail: str


class _Stopped(Exception):
    """The rollout ends here, for this reason."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


async def roll_out(
    task: Task,
    session: Session,
    *,
    gateway: Gateway,
    directory: Path,
    parts: Parts,
    on_stage: OnStage = lambda _status: None,
) -> Trajectory:
    """Run one attempt in `directory`, an empty or new folder that stays, and say what came of it.

    Raises what `on_stage` raises, which is how a caller that lost its lease stops a rollout, and
    `ConfigError` for a task that `Parts.check` would not have let in.
    """
    rollout = _Rollout(task, session, gateway, directory, parts, on_stage)
    failure = None
    try:
        await rollout.run_agent()
        rollout.build()
        rollout.blame_others()
        await rollout.evaluate()
    except _Stopped as stopped:
        failure = stopped.failure
        rollout.save()
    return await rollout.conclude(failure)


class _Rollout:
    """The stages, with a clock each, and what they have found so far."""

    def __init__(
        self,
        task: Task,
        session: Session,
        gateway: Gateway,
        directory: Path,
        parts: Parts,
        on_stage: OnStage,
    ) -> None:
        self.task, self.session, self.gateway = task, session, gateway
        self.directory, self.on_stage = directory, on_stage
        self.harness = parts.harness(task.harness)
        self.runtime = parts.runtime(task.runtime)
        self.evaluator = parts.evaluator(task.evaluator)
        self.builder = parts.builder(task.builder)
        self.ran: _Ran | None = None
        self.calls: Sequence[Call] = ()
        self.built = Built((), Ledger())
        self.verdict: Verdict | None = None
        self.seconds: dict[str, float] = {}
        self.boxes = 0
        self.opened = False
        """Whether the gateway took calls of it."""

    async def run_agent(self) -> None:
        """INIT and RUN: what the agent does to its files, and how it ends."""
        limits = self.task.limits
        async with contextlib.AsyncExitStack() as stack:
            with self._stage(Status.INIT):
                # Not on the clock: the first installation takes as long as it takes.
                await self.harness.install()
                async with asyncio.timeout(limits.init_s):
                    box = await stack.enter_async_context(
                        self.runtime.open(self.directory / "agent", self.task.files)
                    )
                    endpoint = await stack.enter_async_context(
                        self.gateway.open(
                            self.session,
                            self.task,
                            spent_status=spent_status(self.harness),
                            offers_tools=offers_tools(self.harness),
                            workdir=str(box.workdir),
                            home=str(box.home),
                        )
                    )
                    self.opened = True
                    launch = self.harness.launch(self._seat(box, endpoint))
                    await box.write(box.home, launch.files)
            self.on_stage(Status.READY)
            with self._stage(Status.RUN):
                end = await box.run(launch.argv, env=launch.env, timeout_s=limits.agent_s)
                patch = await asyncio.to_thread(compare, self.task.files, box.workdir)
                self.ran = _Ran(end, patch, await asyncio.to_thread(_tail, box.logs))

    def build(self) -> None:
        """BUILD: traces from what was recorded."""
        with self._stage(Status.BUILD):
            self.calls = self.gateway.calls(self.session.id)
            self.built = self.builder.build(self.calls)

    def save(self) -> None:
        """Account for what was sampled before a failure, if it came before BUILD (I2)."""
        if not self.opened or Status.BUILD.value in self.seconds:
            return
        with contextlib.suppress(CaptureError):  # the failure there is already says more
            self.calls = self.gateway.calls(self.session.id)
            self.built = self.builder.build(self.calls)

    def blame_others(self) -> None:
        """Stop if the end was a fault of the engine, or of a program that never did its work.

        A program that gave up after it had talked to the model is judged by what it left.
        """
        engine = self.gateway.failure(self.session.id)
        if engine is not None:
            raise _Stopped(engine)
        if self.calls or self.ran is None:
            return
        end = self.ran.exit
        how = f"ended with exit code {end.code} and" if not end.timed_out else "ran out of time and"
        msg = f"{self.task.harness.name} {how} made no model call: {self.ran.log_tail}"
        raise _Stopped(Failure(Boundary.HARNESS, msg))

    async def evaluate(self) -> None:
        """EVAL, a second time if the first gave no verdict."""
        with self._stage(Status.EVAL):
            try:
                self.verdict = await self._evaluate_once()
            except (EvaluatorError, RuntimeFault, TimeoutError) as error:
                _log.warning("evaluated again", session=self.session.id, error=str(error))
                self.verdict = await self._evaluate_once()

    async def _evaluate_once(self) -> Verdict:
        if self.ran is None:
            msg = "an agent that did not run cannot be judged"
            raise EvaluatorError(msg)
        limit = self.task.limits.eval_s
        outcome = Outcome(self.task.files, self.ran.patch, self._fresh_box, limit)
        async with asyncio.timeout(limit + _EVAL_GRACE_S):
            return await self.evaluator.evaluate(outcome)

    def _fresh_box(self, files: Mapping[str, str]) -> AbstractAsyncContextManager[Box]:
        self.boxes += 1
        return self.runtime.open(self.directory / f"eval-{self.boxes}", files)

    def _seat(self, box: Box, endpoint: Endpoint) -> Seat:
        return Seat(
            instruction=self.task.instruction,
            workdir=str(box.workdir),
            home=str(box.home),
            base_url=endpoint.base_url.rstrip("/"),
            key=endpoint.key,
            model=MODEL,
        )

    @contextlib.contextmanager
    def _stage(self, status: Status) -> Iterator[None]:
        """Time a stage and give its failure a name."""
        self.on_stage(status)
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            failure = _failure(status, error)
            _log.warning("failed", session=self.session.id, stage=status, exc_info=error)
            raise _Stopped(failure) from error
        finally:
            self.seconds[status.value] = time.monotonic() - began

    async def conclude(self, failure: Failure | None) -> Trajectory:
        """All that is known by now, written down beside the calls if any could be made."""
        trajectory = self._trajectory(failure)
        if not self.opened:
            return trajectory
        result = Result(
            status=trajectory.status,
            builder=self.task.builder.name,
            ledger=trajectory.ledger,
            reward=trajectory.reward,
            report=trajectory.report,
            failure=trajectory.failure,
            seconds=trajectory.seconds,
        )
        try:
            await self.gateway.conclude(self.session.id, result)
        except CaptureError as error:
            return self._trajectory(Failure(Boundary.INFRASTRUCTURE, str(error)))
        return trajectory

    def _trajectory(self, failure: Failure | None) -> Trajectory:
        timed_out = self.ran is not None and self.ran.exit.timed_out
        done = Status.TIMED_OUT if timed_out else Status.COMPLETED
        return Trajectory(
            session=self.session.id,
            task=self.task.id,
            sample=self.session.sample,
            status=done if failure is None else Status.FAILED,
            traces=self.built.traces,
            ledger=self.built.ledger,
            reward=self.verdict.reward if self.verdict else None,
            report=self.verdict.report if self.verdict else {},
            failure=failure,
            seconds=self.seconds,
        )


def _failure(status: Status, error: Exception) -> Failure:
    """Whose failure it is, from where it happened and what it was."""
    boundary = Boundary.INFRASTRUCTURE
    if isinstance(error, EngineError):
        boundary = Boundary.ENGINE
    elif status is Status.INIT and isinstance(error, HarnessError | UsageError):
        boundary = Boundary.HARNESS
    elif status is Status.BUILD and isinstance(error, CaptureError):
        boundary = Boundary.ENGINE
    elif status is Status.EVAL and not isinstance(error, RuntimeFault):
        boundary = Boundary.EVALUATOR
    if isinstance(error, TimeoutError):
        return Failure(boundary, f"{status.value} was out of time")
    known = isinstance(error, TuglineError)
    return Failure(boundary, str(error) if known else f"{type(error).__name__}: {error}")


def _tail(logs: Path) -> str:
    with (logs / "agent.log").open("rb") as log:
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - _LOG_TAIL))
        return log.read().decode(errors="replace").strip()
