"""How much better a session did than its group, and what each turn gets of it; numpy only.

The unit is the session. A group's mean and spread are those of this draw: a session of the group,
each as likely, then one of its trained tokens, each as likely; the value is the reward that this
token earned. So a session counts once however many traces it was built into, and cutting it into
other traces changes nothing. Were traces averaged, a chatty session would weigh more in the very
baseline that it is judged against, and the choice of builder would change the objective. Sessions
without a reward are left out before this point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tugline.trainers.grpo.config import Estimator

Rewards = npt.NDArray[np.float64]
"""Shape ``(k,)``."""


class SessionReward(NamedTuple):
    """What the trained tokens of a session earned: distinct rewards, and the share of each."""

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
        """The session's one number."""
        return float(self.rewards @ self.shares)


class Baseline(NamedTuple):
    """What a session's rewards are measured against."""

    level: float
    scale: float

    def advantage(self, reward: float) -> float:
        """How much better `reward` is."""
        return (reward - self.level) * self.scale


def baselines(group: Sequence[SessionReward], estimator: Estimator, eps: float) -> list[Baseline]:
    """The baseline of each session of one group; scale 0 where nothing tells them apart.

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


def has_signal(group: Sequence[SessionReward]) -> bool:
    """Whether the group has several sessions, and some of its tokens earned more than others."""
    return len(group) > 1 and bool(np.ptp(np.concatenate([one.rewards for one in group])) > 0)


def turn_shares(calls: Sequence[int], discount: float) -> Mapping[int, float]:
    """What the turns of a session get of its advantage, by the numbers of its trained calls.

    Turn ``t`` of ``T`` (from 0, in the order of their numbers) gets ``discount ** (T - 1 - t)``:
    the discounted return of a reward that comes at the end (Sutton and Barto 2018, eq. 3.8; for
    turns of a conversation, Kevin, arXiv 2507.11948), applied to the advantage and not the reward,
    so that an early turn is blamed and praised less and never changes sides.
    """
    order = sorted(set(calls), reverse=True)
    return {call: discount**distance for distance, call in enumerate(order)}
