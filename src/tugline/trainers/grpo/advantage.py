"""Advantages of the sessions of a task (numpy only).

The plain rule is for one reward a session; `fit_baselines` has it, and `group_advantages` applies
it. The rest is for rarer shapes: traces with rewards of their own, and turns with discounts.

A reward may be reduced before (`compute_penalty`), and advantages may be scaled over a whole step
(`whiten`). A function of the user gets a `RewardGroup` instead.

The unit is always the session, not the trace. The mean and standard deviation of a group are those
of the reward of a token drawn in two stages: a session of the group, uniformly, then one of its
trained tokens, uniformly. A session therefore counts once, whatever its number of traces, and the
choice of builder does not change the objective. Averaging over traces instead would give a session
with many traces more weight in its own baseline.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from msgspec import convert

from tugline import plugins
from tugline.errors import CaptureError, ConfigError
from tugline.trainers.grpo.config import Deviation, Estimator, GrpoConfig
from tugline.types import Logprobs, Mask, Trace, Trajectory

_ROUNDING = 1e-12
"""Relative difference up to which two rewards are considered equal."""
Rewards = npt.NDArray[np.float64]
"""Shape ``(k,)``."""
NO_PENALTIES: Mapping[str, float] = MappingProxyType({})


class Baseline(NamedTuple):
    """Baseline and scale of a session's advantages."""

    level: float
    scale: float

    def advantage(self, reward: float) -> float:
        """Return the advantage of `reward`."""
        return (reward - self.level) * self.scale


def fit_baselines(
    means: Rewards, variance: float, estimator: Estimator, eps: float, deviation: Deviation
) -> list[Baseline]:
    """Return the baseline of each session of a group, from its mean reward ``R``.

    With ``m`` the mean of ``R``, and ``s`` the square root of `variance`, which is that of ``R`` if
    each session has one reward:

    - ``grpo``: ``(r - m) / (s + eps)`` (arXiv 2402.03300); with the `deviation` ``sample``, ``s``
      is multiplied by ``sqrt(n / (n - 1))`` for ``n`` sessions
    - ``dr_grpo``: ``r - m``, which does not favour easy and hard groups (arXiv 2503.20783)
    - ``rloo``: ``r - mean of the others' R``, an unbiased baseline (arXiv 2402.14740)
    - ``max_rl``: ``(r - m) / m``, which is 0 unless ``m > 0``: maximum likelihood of success as far
      as the group's size allows (arXiv 2602.02710)
    - ``reinforce_plus_plus``: ``r - m``, see `whiten` (REINFORCE++ with baseline, 2501.03262)
    """
    centre = float(means.mean())
    count = len(means)
    if estimator == "rloo":
        return [Baseline((count * centre - float(mean)) / (count - 1), 1.0) for mean in means]
    if estimator in {"dr_grpo", "reinforce_plus_plus"}:
        return [Baseline(centre, 1.0)] * count
    if estimator == "max_rl":
        return [Baseline(centre, 1 / centre if centre > 0 else 0.0)] * count
    if deviation == "sample":
        variance *= count / (count - 1)
    return [Baseline(centre, 1 / (float(np.sqrt(variance)) + eps))] * count


def group_advantages(rewards: Sequence[float], eps: float = 1e-4) -> list[float]:
    """Return ``(r - mean) / (std + eps)`` for a group with one reward per session."""
    means = np.array(rewards, np.float64)
    if not _differ(means):
        return [0.0] * len(means)
    variance = float(np.mean((means - means.mean()) ** 2))
    levels = fit_baselines(means, variance, "grpo", eps, "sample")
    return [level.advantage(reward) for level, reward in zip(levels, rewards, strict=True)]


def _differ(rewards: Rewards) -> bool:
    """Whether rewards differ by more than rounding."""
    return len(rewards) > 1 and bool(np.ptp(rewards) > _ROUNDING * np.abs(rewards).max())


# --------------------------------------------------------------------------- rewards of traces
class SessionReward(NamedTuple):
    """Distinct rewards of a session's trained tokens, and the share of tokens of each."""

    rewards: Rewards
    """Rewards in ascending order."""
    shares: Rewards
    """Share of the trained tokens for each reward; the sum is 1."""

    @classmethod
    def of(cls, rewards: Sequence[float], tokens: Sequence[int], *, otherwise: float) -> Self:
        """Combine the reward and trained tokens of each trace; `otherwise` if none is trained."""
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


def baselines(
    group: Sequence[SessionReward],
    estimator: Estimator,
    eps: float,
    deviation: Deviation = "sample",
) -> list[Baseline]:
    """Return the baseline of each session of one group; scale 0 if all rewards are equal.

    The variance is that of the draw described in the module.
    """
    means = np.array([session.mean for session in group], np.float64)
    if not has_signal(group):
        return [Baseline(float(mean), 0.0) for mean in means]
    centre = float(means.mean())
    spreads = [session.shares @ (session.rewards - centre) ** 2 for session in group]
    return fit_baselines(means, float(np.mean(spreads)), estimator, eps, deviation)


def has_signal(group: Sequence[SessionReward]) -> bool:
    """Whether the group has several sessions, with rewards that differ by more than rounding."""
    return len(group) > 1 and _differ(np.concatenate([session.rewards for session in group]))


