"""A time limit that can stand still: what an agent waits for through no fault of its own is free.

While weights are swapped no model call is answered; a limit that went on would end agents for
having waited. Whoever stops the calls holds the clocks, and every `limit` in force moves with its
clock. Times are those of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator


class PausableTimeout:
    """`limit_s` seconds that pass only while nobody holds it."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._spent = 0.0
        self._since: float | None = None
        """When it last began to tick; None before its first limit and while it is held."""
        self._held = False
        self._limits: set[asyncio.Timeout] = set()

    @property
    def spent(self) -> float:
        """Seconds that have passed on it."""
        running = time.monotonic() - self._since if self._since is not None else 0.0
        return self._spent + running

    def hold(self) -> None:
        """Stand still; holding a held clock changes nothing."""
        self._held, self._spent, self._since = True, self.spent, None
        self._move(None)

    def go(self) -> None:
        """Tick again."""
        self._held = False
        if self._limits:
            self._start()

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Raises `TimeoutError` when the time is over; the clock ticks from the first entry on."""
        async with asyncio.timeout(None) as limit:
            self._limits.add(limit)
            try:
                if not self._held:
                    self._start()
                yield
            finally:
                self._limits.discard(limit)

    def _start(self) -> None:
        if self._since is None:
            self._since = time.monotonic()
        self._move(asyncio.get_running_loop().time() + self.limit_s - self.spent)

    def _move(self, ends: float | None) -> None:
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(ends)


def limit(time_s: float | PausableTimeout) -> contextlib.AbstractAsyncContextManager[object]:
    """Raises `TimeoutError` after so many seconds, or when the clock says so."""
    return time_s.limit() if isinstance(time_s, PausableTimeout) else asyncio.timeout(time_s)
