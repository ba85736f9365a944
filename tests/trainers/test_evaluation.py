"""Pass rates, their intervals and paired comparisons, against cases computed by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tugline.errors import UsageError
from tugline.estimates import estimate, pass_at_k, wilson
from tugline.recording.trajectories import read_results
from tugline.trainers.evaluation import Attempt, compare, compare_verdicts, evaluate, summarize
from tugline.types import Boundary, Cause, Failure


@pytest.mark.parametrize("passed", range(7))
@pytest.mark.parametrize("k", range(1, 7))
def test_pass_at_k_is_the_mean_over_all_subsets(passed: int, k: int) -> None:
    """The estimate of pass@k equals the mean over all subsets of six attempts."""
    attempts = [True] * passed + [False] * (6 - passed)
    draws = [any(draw) for draw in itertools.combinations(attempts, k)]
    assert pass_at_k(6, passed, k) == pytest.approx(sum(draws) / len(draws))


def test_pass_at_k_needs_k_attempts() -> None:
    """Fewer than k attempts are an error."""
    assert pass_at_k(200, 1, 100) == pytest.approx(1 / 2, abs=1e-12)
    with pytest.raises(UsageError, match="pass@3 of 1 in 2"):
        pass_at_k(2, 1, 3)


def test_an_evaluation_averages_over_tasks() -> None:
    """Tasks have equal weights; attempts without a reward are counted by cause, and in no rate."""
    lost = Failure(Boundary.RUNTIME, "gone", Cause.SANDBOX)
    slow = Failure(Boundary.AGENT, "slow", Cause.AGENT_TIMEOUT)
    attempts = [
        *(Attempt("a", reward) for reward in (1.0, 0.0, 0.0, 0.0)),
        *(Attempt("b", reward) for reward in (1.0, 1.0)),
        Attempt("b", None, lost),
        Attempt("c", 0.5, slow),
    ]
    tags = {"a": {"kind": "x"}, "b": {"kind": "y"}, "c": {"kind": "x"}}
    result = evaluate(attempts, k=4, tags=tags)
    assert result.pass_at[1].value == pytest.approx((1 / 4 + 1 + 0) / 3)
    assert result.pass_at[2].value == pytest.approx((1 / 2 + 1) / 2)
    assert (result.pass_at[4].value, result.pass_at[4].tasks) == (1.0, 1)
    assert (result.attempts, result.unrewarded) == (7, 1)
    assert result.reward == pytest.approx(3.5 / 7)
    assert result.by_tag["kind=x"].value == pytest.approx(1 / 8)
    assert result.failures == {"sandbox": 1, "agent_timeout": 1}
    assert dict(summarize(result))["without a reward"] == "1 sessions, not counted"
    assert evaluate([]).pass_at == {}


@pytest.mark.parametrize(
    ("passed", "n", "low", "high"),
    [  # published in R. G. Newcombe 1998, Statistics in Medicine 17, 857, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (0, 0, 0.0, 1.0),  # no attempts
    ],
)
def test_wilson_gives_the_published_intervals(passed: int, n: int, low: float, high: float) -> None:
    """The intervals without continuity correction agree to four digits."""
    assert wilson(passed, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_symmetric_and_contains_the_rate(counts: tuple[int, int]) -> None:
    """The interval is within 0 and 1; failures have the mirrored one."""
    passed, n = counts
    low, high = wilson(passed, n)
    assert 0 <= low <= passed / n <= high <= 1
    assert wilson(n - passed, n) == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_intervals() -> None:
    """The interval is Wilson's if each task is solved or not; less spread makes it narrower."""
    solved = estimate(np.array([1.0] * 31 + [0.0] * 65))
    assert (solved.low, solved.high) == wilson(31, 96)
    even = estimate(np.full(96, 0.3))
    assert even.low < 0.3 < even.high
    assert even.high - even.low < (solved.high - solved.low) / 2
    few = estimate(np.array([0.5]))
    assert few.low < 0.2
    assert few.high > 0.8


def test_intervals_cover_the_true_rate() -> None:
    """About 95 % of intervals contain the true rate, for tasks of mixed difficulty."""
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        chances = random.beta(0.8, 1.2, 40)
        interval = estimate(random.binomial(4, chances) / 4)
        covered += interval.low <= 0.4 <= interval.high
    assert 0.92 <= covered / 400 <= 0.99


