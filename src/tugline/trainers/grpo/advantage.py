"""Advantages of the sessions of a task (numpy only).

The plain rule is for one reward a session; `fit_baselines` has it, and `group_advantages` applies
it. `grade` applies it to the rewards of calls (`credit`), less penalties (`shaping`). Advantages
may be scaled over a whole step (`whiten`). A function of the user gets a `RewardGroup` instead.

The unit is always the session, not the trace. The mean and standard deviation of a group are those
of the reward of a token drawn in two stages: a session of the group, uniformly, then one of its
trained tokens, uniformly. A session therefore counts once, whatever its number of traces, and the
choice of builder does not change the objective. Averaging over traces instead would give a session
with many traces more weight in its own baseline.

If rewards differ within a session, its baseline is made of other sessions only; see `baselines`.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import convert

from tugline import plugins
from tugline.errors import ConfigError
from tugline.trainers.grpo.config import Deviation, Estimator, GrpoConfig
from tugline.trainers.grpo.credit import Rewards, SessionCalls, assign, check_array
from tugline.trainers.grpo.shaping import NO_PENALTIES, list_penalties, penalise_calls
from tugline.types import Logprobs, Mask, Trace, Trajectory

_ROUNDING = 1e-12
"""Relative difference up to which two rewards are considered equal."""
R = TypeVar("R", float, Rewards)


class Baseline(NamedTuple):
    """Baseline and scale of a session's advantages."""

    level: float
    scale: float

    def advantage(self, reward: R) -> R:
        """Return the advantage of `reward`, or of each of an array."""
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


# --------------------------------------------------------------------------- rewards of calls
class SessionReward(NamedTuple):
    """Distinct rewards of a session's trained tokens, and the share of tokens of each."""

    rewards: Rewards
    """Rewards in ascending order."""
    shares: Rewards
    """Share of the trained tokens for each reward; the sum is 1."""

    @classmethod
    def of(cls, rewards: Sequence[float], tokens: Sequence[int], *, otherwise: float) -> Self:
        """Combine the reward and trained tokens of each call; `otherwise` if none is trained."""
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

    If rewards differ within sessions, the level is the mean of the other sessions. Let ``y_t`` be
    the answers of a session, which decide whether there is a ``y_{t+1}``, ``r_t`` the reward after
    ``y_t``, and ``b`` a number that does not depend on them. Given what came before, the mean of
    ``grad log p(y_t)`` is 0, so that of ``sum_t grad log p(y_t) (r_t - b)`` is that of
    ``sum_t grad log p(y_t) r_t``, however the session ends (Williams 1992; Kool et al. 2019 for
    ``b`` from other samples). A mean over the group's sessions that reach turn ``t``, summed over
    the turns that a session has, depends on where it stopped, hence on ``y_t``: each decision to go
    on is charged the mean rewards of the turns after it (verl issue 7244). A mean with the session
    itself depends on it, too, unless it has one reward: then ``r - m = (n - 1) / n * (r - mean of
    the others)`` for ``n`` sessions. So all estimators but `rloo` use the right-hand side, which is
    the same for one reward a session. The scales of `grpo` and `max_rl` are those of their papers,
    with the session itself in them.
    """
    means = np.array([session.mean for session in group], np.float64)
    if not has_signal(group):
        return [Baseline(float(mean), 0.0) for mean in means]
    centre = float(means.mean())
    spreads = [session.shares @ (session.rewards - centre) ** 2 for session in group]
    levels = fit_baselines(means, float(np.mean(spreads)), estimator, eps, deviation)
    if estimator == "rloo" or all(len(session.rewards) == 1 for session in group):
        return levels
    count = len(group)
    return [
        Baseline((count * centre - float(mean)) / (count - 1), level.scale * (count - 1) / count)
        for mean, level in zip(means, levels, strict=True)
    ]


def has_signal(group: Sequence[SessionReward]) -> bool:
    """Whether the group has several sessions, with rewards that differ by more than rounding."""
    return len(group) > 1 and _differ(np.concatenate([session.rewards for session in group]))


CallAdvantages = Mapping[int, float]
"""Advantage of each call of a trace, by its number."""


def grade(
    group: Sequence[Trajectory], config: GrpoConfig, divergences: Mapping[str, float] = NO_PENALTIES
) -> tuple[Mapping[str, Sequence[CallAdvantages]], bool]:
    """Return the advantages of each rewarded session's traces, and whether there is a signal.

    `divergences` are subtracted from all rewards of a session, for `kl_reward`.
    """
    members = [each for each in group if each.reward and math.isfinite(each.reward.value)]
    penalties = list_penalties(members, config, divergences)
    calls = [SessionCalls.of(each) for each in members]
    rewards = []
    sessions = []
    for each in calls:
        penalty = sum(penalties[each.session.session].values())
        by_call = assign(each, config) - penalty - sum(penalise_calls(each, config).values())
        outcome = each.reward.value - penalty
        rewards.append(by_call)
        tokens = each.tokens.tolist()
        sessions.append(SessionReward.of(by_call.tolist(), tokens, otherwise=outcome))
    if ":" in config.advantage:
        own = _call_own(members, sessions, config)
        advantages = [np.full(len(by_call), v) for by_call, v in zip(rewards, own, strict=True)]
        signal = any(own)
    else:
        estimator = convert(config.advantage, Estimator)
        levels = baselines(sessions, estimator, config.advantage_eps, config.advantage_std)
        advantages = [level.advantage(r) for level, r in zip(levels, rewards, strict=True)]
        signal = has_signal(sessions) and any(level.scale for level in levels)
    pairs = zip(calls, advantages, strict=True)
    return {each.session.session: _split_by_trace(each, own) for each, own in pairs}, signal


def _split_by_trace(calls: SessionCalls, advantages: Rewards) -> Sequence[CallAdvantages]:
    """Return the advantages of each trace's calls."""
    split: list[dict[int, float]] = [{} for _ in calls.session.traces]
    for number, trace, advantage in zip(calls.numbers, calls.traces, advantages, strict=True):
        split[trace][int(number)] = float(advantage)
    return split


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
    problem = check_array(result, means.shape, "advantages")
    wrong = members
    if problem is None and not np.isfinite(result).all():
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


def token_advantages(trace: Trace, mask: Mask, advantages: CallAdvantages) -> Logprobs:
    """Return the advantage of each token of a trace; that of a call not listed is 0."""
    values = np.zeros(len(trace.ids), np.float32)
    for span in trace.spans:
        values[span.start : span.end] = advantages.get(span.call, 0.0)
    return np.where(mask, values, np.float32(0))
