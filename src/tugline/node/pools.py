"""Pools of stage slots, and the number of sessions that a node prepares before a slot is free.

An engine is idle while no agent is in RUN. So sessions are prepared before a slot is free: slots x
(time in INIT / time in RUN), with a margin because both times vary widely; at most `ready_max`, and
none while memory is low. The oldest group gets slots first, so that whole groups finish. BUILD and
EVAL have separate pools; the node takes no new work while too many sessions wait there. Evaluations
that wait for the processors lower the slots of RUN and EVAL, others raise them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import dataclass, field

import psutil

from tugline import log
from tugline.node.admission import Admission
from tugline.node.settings import NodeSettings
from tugline.rollout.stages import StageSlots
from tugline.types import Status

_STARVED = 0.5
"""Fraction of an evaluation's time without a processor above which the node has too many slots."""
_LOWER = 0.75
"""Factor that lowers the slots."""
_RAISE = 0.05
"""Fraction of the configured slots by which they are raised."""
_log = log.get("node.pools")

Turn = tuple[int, int]
"""Priority: number of the group in the order of arrival, sample."""
_MEMORY_POLL_S = 1.0
_MB = 1 << 20


class Pool:
    """A pool of `size` slots, given to waiting sessions in the order of their turns."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.busy = 0
        self._queue: list[tuple[Turn, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        """Number of sessions that wait for a slot."""
        return sum(not future.done() for _, _, future in self._queue)

    @contextlib.asynccontextmanager
    async def acquire(self, turn: Turn) -> AsyncIterator[None]:
        """Wait for a slot and hold it during the block."""
        if self.busy < self.size:
            self.busy += 1
        else:
            await self._wait(turn)
        try:
            yield
        finally:
            self._release()

    async def _wait(self, turn: Turn) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (turn, next(self._numbers), future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # the slot was assigned already
                self._release()
            future.cancel()
            raise

    def resize(self, size: int) -> None:
        """Change the number of slots; slots that are held stay with their sessions."""
        self.size = size
        while self.busy < size and self._queue:
            self.busy += 1
            self._release()

    def _release(self) -> None:
        """Give one busy slot to the first waiting session, or free it."""
        while self._queue and self.busy <= self.size:
            future = heapq.heappop(self._queue)[-1]
            if not future.done():
                future.set_result(None)
                return
        self.busy -= 1


class RunningMean:
    """Exponential moving mean over about 32 values."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._count = 0

    def add(self, value: float) -> None:
        """Add a value."""
        self._count = min(self._count + 1, 32)
        before = self.value or 0.0
        self.value = before + (value - before) / self._count


