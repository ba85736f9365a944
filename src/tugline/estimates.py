"""Rates of solved attempts over tasks, with 95 % intervals, and paired comparisons.

Intervals are over tasks, not attempts, because attempts at the same task are correlated.
"""

import math
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from tugline.errors import UsageError
from tugline.protocol import Estimate

_Z = 1.96
"""Normal quantile of 95 % intervals."""
Rates = npt.NDArray[np.float64]
"""Estimate for each task, shape ``(tasks,)``."""
Count = tuple[int, int]
"""Number of rewarded attempts at a task, and number of passed attempts."""


class Comparison(msgspec.Struct, frozen=True):
    """Difference in pass@1, now minus earlier, over the tasks of both runs."""

    difference: Estimate
    better: tuple[str, ...]
    """Tasks with a higher rate now, the largest change first."""
    worse: tuple[str, ...]


def pass_at_k(attempts: int, passed: int, k: int) -> float:
    """Estimate the probability that one of `k` attempts passes, from at least `k` attempts.

    ``1 - C(n - c, k) / C(n, k)`` is unbiased (Chen et al. 2021, arXiv 2107.03374, eq. 1).
    """
    if not 0 <= passed <= attempts or not 1 <= k <= attempts:
        msg = (
            f"pass@{k} of {passed} in {attempts} attempts: requires passed <= attempts and 1 "
            "<= k <= attempts"
        )
        raise UsageError(msg)
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)


def compare_rates(now: Mapping[str, Count], earlier: Mapping[str, Count]) -> Comparison:
    """Compare the rates of two runs by task. Raises `UsageError` if they have none in common.

    The interval is for the tasks' differences of rates, so that attempts at one task are not taken
    for independent ones. As in Bonett and Price (2012, J. Educ. Behav. Stat. 37, 479), whose
    interval it is for one attempt at each task, one task is added in each direction: here with the
    smallest difference that `n` attempts can show, ``1 / n``. So its width is never 0, even if no
    task's rate changed.
    """
    shared = [task for task in now if task in earlier]
    if not shared:
        raise UsageError("the two runs share no task with a reward; run the same task set")
    first, second = (make_rates([run[task] for task in shared], 1) for run in (now, earlier))
    gaps = first - second
    step = 1 / min(run[task][0] for task in shared for run in (now, earlier))
    mean = estimate_difference(gaps, step)
    difference = Estimate(mean.value, max(-1.0, mean.low), min(1.0, mean.high), mean.tasks)
    order = [int(number) for number in np.argsort(-np.abs(gaps), kind="stable")]
    better = tuple(shared[number] for number in order if gaps[number] > 0)
    return Comparison(difference, better, tuple(shared[n] for n in order if gaps[n] < 0))


def estimate_difference(gaps: Rates, step: float) -> Estimate:
    """Average the differences of tasks, with one task of `step` added in each direction."""
    size = len(gaps) + 2
    centre = float(gaps.sum()) / size
    spread = math.sqrt(max(0.0, (float(gaps @ gaps) + 2 * step**2) / size - centre**2) / size)
    return Estimate(float(gaps.mean()), centre - _Z * spread, centre + _Z * spread, len(gaps))


def estimate(rates: Rates) -> Estimate:
    """Average the rates of at least one task.

    The interval is Wilson's if each rate is 0 or 1. Otherwise it is that of Agresti and Coull
    (1998, Am. Stat. 52, 119), which adds two solved and two unsolved tasks, with the variance of
    the rates in place of the binomial one. Its width is not 0 for few tasks, unlike a bootstrap's.
    """
    size = len(rates)
    total = float(rates.sum())
    if np.isin(rates, (0.0, 1.0)).all():
        return Estimate(total / size, *wilson(round(total), size), size)
    added = _Z * _Z
    centre = (total + added / 2) / (size + added)
    variance = (float(rates @ rates) + added / 2) / (size + added) - centre**2
    half = _Z * math.sqrt(variance / (size + added))
    return Estimate(total / size, max(0.0, centre - half), min(1.0, centre + half), size)


def wilson(passed: int, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % score interval for a pass rate; (0, 1) without attempts.

    Unlike the normal approximation it stays within 0 and 1 and holds for few attempts
    (E. B. Wilson 1927, J. Am. Stat. Assoc. 22, 209).
    """
    if n == 0:
        return 0.0, 1.0
    rate = passed / n
    spread = _Z * _Z / n
    centre = rate + spread / 2
    half = _Z * math.sqrt(rate * (1 - rate) / n + spread / (4 * n))
    low = 0.0 if passed == 0 else (centre - half) / (1 + spread)
    high = 1.0 if passed == n else (centre + half) / (1 + spread)
    return low, high


def make_rates(counts: Iterable[Count], k: int) -> Rates:
    """Return pass@k of each task with at least `k` attempts."""
    rates = [pass_at_k(attempts, passed, k) for attempts, passed in counts if attempts >= k]
    return np.array(rates, np.float64)