def grade(
    group: Sequence[Trajectory], config: GrpoConfig, penalties: Mapping[str, float] = NO_PENALTIES
) -> tuple[Mapping[str, Sequence[float]], bool]:
    """Return the advantages of each rewarded session's traces, and whether there is a signal.

    `penalties` are subtracted from all rewards of a session.
    """
    known = {
        each.session: rewards
        for each in group
        if (rewards := _rewards(each, config, penalties.get(each.session, 0.0)))
    }
    sessions = [whole for _, whole in known.values()]
    if ":" in config.advantage:
        members = [each for each in group if each.session in known]
        own = _call_own(members, sessions, config)
        graded = {
            each.session: [value] * len(each.traces)
            for each, value in zip(members, own, strict=True)
        }
        return graded, any(own)
    estimator = convert(config.advantage, Estimator)
    levels = baselines(sessions, estimator, config.advantage_eps, config.advantage_std)
    graded = {
        session: [level.advantage(reward) for reward in by_trace]
        for (session, (by_trace, _)), level in zip(known.items(), levels, strict=True)
    }
    return graded, has_signal(sessions) and any(level.scale for level in levels)


def _rewards(
    trajectory: Trajectory, config: GrpoConfig, penalty: float
) -> tuple[Sequence[float], SessionReward] | None:
    """Return the reward of each trace and that of the session, or None without a finite outcome.

    A trace without a finite reward of its own has that of the outcome.
    """
    reward = trajectory.reward
    traces = trajectory.traces
    if reward is None or not math.isfinite(reward.value):
        return None
    by_trace = [reward.value] * len(traces)
    if config.reward == "per_trace" and reward.per_trace:
        if len(reward.per_trace) != len(traces):
            raise CaptureError(
                f"session {trajectory.session}: reward.per_trace has {len(reward.per_trace)} "
                f"numbers for {len(traces)} traces; it must have one for each trace of the "
                "task's builder"
            )
        by_trace = [r if math.isfinite(r) else reward.value for r in reward.per_trace]
    tokens = [trace.trained for trace in traces]
    penalty += compute_penalty(trajectory.ledger.sampled, config)
    if penalty:
        by_trace = [each - penalty for each in by_trace]
    return by_trace, SessionReward.of(by_trace, tokens, otherwise=reward.value - penalty)


def compute_penalty(sampled: int, config: GrpoConfig) -> float:
    """Return the penalty of a session's number of sampled tokens (DAPO, arXiv 2503.14476)."""
    if config.overlong_length is None:
        return 0.0
    excess = sampled - (config.overlong_length - config.overlong_buffer)
    return max(0.0, excess / config.overlong_buffer * config.overlong_penalty)


# --------------------------------------------------------------------------- your own
class RewardGroup(NamedTuple):
    """The rewarded sessions of a task; arrays of shape ``(k,)``."""

    rewards: Rewards
    """Reward of each session, less penalties; float64."""
    tokens: npt.NDArray[np.int64]
    """Number of trained tokens of each session."""
    sessions: Sequence[Trajectory]


def _call_own(
    members: Sequence[Trajectory], rewards: Sequence[SessionReward], config: GrpoConfig
) -> list[float]:
    """Return the advantage of each session by the function of the user.

    Raises `ConfigError`, with the name of the function and of the sessions, for a result of another
    shape or type, or if a value is not finite.
    """
    function = plugins.find("grpo.advantage", config.advantage)
    tokens = [sum(trace.trained for trace in each.traces) for each in members]
    means = np.array([each.mean for each in rewards], np.float64)
    result = function(RewardGroup(means, np.array(tokens, np.int64), members), config)
    problem = None
    wrong = members
    if not isinstance(result, np.ndarray) or result.dtype.kind != "f":
        kind = result.dtype if isinstance(result, np.ndarray) else type(result).__name__
        problem = f"it must return an array of floats, not {kind}"
    elif result.shape != means.shape:
        problem = f"the advantages must be of shape {means.shape}, not {result.shape}"
    elif not np.isfinite(result).all():
        problem = "advantages must be finite"
        wrong = [each for each, ok in zip(members, np.isfinite(result), strict=True) if not ok]
    if problem is not None:
        names = ", ".join(each.session for each in wrong)
        msg = f"grpo.advantage {config.advantage!r}: {problem} (sessions: {names})"
        raise ConfigError(msg, "grpo.advantage")
    return [float(value) for value in result]


# --------------------------------------------------------------------------- tokens
def whiten(advantages: Rewards) -> Rewards:
    """Return the advantages of a step's trained tokens with mean 0 and deviation 1.

    ``(A - mean) / sqrt(variance + 1e-8)`` with the variance of a sample (REINFORCE++, 2501.03262).
    """
    if len(advantages) < 2:
        return np.zeros_like(advantages)
    centred = advantages - advantages.mean()
    return np.asarray(centred / np.sqrt(centred.var(ddof=1) + 1e-8), np.float64)


def token_advantages(
    trace: Trace, mask: Mask, advantage: float, shares: Mapping[int, float]
) -> Logprobs:
    """Return the advantage of each token of a trace; `shares` scales it by call, 1 by default."""
    values = np.full(len(trace.ids), advantage, np.float32)
    for span in trace.spans:
        values[span.start : span.end] = advantage * shares.get(span.call, 1.0)
    return np.where(mask, values, np.float32(0))


def turn_shares(calls: Sequence[int], discount: float) -> Mapping[int, float]:
    """Return the weight of each turn's advantage, by the number of its call.

    Turn ``t`` of ``T`` (from 0, in the order of their numbers) gets ``discount ** (T - 1 - t)``:
    the discounted return of a final reward (Sutton and Barto 2018, eq. 3.8; for turns of a
    conversation, Kevin, arXiv 2507.11948). The advantage is discounted, not the reward, so the
    sign of an early turn's advantage never changes.
    """
    order = sorted(set(calls), reverse=True)
    return {call: discount**distance for distance, call in enumerate(order)}
