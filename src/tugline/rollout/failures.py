"""What is to blame when a stage fails: from where it happened and what kind of error it was.

The table of what follows is `types.HANDLING` (I5).
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

_KINDS: tuple[tuple[type[Exception], Cause], ...] = (
    (EngineError, Cause.ENGINE),
    (DiskFull, Cause.DISK),
    (SandboxNetworkError, Cause.NETWORK),
    (ImageError, Cause.IMAGE),
    (WorkspaceError, Cause.WORKSPACE),
    (SandboxError, Cause.SANDBOX),
    (HarnessError, Cause.INSTALL),
)
"""The first that fits, wherever it happened."""
_OUT_OF_TIME = {
    Status.INIT: Cause.INIT_TIMEOUT,
    Status.READY: Cause.WAIT_TIMEOUT,
    Status.RUN: Cause.TOTAL_TIMEOUT,
    Status.BUILD: Cause.WAIT_TIMEOUT,
    Status.EVAL: Cause.EVAL_TIMEOUT,
}
_CLOCKED = (Status.INIT, Status.EVAL)
"""Stages that end by a `TimeoutError` of ours; elsewhere one is a disk's or a network's."""


def blamed(cause: Cause, message: str) -> Failure:
    """A failure with the boundary that belongs to its cause."""
    return Failure(HANDLING[cause].boundary, message, cause)


def halted(status: Status) -> Failure:
    """The failure of a session whose `total_s` was over in a stage."""
    return blamed(_OUT_OF_TIME[status], f"total_s was over in {status.value}")


def failure_of(status: Status, error: Exception, *, kept: bool = True) -> Failure:
    """Whose failure it is. Without `kept`, what was captured is lost, and that is the node's."""
    if isinstance(error, TimeoutError) and error.errno is None and status in _CLOCKED:
        return blamed(_OUT_OF_TIME[status], f"{status.value} was out of time")
    said = str(error) if isinstance(error, TuglineError) else f"{type(error).__name__}: {error}"
    return blamed(_cause(status, error, kept=kept), said)


def _cause(status: Status, error: Exception, *, kept: bool) -> Cause:
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return Cause.DISK
    for kind, cause in _KINDS:
        if isinstance(error, kind):
            return cause
    if isinstance(error, CaptureError) and status is Status.BUILD and kept:
        return Cause.ENGINE
    if isinstance(error, UsageError) and status is Status.INIT:
        return Cause.TASK
    return Cause.EVALUATOR if status is Status.EVAL else Cause.NODE
