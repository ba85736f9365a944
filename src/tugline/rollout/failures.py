"""Failures of one session.

`classify` maps an error in a stage to its cause and boundary. The table `types.HANDLING` has the
consequences of each cause: retry and reward (I5).
"""

import errno
import shutil
from pathlib import Path
from typing import NamedTuple

from tugline import errors
from tugline.types import HANDLING, Cause, Failure, Status

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
_MIN_FREE = 32 << 20
"""Minimum free bytes; with less, a disk counts as full."""
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_TIMED_STAGES = (Status.INIT, Status.EVAL)
"""Stages with their own timeout; elsewhere a `TimeoutError` comes from a disk or a network."""


class End(NamedTuple):
    """Outcome of a rollout that ended before its last stage."""

    failure: Failure | None
    status: Status = Status.FAILED


class EarlyEnd(Exception):
    """Ends a rollout before its last stage.

    Only `end` is kept: an error in a variable of a frame that it passed through is a cycle.
    """

    def __init__(self, failure: Failure | None, status: Status = Status.FAILED) -> None:
        super().__init__(status)
        self.end = End(failure, status)


def make_failure(cause: Cause, message: str) -> Failure:
    """Return a failure with the boundary of its cause."""
    return Failure(HANDLING[cause].boundary, message, cause)


def make_total_timeout(status: Status) -> Failure:
    """Return the failure of a session whose `total_s` ended in stage `status`."""
    return make_failure(_TIMEOUT_CAUSES[status], f"total_s expired in stage {status.value}")


def classify(status: Status, error: Exception) -> Failure:
    """Return the failure for `error` in stage `status`."""
    if isinstance(error, TimeoutError) and error.errno is None and status in _TIMED_STAGES:
        return make_failure(
            _TIMEOUT_CAUSES[status], f"the time limit of stage {status.value} expired"
        )
    return make_failure(_find_cause(status, error), describe(error))


def classify_recording_error(error: BaseException) -> Failure:
    """Return the failure of a session whose calls cannot be written, read back or built.

    What an agent sent may be the reason, so it says nothing about the node, except for a full disk.
    """
    chain = (error, error.__cause__)
    full = any(isinstance(each, OSError) and each.errno in _DISK_FULL for each in chain)
    return make_failure(Cause.DISK if full else Cause.RECORDING, describe(error))


def describe(error: BaseException) -> str:
    """Return the error's message, with its type unless it is a `TuglineError`."""
    own = isinstance(error, errors.TuglineError)
    return str(error) if own else f"{type(error).__name__}: {error}"


def _find_cause(status: Status, error: Exception) -> Cause:
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return Cause.DISK
    for kind, cause in _CAUSES:
        if isinstance(error, kind):
            return cause
    if isinstance(error, errors.CaptureError):
        return Cause.ENGINE if status is Status.BUILD else Cause.RECORDING
    if isinstance(error, errors.UsageError) and status is Status.INIT:
        return Cause.TASK
    return Cause.EVALUATOR if status is Status.EVAL else Cause.NODE


def check_disk(folder: Path) -> None:
    """Raise `DiskFull` if programs may have failed for lack of disk space."""
    free = shutil.disk_usage(folder).free
    if free < _MIN_FREE:
        msg = f"the disk of {folder} was full when the agent ended ({free >> 20} MB free)"
        raise errors.DiskFull(msg)
