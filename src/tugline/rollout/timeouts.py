"""How one session is led through its stages: where it waits, what ends it, what is on a clock.

`Course` by itself leads a session that is alone: nothing waits. A node overrides `place` with its
pools (`stages.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from tugline.sandbox.pausable_timeout import PausableTimeout
from tugline.types import Status


class CancelScope:
    """Ends the stages of a session: when somebody asks for it, and when `total_s` is over."""

    def __init__(self, total_s: float | None = None) -> None:
        self.pulled = False
        self.over = False
        """Whether it was the time that ended it."""
        self._ends = None if total_s is None else time.monotonic() + total_s
        self._limits: set[asyncio.Timeout] = set()

    def pull(self) -> None:
        """End what the session is doing; what was captured is kept."""
        self.pulled = True
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(now)

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Raises `TimeoutError` when it is pulled; then, `pulled` is true."""
        left = None if self._ends is None else self._ends - time.monotonic()
        async with asyncio.timeout(0 if self.pulled else left) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)
                if limit.expired() and not self.pulled:
                    self.pulled = self.over = True


class Course:
    """The way of a session that is alone."""

    def __init__(
        self, total_s: float | None = None, spares: asyncio.Semaphore | None = None
    ) -> None:
        self.halt = CancelScope(total_s)
        self.spares = spares
        """How many boxes may wait for evaluators at once; None: as many as there are sessions."""
        self.log: Path | None = None
        """Where the agent's output goes, once its box is there."""
        self._clock: PausableTimeout | None = None
        self._held = False

    def place(self, status: Status) -> AbstractAsyncContextManager[None]:
        """A place in a stage, for as long as the block lasts; entering may wait."""
        return contextlib.nullcontext()

    def clock(self, limit_s: float) -> PausableTimeout:
        """The agent's clock."""
        self._clock = PausableTimeout(limit_s)
        self.hold(held=self._held)
        return self._clock

    def hold(self, *, held: bool) -> None:
        """Stop the agent's clock while no model call is answered, or let it go on."""
        self._held = held
        if self._clock is not None:
            (self._clock.pause if held else self._clock.resume)()
