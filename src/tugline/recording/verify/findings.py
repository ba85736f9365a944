"""What verifying a session finds: a status per turn, and a verdict per check.

A check that could not be made says so (`Verdict.UNCHECKED`) and why; it never counts as passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec


class Seam(StrEnum):
    """How a call's prompt goes on from the call before it."""

    EXACT = "exact"
    """Id for id, or it begins a conversation."""
    HEALED = "healed"
    """Id for id, although the harness wrote the answer down otherwise."""
    FORKED = "forked"
    """It does not, and the record says why."""
    BROKEN = "broken"
    """It does not, and the record says that it does."""
    UNTOLD = "untold"
    """The engine told no ids."""


class Verdict(StrEnum):
    """How a check ended."""

    PASS = "pass"  # noqa: S105 - a verdict
    FAIL = "fail"
    UNCHECKED = "unchecked"


class Check(msgspec.Struct, frozen=True):
    """One property of a session."""

    verdict: Verdict
    detail: str = ""


class Turn(msgspec.Struct, kw_only=True):
    """One call. Log probabilities are in nats; None where the engine was not asked."""

    call: int
    status: Seam
    why: str = ""
    prompt: int
    """Ids asked with."""
    shared: int
    """Of those, how many are the parent's own."""
    sampled: int
    faults: list[str] = []
    """What is wrong with it, one line each."""
    scored: int = 0
    """Sampled tokens whose log probability was recomputed."""
    max_dlogprob: float | None = None
    """Largest difference of a captured and a recomputed log probability."""
    mean_dlogprob: float | None = None
    """Mean of the absolute differences."""
    kl: float | None = None
    """Mean of captured minus recomputed: an unbiased estimate, which may be negative."""
    kl3: float | None = None
    """Mean of ``exp(-d) - 1 + d`` for these differences `d`: less noisy, never negative."""


class SessionReport(msgspec.Struct, kw_only=True):
    """One session. `error` is set where its recording cannot be read; then nothing else is."""

    session: str
    recording: str
    error: str | None = None
    turns: list[Turn] = []
    checks: dict[str, Check] = {}
    notes: list[str] = []
    """What a reader should know beside the verdicts."""

    @property
    def failed(self) -> bool:
        """Whether anything is wrong."""
        found = (check.verdict is Verdict.FAIL for check in self.checks.values())
        return self.error is not None or any(found)


def settled(faults: list[str], passed: str = "") -> Check:
    """A check that passes if there are no faults; else it tells the first and how many."""
    if not faults:
        return Check(Verdict.PASS, passed)
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return Check(Verdict.FAIL, faults[0] + more)


class Total(msgspec.Struct, kw_only=True):
    """All sessions together."""

    sessions: int
    failed: int
    """Sessions with anything wrong, unreadable ones included."""
    unreadable: int
    turns: dict[str, int]
    """By status."""
    checks: dict[str, int]
    """By verdict."""
    scored: int
    """Sampled tokens whose log probability was recomputed."""
    max_dlogprob: float | None
    mean_dlogprob: float | None
    kl: float | None
    kl3: float | None


def total(judged: Sequence[SessionReport]) -> Total:
    """Sums over sessions; means are over tokens."""
    turns = [turn for one in judged for turn in one.turns]
    scored = [turn for turn in turns if turn.scored]
    verdicts = [check.verdict for one in judged for check in one.checks.values()]
    return Total(
        sessions=len(judged),
        failed=sum(one.failed for one in judged),
        unreadable=sum(one.error is not None for one in judged),
        turns={status: sum(turn.status is status for turn in turns) for status in Seam},
        checks={verdict: verdicts.count(verdict) for verdict in Verdict},
        scored=sum(turn.scored for turn in scored),
        max_dlogprob=max((turn.max_dlogprob or 0.0 for turn in scored), default=None),
        mean_dlogprob=_mean([(turn.mean_dlogprob, turn.scored) for turn in scored]),
        kl=_mean([(turn.kl, turn.scored) for turn in scored]),
        kl3=_mean([(turn.kl3, turn.scored) for turn in scored]),
    )


def _mean(values: Sequence[tuple[float | None, int]]) -> float | None:
    """Of values that each stand for so many tokens."""
    count = sum(weight for _, weight in values)
    return sum((value or 0.0) * weight for value, weight in values) / count if count else None
