"""Figures of a run and of a step's sessions, and the alarms raised from figures."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from tugline.estimates import Comparison
from tugline.traces.base import is_malformed
from tugline.trainers.evaluation import VersionScore
from tugline.trainers.grpo.advantage import grade
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.train import StepReport
from tugline.trainers.publish import Publication
from tugline.types import Call, Finish, Ledger, Trajectory, is_pass


class TrainState(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a run and its totals; part of every checkpoint."""

    step: int = 0
    """Number of trained steps; batches up to this number are done."""
    version: int = 0
    """Version of the weights."""
    chosen: dict[int, tuple[int, ...]] = {}
    """Numbers in the task set of the next batches' tasks, by step; submitted or not."""
    starts: dict[int, int] = {}
    """Places of these batches' first tasks in the order of all groups, by step."""
    pass_rates: dict[int, float] = {}
    """Moving average of each task's pass rate, by its number; with `choose: pass_rate` only."""
    ledger: Ledger = Ledger()
    """Ledger of the training sessions."""
    sessions: int = 0
    failed: int = 0
    """Sessions without a reward."""
    solved: int = 0
    """Sessions that solved their task."""
    cost: float = 0.0
    """Cost up to the checkpoint, summed over all starts of the run; 0 without prices."""
    updates: int = 0
    tokens_forwarded: int = 0
    training_s: float = 0.0
    elapsed_s: float = 0.0
    """Wall-clock time up to the checkpoint, summed over all starts of the run."""
    entropies: tuple[float, ...] = ()
    """Entropy of each step for which it is known."""
    scores: tuple[VersionScore, ...] = ()
    """Evaluations, in order."""


class TrainSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run."""

    state: TrainState
    change: Comparison | None
    """Difference in held-out pass@1, last minus first weights; None without two evaluations."""


class RolloutFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a step's sessions. Shares of model calls are None without any call."""

    sessions: int
    failed: int
    """Sessions without a reward."""
    groups: int
    signal: int
    """Groups with a training signal: their sessions did not all earn the same reward."""
    rounds: int = 1
    """Rounds of groups; see `schedule.refill`."""
    further: int = 0
    """Groups of the rounds after the first."""
    lacking: int = 0
    """Groups with a signal that the step lacks although it was refilled up to its limit."""
    reward: float | None
    """Mean over rewarded sessions."""
    passed: float | None
    """Share of rewarded sessions that solved their task."""
    sampled: int
    """Number of sampled tokens."""
    turns: float
    """Mean number of model calls in the traces of a session."""
    tool_calls: float | None
    """Share of calls that offered tools in which the model called one."""
    malformed: float | None
    """Share of calls with a malformed tool call: it names no offered tool, its arguments are not a
    JSON object, or it was left unparsed in the text."""
    truncated: float | None
    """Share of calls that ended at their token limit."""
    entropy: float | None
    """Mean negative captured logprob of the trained tokens in nats: an unbiased estimate of the
    entropy of the sampling distribution."""
    staleness: float | None
    """Mean number of versions between sampling and training, over trained tokens."""
    staleness_max: int | None


_PLAIN = GrpoConfig()


def find_signal(trajectories: Sequence[Trajectory], config: GrpoConfig) -> frozenset[str]:
    """Return the tasks whose groups have a training signal, before any `kl_reward`."""
    groups: dict[str, list[Trajectory]] = {}
    for each in trajectories:
        groups.setdefault(each.task, []).append(each)
    return frozenset(task for task, group in groups.items() if grade(group, config)[1])


def measure_rollout(
    trajectories: Sequence[Trajectory],
    calls: Sequence[Call],
    *,
    version: int,
    config: GrpoConfig = _PLAIN,
) -> RolloutFigures:
    """Measure the sessions of a step, before the weights of `version` are trained on them."""
    offered = [call for call in calls if call.tools]
    rewards = [each.reward.value for each in trajectories if each.reward is not None]
    traces = [trace for each in trajectories for trace in each.traces]
    logprobs = [trace.logprobs[trace.mask] for trace in traces]
    spans = [span for trace in traces for span in trace.spans if span.masked is None]
    lengths = np.array([span.end - span.start for span in spans], np.int64)
    age = np.repeat([float(version - span.version) for span in spans], lengths)
    return RolloutFigures(
        sessions=len(trajectories),
        failed=len(trajectories) - len(rewards),
        groups=len({each.task for each in trajectories}),
        signal=len(find_signal(trajectories, config)),
        reward=_mean(rewards),
        passed=_mean([float(is_pass(reward)) for reward in rewards]),
        sampled=sum(each.ledger.sampled for each in trajectories),
        turns=sum(len({s.call for t in each.traces for s in t.spans}) for each in trajectories)
        / max(1, len(trajectories)),
        tool_calls=_mean([float(bool(c.answer and c.answer.tool_calls)) for c in offered]),
        malformed=_mean([float(is_malformed(call)) for call in offered]),
        truncated=_mean([float(call.finish is Finish.LENGTH) for call in calls]),
        entropy=_mean(-np.concatenate(logprobs)) if logprobs else None,
        staleness=_mean(age),
        staleness_max=int(age.max()) if len(age) else None,
    )


