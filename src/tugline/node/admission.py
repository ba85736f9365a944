"""Engine load, and admission of new agents by it.

An engine whose queue or KV memory is full serves every agent worse: turns wait, and caches of
running sessions are evicted. A new agent waits until at least one engine is below its limits
(sessions stay with one engine, so one is enough), and each poll admits only as many as fit. Running
agents never wait, and engines that report no load hold nobody.

The load is read from the engines' Prometheus pages. The embedded engine counts its working time
itself; for the others the time since the last poll counts if requests ran.
"""

import asyncio
import contextlib
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Self

import aiohttp

from tugline import log

_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "tugline:num_requests_waiting")
_KV = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",  # its name before vLLM 0.10
    "sglang:token_usage",
)
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "tugline:num_requests_running")
_FORWARD = ("tugline:forward_seconds_total",)
_INTERVAL_S = 2.0
"""Between polls for metrics."""
POLL_S = 0.25
"""Maximum age of the last poll while an agent waits."""
_log = log.get("node.admission")


@dataclass(slots=True)
class EngineLoad:
    """The last poll of an engine, and its working time."""

    waiting: float | None = None
    """Requests in its queue; None if it does not answer or does not report it."""
    kv: float = 0.0
    """Share of its KV memory in use, from 0 to 1; 0 if not reported."""
    up: bool = False
    running: float = 0.0
    busy_s: float = 0.0
    """Time in which it worked, since the first poll."""
    _polled: float | None = None
    _forward_s: float | None = None

    def update(self, page: str, now: float) -> None:
        """Read a metrics page at monotonic time `now`; an empty one if the engine did not answer.

        A gap of many polls counts as two.
        """
        waiting, kv = _read_values(page, _WAITING), _read_values(page, _KV)
        running, forward = sum(_read_values(page, _RUNNING)), _read_values(page, _FORWARD)
        if forward:
            total, before = sum(forward), self._forward_s
            if before is not None:  # a smaller total is that of a restarted engine
                self.busy_s += total - before if total >= before else total
            self._forward_s = total
        elif running and self._polled is not None:
            self.busy_s += min(now - self._polled, 2 * _INTERVAL_S)
        self.waiting = sum(waiting) if waiting else None
        self.kv = max(kv, default=0.0)
        self.up, self.running, self._polled = bool(page), running, now if page else None


def _read_values(page: str, names: Sequence[str]) -> list[float]:
    """The values of a metric under one of `names`, over all its labels."""
    pattern = rf"^(?:{'|'.join(names)})(?:\{{.*\}})?\s+(\S+)"
    return [float(value) for value in re.findall(pattern, page, re.MULTILINE)]


class Engines:
    """Polls engines at their base URLs every two seconds while the block lasts."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.loads = {url: EngineLoad() for url in urls}

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=_INTERVAL_S)
        self._http = aiohttp.ClientSession(timeout=timeout)
        self._task = asyncio.create_task(self._poll_forever(), name="engine-load")
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        await self._http.close()

    async def poll(self) -> list[EngineLoad]:
        """Poll all engines now; returns those that report their queue."""
        await asyncio.gather(*(self._poll(url, load) for url, load in self.loads.items()))
        return [load for load in self.loads.values() if load.waiting is not None]

    async def _poll_forever(self) -> None:
        while True:
            await self.poll()
            await asyncio.sleep(_INTERVAL_S)

    async def _poll(self, url: str, load: EngineLoad) -> None:
        page = ""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
            async with self._http.get(f"{url.rstrip('/')}/metrics") as response:
                page = await response.text() if response.ok else ""
        load.update(page, time.monotonic())


Poll = Callable[[], Awaitable[Sequence[EngineLoad]]]
"""Returns the load of every engine that reports its queue."""


class Admission:
    """A gate before RUN. Without `poll` it is always open."""

    clock: Callable[[], float] = time.monotonic
    every_s = POLL_S

    def __init__(self, poll: Poll | None = None, *, waiting: int = 8, kv: float = 0.95) -> None:
        """Agents wait while more than `waiting` requests are queued or more than `kv` is in use."""
        self._poll, self._waiting, self._kv = poll, waiting, kv
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
        began = self.clock()
        self.waiting += 1
        try:
            async with self._lock:
                while not await self._is_open(poll):  # noqa: ASYNC110 - engines are polled
                    await asyncio.sleep(max(0.0, self._polled + self.every_s - self.clock()))
                self._admissible -= 1
        finally:
            self.waiting -= 1
            self.waited_s += self.clock() - began

    async def _is_open(self, poll: Poll) -> bool:
        if self.clock() - self._polled >= self.every_s:
            self._admissible = self._count_admissible(await poll())
            self._polled = self.clock()
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
