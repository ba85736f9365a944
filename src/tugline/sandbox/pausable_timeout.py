"""A timeout that can be paused: time an agent waits through no fault of its own is not charged.

While weights are swapped no model call is answered, and a timeout that kept running would end
agents for having waited. Times are those of the running event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator


class PausableTimeout:
    """`limit_s` seconds that pass only while the timeout is not paused."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._elapsed = 0.0
        self._running_since: float | None = None
        """When it last began to run; None before its first use and while it is paused."""
        self._paused = False
        self._timeouts: set[asyncio.Timeout] = set()

    @property
    def elapsed(self) -> float:
        """Seconds that have been charged."""
        since = self._running_since
        return self._elapsed + (time.monotonic() - since if since is not None else 0.0)

    def pause(self) -> None:
        """Stop charging time; pausing twice changes nothing."""
        self._elapsed = self.elapsed
        self._running_since = None
        self._paused = True
        self._reschedule(None)

    def resume(self) -> None:
        """Charge time again."""
        self._paused = False
        if self._timeouts:
            self._start()

    @contextlib.asynccontextmanager
    async def enforce(self) -> AsyncIterator[None]:
        """Raise `TimeoutError` in the block once the time is over. Runs from its first use on."""
        async with asyncio.timeout(None) as timeout:
            self._timeouts.add(timeout)
            try:
                if not self._paused:
                    self._start()
                yield
            finally:
                self._timeouts.discard(timeout)

    def _start(self) -> None:
        if self._running_since is None:
            self._running_since = time.monotonic()
        self._reschedule(asyncio.get_running_loop().time() + self.limit_s - self.elapsed)

    def _reschedule(self, when: float | None) -> None:
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(when)


def enforce_timeout(
    timeout: float | PausableTimeout,
) -> contextlib.AbstractAsyncContextManager[object]:
    """Raise `TimeoutError` in the block after so many seconds, or when the timeout expires."""
    return timeout.enforce() if isinstance(timeout, PausableTimeout) else asyncio.timeout(timeout)
