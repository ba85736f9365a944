"""Group-relative advantages of sessions and their turns (numpy only).

The unit is the session. The mean and standard deviation of a group are those of a two-stage draw:
a session of the group, uniformly, then one of its trained tokens, uniformly; the value is the
reward of that token. A session therefore counts once, however many traces it was built into, and
the choice of builder does not change the objective. Averaging traces instead would give a session
with many traces more weight in its own baseline. Sessions without a reward must be filtered out by
the caller.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

Estimator = Literal["grpo", "dr_grpo", "rloo"]
_ROUNDING = 1e-12
"""Relative difference up to which two rewards are the same."""
Rewards = npt.NDArray[np.float64]
"""Shape ``(k,)``."""


class SessionReward(NamedTuple):
    """Distinct rewards of a session's trained tokens, and the share of tokens of each."""

    rewards: Rewards
    """Ascending."""
    shares: Rewards
    """They add up to 1."""

    @classmethod
    def of(cls, rewards: Sequence[float], tokens: Sequence[int], *, otherwise: float) -> Self:
        """From the reward and the trained tokens of each trace; `otherwise` if none is trained."""
        earned: Counter[float] = Counter()
        for reward, count in zip(rewards, tokens, strict=True):
            earned[reward] += count
        known = sorted(reward for reward, count in earned.items() if count)
        if not known:
            return cls(np.array([otherwise]), np.ones(1))
        counts = np.array([earned[reward] for reward in known], np.float64)
        return cls(np.array(known, np.float64), counts / counts.sum())

    @property
    def mean(self) -> float:
        """Mean reward over the trained tokens."""
        return float(self.rewards @ self.shares)


class Baseline(NamedTuple):
    """Baseline and scale of a session's advantages."""

    level: float
    scale: float

    def advantage(self, reward: float) -> float:
        """Return the advantage of `reward`."""
        return (reward - self.level) * self.scale


def baselines(group: Sequence[SessionReward], estimator: Estimator, eps: float) -> list[Baseline]:
    """Return the baseline of each session of one group; scale 0 if all rewards are equal.

    With ``R`` the sessions' means, ``m`` the mean of ``R``, and ``s`` the standard deviation of
    the draw described above (that of ``R`` itself where each session earned one reward):

    - ``grpo``: ``(r - m) / (s + eps)`` (arXiv 2402.03300)
    - ``dr_grpo``: ``r - m``, which does not favour easy and hard groups (arXiv 2503.20783)
    - ``rloo``: ``r - mean of the others' R``, an unbiased baseline (arXiv 2402.14740)
    """
    means = np.array([one.mean for one in group], np.float64)
    if not has_signal(group):
        return [Baseline(float(mean), 0.0) for mean in means]
    centre, count = float(means.mean()), len(means)
    if estimator == "rloo":
        return [Baseline((count * centre - float(mean)) / (count - 1), 1.0) for mean in means]
    if estimator == "dr_grpo":
        return [Baseline(centre, 1.0)] * count
    variance = np.mean([one.shares @ (one.rewards - centre) ** 2 for one in group])
    return [Baseline(centre, 1 / (float(np.sqrt(variance)) + eps))] * count


def group_advantages(rewards: Sequence[float], eps: float = 1e-4) -> list[float]:
    """Return ``(r - mean) / (std + eps)`` for the rewards of a group's sessions, one each."""
    group = [SessionReward(np.array([reward]), np.ones(1)) for reward in rewards]
    levels = baselines(group, "grpo", eps)
    return [level.advantage(one) for level, one in zip(levels, rewards, strict=True)]


def has_signal(group: Sequence[SessionReward]) -> bool:
    """Whether the group has several sessions whose tokens differ in reward, rounding apart."""
    if len(group) < 2:
        return False
    rewards = np.concatenate([one.rewards for one in group])
    return bool(np.ptp(rewards) > _ROUNDING * np.abs(rewards).max())


def turn_shares(calls: Sequence[int], discount: float) -> Mapping[int, float]:
    """Return the weight of each turn's advantage, by the number of its call.

    Turn ``t`` of ``T`` (from 0, in the order of their numbers) gets ``discount ** (T - 1 - t)``:
    the discounted return of a reward that comes at the end (Sutton and Barto 2018, eq. 3.8; for
    turns of a conversation, Kevin, arXiv 2507.11948), applied to the advantage and not the reward,
    so that the sign of an early turn's advantage never changes.
    """
    order = sorted(set(calls), reverse=True)
    return {call: discount**distance for distance, call in enumerate(order)}
