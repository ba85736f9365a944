"""From what a test runner told to a reward: which tests were wanted, and how many came true.

Nothing counts of a run that did not come to its end, or whose claims contradict themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from tugline.errors import ConfigError
from tugline.evaluators.base import Verdict
from tugline.evaluators.formats.base import TestOutcome, TestReport
from tugline.sandbox.base import Exit
from tugline.types import Reward

_SHOWN = 50
"""Names of each kind in a report."""


class ExpectedTests(msgspec.Struct, frozen=True):
    """What each test must become, by name; None: every test that is told of must pass."""

    tests: dict[str, TestOutcome] | None = None
    groups: dict[str, tuple[str, ...]] = {}
    """Names of lists whose shares are parts of the reward."""
    partial: bool = False
    """Whether the reward is the share of tests that came true, and not all or nothing."""


def wanted(
    expected: Sequence[str] | Mapping[str, str] | None,
    groups: Mapping[str, Sequence[str] | None],
    *,
    partial: bool,
) -> ExpectedTests:
    """From options as they were written. Raises `ConfigError` naming the option."""
    lists = {
        option: tuple(_names(option, names))
        for option, names in groups.items()
        if names is not None
    }
    tests = {name: TestOutcome.PASS for names in lists.values() for name in names}
    if isinstance(expected, Mapping):
        for name, mark in expected.items():
            if mark not in set(TestOutcome):
                known = ", ".join(TestOutcome)
                msg = f"evaluator 'tests': expected[{name!r}] is {mark!r}, must be one of {known}"
                raise ConfigError(msg)
            tests[name] = TestOutcome(mark)
    elif expected is not None:
        tests |= dict.fromkeys(_names("expected", expected), TestOutcome.PASS)
    if not tests and (lists or expected is not None):
        msg = "evaluator 'tests': no test is expected; leave `expected` out to ask for all"
        raise ConfigError(msg)
    return ExpectedTests(tests or None, lists, partial)


def _names(option: str, names: object) -> Sequence[str]:
    if isinstance(names, list | tuple) and all(isinstance(name, str) and name for name in names):
        return names
    msg = f"evaluator 'tests': {option} is {names!r:.80}, must be a list of names of tests"
    raise ConfigError(msg)


def score(
    told: TestReport,
    asked: ExpectedTests,
    end: Exit,
    name: Callable[[str], str] = lambda given: given,
    *,
    codes: Collection[int] = (),
) -> Verdict:
    """The verdict on a run; `name` makes a wanted test's name one of the format's.

    `codes` are the exit codes with which all may be well; none given: any.
    """
    tests = asked.tests if asked.tests is not None else dict.fromkeys(told.marks, TestOutcome.PASS)
    marks = {test: told.look(name(test)) for test in tests}
    met = {test for test, mark in marks.items() if mark is tests[test]}
    trouble = _trouble(told, end)
    share = len(met) / len(tests) if tests and not trouble else 0.0
    good = share == 1.0 and (not codes or end.code in codes)
    value = share if asked.partial else float(good)
    failed = {t: told.reason(name(t)) or m.value for t, m in marks.items() if m and t not in met}
    report: dict[str, Any] = {
        "reason": trouble or _reason(len(tests) - len(met), len(tests), end, good=good),
        "passed": len(met),
        "total": len(tests),
        "failed": dict(list(failed.items())[:_SHOWN]),
        "missing": sorted(test for test, mark in marks.items() if mark is None)[:_SHOWN],
        "exit": end.code,
        "timed_out": end.timed_out,
        "seconds": round(end.seconds, 3),
    }
    parts = {"passed": float(len(met)), "total": float(len(tests))}
    for group, names in asked.groups.items():
        parts[group] = len(met & set(names)) / len(names) if names else 1.0
    return Verdict(Reward(value, parts), report)


def _reason(lacking: int, total: int, end: Exit, *, good: bool) -> str:
    if good:
        return "passed"
    return (
        f"{lacking} of {total} not passed" if lacking else f"all passed, but exit code {end.code}"
    )


def _trouble(told: TestReport, end: Exit) -> str:
    if end.timed_out:
        return f"out of time after {end.seconds:.1f} s"
    if end.cause is not None:
        return f"ended by {end.cause.value}"
    if not told.marks:
        return f"no test was told of (exit {end.code})"
    if not told.complete:
        return f"the run did not come to its end (exit {end.code})"
    return told.oddity and f"not believed: {told.oddity}"
