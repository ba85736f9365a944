"""Stage slots, cancellation and timeouts of one session."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from enum import Enum, auto
from pathlib import Path

from tugline.aio import PausableTimeout
from tugline.types import Status

_NO_LIMIT_S = 1e9


class Ending(Enum):
    """Why a session's stages were ended."""

    CANCELLED = auto()
    OUT_OF_TIME = auto()


class ScopeEnded(Exception):
    """Raised in place of the rest of a stage, and of all later stages."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.name)
        self.ending = ending


class CancelScope(PausableTimeout):
    """Ends the current stage of a session on request, or when `total_s` is over.

    The time runs from the first stage on, also between stages, except while paused. The first
    `ending` counts.
    """

    def __init__(self, total_s: float | None = None) -> None:
        super().__init__(_NO_LIMIT_S if total_s is None else total_s)
        self.ending: Ending | None = None
        """Why the scope has ended; None while it has not."""
        self._stages: set[asyncio.Task[object]] = set()
        """Tasks of the stages that are running."""

    def cancel(self) -> None:
        """End the current stage and all later ones; recorded calls are kept."""
        if self.ending is None:
            self.ending = Ending.CANCELLED
            for stage in self._stages:
                stage.cancel()

    def _check(self) -> None:
        if self.ending is not None:
            raise ScopeEnded(self.ending)

    @contextlib.asynccontextmanager
    async def enforce(self) -> AsyncIterator[None]:
        """Raise `ScopeEnded` in the block once the scope is cancelled or `total_s` is over."""
        self._check()
        stage = asyncio.current_task()
        if stage is None:
            raise RuntimeError("a stage runs in a task")
        others = stage.cancelling()
        self._stages.add(stage)
        try:
            async with super().enforce():
                yield
        except asyncio.CancelledError as error:
            if self.ending is Ending.CANCELLED and stage.cancelling() == others + 1:
                raise ScopeEnded(self.ending) from error
            raise  # the whole task was cancelled
        except TimeoutError as error:
            if self.ending is None and self.expired:
                self.ending = Ending.OUT_OF_TIME
                raise ScopeEnded(self.ending) from error
            raise
        finally:
            self._stages.discard(stage)
            if self.ending is Ending.CANCELLED:
                stage.uncancel()


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