def test_a_comparison_is_paired() -> None:
    """With 3 of 5 tasks better and none worse, the interval is that of Bonett and Price."""
    before = [Attempt(name, 0.0) for name in "abcde"]
    now = [Attempt(name, float(name in "abc")) for name in "abcdef"]
    comparison = compare(now, before)
    assert (comparison.better, comparison.worse, comparison.difference.tasks) == (
        ("a", "b", "c"),
        (),
        5,
    )
    assert comparison.difference.value == pytest.approx(0.6)
    centre, spread = 3 / 7, ((5 / 7 - (3 / 7) ** 2) / 7) ** 0.5
    assert comparison.difference.low == pytest.approx(centre - 1.96 * spread)
    assert comparison.difference.high == pytest.approx(centre + 1.96 * spread)
    same = compare(before, before).difference
    assert (same.value, same.low < 0 < same.high) == (0.0, True)
    with pytest.raises(UsageError, match="share no task with a reward"):
        compare(now, [Attempt("z", 1.0)])


@pytest.mark.parametrize(("tasks", "k"), [(20, 4), (100, 4), (100, 1), (40, 8)])
def test_comparisons_cover_the_true_difference(tasks: int, k: int) -> None:
    """About 95 % of intervals contain the true difference, for tasks of mixed difficulty."""
    random = np.random.default_rng(0)
    covered = found = 0
    for _ in range(300):
        chances = random.beta(0.5, 0.5, tasks)
        better = np.clip(chances + 0.05, 0, 1)
        runs = [
            [Attempt(str(at), float(passed)) for at, row in enumerate(drawn) for passed in row]
            for drawn in (random.random((tasks, k)) < rates[:, None] for rates in (better, chances))
        ]
        difference = compare(*runs).difference
        covered += difference.low <= float((better - chances).mean()) <= difference.high
        found += difference.low > 0
    assert 0.92 <= covered / 300 <= 0.99
    if k > 1 and tasks == 100:
        assert found / 300 > 0.4  # 0.34 if a whole task is added in each direction


def test_a_run_without_results_is_an_error(tmp_path: Path) -> None:
    """The error names the file that has no results."""
    with pytest.raises(UsageError, match=r"results\.jsonl is not a file of results"):
        read_results(tmp_path)


REWARDS = st.sampled_from([0.0, 0.25, 1.0])


@given(st.lists(st.tuples(st.sampled_from("abc"), REWARDS, REWARDS), min_size=1, max_size=30))
def test_two_verdicts_are_compared_in_pairs(pairs: list[tuple[str, float, float]]) -> None:
    """Exchanged verdicts give negative differences; equal ones have none, with an interval."""
    one = compare_verdicts(pairs)
    other = compare_verdicts([(task, now, before) for task, before, now in pairs])
    assert one.same == other.same
    assert (one.changed, one.sessions) == (other.changed, len(pairs))
    assert one.changed == sum(before != now for _, before, now in pairs)
    for first, second in (
        (one.difference, other.difference),
        (one.reward_difference, other.reward_difference),
    ):
        assert (first.value, first.low) == pytest.approx((-second.value, -second.high))
        assert first.low < first.high
    equal = compare_verdicts([(task, now, now) for task, _, now in pairs])
    assert (equal.changed, equal.same.value, equal.reward_difference.value) == (0, 1.0, 0.0)
    assert equal.reward_difference.low < 0 < equal.reward_difference.high


def test_binary_verdicts_have_one_difference() -> None:
    """For rewards of 0 and 1, the difference in the reward is that of pass@1, computed by hand."""
    result = compare_verdicts([("a", 0.0, 1.0), ("a", 0.0, 0.0), ("b", 1.0, 1.0), ("c", 1.0, 0.0)])
    assert result.difference.value == pytest.approx((0.5 + 0.0 - 1.0) / 3)
    assert result.reward_difference == result.difference
    assert (result.solved, result.reward) == ((2, 2), (0.5, 0.5))
    assert result.same.value == pytest.approx((0.5 + 1.0 + 0.0) / 3)
