"""Figures of the demo: one `Step` per training step, one `RunSummary` at the end.

They are stored as they are shown, so the picture can be drawn again from the files. A pass rate is
always stored with its number of attempts.
"""

from __future__ import annotations

import math

import msgspec

from tugline.types import Ledger


class Score(msgspec.Struct, frozen=True):
    """`passed` of `n` attempts."""

    passed: int
    n: int

    @property
    def rate(self) -> float:
        """Share that passed; NaN without attempts."""
        return self.passed / self.n if self.n else math.nan


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One training step: its sessions, then its updates."""

    step: int
    """From 1."""
    reward: float
    """Mean reward of the step's sessions."""
    pass_rate: float
    """Share of the step's sessions whose task was solved."""
    tokens: int
    """Sampled tokens of the step."""
    ledger: Ledger
    """Trained, masked and dropped tokens of the step, including those the trainer left out."""
    sessions_per_s: float
    engine_busy: float
    """Share of the rollout time in which the engine was computing, 0 to 1."""
    updates: int
    """Optimizer updates of the step; 0 if no group had a signal."""
    max_abs_dlogprob: float | None
    """Largest difference of a captured and a recomputed logprob, nats; None if not measured."""
    seconds: float
    """Wall clock of the step."""


class BuilderCost(msgspec.Struct, frozen=True, kw_only=True):
    """Training cost of the same sessions with one builder."""

    builder: str
    sessions: int
    traces: int
    updates: int
    tokens_trained: int
    tokens_forwarded: int
    seconds: float


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a whole run."""

    before: Score
    """Held-out tasks, first weights, one attempt each."""
    after: Score
    """The same tasks and random draws, last weights."""
    seed: int
    steps: int
    updates: int
    sessions: int
    """All sessions, evaluations included."""
    failed_sessions: int
    """Sessions that failed for a reason other than the policy."""
    ledger: Ledger
    """All sampled tokens; those of evaluations are dropped as `held_out`."""
    tokens_forwarded: int
    """Positions that the trainer computed with gradient."""
    training_s: float
    """Seconds in the trainer."""
    max_abs_dlogprob: float | None
    """Largest distance between a captured and a recomputed logprob over all steps, nats."""
    seconds: float
    harness: str
    harness_version: str
    model: str
    """Architecture and size, as text."""
    builder: str
    builders: tuple[BuilderCost, ...] = ()
    """Cost of each builder on the sessions of the last step."""

    def to_dict(self) -> dict[str, object]:
        """Return the flat form for ``tugline demo --json`` and ``summary.json``."""
        return {
            "harness": self.harness,
            "harness_version": self.harness_version,
            "model": self.model,
            "seed": self.seed,
            "pass_before": self.before.rate,
            "pass_after": self.after.rate,
            "ci_before": wilson(self.before.passed, self.before.n),
            "ci_after": wilson(self.after.passed, self.after.n),
            "held_out": self.before.n,
            "sessions": self.sessions,
            "failed_sessions": self.failed_sessions,
            "steps": self.steps,
            "updates": self.updates,
            "seconds": self.seconds,
            "ledger": {
                "sampled": self.ledger.sampled,
                "trained": self.ledger.trained,
                "masked": sum(self.ledger.masked.values()),
                "dropped": sum(self.ledger.dropped.values()),
                "masked_by_reason": self.ledger.masked,
                "dropped_by_reason": self.ledger.dropped,
            },
            "tokens_trained": self.ledger.trained,
            "tokens_forwarded": self.tokens_forwarded,
            "training_seconds": self.training_s,
            "replay_max_abs_dlogprob": self.max_abs_dlogprob,
            "builder": self.builder,
            "builders": msgspec.to_builtins(self.builders),
        }


def wilson(passed: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval for a pass rate, 95 % by default; (0, 1) without attempts.

    Unlike the normal approximation it stays within 0 and 1 and holds for few attempts
    (E. B. Wilson 1927, J. Am. Stat. Assoc. 22, 209).
    """
    if n == 0:
        return 0.0, 1.0
    rate, spread = passed / n, z * z / n
    centre = rate + spread / 2
    half = z * math.sqrt(rate * (1 - rate) / n + spread / (4 * n))
    low, high = (centre - half) / (1 + spread), (centre + half) / (1 + spread)
    return (0.0 if passed == 0 else low), (1.0 if passed == n else high)


def smoothed(values: list[float], window: int = 5) -> list[float]:
    """The mean of each value and its neighbours, `window` in all, fewer at the ends."""
    reach = window // 2
    around = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(few) / len(few) for few in around]
