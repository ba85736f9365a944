"""Sessions and their status."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Status(StrEnum):
    """State of a session. `TRANSITIONS` lists allowed successors, `TERMINAL` the final states."""

    QUEUED = "queued"
    INIT = "init"
    READY = "ready"
    RUN = "run"
    BUILD = "build"
    EVAL = "eval"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


TERMINAL = frozenset({Status.COMPLETED, Status.FAILED, Status.TIMED_OUT, Status.CANCELLED})
_ENDS = frozenset({Status.FAILED, Status.TIMED_OUT, Status.CANCELLED})
TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.QUEUED: frozenset({Status.INIT}) | _ENDS,
    Status.INIT: frozenset({Status.READY, Status.QUEUED}) | _ENDS,
    Status.READY: frozenset({Status.RUN, Status.QUEUED}) | _ENDS,
    Status.RUN: frozenset({Status.BUILD, Status.QUEUED}) | _ENDS,
    Status.BUILD: frozenset({Status.EVAL, Status.QUEUED}) | _ENDS,
    Status.EVAL: frozenset({Status.COMPLETED, Status.QUEUED}) | _ENDS,
    **{status: frozenset() for status in TERMINAL},
}
"""A lost lease returns any running state to QUEUED."""


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one sample of a task. `epoch` fences results of lost leases."""

    id: str
    task: str
    sample: int
    attempt: int = 0
    epoch: int = 0
    status: Status = Status.QUEUED
