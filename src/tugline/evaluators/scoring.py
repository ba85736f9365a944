"""Score a test report: which tests were expected, and how many had the expected outcome.

Nothing counts of a run that did not end, or whose report contradicts itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from tugline.errors import ConfigError
from tugline.evaluators.base import Verdict
from tugline.evaluators.formats.base import TestOutcome, TestReport
from tugline.sandbox.base import Exit
from tugline.types import Reward

_MAX_NAMES = 50
"""Names of each kind in a report."""

Names = Sequence[Annotated[str, msgspec.Meta(min_length=1)]]
"""Names of tests, as an option of an evaluator."""
Expected = Names | Mapping[str, TestOutcome]
"""Tests that must pass, or the outcome of each."""


class ExpectedTests(msgspec.Struct, frozen=True):
    """The expected outcome of each test, by name; None: every reported test must pass."""

    tests: dict[str, TestOutcome] | None = None
    groups: dict[str, tuple[str, ...]] = {}
    """Lists of tests whose share is a part of the reward, by name of the part."""
    partial: bool = False
    """Whether the reward is the share of tests with the expected outcome, or all or nothing."""


def parse_expected(
    expected: Expected | None, groups: Mapping[str, Names | None], *, partial: bool
) -> ExpectedTests:
    """Combine the options of a task. Raises `ConfigError` if no test is expected."""
    lists = {option: tuple(names) for option, names in groups.items() if names is not None}
    tests = {name: TestOutcome.PASS for names in lists.values() for name in names}
    if isinstance(expected, Mapping):
        tests |= {name: TestOutcome(outcome) for name, outcome in expected.items()}
    elif expected is not None:
        tests |= dict.fromkeys(expected, TestOutcome.PASS)
    if not tests and (lists or expected is not None):
        msg = "evaluator 'tests': no test is expected; leave `expected` out to ask for all"
        raise ConfigError(msg)
    return ExpectedTests(tests or None, lists, partial)


def score(
    report: TestReport,
    expected: ExpectedTests,
    end: Exit,
    normalize: Callable[[str], str] = lambda name: name,
    *,
    codes: Collection[int] = (),
) -> Verdict:
    """Score a run; `normalize` returns the format's name of an expected test.

    `codes` are the exit codes of a run in which all tests may have passed; empty: any.
    """
    tests = expected.tests
    if tests is None:
        tests = dict.fromkeys(report.outcomes, TestOutcome.PASS)
    outcomes = {test: report.find(normalize(test)) for test in tests}
    met = {test for test, outcome in outcomes.items() if outcome is tests[test]}
    trouble = _find_trouble(report, end)
    share = len(met) / len(tests) if tests and not trouble else 0.0
    good = share == 1.0 and (not codes or end.code in codes)
    failed = {
        test: report.find_reason(normalize(test)) or outcome.value
        for test, outcome in outcomes.items()
        if outcome and test not in met
    }
    details: dict[str, Any] = {
        "reason": trouble or _give_reason(len(tests) - len(met), len(tests), end, good=good),
        "passed": len(met),
        "total": len(tests),
        "failed": dict(list(failed.items())[:_MAX_NAMES]),
        "missing": sorted(test for test, found in outcomes.items() if found is None)[:_MAX_NAMES],
        "exit": end.code,
        "timed_out": end.timed_out,
        "seconds": round(end.seconds, 3),
    }
    parts = {"passed": float(len(met)), "total": float(len(tests))}
    for group, names in expected.groups.items():
        parts[group] = len(met & set(names)) / len(names) if names else 1.0
    return Verdict(Reward(share if expected.partial else float(good), parts), details)


def _give_reason(lacking: int, total: int, end: Exit, *, good: bool) -> str:
    if good:
        return "passed"
    if lacking:
        return f"{lacking} of {total} not passed"
    return f"all passed, but exit code {end.code}"


def _find_trouble(report: TestReport, end: Exit) -> str:
    if end.timed_out:
        return f"out of time after {end.seconds:.1f} s"
    if end.cause is not None:
        return f"ended by {end.cause.value}"
    if not report.outcomes:
        return f"no test was reported (exit {end.code})"
    if not report.complete:
        return f"the run did not come to its end (exit {end.code})"
    return report.inconsistency and f"not believed: {report.inconsistency}"
