"""Conversion of trajectories to samples with an advantage at each token (numpy only).

`prepare` computes the advantage of every token and updates the ledger, so that over a whole step
sampled = trained + masked + dropped (I2). Trajectories rebuilt from recordings give equal samples.

The unit of advantages is the session, not the trace. The mean and standard deviation of a group are
those of the reward of a token drawn in two stages: a session of the group, uniformly, then one of
its trained tokens, uniformly. A session therefore counts once, whatever its number of traces, and
the choice of builder does not change the objective. Averaging over traces instead would give a
session with many traces more weight in its own baseline.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tugline.errors import CaptureError
from tugline.traces.base import leave_out, sum_ledgers
from tugline.trainers.grpo.config import Deviation, Estimator, GrpoConfig
from tugline.types import Boundary, Ids, Ledger, Logprobs, Mask, Reason, Sample, Trace, Trajectory

_ROUNDING = 1e-12
"""Relative difference up to which two rewards are considered equal."""
Rewards = npt.NDArray[np.float64]
"""Shape ``(k,)``."""


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


class Baseline(NamedTuple):
    """Baseline and scale of a session's advantages."""

    level: float
    scale: float

    def advantage(self, reward: float) -> float:
        """Return the advantage of `reward`."""
        return (reward - self.level) * self.scale


def baselines(
    group: Sequence[SessionReward],
    estimator: Estimator,
    eps: float,
    deviation: Deviation = "sample",
) -> list[Baseline]:
    """Return the baseline of each session of one group; scale 0 if all rewards are equal.

    With ``R`` the sessions' means, ``m`` the mean of ``R``, and ``s`` the standard deviation of
    the draw described in the module (that of ``R`` itself if each session has one reward):

    - ``grpo``: ``(r - m) / (s + eps)`` (arXiv 2402.03300); with the `deviation` ``sample``, ``s``
      is multiplied by ``sqrt(n / (n - 1))`` for ``n`` sessions
    - ``dr_grpo``: ``r - m``, which does not favour easy and hard groups (arXiv 2503.20783)
    - ``rloo``: ``r - mean of the others' R``, an unbiased baseline (arXiv 2402.14740)
    """
    means = np.array([session.mean for session in group], np.float64)
    if not has_signal(group):
        return [Baseline(float(mean), 0.0) for mean in means]
    centre = float(means.mean())
    count = len(means)
    if estimator == "rloo":
        return [Baseline((count * centre - float(mean)) / (count - 1), 1.0) for mean in means]
    if estimator == "dr_grpo":
        return [Baseline(centre, 1.0)] * count
    variance = np.mean([session.shares @ (session.rewards - centre) ** 2 for session in group])
    if deviation == "sample":
        variance *= count / (count - 1)
    return [Baseline(centre, 1 / (float(np.sqrt(variance)) + eps))] * count


def group_advantages(rewards: Sequence[float], eps: float = 1e-4) -> list[float]:
    """Return ``(r - mean) / (std + eps)`` for a group with one reward per session."""
    group = [SessionReward(np.array([reward]), np.ones(1)) for reward in rewards]
    levels = baselines(group, "grpo", eps)
    return [level.advantage(reward) for level, reward in zip(levels, rewards, strict=True)]


def has_signal(group: Sequence[SessionReward]) -> bool:
    """Whether the group has several sessions, with rewards that differ by more than rounding."""
    if len(group) < 2:
        return False
    rewards = np.concatenate([session.rewards for session in group])
    return bool(np.ptp(rewards) > _ROUNDING * np.abs(rewards).max())


def turn_shares(calls: Sequence[int], discount: float) -> Mapping[int, float]:
    """Return the weight of each turn's advantage, by the number of its call.

    Turn ``t`` of ``T`` (from 0, in the order of their numbers) gets ``discount ** (T - 1 - t)``:
    the discounted return of a final reward (Sutton and Barto 2018, eq. 3.8; for turns of a
    conversation, Kevin, arXiv 2507.11948). The advantage is discounted, not the reward, so the
    sign of an early turn's advantage never changes.
    """
    order = sorted(set(calls), reverse=True)
    return {call: discount**distance for distance, call in enumerate(order)}


# --------------------------------------------------------------------------- samples
def prepare(
    trajectories: Sequence[Trajectory], config: GrpoConfig, *, version: int
) -> tuple[list[Sample], Ledger]:
    """Return a sample for each trace with trained tokens, and the ledger of all sessions.

    Advantages are relative to the sessions of the same task. Sessions without a finite reward are
    dropped as SESSION_FAILED and count in no mean. `version` is the policy version about to be
    updated, from which staleness is measured.
    """
    masked = Counter[Reason]()
    dropped = Counter[Reason]()
    samples: list[Sample] = []
    ordered = sorted(trajectories, key=lambda each: (each.task, each.sample, each.session))
    for _, members in groupby(ordered, key=lambda trajectory: trajectory.task):
        group = list(members)
        graded, signal = _grade(group, config)
        for trajectory in group:
            _check_ledger(trajectory)
            if trajectory.session not in graded:
                dropped[Reason.SESSION_FAILED] += trajectory.ledger.trained
            elif config.drop_truncated and _is_truncated(trajectory):
                dropped[Reason.TRUNCATED] += trajectory.ledger.trained
            elif not signal:
                dropped[Reason.NO_SIGNAL] += trajectory.ledger.trained
            else:
                advantages = graded[trajectory.session]
                samples += _samples(trajectory, advantages, config, version, masked)
    ledger = sum_ledgers(trajectory.ledger for trajectory in trajectories)
    return samples, leave_out(ledger, masked=masked, dropped=dropped)


