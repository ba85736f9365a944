"""Stage slots, cancellation and timeouts of one session."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from tugline.sandbox.base import PausableTimeout
from tugline.types import Status

_NO_LIMIT_S = 1e9


class CancelScope(PausableTimeout):
    """Ends the current stage of a session on request, or when `total_s` is over.

    The time runs from the first stage on, also between stages, except while paused.
    """

    def __init__(self, total_s: float | None = None) -> None:
        super().__init__(_NO_LIMIT_S if total_s is None else total_s)
        self.cancelled = False
        self.timed_out = False
        """Whether the scope ended because `total_s` was over."""

    def cancel(self) -> None:
        """End the current stage and all later ones; recorded calls are kept."""
        self.cancelled = True
        self.limit_s = 0.0
        self.resume()

    @contextlib.asynccontextmanager
    async def enforce(self) -> AsyncIterator[None]:
        """Raise `TimeoutError` in the block once the scope is cancelled or `total_s` is over."""
        try:
            async with super().enforce():
                yield
        except TimeoutError:
            if not self.cancelled and self.elapsed >= self.limit_s:
                self.cancelled = self.timed_out = True
            raise


class StageSlots:
    """Slots and timeouts of one session. This base class never waits; a node's subclass does."""

    def __init__(self, total_s: float | None = None, *, eval_grace_s: float = 10.0) -> None:
        """Create slots; an evaluator is cancelled `eval_grace_s` after its own timeout."""
        self.cancel_scope = CancelScope(total_s)
        self.eval_grace_s = eval_grace_s
        self.agent_log: Path | None = None
        """File of the agent's output, once its sandbox is open."""
        self.paused = False
        self.agent_timeout = PausableTimeout(_NO_LIMIT_S)

    def acquire(self, status: Status) -> AbstractAsyncContextManager[None]:
        """Hold a slot of a stage during the block; entering it may wait."""
        return contextlib.nullcontext()

    def start_agent_timeout(self, limit_s: float) -> PausableTimeout:
        """Set and return the timeout of RUN, which `pause_timeout` may have paused."""
        self.agent_timeout.limit_s = limit_s
        return self.agent_timeout

    def note_waits(self, waited_s: float, seconds: float) -> None:
        """Take notice of an evaluation that waited for a processor for `waited_s` of `seconds`."""

    def pause_timeout(self, *, paused: bool) -> None:
        """Pause the agent's timeout, as when no model call is answered, or resume it."""
        self.paused = paused
        (self.agent_timeout.pause if paused else self.agent_timeout.resume)()
