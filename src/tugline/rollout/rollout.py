"""Run one session from its task to a trajectory.

`roll_out` runs the stages INIT, READY, RUN, BUILD and EVAL and returns a trajectory in any case
(I5); it raises only cancellation and errors of the caller. A failure is classified by its stage and
the type of its error (`failures`).

Each stage has its own timeout, which starts when the session gets a slot; waiting for a slot counts
only for `total_s`. After an agent's timeout, BUILD and EVAL still run; after a cancellation, BUILD
still runs, because a partial trajectory is data (I2).
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from tugline import errors, log
from tugline.evaluators.base import SessionOutcome, Verdict
from tugline.gateway.app import Gateway
from tugline.gateway.terms import Opened, SessionTerms
from tugline.harnesses.base import Launch, LaunchContext, prepare
from tugline.patch import Patch, pack_patch
from tugline.plugins import ENDINGS, refuse_endings
from tugline.recording import file as recordings
from tugline.recording.patches import save_patch
from tugline.recording.records import RecordedExit, RecordedResult
from tugline.rollout.evaluation import evaluate_outcome
from tugline.rollout.failures import (
    EarlyEnd,
    End,
    check_disk,
    classify,
    classify_recording_error,
    make_failure,
)
from tugline.rollout.parts import LOG_TAIL, Parts, PrewarmedSandboxes, TaskSandboxes
from tugline.rollout.stage_runner import OnStage, StageRunner
from tugline.rollout.stages import StageSlots
from tugline.sandbox.base import Exit, Sandbox
from tugline.sandbox.files import collect_artifacts
from tugline.schema import copy_fields
from tugline.traces.base import Built, count_session
from tugline.types import (
    Call,
    CallOutcome,
    Cause,
    Failure,
    Ledger,
    Reason,
    Session,
    SpentLimit,
    Status,
    Task,
    Trajectory,
    count_prompt_tokens,
    measure_engine,
)

MODEL = "tugline-policy"
"""Model name that agents are given; no harness has special cases for it."""

_INSTALL_S = 1800.0
"""Timeout of a harness's first installation."""
_log = log.get("node")

OnCalls = Callable[[Sequence[Call]], None]
"""Called with the recorded calls of an attempt, before its trajectory is returned."""


async def roll_out(  # noqa: PLR0913 - a session, its environment and its observers
    task: Task,
    session: Session,
    *,
    gateway: Gateway,
    directory: Path,
    parts: Parts,
    on_stage: OnStage = lambda _status: None,
    on_calls: OnCalls = lambda _calls: None,
    slots: StageSlots | None = None,
) -> Trajectory:
    """Run one attempt in `directory`, an empty or new folder that is kept.

    Without `slots` no stage waits. Raises errors of `on_stage` and `on_calls`, and `ConfigError` or
    `UnknownPlugin` if creating a plug-in of the task fails.
    """
    rollout = _Rollout(task, session, gateway, directory, parts, on_stage, slots or StageSlots())
    end = None
    try:
        async with contextlib.aclosing(rollout.prewarmed):
            async with AsyncExitStack() as model:
                await rollout.run_agent(*await rollout.initialize(model))
            if not rollout.evaluator.in_place:
                await rollout.close_sandbox()
            await rollout.build()
            rollout.check_engine_and_harness()
            await rollout.evaluate()
    except EarlyEnd as early:
        end = early.end
        await rollout.build_remaining()
    except errors.CaptureError as error:  # raised when the gateway closed the session
        end = End(classify_recording_error(error))
        await rollout.build_remaining()
    finally:
        await rollout.close_sandbox()
    on_calls(rollout.calls)
    return await rollout.commit(end)


