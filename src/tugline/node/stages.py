"""The pools that sessions go through, and how many may be made ready ahead of their turn.

RUN is what counts: an engine without an agent is idle. So sessions are made ready before a slot is
free, as many as slots x (time of INIT / time of RUN) says, with a margin because both times vary
widely; but no more than `ready_max`, and none ahead while memory is short. Slots go to the oldest
group first, so that whole groups finish. What comes after RUN has pools of its own and holds no
slot; only when too much has piled up there does the node take no new work.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from tugline.node.admission import Admission
from tugline.node.settings import NodeSettings
from tugline.rollout.stages import StageSlots
from tugline.types import Status

Turn = tuple[int, int]
"""Who goes first: number of the group in the order of arrival, sample."""
_MEMORY_LOOK_S = 1.0


class Pool:
    """`size` places; whoever waits goes by turn, not by arrival."""

    def __init__(self, size: int) -> None:
        self.size, self.busy = size, 0
        self._waiting: list[tuple[Turn, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return sum(not future.done() for _, _, future in self._waiting)

    @contextlib.asynccontextmanager
    async def place(self, turn: Turn) -> AsyncIterator[None]:
        """Hold a place; waits until there is one."""
        if self.busy < self.size:
            self.busy += 1
        else:
            await self._wait(turn)
        try:
            yield
        finally:
            self._next()

    async def _wait(self, turn: Turn) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (turn, next(self._numbers), future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # it got the place as it left
                self._next()
            future.cancel()
            raise

    def _next(self) -> None:
        while self._waiting:
            future = heapq.heappop(self._waiting)[-1]
            if not future.done():
                future.set_result(None)
                return
        self.busy -= 1


class Average:
    """A running mean in which the last few dozen count."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._count = 0

    def add(self, value: float) -> None:
        """One more."""
        self._count = min(self._count + 1, 32)
        before = self.value or 0.0
        self.value = before + (value - before) / self._count


class Stages:
    """Pools by stage, and the room that they leave."""

    def __init__(
        self,
        settings: NodeSettings,
        admission: Admission,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` is called whenever there may be more room than before."""
        self._settings, self.admission, self._changed = settings, admission, changed
        self.pools = {
            Status.INIT: Pool(settings.at_once),
            Status.RUN: Pool(settings.slots),
            Status.BUILD: Pool(settings.builds),
            Status.EVAL: Pool(settings.judges),
        }
        self.spares = asyncio.Semaphore(settings.boxes)
        self.held = 0
        """Sessions in all stages."""
        self.early = 0
        """Of these, the ones before RUN."""
        self.cold = 0
        """Of these, the ones that are not ready."""
        self.times = {Status.INIT: Average(), Status.RUN: Average()}
        self._groups: dict[str, tuple[int, int]] = {}
        """Task to its number in the order of arrival, and its sessions that are here."""
        self._numbers = itertools.count()
        self._memory = (-math.inf, True)
        """When it was looked at last, and whether there was enough."""

    @contextlib.contextmanager
    def course(self, task: str, sample: int, total_s: float | None) -> Iterator[NodeSlots]:
        """The way of one more session through these stages."""
        number, members = self._groups.get(task, (-1, 0))
        if not members:
            number = next(self._numbers)
        self._groups[task] = (number, members + 1)
        led = NodeSlots(self, (number, sample), total_s)
        self.held += 1
        self.early += 1
        self.cold += 1
        try:
            yield led
        finally:
            self.held -= 1
            led.past(Status.RUN)
            number, members = self._groups.pop(task)
            if members > 1:
                self._groups[task] = (number, members - 1)
            self._changed()

    @property
    def target(self) -> int:
        """How many sessions should be in INIT or READY while all slots are taken."""
        init, run = (self.times[stage].value for stage in (Status.INIT, Status.RUN))
        if init is None or not run:
            return min(1, self._settings.ahead)
        # Slots become free about as events of a Poisson process do: two deviations make it last.
        mean = self._settings.slots * init / run
        return min(math.ceil(mean + 2 * math.sqrt(mean)) + 1, self._settings.ahead)

    def room(self) -> int:
        """How many more sessions could begin INIT at once."""
        running = self.pools[Status.RUN].busy - self.admission.held  # those have a slot, and wait
        free = self._settings.slots - running
        ahead = self.target if self._enough_memory() else 0
        return max(
            0,
            min(
                self._settings.at_once - self.cold,
                free + ahead - self.early,
                self._settings.room - self.held,
            ),
        )

    def _enough_memory(self) -> bool:
        looked, enough = self._memory
        if time.monotonic() - looked > _MEMORY_LOOK_S:
            enough = available_mb() >= self._settings.memory_floor_mb
            self._memory = (time.monotonic(), enough)
        return enough

    def took(self, stage: Status, seconds: float) -> None:
        """A session was in `stage` for so long."""
        if stage in self.times:
            self.times[stage].add(seconds)

    def moved(self) -> None:
        """There may be more room."""
        self._changed()


class NodeSlots(StageSlots):
    """The way of one session through a node's pools."""

    def __init__(self, stages: Stages, turn: Turn, total_s: float | None) -> None:
        super().__init__(total_s, prewarm=stages.spares)
        self._stages, self._turn = stages, turn
        self._cold = self._early = True

    def past(self, status: Status) -> None:
        """It is done with INIT, or has begun RUN."""
        self._stages.cold -= self._cold
        self._cold = False
        if status is Status.RUN:
            self._stages.early -= self._early
            self._early = False

    def acquire(self, status: Status) -> AbstractAsyncContextManager[None]:
        """A place in the pool of this stage."""
        return self._placed(status)

    @contextlib.asynccontextmanager
    async def _placed(self, status: Status) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._stages.pools[status].place(self._turn))
            if status is Status.RUN:
                await stack.enter_async_context(self._stages.admission.admitted())
                self.past(status)
                self._stages.moved()
            began = time.monotonic()
            try:
                yield
            finally:
                self._stages.took(status, time.monotonic() - began)
        self.past(status)
        self._stages.moved()


def available_mb() -> float:
    """Memory that can be had without swapping; without ``/proc``, endless."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return math.inf
    kilobytes = next(line.split()[1] for line in text.splitlines() if "MemAvailable" in line)
    return int(kilobytes) / 1024
