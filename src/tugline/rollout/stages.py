"""Stage slots, cancellation, timeouts and failures of one session.

`classify` maps an error in a stage to its cause and boundary. The table `types.HANDLING` has the
consequences of each cause: retry, reward, quarantine (I5).
"""

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from tugline import errors
from tugline.evaluators.plain import plain_text
from tugline.sandbox.base import PausableTimeout
from tugline.types import HANDLING, Cause, Failure, Status

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

    def pause_timeout(self, *, paused: bool) -> None:
        """Pause the agent's timeout, as when no model call is answered, or resume it."""
        self.paused = paused
        (self.agent_timeout.pause if paused else self.agent_timeout.resume)()


@contextlib.contextmanager
def reject_foreign_cancellation() -> Iterator[None]:
    """Raise `RuntimeError` for a `CancelledError` that a plug-in raised by itself.

    Only a request to this task is a cancellation, such as an order or a timeout.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("CancelledError was raised, but nothing was cancelled") from error


# --------------------------------------------------------------------------- failures
_CAUSES: tuple[tuple[type[Exception], Cause], ...] = (
    (errors.EngineError, Cause.ENGINE),
    (errors.DiskFull, Cause.DISK),
    (errors.SandboxNetworkError, Cause.NETWORK),
    (errors.ImageError, Cause.IMAGE),
    (errors.WorkspaceError, Cause.WORKSPACE),
    (errors.SandboxError, Cause.SANDBOX),
    (errors.HarnessError, Cause.INSTALL),
)
"""Causes by type of error in any stage; the first match counts."""
_TIMEOUT_CAUSES = {
    Status.INIT: Cause.INIT_TIMEOUT,
    Status.READY: Cause.WAIT_TIMEOUT,
    Status.RUN: Cause.TOTAL_TIMEOUT,
    Status.BUILD: Cause.WAIT_TIMEOUT,
    Status.EVAL: Cause.EVAL_TIMEOUT,
}
_TIMED_STAGES = (Status.INIT, Status.EVAL)
"""Stages with their own timeout; elsewhere a `TimeoutError` comes from a disk or a network."""


def make_failure(cause: Cause, message: str) -> Failure:
    """Return a failure with the boundary of its cause."""
    return Failure(HANDLING[cause].boundary, plain_text(message), cause)


def make_total_timeout(status: Status) -> Failure:
    """Return the failure of a session whose `total_s` ended in stage `status`."""
    return make_failure(_TIMEOUT_CAUSES[status], f"total_s was over in {status.value}")


def classify(status: Status, error: Exception, *, recorded: bool = True) -> Failure:
    """Return the failure for `error` in stage `status`.

    `recorded` is False if the session's calls could not be written, which is the node's failure.
    """
    if isinstance(error, TimeoutError) and error.errno is None and status in _TIMED_STAGES:
        return make_failure(_TIMEOUT_CAUSES[status], f"{status.value} was out of time")
    return make_failure(_find_cause(status, error, recorded=recorded), describe(error))


def describe(error: BaseException) -> str:
    """Return the error's message, with its type unless it is a `TuglineError`."""
    own = isinstance(error, errors.TuglineError)
    return plain_text(str(error) if own else f"{type(error).__name__}: {error}")


def _find_cause(status: Status, error: Exception, *, recorded: bool) -> Cause:
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return Cause.DISK
    for kind, cause in _CAUSES:
        if isinstance(error, kind):
            return cause
    if isinstance(error, errors.CaptureError) and status is Status.BUILD and recorded:
        return Cause.ENGINE
    if isinstance(error, errors.UsageError) and status is Status.INIT:
        return Cause.TASK
    return Cause.EVALUATOR if status is Status.EVAL else Cause.NODE
