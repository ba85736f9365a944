"""The result of a session."""

from __future__ import annotations

from typing import Any

import msgspec

from tugline.types.failure import Failure
from tugline.types.session import Status
from tugline.types.trace import Ledger, Trace


class Reward(msgspec.Struct, frozen=True):
    """The outcome of a session, and its named parts."""

    value: float
    parts: dict[str, float] = {}
    per_trace: tuple[float, ...] = ()
    """One value per trace, where the evaluator scores traces; else empty."""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one session: traces, reward, ledger and timings."""

    session: str
    task: str
    sample: int
    status: Status
    traces: tuple[Trace, ...]
    ledger: Ledger
    reward: Reward | None = None
    """None if the session failed for a reason that does not count for the policy."""
    report: dict[str, Any] = {}
    """Details from the evaluator."""
    failure: Failure | None = None
    seconds: dict[str, float] = {}
    """Wall-clock seconds per stage."""
