"""Pools of stage slots, and how many sessions a node prepares ahead of a free slot.

RUN is the stage that counts: an engine without an agent is idle. Sessions are prepared before a
slot is free, as many as slots x (time in INIT / time in RUN), with a margin because both vary
widely; at most `ready_max`, and none while memory is short. Slots go to the oldest group first, so
that whole groups finish. BUILD and EVAL have pools of their own; the node takes no new work when
too many sessions wait there.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import dataclass

import psutil

from tugline.node.admission import Admission
from tugline.node.settings import NodeSettings
from tugline.rollout.stages import StageSlots
from tugline.types import Status

Turn = tuple[int, int]
"""Priority: number of the group in the order of arrival, sample."""
_MEMORY_POLL_S = 1.0
_MB = 1 << 20


class Pool:
    """`size` slots; waiting sessions get them by turn, not by arrival."""

    def __init__(self, size: int) -> None:
        self.size, self.busy = size, 0
        self._queue: list[tuple[Turn, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        """How many wait for a slot."""
        return sum(not future.done() for _, _, future in self._queue)

    @contextlib.asynccontextmanager
    async def acquire(self, turn: Turn) -> AsyncIterator[None]:
        """Hold a slot; waits until there is one."""
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
            if future.done() and not future.cancelled():  # it got the slot as it was cancelled
                self._release()
            future.cancel()
            raise

    def _release(self) -> None:
        while self._queue:
            future = heapq.heappop(self._queue)[-1]
            if not future.done():
                future.set_result(None)
                return
        self.busy -= 1


class RunningMean:
    """A mean in which the last few dozen values count."""

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
    """Pools by stage, and the room that they leave."""

    settings: NodeSettings
    admission: Admission
    on_room: Callable[[], None] = lambda: None
    """Called whenever there may be more room than before."""
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
        """Of groups, in the order of arrival."""
        self._memory = (-math.inf, True)
        """Time of the last look, and whether there was enough."""

    @contextlib.contextmanager
    def enter(self, task: str, sample: int, total_s: float | None) -> Iterator[PooledSlots]:
        """The slots of one more session, counted while the block lasts."""
        own = [one.turn for one in self.members if one.task == task]
        number = own[0][0] if own else next(self._numbers)
        slots = PooledSlots(self, task, (number, sample), total_s)
        self.members.add(slots)
        try:
            yield slots
        finally:
            self.members.remove(slots)
            self.on_room()

    def count(self, passed: Collection[Status | None]) -> int:
        """How many sessions have passed one of these stages last; None: none yet."""
        return sum(one.passed in passed for one in self.members)

    @property
    def target(self) -> int:
        """How many sessions should be in INIT or READY while all slots are taken."""
        init, run = (self.mean_s[stage].value for stage in (Status.INIT, Status.RUN))
        if init is None or not run:
            return min(1, self.settings.ready_limit)
        # Slots become free about like a Poisson process: a margin of two standard deviations.
        mean = self.settings.slots * init / run
        return min(math.ceil(mean + 2 * math.sqrt(mean)) + 1, self.settings.ready_limit)

    def count_room(self) -> int:
        """How many more sessions could begin INIT now."""
        running = self.by_stage[Status.RUN].busy - self.admission.waiting
        free = self.settings.slots - running
        ahead = self.target if self._has_memory() else 0
        return max(
            0,
            min(
                self.settings.init_slots - self.count({None}),
                free + ahead - self.count({None, Status.INIT}),
                self.settings.capacity - len(self.members),
            ),
        )

    def _has_memory(self) -> bool:
        looked, enough = self._memory
        if time.monotonic() - looked > _MEMORY_POLL_S:
            enough = self.read_available_mb() >= self.settings.memory_floor_mb
            self._memory = (time.monotonic(), enough)
        return enough


class PooledSlots(StageSlots):
    """The slots of one session in a node's pools."""

    def __init__(self, pools: Pools, task: str, turn: Turn, total_s: float | None) -> None:
        super().__init__(total_s)
        self._pools, self.task, self.turn = pools, task, turn
        self.passed: Status | None = None
        """INIT once that is over, RUN once that has begun."""

    @contextlib.asynccontextmanager
    async def acquire(self, status: Status) -> AsyncIterator[None]:
        """Hold a slot in the pool of this stage, for RUN after admission."""
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