@dataclass(eq=False)
class _Rollout:
    """Stages of one rollout, one method for each, and their results so far."""

    task: Task
    session: Session
    gateway: Gateway
    directory: Path
    parts: Parts
    on_stage: OnStage
    slots: StageSlots
    sandbox: Sandbox | None = None
    """The agent's sandbox."""
    log_tail: str = ""
    calls: Sequence[Call] = ()
    verdict: Verdict | None = None
    recording: bool = False
    """Whether the gateway has a recording of this session."""
    is_built: bool = False
    """Whether BUILD has succeeded."""

    def __post_init__(self) -> None:
        self.harness = self.parts.harness(self.task.harness)
        self.evaluator = self.parts.evaluator(self.task.evaluator)
        self.builder = self.parts.builder(self.task.builder)
        self.sandboxes = TaskSandboxes(self.task, self.directory, self.parts)
        self.sandbox_stack = AsyncExitStack()
        self.stages = StageRunner(self.session.id, self.on_stage, self.slots)
        self.exit = Exit(0, timed_out=False, seconds=0.0)
        """Exit of the agent's program, here that of a program that did nothing."""
        self.patch: Patch | None = None
        """Changes made by the agent's program, once they are collected."""
        self.patch_digest = ""
        """Digest under which they are stored."""
        self.built = Built((), Ledger())
        self._recorded: Sequence[Call] | None = None
        """Calls as the gateway recorded them; None until they are read."""
        self.prewarmed = PrewarmedSandboxes(self.sandboxes.open_evaluation)

    async def initialize(self, model: AsyncExitStack) -> tuple[Sandbox, Launch]:
        """Run INIT: install the harness, open sandbox and gateway (until `model` closes)."""
        async with self.stages.run(Status.INIT):
            await self._install()
            async with asyncio.timeout(self.task.limits.init_s):
                await self.parts.report_weaknesses(self.task.runtime)
                opening = self.sandboxes.open_agent(self.harness.mounts)
                sandbox = self.sandbox = await self.sandbox_stack.enter_async_context(opening)
                endpoint = await model.enter_async_context(self._open_gateway(sandbox))
                self.recording = True
                launch = self.harness.launch(
                    LaunchContext(
                        instruction=self.task.instruction,
                        workdir=str(sandbox.workdir),
                        home=str(sandbox.home),
                        base_url=await sandbox.expose(endpoint.base_url.rstrip("/")),
                        key=endpoint.key,
                        model=MODEL,
                    )
                )
                await prepare(sandbox, launch)
        self.slots.agent_log = sandbox.logs / "agent.log"
        return sandbox, launch

    async def run_agent(self, sandbox: Sandbox, launch: Launch) -> None:
        """Run READY and RUN: the agent works until it ends or `agent_s` is over."""
        async with self.stages.run(Status.RUN):
            if not self.evaluator.in_place:
                self.prewarmed.prepare(self.evaluator.sandboxes)
            timeout = self.slots.start_agent_timeout(self.task.limits.agent_s)
            self.exit = await sandbox.run(launch.argv, env=launch.env, timeout_s=timeout)
            check_disk(self.directory)
            home = self.directory / "agent" / "home"  # of the built-in runtimes
            await asyncio.to_thread(collect_artifacts, home, self.harness.log_globs, sandbox.logs)
            self.patch = await sandbox.diff()
            self.log_tail = self.exit.output[-LOG_TAIL:].strip()

    async def build(self) -> None:
        """Run BUILD: build traces from the recorded calls."""
        async with self.stages.run(Status.BUILD):
            self.calls, self.built = await asyncio.to_thread(self._build)
            self.is_built = True

    async def build_remaining(self) -> None:
        """Build what was recorded before a rollout ended; if that fails, count its tokens (I2)."""
        if not self.recording or self.is_built:
            return
        if Status.BUILD.value not in self.stages.seconds:
            # The rollout has its failure already.
            with contextlib.suppress(EarlyEnd):
                self.calls, self.built = await asyncio.to_thread(self._build)
                return
        self.calls, self.built = await asyncio.to_thread(self._count_tokens)

    def check_engine_and_harness(self) -> None:
        """End the rollout if the engine failed or the harness crashed.

        A program that exited with an error after a model call is still evaluated.
        """
        failure = self.gateway.describe(self.session.id).failure
        if failure is not None:
            raise EarlyEnd(failure)
        if any(call.outcome is CallOutcome.ENGINE_LOST for call in self.calls):
            msg = "the engine was lost during an answer, so the agent received it truncated"
            raise EarlyEnd(make_failure(Cause.ENGINE_LOST, msg))
        end = self.exit
        tail = self.log_tail
        name = self.task.harness.name
        if end.cause is not None:
            return
        crash = self.harness.find_crash(end, tail)
        if crash is not None:
            raise EarlyEnd(make_failure(Cause.CRASH, f"{name} crashed: {crash}: {tail}"))
        if not self.calls:
            ending = "ran out of time" if end.timed_out else f"ended with exit code {end.code}"
            msg = f"{name} {ending} and made no model call: {tail}"
            raise EarlyEnd(make_failure(Cause.NO_MODEL_CALL, msg))

    async def evaluate(self) -> None:
        """Run EVAL, with one repetition if the first evaluation gave no verdict."""
        async with self.stages.run(Status.EVAL):
            outcome = SessionOutcome(
                task=self.task,
                patch=self.patch or Patch(),
                open_sandbox=self.prewarmed.open,
                timeout_s=self.task.limits.eval_s,
                calls=self.calls,
                traces=self.built.traces,
                exit=self.exit,
                spent=self._spent,
                sandbox=self.sandbox if self.evaluator.in_place else None,
            )
            self.verdict = await evaluate_outcome(
                self.evaluator, outcome, self.slots, self.session.id
            )

    async def commit(self, end: End | None) -> Trajectory:
        """Return the trajectory, after writing the result to the recording if there is one."""
        if not self.recording:
            return self._make_trajectory(end)
        try:
            ended = await self._store_patch()
            trajectory = self._make_trajectory(end)
            builder = self.task.builder.name
            result = copy_fields(RecordedResult, trajectory, builder=builder, exit=ended)
            await self.gateway.write_result(self.session.id, result)
        except errors.CaptureError as error:
            return self._make_trajectory(End(classify_recording_error(error)))
        return trajectory

    async def close_sandbox(self) -> None:
        """Close the agent's sandbox. An error here does not change the outcome."""
        try:
            with refuse_endings("the sandbox"):
                await self.sandbox_stack.aclose()
        except Exception as error:  # noqa: BLE001 - also a plug-in's; `reap` cleans up later
            places = log.describe_error(error)
            _log.warning("sandbox not closed", session=self.session.id, traceback=places)

    async def _install(self) -> None:
        """Install the harness, outside of `init_s` and `total_s`: it may take minutes at first."""
        self.slots.cancel_scope.pause()
        try:
            async with asyncio.timeout(_INSTALL_S):
                await self.harness.install()
        except errors.UsageError as error:  # such as a missing Node: a fault of the node
            raise errors.HarnessError(str(error)) from error
        finally:
            self.slots.cancel_scope.resume()

    @property
    def _spent(self) -> SpentLimit | None:
        """Budget that was spent, so that the last answer was cut or refused; None if none was."""
        return self.gateway.describe(self.session.id).spent if self.recording else None

    def _open_gateway(self, sandbox: Sandbox) -> AbstractAsyncContextManager[Opened]:
        terms = SessionTerms(
            spent_status=self.harness.spent_status,
            offers_tools=self.harness.offers_tools,
            compaction_phrases=self.harness.compaction_phrases,
            side_phrases=self.harness.side_phrases,
            workdir=str(sandbox.workdir),
            home=str(sandbox.home),
        )
        credit = self.slots.agent_timeout.credit
        return self.gateway.open(self.session, self.task, terms, on_hang=credit)

    def _build(self) -> tuple[Sequence[Call], Built]:
        """Read the calls and build their traces. Raises `EarlyEnd`, whatever the calls hold."""
        try:
            calls = self._recorded = self.gateway.read_calls(self.session.id)
        except Exception as error:
            raise EarlyEnd(classify_recording_error(error)) from error
        try:
            return calls, self.builder.build(calls)
        except (errors.CaptureError, errors.EngineError) as error:  # such as a call without ids
            raise EarlyEnd(classify(Status.BUILD, error)) from error
        except (Exception, *ENDINGS) as error:
            raise EarlyEnd(classify_recording_error(error)) from error

    def _count_tokens(self) -> tuple[Sequence[Call], Built]:
        """Return the calls that can be read, and a ledger that drops all of their tokens."""
        calls = self._recorded
        if calls is None:
            calls = self._salvage()
        dropped = {call.number: Reason.SESSION_FAILED for call in calls}
        return calls, Built((), count_session(calls, (), dropped))

    def _salvage(self) -> Sequence[Call]:
        """Return the calls that can be read of a damaged recording."""
        path = self.gateway.describe(self.session.id).path
        with contextlib.suppress(errors.CaptureError):  # nothing can be read
            return recordings.read(path, salvage=True).calls
        return ()

    async def _store_patch(self) -> RecordedExit | None:
        """Store the changes beside the recording; return the exit of the program that made them.

        Raises `CaptureError` if the disk is full.
        """
        if self.patch is None:
            return None
        folder = self.gateway.describe(self.session.id).path.parent
        packed = await asyncio.to_thread(pack_patch, self.patch)
        self.patch_digest = await asyncio.to_thread(save_patch, packed, folder)
        return copy_fields(RecordedExit, self.exit)

    def _find_agent_failure(self) -> Failure | None:
        """Return a failure for the limit that ended the agent, whose work was still evaluated."""
        end = self.exit
        if not (end.timed_out or end.cause):
            return None
        cause = end.cause or Cause.AGENT_TIMEOUT
        return make_failure(cause, f"{cause.value} after {end.seconds:.0f} s")

    def _measure_engine(self) -> float:
        """Return the time at the engine, which cannot exceed that of the agent."""
        return min(measure_engine(self.calls), self.stages.seconds.get(Status.RUN.value, 0.0))

    def _make_trajectory(self, end: End | None) -> Trajectory:
        completed = Status.TIMED_OUT if self.exit.timed_out else Status.COMPLETED
        return Trajectory(
            session=self.session.id,
            task=self.task.id,
            sample=self.session.sample,
            status=end.status if end else completed,
            traces=self.built.traces,
            ledger=self.built.ledger,
            reward=self.verdict.reward if self.verdict else None,
            report=self.verdict.report if self.verdict else {},
            failure=end.failure if end else self._find_agent_failure(),
            spent=self._spent,
            seconds=self.stages.seconds,
            engine_s=self._measure_engine(),
            prompt_tokens=count_prompt_tokens(self.calls),
            harness=self.task.harness.name,
            patch=self.patch_digest,
        )
