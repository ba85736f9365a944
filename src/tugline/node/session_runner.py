"""The sessions that a node has: taken, led through their stages, handed in or given up.

A session is held until the server has its result or has it back; whatever breaks in one of them
is a result of that one, and no business of the others (I5). A result is in the journal before it
is offered (I3).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path

from tugline import log
from tugline.errors import FencedError, ServerError
from tugline.node.active_sessions import STARTED, ActiveSession, StopReason
from tugline.node.admission import Admission, Engines
from tugline.node.dispatcher import LONGEST_S, RetryingDispatcher
from tugline.node.housekeeping import DONE
from tugline.node.journal import Entry, Journal
from tugline.node.logs import LogSender
from tugline.node.settings import NodeSettings
from tugline.node.stages import Stages
from tugline.node.stats import Observer, Stats
from tugline.protocol import CommitOutcome, HeldSession, Release, Stop, StopKind, Work
from tugline.recording.trajectories import pack
from tugline.rollout.failures import describe, make_failure
from tugline.rollout.parts import Parts
from tugline.rollout.rollout import Gateway, roll_out
from tugline.types import Cause, Ledger, Status, Trajectory

_OFFER_S = 2.0
"""How long the results of a predecessor may take before the node joins without waiting."""
_BACK_S = 10.0
"""How long a server may take to take a session back; then its lease runs out instead."""
_log = log.get("node")


class SessionRunner:
    """Every session that is held, by id."""

    def __init__(  # noqa: PLR0913 - what sessions need, and who watches
        self,
        link: RetryingDispatcher,
        gateway: Gateway,
        parts: Parts,
        folder: Path,
        settings: NodeSettings,
        *,
        stats: Stats,
        observer: Observer | None,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when there may be more room, or a session less."""
        self._link, self._gateway, self._parts = link, gateway, parts
        self._sessions, self._stats = folder / "sessions", stats
        self._observer, self._changed = observer, changed
        self.live: dict[str, ActiveSession] = {}
        self.journal = Journal(folder / "journal")
        self.logs = LogSender(link.server, self.live)
        look = Engines(settings.engines) if settings.engines else None
        admission = Admission(look, waiting=settings.engine_waiting, kv=settings.engine_kv)
        self.stages = Stages(settings, admission, changed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused = False

    # ----------------------------------------------------------------------- orders
    def held(self) -> tuple[HeldSession, ...]:
        """All that this node has."""
        return tuple(live.held for live in self.live.values())

    def is_needed(self, name: str) -> bool:
        """Whether ``<session>.<epoch>`` is live or not committed yet."""
        session, _, epoch = name.rpartition(".")
        live = self.live.get(session)
        return (live is not None and str(live.epoch) == epoch) or self.journal.holds(name)

    def take(self, work: Work) -> None:
        """Begin a session; one that is here already under this lease goes on as it is."""
        older = self.live.get(work.session.id)
        if older is not None and older.epoch >= work.session.epoch:
            return
        self._stats.leased += 1
        session, task = work.session, work.task
        stack = contextlib.ExitStack()
        slots = stack.enter_context(
            self.stages.course(task.id, session.sample, task.limits.total_s)
        )
        slots.pause_timeout(paused=self._paused)
        # A path of constant length: agents tell the model where they are.
        directory = self._sessions / f"{session.id}.{session.epoch}"
        live = self.live[session.id] = ActiveSession(work, slots, directory)
        self._begin(self._lead(live, stack, older), f"session-{session.id}")

    def stop(self, order: Stop) -> None:
        """End a session as told; one that is no longer here was ended before."""
        live = self.live.get(order.session)
        if live is None or live.epoch != order.epoch:
            return
        _log.info("told to stop", session=live.id, why=order.reason, by=order.by)
        if order.reason is StopKind.CANCELLED:
            live.slots.cancel_scope.cancel()
        else:
            live.call_off(StopReason.STALE if order.reason is StopKind.STALE else StopReason.DROP)

    def pause(self, paused: bool) -> None:  # noqa: FBT001 - told by `Controls`
        """Stop the clocks of all agents, or let them go on."""
        self._paused = paused
        for live in self.live.values():
            live.slots.pause_timeout(paused=paused)

    def call_off(self, fate: StopReason, *, started: bool = True) -> None:
        """Give up all sessions; without `started` those that run go on."""
        for live in list(self.live.values()):
            if started or live.status not in STARTED:
                live.call_off(fate)

    async def offer(self) -> None:
        """Commit what an earlier process in this folder had finished; slow ones go on alone."""
        offers = [self._begin(self._offer(*one), "offer") for one in self.journal.left()]
        if offers:
            await asyncio.wait(offers, timeout=_OFFER_S)

    async def empty(self, within_s: float) -> None:
        """Wait until all that is here now is gone, but no longer than that."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=within_s)

    async def close(self) -> None:
        """End everything at once; what is in the journal stays there."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # ----------------------------------------------------------------------- one session
    def _begin(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _lead(
        self, live: ActiveSession, stack: contextlib.ExitStack, older: ActiveSession | None
    ) -> None:
        try:
            with stack, log.about(task=live.work.task.id, session=live.id, epoch=live.epoch):
                if older is not None:  # the gateway knows a session once
                    older.call_off(StopReason.DROP)
                    await older.ended.wait()
                trajectory = await self._roll(live)
                if trajectory is None:
                    await self._give_up(live)
                else:
                    await self._hand_in(live, trajectory)
        finally:
            live.ended.set()
            if self.live.get(live.id) is live:
                del self.live[live.id]
            self._changed()

    async def _roll(self, live: ActiveSession) -> Trajectory | None:
        """What came of it; None if it was called off."""
        if live.fate is not None:
            return None

        def on_stage(status: Status) -> None:
            live.status = status
            if self._observer is not None:
                self._observer.stage(live.work, status)

        live.rolling = asyncio.create_task(
            roll_out(
                live.work.task,
                live.work.session,
                gateway=self._gateway,
                directory=live.directory,
                parts=self._parts,
                on_stage=on_stage,
                slots=live.slots,
            )
        )
        try:
            await asyncio.wait({live.rolling})
        except asyncio.CancelledError:
            live.rolling.cancel()
            await asyncio.wait({live.rolling})
            raise
        if live.rolling.cancelled():
            return None
        error = live.rolling.exception()
        if error is None:
            return live.rolling.result()
        _log.error("rollout broke", session=live.id, exc_info=error)
        return _broken(live, error)

    async def _give_up(self, live: ActiveSession) -> None:
        if live.fate is None or live.fate is StopReason.DROP:
            self._stats.fenced += 1
            return
        back = Release(epoch=live.epoch, reason=live.fate.value)
        try:
            async with asyncio.timeout(_BACK_S):
                await self._link.answer(lambda: self._link.server.release(live.id, back))
            self._stats.handed_back += 1
        except (ServerError, TimeoutError) as error:
            _log.warning("not handed back", session=live.id, error=str(error))

    async def _hand_in(self, live: ActiveSession, trajectory: Trajectory) -> None:
        self._stats.ended(trajectory)
        if self._observer is not None:
            self._observer.ended(live.work, trajectory)
        _log.info("ended", status=trajectory.status, seconds=sum(trajectory.seconds.values()))
        data = await asyncio.to_thread(pack, trajectory)
        entry = await self.journal.keep(live.id, live.epoch, data)
        await self.logs.finish(live)
        await self._commit(entry)

    async def _offer(self, session: str, epoch: int) -> None:
        try:
            entry = await self.journal.read(session, epoch)
        except OSError as error:  # it stays there, for the next start of this node
            _log.error("result not read", session=session, error=str(error))
            return
        await self._commit(entry)

    async def _commit(self, entry: Entry) -> None:
        """Offer a result until the server has it or does not want it."""
        while True:
            try:
                answer = await self._link.answer(
                    lambda: self._link.server.commit(entry.session, entry.epoch, entry.data)
                )
            except FencedError as error:
                self._stats.fenced += 1
                _log.warning("result fenced", session=entry.session, error=str(error))
            except ServerError as error:
                if error.status in {401, 403}:  # until the node has joined again
                    await asyncio.sleep(LONGEST_S)
                    continue
                _log.error("result refused", session=entry.session, error=str(error))
                await asyncio.to_thread(self.journal.refused, entry)
                return
            else:
                self._stats.requeued += answer.outcome is CommitOutcome.REQUEUED
                self._stats.committed += answer.outcome is not CommitOutcome.REQUEUED
            await asyncio.to_thread(self._settle, entry)
            return

    def _settle(self, entry: Entry) -> None:
        """Its folder may go when its time comes, the journal's entry at once."""
        with contextlib.suppress(OSError):  # it never got a folder, or is gone already
            (self._sessions / entry.name / DONE).touch()
        self.journal.done(entry)


def _broken(live: ActiveSession, error: BaseException) -> Trajectory:
    """The result of a rollout that could not even say what happened: tried again elsewhere."""
    return Trajectory(
        session=live.id,
        task=live.work.task.id,
        sample=live.work.session.sample,
        status=Status.FAILED,
        traces=(),
        ledger=Ledger(),
        failure=make_failure(Cause.NODE, describe(error)),
    )
