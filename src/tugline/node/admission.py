"""Hold new agents while the engine has more than enough to do; those that run are never held.

An engine whose queue or KV memory is full serves every agent worse: turns wait, and caches of
running sessions are pushed out. A new agent waits until at least one engine is below its marks
(sessions stay with one engine, so one is enough), and each look lets in only as many as fit. The
engines are asked only while somebody waits. An engine that does not tell is no reason to stand
still: the gate is open then, with a warning.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple

import aiohttp

from tugline import log

_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "tugline:num_requests_waiting")
_KV = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",  # its name before vLLM 0.10
    "sglang:token_usage",
)
LOOK_S = 0.25
"""How old the last look may be."""
_ANSWER_S = 2.0
_log = log.get("node.admission")


class Pressure(NamedTuple):
    """How busy an engine is."""

    waiting: float
    """Requests in its queue."""
    kv: float
    """Share of its KV memory in use, from 0 to 1; 0 where it does not say."""


Look = Callable[[], Awaitable[Sequence[Pressure]]]
"""The pressure of every engine that answered."""


def pressure(page: str) -> Pressure | None:
    """What an engine's Prometheus page says; None if it names no queue."""
    waiting, kv = _values(page, _WAITING), _values(page, _KV)
    if not waiting:
        return None
    return Pressure(sum(waiting), max(kv, default=0.0))


def _values(page: str, names: Sequence[str]) -> list[float]:
    pattern = rf"^(?:{'|'.join(names)})(?:\{{.*\}})?\s+(\S+)"
    return [float(value) for value in re.findall(pattern, page, re.MULTILINE)]


class Engines:
    """Reads the metrics of engines at their base URLs."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls

    async def __call__(self) -> Sequence[Pressure]:
        """Those that answer within two seconds."""
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            found = await asyncio.gather(*(self._one(http, url) for url in self._urls))
        return [one for one in found if one is not None]

    async def _one(self, http: aiohttp.ClientSession, url: str) -> Pressure | None:
        try:
            async with http.get(f"{url.rstrip('/')}/metrics") as answer:
                return pressure(await answer.text()) if answer.ok else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None


class Admission:
    """A gate before RUN. Without `look` it is always open."""

    def __init__(
        self,
        look: Look | None = None,
        *,
        waiting: int = 8,
        kv: float = 0.95,
        every_s: float = LOOK_S,
    ) -> None:
        """Holds while more than `waiting` requests are queued or more than `kv` is in use."""
        self._look, self._waiting, self._kv, self._every_s = look, waiting, kv, every_s
        self._lock = asyncio.Lock()
        self._looked = -math.inf
        self._left = 0.0
        """Sessions that may still pass on the strength of the last look."""
        self._told = True
        self.inside = 0
        """Agents that were let in and run."""
        self.held = 0
        """Sessions that wait right now."""
        self.held_s = 0.0
        """How long sessions have waited in all."""

    @contextlib.asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Enter when a new agent may start; the first that asks is the first to go."""
        if self._look is not None:
            await self._wait(self._look)
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    async def _wait(self, look: Look) -> None:
        began = time.monotonic()
        self.held += 1
        try:
            async with self._lock:
                while not await self._open(look):  # noqa: ASYNC110 - engines are asked
                    await asyncio.sleep(max(0.0, self._looked + self._every_s - time.monotonic()))
                self._left -= 1
        finally:
            self.held -= 1
            self.held_s += time.monotonic() - began

    async def _open(self, look: Look) -> bool:
        if time.monotonic() - self._looked >= self._every_s:
            self._left = self._fits(await look())
            self._looked = time.monotonic()
        return self._left >= 1

    def _fits(self, engines: Sequence[Pressure]) -> float:
        """How many new agents the engines can take until the next look."""
        if bool(engines) is not self._told:
            self._told = bool(engines)
            say = _log.info if engines else _log.warning
            say("engines tell their load" if engines else "no engine tells its load; none is held")
        if not engines:
            return math.inf
        return sum(map(self._fits_in, engines))

    def _fits_in(self, engine: Pressure) -> float:
        if engine.kv >= self._kv or engine.waiting > self._waiting:
            return 0
        by_queue = self._waiting - engine.waiting + 1 if engine.waiting else math.inf
        # Agents of this node may become more by the share by which the memory in use may grow.
        by_kv = self.inside * (self._kv / engine.kv - 1) if engine.kv else math.inf
        return max(1, min(by_queue, by_kv))
