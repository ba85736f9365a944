"""Stage slots, cancellation and timeouts of one session."""

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
    """Ends the current stage of a session on request, or when `total_s` is over."""

    def __init__(self, total_s: float | None = None) -> None:
        self.cancelled = False
        self.timed_out = False
        """Whether `total_s` was the reason."""
        self._deadline = None if total_s is None else time.monotonic() + total_s
        self._timeouts: set[asyncio.Timeout] = set()

    def cancel(self) -> None:
        """End the current stage and every later one; recorded calls are kept."""
        self.cancelled = True
        now = asyncio.get_running_loop().time()
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(now)

    @contextlib.asynccontextmanager
    async def enforce(self) -> AsyncIterator[None]:
        """Raise `TimeoutError` in the block once the scope is cancelled or `total_s` is over."""
        left = None if self._deadline is None else self._deadline - time.monotonic()
        async with asyncio.timeout(0 if self.cancelled else left) as timeout:
            self._timeouts.add(timeout)
            try:
                yield
            finally:
                self._timeouts.discard(timeout)
                if timeout.expired() and not self.cancelled:
                    self.cancelled = self.timed_out = True


class StageSlots:
    """Slots and timeouts of one session. This base class never waits; a node's has pools."""

    def __init__(
        self,
        total_s: float | None = None,
        *,
        prewarm: asyncio.Semaphore | None = None,
        install_s: float = 1800.0,
        eval_grace_s: float = 10.0,
    ) -> None:
        """`prewarm` limits the sandboxes opened ahead of evaluations; None: no limit.

        `install_s` limits a harness's first installation; an evaluator that has not ended
        `eval_grace_s` after its own timeout is cancelled.
        """
        self.cancel_scope = CancelScope(total_s)
        self.prewarm, self.install_s, self.eval_grace_s = prewarm, install_s, eval_grace_s
        self.agent_log: Path | None = None
        """File of the agent's output, once its sandbox is open."""
        self.paused = False
        self._agent_timeout: PausableTimeout | None = None

    def acquire(self, status: Status) -> AbstractAsyncContextManager[None]:
        """Hold a slot of a stage for the block; entering may wait."""
        return contextlib.nullcontext()

    def start_agent_timeout(self, limit_s: float) -> PausableTimeout:
        """The timeout of RUN, paused if `pause_timeout` says so."""
        self._agent_timeout = PausableTimeout(limit_s)
        self.pause_timeout(paused=self.paused)
        return self._agent_timeout

    def pause_timeout(self, *, paused: bool) -> None:
        """Pause the agent's timeout while no model call is answered, or resume it."""
        self.paused = paused
        if self._agent_timeout is not None:
            (self._agent_timeout.pause if paused else self._agent_timeout.resume)()
