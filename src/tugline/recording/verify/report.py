"""The results of verifying sessions.

`VerifyVerdict.UNCHECKED` marks a check that could not be made, with a reason; it never passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from tugline.traces.lineage import Continuation


class VerifyVerdict(StrEnum):
    """The result of a check."""

    PASS = "pass"  # noqa: S105 - a verdict
    FAIL = "fail"
    UNCHECKED = "unchecked"


class VerifyCheck(msgspec.Struct, frozen=True):
    """One property of a session."""

    verdict: VerifyVerdict
    detail: str = ""


class CallReport(msgspec.Struct, kw_only=True):
    """One call. Log probabilities are in nats; None where the engine was not asked."""

    call: int
    continuation: Continuation
    detail: str = ""
    """Reasons for the continuation."""
    prompt: int
    """Ids in the prompt."""
    shared: int
    """Of those, how many are the parent's."""
    sampled: int
    faults: list[str] = []
    """One line each."""
    scored: int = 0
    """Sampled tokens whose log probability was recomputed."""
    max_dlogprob: float | None = None
    """Largest difference of a captured and a recomputed log probability."""
    mean_dlogprob: float | None = None
    """Mean of the absolute differences."""
    kl: float | None = None
    """Mean of captured minus recomputed: an unbiased estimate, which may be negative."""
    kl3: float | None = None
    """Mean of ``exp(-d) - 1 + d`` for these differences `d`: less variance, never negative."""


class SessionReport(msgspec.Struct, kw_only=True):
    """One session. If `error` is set the recording could not be read and the rest is empty."""

    session: str
    recording: str
    """Path of the file."""
    error: str | None = None
    turns: list[CallReport] = []
    checks: dict[str, VerifyCheck] = {}
    notes: list[str] = []

    @property
    def failed(self) -> bool:
        """Whether the recording is unreadable or a check failed."""
        failures = (check.verdict is VerifyVerdict.FAIL for check in self.checks.values())
        return self.error is not None or any(failures)


def check_result(faults: list[str], detail: str = "") -> VerifyCheck:
    """Return a passed check with `detail`, or a failed one with the first fault and their count."""
    if not faults:
        return VerifyCheck(VerifyVerdict.PASS, detail)
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return VerifyCheck(VerifyVerdict.FAIL, faults[0] + more)


class VerifySummary(msgspec.Struct, kw_only=True):
    """All sessions together; means are over tokens."""

    sessions: int
    failed: int
    """Sessions with a failed check, and unreadable ones."""
    unreadable: int
    turns: dict[str, int]
    """Calls by continuation."""
    checks: dict[str, int]
    """Checks by verdict."""
    scored: int
    """Sampled tokens whose log probability was recomputed."""
    max_dlogprob: float | None
    mean_dlogprob: float | None
    kl: float | None
    kl3: float | None


def summarize(reports: Sequence[SessionReport]) -> VerifySummary:
    """Add up the reports of sessions."""
    turns = [turn for report in reports for turn in report.turns]
    scored = [turn for turn in turns if turn.scored]
    verdicts = [check.verdict for report in reports for check in report.checks.values()]
    return VerifySummary(
        sessions=len(reports),
        failed=sum(report.failed for report in reports),
        unreadable=sum(report.error is not None for report in reports),
        turns={kind: sum(turn.continuation is kind for turn in turns) for kind in Continuation},
        checks={verdict: verdicts.count(verdict) for verdict in VerifyVerdict},
        scored=sum(turn.scored for turn in scored),
        max_dlogprob=max((turn.max_dlogprob or 0.0 for turn in scored), default=None),
        mean_dlogprob=_weighted_mean([(turn.mean_dlogprob, turn.scored) for turn in scored]),
        kl=_weighted_mean([(turn.kl, turn.scored) for turn in scored]),
        kl3=_weighted_mean([(turn.kl3, turn.scored) for turn in scored]),
    )


def _weighted_mean(values: Sequence[tuple[float | None, int]]) -> float | None:
    count = sum(weight for _, weight in values)
    return sum((value or 0.0) * weight for value, weight in values) / count if count else None
