"""One rollout: from an empty folder to a trajectory.

`roll_out` reads top to bottom like the life of a session: INIT, READY, RUN, BUILD, EVAL. It returns
a trajectory whatever happens (I5); only cancellation and the caller's own errors come out as
exceptions. What is to blame comes from *where* something failed and from what kind of error it was
(`blame.py`, `blame_others`).

Every stage has a clock of its own, which starts when the session gets its place there (`course`):
waiting is charged to nobody but `total_s`. An agent that runs out of time is still built and
judged, one that is cancelled is still built: a partial trajectory is data (I2).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple

from tugline import log
from tugline.errors import (
    CaptureError,
    DiskFull,
    EngineError,
    EvaluatorError,
    HarnessError,
    SandboxError,
    UsageError,
)
from tugline.evaluators import base as evaluators
from tugline.evaluators.base import Outcome, Verdict, wants_box
from tugline.harnesses import base as harnesses
from tugline.harnesses.base import LaunchContext, offers_tools, spent_status
from tugline.recording.records import Result
from tugline.rollout.failures import blamed, failure_of, halted
from tugline.rollout.gateway import Endpoint, Gateway
from tugline.rollout.parts import Parts
from tugline.rollout.prewarm import PrewarmedSandbox
from tugline.rollout.timeouts import Course
from tugline.sandbox.artifacts import keep
from tugline.sandbox.base import Exit, Mount, Sandbox, SandboxSpec
from tugline.sandbox.patch import Patch
from tugline.traces.base import Built
from tugline.types import Call, Cause, Failure, Ledger, Session, Status, Task, Trajectory

MODEL = "tugline-policy"
"""The model name that agents see: one that no harness knows, so that none adapts itself to it."""

_INSTALL_S = 1800.0
_EVAL_GRACE_S = 10.0
_LOG_TAIL = 400
_ROOM = 32 << 20
"""Bytes; with less a disk is full."""
_log = log.get("node")

OnStage = Callable[[Status], None]
"""Told of each stage before it begins."""


class _Ran(NamedTuple):
    """How the agent's program ended and what it left."""

    exit: Exit
    patch: Patch
    log_tail: str


class _Stopped(Exception):
    """The rollout ends here, with this."""

    def __init__(self, failure: Failure | None, status: Status = Status.FAILED) -> None:
        super().__init__(status)
        self.failure, self.status = failure, status


async def roll_out(  # noqa: PLR0913 - what a session is, where it runs, and who is told
    task: Task,
    session: Session,
    *,
    gateway: Gateway,
    directory: Path,
    parts: Parts,
    on_stage: OnStage = lambda _status: None,
    course: Course | None = None,
) -> Trajectory:
    """Run one attempt in `directory`, an empty or new folder that stays, and say what came of it.

    Without a `course` no stage waits. Raises what `on_stage` raises, which is how a caller that
    lost its lease stops a rollout, and `ConfigError` for a task that `Parts.check` would not have
    let in.
    """
    rollout = _Rollout(task, session, gateway, directory, parts, on_stage, course or Course())
    end = None
    try:
        async with contextlib.aclosing(rollout.spare):
            await rollout.run_agent()
            await rollout.build()
            rollout.blame_others()
            await rollout.evaluate()
    except _Stopped as stopped:
        end = stopped
        await rollout.save()
    finally:
        await rollout.leave()
    return await rollout.conclude(end)