def _mean(values: Sequence[float] | np.ndarray[Any, Any]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def flatten(value: msgspec.Struct, prefix: str = "") -> dict[str, float]:
    """Return every finite number in a struct by name, such as ``update/ledger/trained``."""
    return dict(_numbers(prefix, msgspec.to_builtins(value, str_keys=True)))


def _numbers(name: str, value: Any) -> Iterable[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(f"{name}/{key}" if name else key, inner)
    elif isinstance(value, int | float) and math.isfinite(value):
        yield name, float(value)


def describe_replay(report: StepReport) -> str | None:
    """Return a line on what replaying experts changed in a step; None without replay."""
    mismatch = report.mismatch
    if mismatch is None or mismatch.without_replay is None:
        return None
    without = mismatch.without_replay
    text = (
        f"mean |dlogp| {mismatch.total.mean_abs:.1e} with the recorded experts, "
        f"{without.mean_abs:.1e} without"
    )
    if not mismatch.experts_changed:
        return text
    layer, share = max(mismatch.experts_changed.items(), key=lambda item: item[1])
    return f"{text}; routers differ most in layer {layer}, for {share:.1%} of tokens"


# --------------------------------------------------------------------------- alarms
_COLLAPSE = 0.1
"""Share of the first steps' mean entropy below which the entropy has collapsed."""
_FIRST = 5
_MALFORMED = 0.2
_MISMATCH = 0.1
_TOOL_CALLS = 0.01
_FAILED = 0.1
_LARGEST_SESSION = 4.0
"""Weight of a session in an update, as a multiple of the mean, from which it is an alarm."""
_TOKENS_MEAN = 0.05
"""Mean mismatch of the trained tokens, in nats, from which it is an alarm."""
_TOKENS_P99 = 0.4
"""The same for its 99th percentile."""


def find_alarms(
    rollout: RolloutFigures, report: StepReport, publish: Publication, entropies: Sequence[float]
) -> dict[str, str]:
    """Return the alarms of a step by name, each with its likely cause.

    `entropies` are those of all steps so far, including this one.
    """
    alarms = _find_mismatch(report, publish)
    ledger = report.ledger
    if rollout.failed > _FAILED * rollout.sessions:
        alarms["failed"] = (
            f"{rollout.failed} of {rollout.sessions} sessions have no reward:"
            " the line of this step has the most frequent reason"
        )
    if ledger.trained == 0:
        lost = {**ledger.masked, **ledger.dropped}
        most = max(lost, key=lambda reason: lost[reason], default=None)
        cause = f"most tokens were excluded as {most}" if most else "the agents made no model calls"
        alarms["no_tokens"] = f"no tokens were trained: {cause}"
    if rollout.signal == 0:
        earned = rollout.reward or 0.0
        alarms["no_signal"] = (
            "no group has a training signal: all rewards within each group are equal (mean "
            f"{earned:.2f});"
            " the tasks are too hard or too easy, or the evaluator fails"
        )
    if rollout.lacking:
        alarms["refill"] = (
            f"{rollout.signal} groups have a training signal, {rollout.lacking} less than asked:"
            f" after {rollout.groups} groups the limit schedule.refill_limit is reached; the tasks"
            " are too hard or too easy"
        )
    if rollout.tool_calls is not None and rollout.tool_calls < _TOOL_CALLS:
        alarms["no_tool_calls"] = (
            "tools are offered but hardly ever called: check that engine.renderer fits the model"
        )
    if rollout.malformed is not None and rollout.malformed > _MALFORMED:
        alarms["malformed"] = (
            f"{rollout.malformed:.0%} of answers have a malformed tool call:"
            " check that engine.renderer fits the model, and that max_tokens is large enough"
        )
    if report.largest_session > _LARGEST_SESSION:
        alarms["session_weight"] = (
            f"a session has {report.largest_session:.1f} times the mean weight of an update's"
            " sessions: it has more trained tokens, such as those of sub-agents; set"
            " grpo.normalisation to sequence to weight all alike"
        )
    if publish.moved == 0.0 and ledger.trained and rollout.signal:
        alarms["unchanged"] = (
            "the update changed no logprob: grpo.lr is too small for the precision of the weights"
        )
    first = entropies[:_FIRST]
    if len(entropies) > _FIRST and entropies[-1] < _COLLAPSE * sum(first) / len(first):
        alarms["entropy"] = (
            f"entropy fell from {sum(first) / len(first):.3f} to {entropies[-1]:.3f} nats:"
            " lower grpo.lr, or raise grpo.clip_high"
        )
    return alarms


def _find_mismatch(report: StepReport, publish: Publication) -> dict[str, str]:
    """Return the alarm if engine and trainer differ on a probe or on the newest trained tokens."""
    if publish.max_abs_dlogprob is not None and publish.max_abs_dlogprob > _MISMATCH:
        text = f"engine and trainer differ by {publish.max_abs_dlogprob:.2g} nats on a probe"
        return {"mismatch": f"{text}; check that both have the same model and precision"}
    if report.mismatch is None or not report.mismatch.by_version:
        return {}
    newest = report.mismatch.by_version[max(report.mismatch.by_version)]
    if newest.non_finite or newest.mean_abs > _TOKENS_MEAN or newest.p99_abs > _TOKENS_P99:
        text = (
            f"captured and recomputed logprobs of trained tokens differ by {newest.mean_abs:.2g}"
            f" nats on average, {newest.p99_abs:.2g} at the 99th percentile"
        )
        return {
            "mismatch": (
                f"{text}; check that both have the same model, precision and sampling distribution"
            )
        }
    return {}
