"""What the demo measures, as values: one `Step` per training step, one `Summary` at the end.

They are written to disk as they are shown, so a picture can be drawn again from the files alone.
Pass rates always travel with their number of attempts: a rate without it says nothing about luck.
"""

from __future__ import annotations

import math

import msgspec


class Score(msgspec.Struct, frozen=True):
    """`passed` of `n` attempts."""

    passed: int
    n: int

    @property
    def rate(self) -> float:
        """Share that passed; nan where nothing was tried."""
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
    sessions_per_s: float
    engine_busy: float
    """Share of the rollout time in which the engine was computing, 0 to 1."""
    updates: int
    """Optimizer updates of the step; 0 where no group carried a signal."""
    max_abs_dlogprob: float
    """Largest distance between a captured and a recomputed logprob, nats."""
    seconds: float
    """Wall clock of the step."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a whole run came to."""

    before: Score
    """Held-out tasks, first weights, one attempt each."""
    after: Score
    """The same tasks, last weights."""
    steps: int
    sessions: int
    """All sessions, evaluations included."""
    failed_sessions: int
    """Those that ended for a reason that is not the policy's."""
    sampled_tokens: int
    trained_tokens: int
    masked_tokens: int
    dropped_tokens: int
    max_abs_dlogprob: float
    seconds: float
    harness: str
    """Program and version, such as ``pi 0.87.1``."""
    model: str
    """Architecture and size, in words."""


def wilson(passed: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval for a pass rate, 95 % by default; (0, 1) where nothing was tried.

    Unlike the plus-minus of a normal distribution it stays within 0 and 1 and is honest for few
    attempts (E. B. Wilson 1927, J. Am. Stat. Assoc. 22, 209).
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
