"""Run the sessions that a node holds, and commit or release them.

A session is held until the server has its result or the session was released. Any failure in a
session is a result of that session and does not affect the others (I5). A result is written to the
journal before it is offered to the server (I3).
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import zstandard
from msgspec.structs import replace

from tugline import log
from tugline.errors import FencedError, ServerError
from tugline.gateway.app import Gateway
from tugline.node.active_sessions import STARTED, ActiveSession, LogSender, StopReason
from tugline.node.housekeeping import COMMITTED, Journal
from tugline.node.pools import Pools
from tugline.node.retries import LAST_RETRY_S, RetryingDispatcher
from tugline.node.telemetry import Rollout, Stats, Tracer
from tugline.protocol import CommitOutcome, HeldSession, Release, Stop, StopKind, Work
from tugline.recording.trajectories import pack, unpack
from tugline.rollout.failures import describe, make_failure
from tugline.rollout.parts import Parts
from tugline.rollout.rejudge import run_judging
from tugline.rollout.rollout import roll_out
from tugline.sandbox.files import remove
from tugline.types import Call, Cause, Ledger, Reason, Status, Task, Trajectory

_RELEASE_S = 10.0
"""Timeout in seconds for releasing a session, whose lease expires if that fails."""
_log = log.get("node")


@dataclass(eq=False)
class SessionRunner:
    """Runs all sessions of a node, which `sessions` has by id."""

    dispatcher: RetryingDispatcher
    gateway: Gateway
    parts: Parts
    folder: Path
    """Folder of the node."""
    pools: Pools
    stats: Stats
    tracer: Tracer | None
    on_ended: Callable[[], None]
    """Called when a session has ended on this node."""
    on_result: Callable[[Task, Trajectory, float], None]
    """Called with each result, and the Unix time at which its session began."""

    def __post_init__(self) -> None:
        self._directories = self.folder / "sessions"
        self.sessions: dict[str, ActiveSession] = {}
        self.journal = Journal(self.folder / "journal")
        self.logs = LogSender(self.dispatcher.server, self.sessions)
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused = False

    # ----------------------------------------------------------------------- orders
    def list_held(self) -> tuple[HeldSession, ...]:
        """Return all sessions that this node holds."""
        sessions = self.sessions.values()
        return tuple(HeldSession(each.id, each.epoch, each.status) for each in sessions)

    def is_needed(self, name: str) -> bool:
        """Return whether ``<session>.<epoch>`` is active or not committed yet."""
        session, _, epoch = name.rpartition(".")
        active = self.sessions.get(session)
        is_active = active is not None and str(active.epoch) == epoch
        return is_active or self.journal.contains(name)

    def start(self, work: Work) -> None:
        """Start a session; do nothing if it is already held with this epoch or a newer one."""
        older = self.sessions.get(work.session.id)
        if older is not None and older.epoch >= work.session.epoch:
            return
        self.stats.leased += 1
        session = work.session
        task = work.task
        stack = contextlib.ExitStack()
        slots = stack.enter_context(self.pools.enter(task.id, session.sample, task.limits.total_s))
        slots.pause_timeout(paused=self._paused)
        # A path of constant length, because agents include it in prompts.
        directory = self._directories / f"{session.id}.{session.epoch}"
        active = self.sessions[session.id] = ActiveSession(work, slots, directory)
        self._spawn(self._run(active, stack, older), f"session-{session.id}")

    def stop(self, order: Stop) -> None:
        """Stop a session as ordered; do nothing if it is not held any more."""
        session = self.sessions.get(order.session)
        if session is None or session.epoch != order.epoch:
            return
        _log.info("stopping", session=session.id, reason=order.reason, by=order.by)
        if order.reason is StopKind.CANCELLED:
            session.slots.cancel_scope.cancel()
        else:
            stale = order.reason is StopKind.STALE
            session.stop(StopReason.STALE if stale else StopReason.DROP)

    def stop_all(self, reason: StopReason, *, started: bool = True) -> None:
        """Stop all sessions; if not `started`, only those that have not started RUN."""
        for session in list(self.sessions.values()):
            if started or session.status not in STARTED:
                session.stop(reason)

    def pause_timeouts(self, *, paused: bool) -> None:
        """Pause the timeouts of all agents, or resume them."""
        self._paused = paused
        for session in self.sessions.values():
            session.slots.pause_timeout(paused=paused)

    async def offer_pending(self) -> None:
        """Offer the results that an earlier process left; return when all are answered.

        Waits for the server for any time: registering first would lease their sessions to others.
        """
        offers = [self._spawn(self._offer(name), "offer") for name in self.journal.list_pending()]
        if offers:
            await asyncio.wait(offers)

    async def wait_until_empty(self, within_s: float) -> None:
        """Wait until all present sessions have ended, at most `within_s` seconds."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=within_s)

    async def close(self) -> None:
        """Cancel all sessions; results in the journal are kept."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # ----------------------------------------------------------------------- one session
    def _spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(
        self, session: ActiveSession, stack: contextlib.ExitStack, older: ActiveSession | None
    ) -> None:
        context = log.about(task=session.work.task.id, session=session.id, epoch=session.epoch)
        try:
            with stack, context:
                if older is not None:  # the gateway has one entry per session
                    older.stop(StopReason.DROP)
                    await older.ended.wait()
                trajectory = await self._roll_out(session)
                if trajectory is None:
                    await self._release(session)
                    await asyncio.to_thread(self._mark_done, session.directory)
                else:
                    await self._finish(session, trajectory)
        finally:
            self.gateway.forget(session.id)
            session.ended.set()
            if self.sessions.get(session.id) is session:
                del self.sessions[session.id]
            self.on_ended()

    async def _roll_out(self, session: ActiveSession) -> Trajectory | None:
        """Run a session; return its trajectory, or None if it was stopped without a result."""
        if session.stop_reason is not None:
            return None
        directory = session.directory
        if directory.exists():  # left by a run that is unknown to a store restored from a backup
            await asyncio.to_thread(remove, directory.parent, directory.name)
        session.rollout = asyncio.create_task(self._work(session))
        try:
            await asyncio.wait({session.rollout})
        except asyncio.CancelledError:
            session.rollout.cancel()
            await asyncio.wait({session.rollout})
            raise
        if session.rollout.cancelled():
            stopped: StopReason | None = session.stop_reason
            return (
                None
                if stopped
                else _make_failed(session, RuntimeError("the rollout was cancelled from within"))
            )
        error = session.rollout.exception()
        if error is None:
            return session.rollout.result()
        _log.error("rollout raised", session=session.id, traceback=log.describe_error(error))
        return _make_failed(session, error)

    def _work(self, session: ActiveSession) -> Coroutine[None, None, Trajectory]:
        """Return what a session consists of: running an agent, or judging a recorded session."""

        def on_stage(status: Status) -> None:
            session.stages.append((status, time.time()))

        if session.work.task.judges is not None:
            return run_judging(
                session.work.task,
                session.work.session,
                recordings=self.gateway.folder,
                directory=session.directory,
                parts=self.parts,
                on_stage=on_stage,
                slots=session.slots,
            )
        return roll_out(
            session.work.task,
            session.work.session,
            gateway=self.gateway,
            directory=session.directory,
            parts=self.parts,
            on_stage=on_stage,
            on_calls=partial(self._keep_calls, session),
            slots=session.slots,
        )

    def _keep_calls(self, session: ActiveSession, calls: Sequence[Call]) -> None:
        if self.tracer is not None:
            session.calls = calls

    async def _release(self, session: ActiveSession) -> None:
        if session.stop_reason is None or session.stop_reason is StopReason.DROP:
            self.stats.fenced += 1
            return
        release = Release(epoch=session.epoch, reason=session.stop_reason.value)
        server = self.dispatcher.server
        try:
            async with asyncio.timeout(_RELEASE_S):
                await self.dispatcher.call(lambda: server.release(session.id, release))
            self.stats.released += 1
        except (ServerError, TimeoutError) as error:
            _log.warning("not released", session=session.id, error=str(error))

    async def _finish(self, session: ActiveSession, trajectory: Trajectory) -> None:
        ended = time.time()
        self.stats.count_result(trajectory)
        began = session.stages[0][1] if session.stages else ended
        self.on_result(session.work.task, trajectory, began)
        _log.info("ended", status=trajectory.status, seconds=sum(trajectory.seconds.values()))
        data = await asyncio.to_thread(_pack, trajectory)
        await self.journal.write(session.directory.name, data)
        await self.logs.send(session)
        await self._commit(session.directory.name, data)
        if self.tracer is not None:
            await self._trace(self.tracer, session, trajectory, ended)

    async def _trace(
        self, tracer: Tracer, session: ActiveSession, trajectory: Trajectory, ended: float
    ) -> None:
        """Export the trace of a committed session. Errors are only logged and counted."""
        try:
            rollout = Rollout(
                task=session.work.task,
                session=session.work.session,
                trajectory=trajectory,
                stages=session.stages,
                ended=ended,
                calls=session.calls,
                model=self.gateway.card.id,
            )
            await asyncio.to_thread(tracer.export, rollout)
        except Exception as error:  # noqa: BLE001 - a session never fails because of its trace
            self.stats.untraced += 1
            _log.warning("no trace", session=session.id, traceback=log.describe_error(error))

    async def _offer(self, name: str) -> None:
        try:
            data = await self.journal.read(name)
        except OSError as error:  # the file is kept for the next start of this node
            _log.error("result not read", result=name, error=str(error))
            return
        if not await self._try_to_commit(name, data):
            self._spawn(self._commit(name, data), "commit")

    async def _commit(self, name: str, data: bytes) -> None:
        """Offer a result until the server has it or refuses it."""
        while not await self._try_to_commit(name, data):  # noqa: ASYNC110 - nothing to wait for
            await asyncio.sleep(LAST_RETRY_S)

    async def _try_to_commit(self, name: str, data: bytes, *, replaced: bool = False) -> bool:
        """Offer a result; return False if the node must register again first.

        A result that the server refuses is `replaced` by one that has only the reason: without any,
        the session would be leased again for ever.
        """
        session, _, epoch = name.rpartition(".")
        commit = self.dispatcher.server.commit
        try:
            response = await self.dispatcher.call(lambda: commit(session, int(epoch), data))
        except FencedError as error:
            self.stats.fenced += 1
            _log.warning("result fenced", session=session, error=str(error))
        except Exception as error:  # noqa: BLE001 - a server in this process may fail on its content
            if isinstance(error, ServerError) and error.status in {401, 403}:
                return False
            _log.error("result refused", session=session, error=describe(error))
            if not replaced:
                directory = self._directories / name
                await asyncio.to_thread(self.journal.set_aside, name, directory)
                data = await asyncio.to_thread(_pack_refused, session, data, error)
                await self.journal.write(name, data)
                return await self._try_to_commit(name, data, replaced=True)
        else:
            requeued = response.outcome is CommitOutcome.REQUEUED
            self.stats.requeued += requeued
            self.stats.committed += not requeued
        await asyncio.to_thread(self._mark_done, self._directories / name)
        await asyncio.to_thread(self.journal.remove, name)
        return True

    def _mark_done(self, directory: Path) -> None:
        """Mark the folder of a committed or lost session as removable by housekeeping."""
        with contextlib.suppress(OSError):  # there is no folder
            (directory / COMMITTED).touch()


def _pack(trajectory: Trajectory) -> bytes:
    """Encode a result; one that cannot be encoded is replaced by its failure."""
    try:
        return pack(trajectory)
    except Exception as error:  # noqa: BLE001 - a plug-in's traces may hold anything
        _log.error("result not encoded", traceback=log.describe_error(error))
        return pack(
            replace(
                trajectory,
                status=Status.FAILED,
                traces=(),
                ledger=_drop_tokens(trajectory.ledger.sampled),
                reward=None,
                report={},
                failure=make_failure(
                    Cause.EVALUATOR, f"the result cannot be encoded: {describe(error)}"
                ),
            )
        )


def _drop_tokens(sampled: int) -> Ledger:
    """Return the ledger of a session whose tokens are in no result (I2)."""
    return Ledger(sampled=sampled, dropped={Reason.SESSION_FAILED: sampled} if sampled else {})


def _pack_refused(session: str, data: bytes, error: Exception) -> bytes:
    """Return the result of a session whose own one, `data`, the server refused."""
    task, _, sample = session.rpartition("-")
    sampled = 0
    with contextlib.suppress(msgspec.DecodeError, zstandard.ZstdError):
        sampled = unpack(data).ledger.sampled
    trajectory = Trajectory(
        session=session,
        task=task,
        sample=int(sample) if sample.isdecimal() else 0,
        status=Status.FAILED,
        traces=(),
        ledger=_drop_tokens(sampled),
        failure=make_failure(
            Cause.RESULT, f"the server refused a result of {len(data)} bytes: {error}"
        ),
    )
    return pack(trajectory)


def _make_failed(session: ActiveSession, error: BaseException) -> Trajectory:
    """Return the result of a rollout that raised: a node failure, retried on another node."""
    return Trajectory(
        session=session.id,
        task=session.work.task.id,
        sample=session.work.session.sample,
        status=Status.FAILED,
        traces=(),
        ledger=Ledger(),
        failure=make_failure(Cause.NODE, describe(error)),
        harness=session.work.task.harness.name,
    )
