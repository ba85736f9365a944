"""Which states may follow each state of a session."""

from __future__ import annotations

from tugline.types import TERMINAL, Status

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
