"""Engine load, and admission of new agents by it.

An engine whose queue or KV memory is full slows all agents: turns wait, and prefix caches of
running sessions are evicted. A new agent waits until at least one engine is below its limits (a
session stays with one engine, so one is enough), and each poll admits only as many agents as fit.
Running agents never wait. Agents do not wait for engines that report no load.

The load is read from the engines' Prometheus metrics. The embedded engine reports its busy time;
for other engines, the time since the last poll counts as busy if requests were running.
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
    "vllm:gpu_cache_usage_perc",  # vLLM before 0.10
    "sglang:token_usage",
)
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "tugline:num_requests_running")
_PROMPT_TOKENS = (
    "vllm:prompt_tokens_total",
    "sglang:prompt_tokens_total",
    "tugline:prompt_tokens_total",
)
_SAMPLED_TOKENS = (
    "vllm:generation_tokens_total",
    "sglang:generation_tokens_total",
    "tugline:generation_tokens_total",
)
_FORWARD = ("tugline:forward_seconds_total",)
_NAMES = (*_WAITING, *_KV, *_RUNNING, *_PROMPT_TOKENS, *_SAMPLED_TOKENS, *_FORWARD)
_VALUE = re.compile(rf"^({'|'.join(_NAMES)})(?:\{{.*\}})?\s+(\S+)", re.MULTILINE)
_INTERVAL_S = 2.0
"""Seconds between polls for metrics."""
POLL_S = 0.25
"""Maximum age of the last poll, in seconds, while an agent waits."""
_log = log.get("node.admission")


@dataclass(slots=True)
class EngineLoad:
    """Load of an engine at the last poll, and its busy time."""

    waiting: float | None = None
    """Requests in the queue; None if the engine does not answer or report the number."""
    kv: float | None = None
    """Fraction of the KV memory in use, from 0 to 1; None if not reported."""
    up: bool = False
    running: float = 0.0
    busy_s: float = 0.0
    """Busy seconds since the first poll."""
    prompt_tokens: float | None = None
    """Tokens of all prompts since the engine started; None if not reported."""
    sampled_tokens: float | None = None
    """The same for sampled tokens."""
    _polled: float | None = None
    _forward_s: float | None = None

    def update(self, page: str, now: float) -> None:
        """Update from a metrics page of monotonic time `now`, empty if the engine did not answer.

        A gap between polls counts as at most two intervals of busy time.
        """
        values = [(name, float(value)) for name, value in _VALUE.findall(page)]

        def read(names: Sequence[str]) -> list[float]:
            """Return the values of a metric with one of these names, for all labels."""
            return [value for name, value in values if name in names]

        waiting = read(_WAITING)
        kv = read(_KV)
        running = sum(read(_RUNNING))
        forward = read(_FORWARD)
        if forward:
            total = sum(forward)
            before = self._forward_s
            if before is not None:  # a smaller total means that the engine was restarted
                self.busy_s += total - before if total >= before else total
            self._forward_s = total
        elif running and self._polled is not None:
            self.busy_s += min(now - self._polled, 2 * _INTERVAL_S)
        self.waiting = sum(waiting) if waiting else None
        self.kv = max(kv, default=None)
        self.prompt_tokens = _sum(read(_PROMPT_TOKENS))
        self.sampled_tokens = _sum(read(_SAMPLED_TOKENS))
        self.up = bool(page)
        self.running = running
        self._polled = now if page else None


def _sum(values: Sequence[float]) -> float | None:
    return sum(values) if values else None


class Engines:
    """Polls engines at their base URLs every two seconds during the block."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.loads = {url: EngineLoad() for url in urls}

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=_INTERVAL_S)
        self._http = aiohttp.ClientSession(timeout=timeout)
        self._task = log.start_task(self._poll_forever(), "engine-load")
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        await self._http.close()

    async def poll(self) -> list[EngineLoad]:
        """Poll all engines now; return the loads of those that report their queue."""
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
"""Returns the loads of all engines that report their queue."""


class Admission:
    """Admits sessions to RUN; without `poll` all at once."""

    clock: Callable[[], float] = time.monotonic
    every_s = POLL_S

    def __init__(self, poll: Poll | None = None, *, waiting: int = 8, kv: float = 0.95) -> None:
        """Set the limits: queued requests (`waiting`) and KV memory in use (`kv`) of an engine."""
        self._poll = poll
        self._waiting = waiting
        self._kv = kv
        self._lock = asyncio.Lock()
        self._polled = -math.inf
        self._admissible = 0.0
        """Number of sessions that may be admitted until the next poll."""
        self._reported = True
        self.running = 0
        """Number of running agents."""
        self.waiting = 0
        """Number of waiting sessions."""
        self.waited_s = 0.0
        """Total seconds that sessions have waited."""

    @contextlib.asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Wait until a new agent may start, in the order of arrival; count it in the block."""
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
        """Return the number of new agents that the engines can take until the next poll."""
        if bool(engines) is not self._reported:
            self._reported = bool(engines)
            if engines:
                _log.info("engines report their load")
            else:
                _log.warning("no engine reports its load; no agent waits")
        return sum(map(self._count_for, engines)) if engines else math.inf

    def _count_for(self, engine: EngineLoad) -> float:
        queued = engine.waiting or 0.0
        kv = engine.kv or 0.0
        if kv >= self._kv or queued > self._waiting:
            return 0
        by_queue = self._waiting - queued + 1 if queued else math.inf
        # The number of agents may grow by the same factor as the KV memory in use.
        by_kv = self.running * (self._kv / kv - 1) if kv else math.inf
        return max(1, min(by_queue, by_kv))