class _Rollout:
    """The stages, with a clock each, and what they have found so far."""

    def __init__(  # noqa: PLR0913, PLR0917 - what `roll_out` was given
        self,
        task: Task,
        session: Session,
        gateway: Gateway,
        directory: Path,
        parts: Parts,
        on_stage: OnStage,
        course: Course,
    ) -> None:
        self.task, self.session, self.gateway = task, session, gateway
        self.directory, self.on_stage, self.course = directory, on_stage, course
        self.harness = parts.harness(task.harness)
        self.parts, self.runtime = parts, parts.runtime(task.runtime)
        self.evaluator = parts.evaluator(task.evaluator)
        self.builder = parts.builder(task.builder)
        self.place = contextlib.AsyncExitStack()
        """Holds the agent's box while it is needed."""
        self.box: Sandbox | None = None
        self.spare = PrewarmedSandbox(self._new_box)
        """A box that waits for the evaluator."""
        self.ran: _Ran | None = None
        self.calls: Sequence[Call] = ()
        self.built = Built((), Ledger())
        self.verdict: Verdict | None = None
        self.seconds: dict[str, float] = {}
        self.boxes = 0
        self.opened = False
        """Whether the gateway took calls of it."""

    async def run_agent(self) -> None:
        """INIT, READY and RUN: what the agent does to its files, and how it ends."""
        limits = self.task.limits
        async with contextlib.AsyncExitStack() as stack:
            async with self._stage(Status.INIT):
                # Not on the clock of INIT: the first installation may take long.
                async with asyncio.timeout(_INSTALL_S):
                    await self._install()
                async with asyncio.timeout(limits.init_s):
                    await self.parts.introduce(self.task.runtime)
                    box = self.box = await self.place.enter_async_context(self._agents_box())
                    endpoint = await stack.enter_async_context(self._endpoint(box))
                    self.opened = True
                    url = await box.expose(endpoint.base_url.rstrip("/"))
                    launch = self.harness.launch(self._seat(box, url, endpoint.key))
                    await box.put(box.home, launch.files)
            self.course.log = box.logs / "agent.log"
            async with self._stage(Status.RUN):
                if wants_box(self.evaluator) and not evaluators.in_place(self.evaluator):
                    self.spare.prepare(self.course.spares)
                clock = self.course.clock(limits.agent_s)
                end = await box.run(launch.argv, env=launch.env, timeout_s=clock)
                _check_disk(self.directory)
                home = self.directory / "agent" / "home"  # where built-in runtimes have it
                await asyncio.to_thread(keep, home, harnesses.keeps(self.harness), box.logs)
                patch = await box.diff()
                said = await asyncio.to_thread(_tail, box.logs)
                self.ran = _Ran(end, patch, said)
        if not evaluators.in_place(self.evaluator):
            await self.leave()

    async def leave(self) -> None:
        """Close the agent's box. One that breaks as it is closed changes nothing of what was."""
        try:
            await self.place.aclose()
        except Exception as error:  # noqa: BLE001 - a plug-in's, too; `reap` finds what is left
            _log.warning("box not closed well", session=self.session.id, error=str(error))

    async def _install(self) -> None:
        try:
            await self.harness.install()
        except UsageError as error:  # such as a Node that is missing: this node's, not the task's
            raise HarnessError(str(error)) from error

    def _agents_box(self) -> AbstractAsyncContextManager[Sandbox]:
        mounts = harnesses.mounts(self.harness)
        mounts += evaluators.hidden(self.evaluator, self.task)
        if evaluators.in_place(self.evaluator):
            mounts += evaluators.mounts(self.evaluator, self.task)
        return self._open(self.directory / "agent", mounts, self.task.files)

    def _open(
        self, directory: Path, mounts: tuple[Mount, ...], files: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Sandbox]:
        place = SandboxSpec(workspace=self.task.workspace, files=files, mounts=mounts)
        return self.runtime.open(directory, place)

    async def build(self) -> None:
        """BUILD: traces from what was recorded."""
        async with self._stage(Status.BUILD):
            self.calls, self.built = await asyncio.to_thread(self._build)

    async def save(self) -> None:
        """Account for what was sampled before an early end, if it came before BUILD (I2)."""
        if not self.opened or Status.BUILD.value in self.seconds:
            return
        with contextlib.suppress(CaptureError, EngineError):  # the end there already says more
            self.calls, self.built = await asyncio.to_thread(self._build)

    def _build(self) -> tuple[Sequence[Call], Built]:
        calls = self.gateway.calls(self.session.id)
        return calls, self.builder.build(calls)

    def blame_others(self) -> None:
        """Stop if the end was a fault of the engine, or of the agent's program.

        A program that gave up after it had talked to the model is judged by what it left.
        """
        engine = self.gateway.failure(self.session.id)
        if engine is not None:
            raise _Stopped(blamed(Cause.ENGINE, engine.message))
        if self.ran is None:
            return
        end, said, name = self.ran.exit, self.ran.log_tail, self.task.harness.name
        if end.cause is not None:
            return
        broke = harnesses.crashed(self.harness, end, said)
        if broke is not None:
            raise _Stopped(blamed(Cause.CRASH, f"{name} broke: {broke}: {said}"))
        if self.calls:
            return
        how = f"ended with exit code {end.code} and" if not end.timed_out else "ran out of time and"
        raise _Stopped(blamed(Cause.CRASH, f"{name} {how} made no model call: {said}"))

    async def evaluate(self) -> None:
        """EVAL, a second time if the first gave no verdict."""
        async with self._stage(Status.EVAL):
            try:
                self.verdict = await self._evaluate_once()
            except (EvaluatorError, SandboxError, TimeoutError) as error:
                _log.warning("evaluated again", session=self.session.id, error=str(error))
                self.verdict = await self._evaluate_once()

    async def _evaluate_once(self) -> Verdict:
        if self.ran is None:
            msg = "an agent that did not run cannot be judged"
            raise EvaluatorError(msg)
        limit = self.task.limits.eval_s
        outcome = Outcome(
            task=self.task,
            patch=self.ran.patch,
            open_box=self.spare.open,
            timeout_s=limit,
            calls=self.calls,
            traces=self.built.traces,
            exit=self.ran.exit,
            box=self.box if evaluators.in_place(self.evaluator) else None,
        )
        async with asyncio.timeout(limit + _EVAL_GRACE_S):
            return await self.evaluator.evaluate(outcome)

    def _new_box(self) -> AbstractAsyncContextManager[Sandbox]:
        self.boxes += 1
        mounts = evaluators.mounts(self.evaluator, self.task)
        return self._open(self.directory / f"eval-{self.boxes}", mounts, {})

    def _endpoint(self, box: Sandbox) -> AbstractAsyncContextManager[Endpoint]:
        return self.gateway.open(
            self.session,
            self.task,
            spent_status=spent_status(self.harness),
            offers_tools=offers_tools(self.harness),
            workdir=str(box.workdir),
            home=str(box.home),
        )

    def _seat(self, box: Sandbox, url: str, key: str) -> LaunchContext:
        return LaunchContext(
            instruction=self.task.instruction,
            workdir=str(box.workdir),
            home=str(box.home),
            base_url=url,
            key=key,
            model=MODEL,
        )

    @contextlib.asynccontextmanager
    async def _stage(self, status: Status) -> AsyncIterator[None]:
        """Wait for a place (for RUN, that is READY), time the stage, give its failure a name."""
        at: Status = Status.READY if status is Status.RUN else status
        self.on_stage(at)
        began, placed = time.monotonic(), False
        try:
            async with self.course.halt.limit(), self.course.place(status):
                placed = True
                if at is not status:
                    self.seconds[at.value] = time.monotonic() - began
                    at = status
                    self.on_stage(at)
                began = time.monotonic()
                yield
        except Exception as error:
            if self.course.halt.pulled and isinstance(error, TimeoutError):
                failure = halted(at if placed else Status.READY) if self.course.halt.over else None
                ending = Status.TIMED_OUT if failure else Status.CANCELLED
                raise _Stopped(failure, ending) from error
            failure = failure_of(at, error)
            _log.warning("failed", session=self.session.id, stage=at, exc_info=error)
            raise _Stopped(failure) from error
        finally:
            self.seconds[at.value] = time.monotonic() - began

    async def conclude(self, end: _Stopped | None) -> Trajectory:
        """All that is known by now, written down beside the calls if any could be made."""
        trajectory = self._trajectory(end)
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
            return self._trajectory(_Stopped(failure_of(Status.BUILD, error, kept=False)))
        return trajectory

    def _agents_failure(self) -> Failure | None:
        """What the agent ran out of; it was judged all the same."""
        end = self.ran.exit if self.ran is not None else None
        if end is None or not (end.timed_out or end.cause):
            return None
        cause = end.cause or Cause.AGENT_TIMEOUT
        return blamed(cause, f"{cause.value} after {end.seconds:.0f} s")

    def _trajectory(self, end: _Stopped | None) -> Trajectory:
        timed_out = self.ran is not None and self.ran.exit.timed_out
        done = Status.TIMED_OUT if timed_out else Status.COMPLETED
        failure = end.failure if end else self._agents_failure()
        return Trajectory(
            session=self.session.id,
            task=self.task.id,
            sample=self.session.sample,
            status=end.status if end else done,
            traces=self.built.traces,
            ledger=self.built.ledger,
            reward=self.verdict.reward if self.verdict else None,
            report=self.verdict.report if self.verdict else {},
            failure=failure,
            seconds=self.seconds,
        )


def _check_disk(folder: Path) -> None:
    """Raises `DiskFull` for a node without room: that programs broke on it is not their fault."""
    free = shutil.disk_usage(folder).free
    if free < _ROOM:
        msg = f"the disk of {folder} was full when the agent ended ({free >> 20} MB free)"
        raise DiskFull(msg)


def _tail(logs: Path) -> str:
    with (logs / "agent.log").open("rb") as log:
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - _LOG_TAIL))
        return log.read().decode(errors="replace").strip()
