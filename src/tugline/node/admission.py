"""Admission: new agents wait while the engines are overloaded; running ones never do.

An engine whose queue or KV memory is full serves every agent worse: turns wait, and caches of
running sessions are evicted. A new agent waits until at least one engine is below its limits
(sessions stay with one engine, so one is enough), and each poll admits only as many as fit. Engines
that report no load hold nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from tugline import log
from tugline.node.engines import EngineLoad

POLL_S = 0.25
"""Maximum age of the last poll."""
_log = log.get("node.admission")

Poll = Callable[[], Awaitable[Sequence[EngineLoad]]]
"""Returns the load of every engine that reports its queue."""


class Admission:
    """A gate before RUN. Without `poll` it is always open."""

    def __init__(
        self,
        poll: Poll | None = None,
        *,
        waiting: int = 8,
        kv: float = 0.95,
        every_s: float = POLL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Agents wait while more than `waiting` requests are queued or more than `kv` is in use."""
        self._poll, self._waiting, self._kv, self._every_s = poll, waiting, kv, every_s
        self._clock = clock
        self._lock = asyncio.Lock()
        self._polled = -math.inf
        self._admissible = 0.0
        """Sessions that may still enter after the last poll."""
        self._reported = True
        self.running = 0
        """Agents that were admitted and run."""
        self.waiting = 0
        """Sessions that wait right now."""
        self.waited_s = 0.0
        """Total time that sessions have waited."""

    @contextlib.asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Enter when a new agent may start, in the order of arrival."""
        if self._poll is not None:
            await self._wait(self._poll)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    async def _wait(self, poll: Poll) -> None:
        began = self._clock()
        self.waiting += 1
        try:
            async with self._lock:
                while not await self._is_open(poll):  # noqa: ASYNC110 - engines are polled
                    await asyncio.sleep(max(0.0, self._polled + self._every_s - self._clock()))
                self._admissible -= 1
        finally:
            self.waiting -= 1
            self.waited_s += self._clock() - began

    async def _is_open(self, poll: Poll) -> bool:
        if self._clock() - self._polled >= self._every_s:
            self._admissible = self._count_admissible(await poll())
            self._polled = self._clock()
        return self._admissible >= 1

    def _count_admissible(self, engines: Sequence[EngineLoad]) -> float:
        """How many new agents the engines can take until the next poll."""
        if bool(engines) is not self._reported:
            self._reported = bool(engines)
            if engines:
                _log.info("engines report their load")
            else:
                _log.warning("no engine reports its load; no agent waits")
        return sum(map(self._count_for, engines)) if engines else math.inf

    def _count_for(self, engine: EngineLoad) -> float:
        queued = engine.waiting or 0.0
        if engine.kv >= self._kv or queued > self._waiting:
            return 0
        by_queue = self._waiting - queued + 1 if queued else math.inf
        # The node's agents may grow by the factor by which the KV memory in use may grow.
        by_kv = self.running * (self._kv / engine.kv - 1) if engine.kv else math.inf
        return max(1, min(by_queue, by_kv))
