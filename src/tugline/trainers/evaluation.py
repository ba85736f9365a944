"""Measure a policy on tasks: pass@1, pass@k, intervals, failures, and paired comparisons.

Only attempts with a reward count. A session that failed for a reason unrelated to the policy is
listed by its cause and is in no denominator (I5). Intervals are over tasks, not attempts, because
attempts at the same task are correlated. This module does not import torch.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec
import numpy as np

from tugline.estimates import (
    Comparison,
    Count,
    compare_rates,
    estimate,
    estimate_difference,
    make_rates,
)
from tugline.protocol import Estimate, ResultView
from tugline.types import Failure, Trajectory, is_pass

_NAMED = 10
"""Number of tasks of a comparison that are printed by name."""
_SAME = 1e-6
"""Difference of rewards that is rounding."""


class Attempt(NamedTuple):
    """A session of a task; `reward` is None if the session is not counted."""

    task: str
    reward: float | None
    failure: Failure | None = None


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Results on a set of tasks."""

    pass_at: dict[int, Estimate]
    """Probability that one of k attempts solves a task, by k; mean over tasks with at least k."""
    reward: float | None
    """Mean over attempts; None without any."""
    attempts: int
    """Attempts with a reward."""
    unrewarded: int
    """Sessions without a reward; they are in no estimate."""
    by_tag: dict[str, Estimate] = {}
    """pass@1 of the tasks with each tag, by ``name=value``."""
    failures: dict[str, int] = {}
    """Number of failed sessions by cause, including those with a reward."""


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Two verdicts on the same sessions: before, and now."""

    sessions: int
    changed: int
    """Sessions with another reward."""
    same: Estimate
    """Share of sessions that are solved by both verdicts or by none; mean over tasks."""
    solved: tuple[int, int]
    """Solved sessions before, and now."""
    reward: tuple[float, float]
    """Mean reward before, and now."""
    difference: Estimate
    """Difference in pass@1, now minus before."""
    reward_difference: Estimate
    """Difference in the mean reward of tasks, now minus before."""


class VersionScore(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation of one version on the held-out tasks."""

    step: int
    version: int
    evaluation: Evaluation
    mixed: int
    """Sessions with tokens of another version; 0 unless a replica was restarted."""
    sampled: int
    """Number of sampled tokens."""
    seconds: float


def read_attempts(results: Sequence[Trajectory]) -> list[Attempt]:
    """Return attempts at held-out tasks, under names that do not contain the version."""
    return [
        Attempt(r.task.partition("-")[2], r.reward.value if r.reward else None, r.failure)
        for r in results
    ]


def evaluate(
    attempts: Iterable[Attempt | ResultView],
    *,
    k: int = 1,
    tags: Mapping[str, Mapping[str, str]] = {},
) -> Evaluation:
    """Summarize attempts, with pass@j for every power of two `j` up to `k`, and for `k` itself.

    A task with fewer than `j` rewarded attempts is not in pass@j. `tags` has the tags of each task.
    """
    sessions = list(attempts)
    rewards = [session.reward for session in sessions if session.reward is not None]
    counts = _count(sessions)
    groups: dict[str, list[Count]] = {}
    for task, count in counts.items():
        for name, value in tags.get(task, {}).items():
            groups.setdefault(f"{name}={value}", []).append(count)
    sizes = {k, *(1 << i for i in range(k.bit_length()))}  # powers of two up to k, and k
    rates = {size: make_rates(counts.values(), size) for size in sorted(sizes)}
    failures = [session.failure for session in sessions if session.failure]
    return Evaluation(
        pass_at={size: estimate(each) for size, each in rates.items() if len(each)},
        reward=sum(rewards) / len(rewards) if rewards else None,
        attempts=len(rewards),
        unrewarded=len(sessions) - len(rewards),
        by_tag={tag: estimate(make_rates(groups[tag], 1)) for tag in sorted(groups)},
        failures=dict(Counter(str(failure.cause or failure.boundary) for failure in failures)),
    )