def read_group(group: Sequence[Trajectory], config: GrpoConfig) -> Iterator[Sample]:
    """Yield the samples of one task's sessions with a finite reward, for any trainer.

    No sample is left out because of its reward or age; without a signal, all advantages are 0.
    """
    graded, _ = _grade(group, config)
    for trajectory in group:
        if trajectory.session in graded:
            advantages = graded[trajectory.session]
            yield from _samples(trajectory, advantages, config, 0, Counter())


def _check_ledger(trajectory: Trajectory) -> None:
    """Check a session's own ledger against its traces. Raises `CaptureError`."""
    ledger = trajectory.ledger
    in_traces = sum(int(trace.mask.sum()) for trace in trajectory.traces)
    if not ledger.balanced or ledger.trained != in_traces:
        raise CaptureError(
            f"session {trajectory.session}: its ledger {ledger} does not balance with the "
            f"{in_traces} trained tokens in its traces"
        )


def _grade(
    group: Sequence[Trajectory], config: GrpoConfig
) -> tuple[Mapping[str, Sequence[float]], bool]:
    """Return the advantages of each rewarded session's traces, and whether there is a signal."""
    rewarded = {t.session: rewards for t in group if (rewards := _rewards(t, config))}
    sessions = [whole for _, whole in rewarded.values()]
    levels = baselines(sessions, config.advantage, config.advantage_eps, config.advantage_std)
    graded = {
        session: [level.advantage(reward) for reward in by_trace]
        for (session, (by_trace, _)), level in zip(rewarded.items(), levels, strict=True)
    }
    return graded, has_signal(sessions)


def _is_truncated(trajectory: Trajectory) -> bool:
    """Whether the agent was stopped at a limit, or used up a budget of model calls."""
    stopped = trajectory.failure is not None and trajectory.failure.boundary is Boundary.AGENT
    return stopped or trajectory.spent is not None


def _rewards(
    trajectory: Trajectory, config: GrpoConfig
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
    tokens = [int(trace.mask.sum()) for trace in traces]
    return by_trace, SessionReward.of(by_trace, tokens, otherwise=reward.value)


def _samples(
    trajectory: Trajectory,
    advantages: Sequence[float],
    config: GrpoConfig,
    version: int,
    masked: Counter[Reason],
) -> Iterator[Sample]:
    """Yield a sample for each trace with a token to train; `advantages` has one per trace.

    Trained tokens that are masked here are counted in `masked`.
    """
    shares: Mapping[int, float] = {}
    if config.turn_discount is not None:
        spans = (span for trace in trajectory.traces for span in trace.spans)
        trained = [span.call for span in spans if span.masked is None]
        shares = turn_shares(trained, config.turn_discount)
    for trace, advantage in zip(trajectory.traces, advantages, strict=True):
        versions, temperatures = read_spans(trace)
        mask = trace.mask & (temperatures > 0)
        masked[Reason.UNREPRODUCIBLE] += int(trace.mask.sum() - mask.sum())
        if config.max_staleness is not None:
            stale = mask & (versions < version - config.max_staleness)
            mask = mask & ~stale
            masked[Reason.STALE] += int(stale.sum())
        if mask.any():
            yield Sample(
                input_ids=trace.ids,
                loss_mask=mask,
                logprobs=trace.logprobs,
                versions=versions,
                advantages=_token_advantages(trace, mask, advantage, shares),
                temperatures=temperatures,
                group=trajectory.task,
                session=trajectory.session,
                engine="+".join(sorted({span.engine for span in trace.spans})),
                harness=trajectory.harness,
                reward=None if trajectory.reward is None else trajectory.reward.value,
                reward_parts={} if trajectory.reward is None else trajectory.reward.parts,
                masked=_count_masked(trace, mask),
            )


def _count_masked(trace: Trace, mask: Mask) -> dict[Reason, int]:
    """Return the number of sampled tokens outside of `mask`, by reason."""
    counts = Counter[Reason]()
    for span in trace.spans:
        left_out = int((~mask[span.start : span.end]).sum())
        if left_out:
            unreproducible = span.distribution.forward_temperature is None
            reason = Reason.UNREPRODUCIBLE if unreproducible else Reason.STALE
            counts[span.masked or reason] += left_out
    return dict(counts)


def _token_advantages(
    trace: Trace, mask: Mask, advantage: float, shares: Mapping[int, float]
) -> Logprobs:
    """Return the advantage of each token of a trace; `shares` scales it by call, 1 by default."""
    values = np.full(len(trace.ids), advantage, np.float32)
    for span in trace.spans:
        values[span.start : span.end] = advantage * shares.get(span.call, 1.0)
    return np.where(mask, values, np.float32(0))


def read_spans(trace: Trace) -> tuple[Ids, Logprobs]:
    """Return the version (-1 where nothing was sampled) and temperature of each token.

    The temperature is 0 where no forward pass reproduces the logprob, 1 where nothing was sampled.
    """
    versions = np.full(len(trace.ids), -1, np.int32)
    temperatures = np.ones(len(trace.ids), np.float32)
    for span in trace.spans:
        versions[span.start : span.end] = span.version
        temperatures[span.start : span.end] = span.distribution.forward_temperature or 0
    return versions, temperatures