@dataclass(eq=False)
class Pools:
    """Pools by stage, and the node's capacity for more sessions."""

    settings: NodeSettings
    admission: Admission
    on_room: Callable[[], None] = lambda: None
    """Called when the capacity may have grown."""
    processors: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    read_available_mb: Callable[[], float] = lambda: psutil.virtual_memory().available / _MB

    def __post_init__(self) -> None:
        self.by_stage = {
            Status.INIT: Pool(self.settings.init_slots),
            Status.RUN: Pool(self.settings.slots),
            Status.BUILD: Pool(self.settings.max_building),
            Status.EVAL: Pool(self.settings.eval_slots),
        }
        self.members: set[PooledSlots] = set()
        """The slots of all sessions on the node."""
        self.mean_s = {Status.INIT: RunningMean(), Status.RUN: RunningMean()}
        self._numbers = itertools.count()
        """Numbers of groups in the order of arrival."""
        self._load_factor = 1.0
        """Fraction of the configured slots of RUN and EVAL in use; less on busy processors."""
        self._memory = (-math.inf, True)
        """Monotonic time of the last check, and whether memory was sufficient."""

    @contextlib.contextmanager
    def enter(self, task: str, sample: int, total_s: float | None) -> Iterator[PooledSlots]:
        """Return the slots of a new session, which counts as a member during the block."""
        turns = [member.turn for member in self.members if member.task == task]
        number = turns[0][0] if turns else next(self._numbers)
        slots = PooledSlots(self, task, (number, sample), total_s)
        self.members.add(slots)
        try:
            yield slots
        finally:
            self.members.remove(slots)
            self.on_room()

    def count(self, passed: Collection[Status | None]) -> int:
        """Return the number of sessions whose `PooledSlots.passed` is in `passed`."""
        return sum(member.passed in passed for member in self.members)

    @property
    def target(self) -> int:
        """Number of sessions that should be in INIT or READY while all slots are taken."""
        init, run = (self.mean_s[stage].value for stage in (Status.INIT, Status.RUN))
        if init is None or not run:
            return min(1, self.settings.ready_limit)
        # Free slots are roughly a Poisson process: add a margin of two standard deviations.
        mean = self.by_stage[Status.RUN].size * init / run
        return min(math.ceil(mean + 2 * math.sqrt(mean)) + 1, self.settings.ready_limit)

    def count_room(self) -> int:
        """Return the number of sessions that could start INIT now."""
        running = self.by_stage[Status.RUN].busy - self.admission.waiting
        free = max(0, self.by_stage[Status.RUN].size - running)
        ahead = self.target if self._has_memory() else 0
        return max(
            0,
            min(
                self.settings.init_slots - self.count({None}),
                free + ahead - self.count({None, Status.INIT}),
                self.settings.capacity - len(self.members),
            ),
        )

    def note_waits(self, waited_s: float, seconds: float) -> None:
        """Lower the slots after an evaluation that mostly waited for a processor; else raise them.

        Not below one slot per processor, which no number of sessions can overload.
        """
        starved = waited_s > _STARVED * seconds
        factor = self._load_factor * (_LOWER if starved else 1.0) + (0.0 if starved else _RAISE)
        self._load_factor = min(1.0, max(factor, self.processors / self.settings.slots))
        before = self.by_stage[Status.RUN].size
        for stage, slots in (
            (Status.RUN, self.settings.slots),
            (Status.EVAL, self.settings.eval_slots),
        ):
            size = max(round(self._load_factor * slots), min(slots, self.processors))
            self.by_stage[stage].resize(size)
        after = self.by_stage[Status.RUN].size
        if after != before:
            _log.warning("slots follow the load of the processors", slots=after, before=before)
            self.on_room()

    def _has_memory(self) -> bool:
        checked, sufficient = self._memory
        if time.monotonic() - checked > _MEMORY_POLL_S:
            sufficient = self.read_available_mb() >= self.settings.memory_floor_mb
            self._memory = (time.monotonic(), sufficient)
        return sufficient


class PooledSlots(StageSlots):
    """The slots of one session in a node's pools."""

    def __init__(self, pools: Pools, task: str, turn: Turn, total_s: float | None) -> None:
        super().__init__(total_s)
        self._pools = pools
        self.task = task
        self.turn = turn
        self.passed: Status | None = None
        """INIT after INIT has ended, RUN after RUN has started; None before."""

    def note_waits(self, waited_s: float, seconds: float) -> None:
        """See `StageSlots.note_waits`."""
        self._pools.note_waits(waited_s, seconds)

    @contextlib.asynccontextmanager
    async def acquire(self, status: Status) -> AsyncIterator[None]:
        """Hold a slot of the stage during the block; for RUN, also wait for admission."""
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._pools.by_stage[status].acquire(self.turn))
            if status is Status.RUN:
                await stack.enter_async_context(self._pools.admission.admit())
                self.passed = status
                self._pools.on_room()
            began = time.monotonic()
            try:
                yield
            finally:
                if status in self._pools.mean_s:
                    self._pools.mean_s[status].add(time.monotonic() - began)
        self.passed = self.passed or status
        self._pools.on_room()