def compare(
    now: Iterable[Attempt | ResultView], earlier: Iterable[Attempt | ResultView]
) -> Comparison:
    """Compare two runs task by task. Raises `UsageError` if they have no task in common.

    `compare_rates` explains the interval.
    """
    return compare_rates(_count(now), _count(earlier))


def compare_verdicts(pairs: Sequence[tuple[str, float, float]]) -> Agreement:
    """Compare two verdicts on each of at least one session: its task, reward before and now.

    The intervals are over tasks; those of differences are as in `compare`, with the rewards in
    place of the rates.
    """
    by_task: dict[str, list[tuple[float, float]]] = {}
    for task, before, now in pairs:
        by_task.setdefault(task, []).append((before, now))
    groups = by_task.values()
    same = [fmean(is_pass(before) == is_pass(now) for before, now in group) for group in groups]
    gaps = [fmean(now - before for before, now in group) for group in groups]
    earlier = [Attempt(task, before) for task, before, _ in pairs]
    later = [Attempt(task, now) for task, _, now in pairs]
    return Agreement(
        sessions=len(pairs),
        changed=sum(is_other(before, now) for _, before, now in pairs),
        same=estimate(np.array(same)),
        solved=(sum(is_pass(pair[1]) for pair in pairs), sum(is_pass(pair[2]) for pair in pairs)),
        reward=(fmean(pair[1] for pair in pairs), fmean(pair[2] for pair in pairs)),
        difference=compare(later, earlier).difference,
        reward_difference=estimate_difference(np.array(gaps), 1 / min(map(len, groups))),
    )


def is_other(before: float | None, now: float | None) -> bool:
    """Return whether a reward has changed by more than rounding."""
    if before is None or now is None:
        return before is not now
    return abs(before - now) > _SAME


def _count(attempts: Iterable[Attempt | ResultView]) -> dict[str, Count]:
    """Return the counts of each task with a rewarded attempt, in order of first appearance."""
    rewarded = [(a.task, a.reward) for a in attempts if a.reward is not None]
    passed = Counter(task for task, reward in rewarded if is_pass(reward))
    number = Counter(task for task, _ in rewarded)
    return {task: (count, passed[task]) for task, count in number.items()}


def format_estimate(mean: Estimate) -> str:
    """Return an estimate as text, such as ``32.3% (23.8% to 42.2%, 96 tasks)``."""
    return f"{mean.value:.1%} ({mean.low:.1%} to {mean.high:.1%}, {mean.tasks} tasks)"


def summarize_change(change: Comparison | None) -> Iterator[tuple[str, str]]:
    """Yield the names and values of a comparison, if any, with the tasks that changed."""
    if change is None:
        return
    yield "change of pass@1", format_estimate(change.difference)
    for name, tasks in (("better", change.better), ("worse", change.worse)):
        more = f", and {len(tasks) - _NAMED} more" if len(tasks) > _NAMED else ""
        names = f": {', '.join(tasks[:_NAMED])}{more}" if tasks else ""
        yield "", f"{len(tasks)} {name}{names}"


def summarize(evaluation: Evaluation) -> Sequence[tuple[str, str]]:
    """Return the rows of a report: names and values."""
    rows = [(f"pass@{k}", format_estimate(mean)) for k, mean in evaluation.pass_at.items()]
    if evaluation.reward is not None:
        rows.append(("mean reward", f"{evaluation.reward:.3f} over {evaluation.attempts} attempts"))
    if evaluation.unrewarded:
        rows.append(("without a reward", f"{evaluation.unrewarded} sessions, not counted"))
    rows += [(tag, format_estimate(mean)) for tag, mean in evaluation.by_tag.items()]
    rows += [(f"failed: {cause}", f"{n} sessions") for cause, n in evaluation.failures.items()]
    return rows
