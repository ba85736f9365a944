"""Failure classification: which cause and boundary an error in a stage stands for.

What follows from a cause (retry, reward, quarantine) is the table `types.HANDLING` (I5).
"""

from __future__ import annotations

import errno

from tugline.errors import (
    CaptureError,
    DiskFull,
    EngineError,
    HarnessError,
    ImageError,
    SandboxError,
    SandboxNetworkError,
    TuglineError,
    UsageError,
    WorkspaceError,
)
from tugline.types import HANDLING, Cause, Failure, Status

_CAUSES: tuple[tuple[type[Exception], Cause], ...] = (
    (EngineError, Cause.ENGINE),
    (DiskFull, Cause.DISK),
    (SandboxNetworkError, Cause.NETWORK),
    (ImageError, Cause.IMAGE),
    (WorkspaceError, Cause.WORKSPACE),
    (SandboxError, Cause.SANDBOX),
    (HarnessError, Cause.INSTALL),
)
"""Causes that follow from the error alone; the first match counts."""
_TIMEOUT_CAUSES = {
    Status.INIT: Cause.INIT_TIMEOUT,
    Status.READY: Cause.WAIT_TIMEOUT,
    Status.RUN: Cause.TOTAL_TIMEOUT,
    Status.BUILD: Cause.WAIT_TIMEOUT,
    Status.EVAL: Cause.EVAL_TIMEOUT,
}
_TIMED_STAGES = (Status.INIT, Status.EVAL)
"""Stages with a timeout of ours; elsewhere a `TimeoutError` comes from a disk or a network."""


def make_failure(cause: Cause, message: str) -> Failure:
    """A failure with the boundary of its cause."""
    return Failure(HANDLING[cause].boundary, message, cause)


def make_total_timeout(status: Status) -> Failure:
    """The failure of a session whose `total_s` ended in stage `status`."""
    return make_failure(_TIMEOUT_CAUSES[status], f"total_s was over in {status.value}")


def classify(status: Status, error: Exception, *, recorded: bool = True) -> Failure:
    """The failure for `error` in stage `status`.

    Without `recorded` the session's calls could not be written, which is the node's failure.
    """
    if isinstance(error, TimeoutError) and error.errno is None and status in _TIMED_STAGES:
        return make_failure(_TIMEOUT_CAUSES[status], f"{status.value} was out of time")
    return make_failure(_find_cause(status, error, recorded=recorded), describe(error))


def describe(error: BaseException) -> str:
    """The error's message, with its type unless it is one of ours."""
    return str(error) if isinstance(error, TuglineError) else f"{type(error).__name__}: {error}"


def _find_cause(status: Status, error: Exception, *, recorded: bool) -> Cause:
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return Cause.DISK
    for kind, cause in _CAUSES:
        if isinstance(error, kind):
            return cause
    if isinstance(error, CaptureError) and status is Status.BUILD and recorded:
        return Cause.ENGINE
    if isinstance(error, UsageError) and status is Status.INIT:
        return Cause.TASK
    return Cause.EVALUATOR if status is Status.EVAL else Cause.NODE
