"""The load of a node's engines, read from their Prometheus pages.

Queue and KV memory decide whether new agents start (`admission`). The time in which an engine works
is counted by the embedded engine itself; for the others the time since the last poll counts if
requests ran.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import aiohttp

_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "tugline:num_requests_waiting")
_KV = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",  # its name before vLLM 0.10
    "sglang:token_usage",
)
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "tugline:num_requests_running")
_FORWARD = ("tugline:forward_seconds_total",)
_INTERVAL_S = 2.0


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
        """Read a metrics page at monotonic time `now`. A gap of many polls counts as two."""
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
        self.up, self.running, self._polled = True, running, now

    def mark_down(self) -> None:
        """It did not answer."""
        self.up, self.running, self.waiting, self._polled = False, 0.0, None, None


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
        if page:
            load.update(page, time.monotonic())
        else:
            load.mark_down()
