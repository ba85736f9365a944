"""Test reports, and their scores by the expected tests.

The code under test may have written the report, so it is trusted as little as its format allows: of
several results of a test the worst counts, a run that did not end counts as failed, and results
that contradict the test program's own count are an `inconsistency`.
"""

import codecs
import io
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from tugline.errors import ConfigError
from tugline.evaluators.base import Verdict
from tugline.sandbox.base import Exit
from tugline.types import Reward

_MAX_LINE = 8192
"""Maximum bytes read of a line."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_LINE = re.compile(r" \(line \d+\)$")
_MAX_REASON = 300
_MAX_TESTS = 100_000


class TestOutcome(StrEnum):
    """Outcome of a test, worst first."""

    __test__ = False  # not a class of tests for pytest

    FAIL = "fail"
    SKIP = "skip"
    """Skipped, or an expected failure."""
    PASS = "pass"  # noqa: S105 - not a password


_WORST_FIRST = list(TestOutcome)


class TestReport(msgspec.Struct):
    """Outcomes by test name, as reported by one run."""

    __test__ = False  # not a class of tests for pytest

    outcomes: dict[str, TestOutcome] = {}
    complete: bool = False
    """Whether the test program reported that it ran to its end."""
    inconsistency: str = ""
    """Contradiction in the report, because of which nothing of it counts; empty if none."""
    _cases: dict[str, TestOutcome] = {}
    """Worst outcome of each parametrized test, by the common name of its cases."""
    _reasons: dict[str, str] = {}
    _items: dict[str, TestOutcome] = {}
    """Worst outcome of the documentation tests of each item, by their common name."""

    def add(self, name: str, outcome: TestOutcome, reason: str = "") -> None:
        """Add a result; of several results of a test the worst counts."""
        name = _clean(name)
        reason = _clean(reason)
        if len(self.outcomes) >= _MAX_TESTS and name not in self.outcomes:
            self.inconsistency = f"more than {_MAX_TESTS} tests are reported"
            return
        self.outcomes[name] = _worse(self.outcomes.get(name, outcome), outcome)
        shared = name.partition("[")[0] if name.endswith("]") else name
        if shared != name:
            self._cases[shared] = _worse(self._cases.get(shared, outcome), outcome)
        if reason.strip() and outcome is not TestOutcome.PASS:
            first_line = reason.strip().partition("\n")[0][:_MAX_REASON]
            self._reasons.setdefault(name, first_line)
            self._reasons.setdefault(shared, first_line)

    def add_doctest(self, name: str, outcome: TestOutcome) -> None:
        """Add a test in the documentation of an item, whose name has a line that may move."""
        self.add(name, outcome)
        item = _LINE.sub("", name)
        self._items[item] = _worse(self._items.get(item, outcome), outcome)

    def find(self, name: str) -> TestOutcome | None:
        """Return a test's outcome; for the name of a parametrized test, that of its worst case.

        A documentation test that is not on its line stands for all of its item.
        """
        name = _clean(name)
        found = self.outcomes.get(name) or self._cases.get(name)
        return found or self._items.get(_LINE.sub("", name))

    def find_reason(self, name: str) -> str:
        """Return the first line of the reported reason why a test did not pass; may be empty."""
        return self._reasons.get(_clean(name), "")


def _clean(text: str) -> str:
    """Return a text that UTF-8 can hold, without blanks at its ends."""
    text = text.strip()
    return text if text.isascii() else text.encode(errors="replace").decode()


_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


def decode_marked(data: bytes) -> str | None:
    """Decode a text that begins with a byte order mark; None if it has none."""
    for mark, encoding in _MARKS.items():
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, errors="replace")
    return None


def read_lines(data: bytes) -> Iterator[str]:
    """Yield lines without colours, control sequences, line ends and what was written over."""
    if (marked := decode_marked(data)) is not None:  # such as from PowerShell
        data = marked.encode(errors="replace")
    for raw in io.BytesIO(data):
        text = raw[:_MAX_LINE].decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
        yield _ESCAPES.sub("", text) if "\x1b" in text else text


def _worse(first: TestOutcome, other: TestOutcome) -> TestOutcome:
    return min(first, other, key=_WORST_FIRST.index)


# --------------------------------------------------------------------------- scores
_MAX_NAMES = 50
"""Maximum number of names in each list of a report."""

Names = Sequence[Annotated[str, msgspec.Meta(min_length=1)]]
"""Names of tests, as an option of an evaluator."""


class ExpectedTests(msgspec.Struct, frozen=True):
    """The tests that must pass; None: every reported test must."""

    tests: tuple[str, ...] | None = None
    groups: dict[str, tuple[str, ...]] = {}
    """Tests of each part of the reward, whose value is the fraction of them that passed."""
    partial: bool = False
    """Whether the reward is the fraction of tests that passed, instead of 1 or 0."""


def parse_expected(
    expected: Names | None, groups: Mapping[str, Names | None], *, partial: bool
) -> ExpectedTests:
    """Combine a task's options of expected tests. Raises `ConfigError` if there are none."""
    lists = {option: tuple(names) for option, names in groups.items() if names is not None}
    if expected is None and not lists:
        return ExpectedTests(partial=partial)
    tests = dict.fromkeys(itertools.chain(expected or (), *lists.values()))
    if not tests:
        msg = (
            "evaluator 'tests': the list of expected tests is empty; leave it out to expect "
            "all tests"
        )
        raise ConfigError(msg)
    return ExpectedTests(tuple(tests), lists, partial)


def score(
    report: TestReport,
    expected: ExpectedTests,
    end: Exit,
    normalize: Callable[[str], str] = lambda name: name,
    *,
    codes: Collection[int] = (),
) -> Verdict:
    """Score a run; `normalize` returns the format's name of a test that is not found as it is.

    `codes` are the exit codes with which the run may count as passed; empty means any.
    """
    tests = report.outcomes if expected.tests is None else expected.tests
    outcomes = {test: report.find(test) or report.find(normalize(test)) for test in tests}
    passed = {test for test, outcome in outcomes.items() if outcome is TestOutcome.PASS}
    trouble = _find_trouble(report, end)
    share = len(passed) / len(tests) if tests and not trouble else 0.0
    good = share == 1.0 and (not codes or end.code in codes)
    failed = {
        test: report.find_reason(test) or report.find_reason(normalize(test)) or outcome.value
        for test, outcome in outcomes.items()
        if outcome and test not in passed
    }
    details: dict[str, Any] = {
        "reason": trouble or _give_reason(len(tests) - len(passed), len(tests), end, good=good),
        "passed": len(passed),
        "total": len(tests),
        "failed": dict(list(failed.items())[:_MAX_NAMES]),
        "missing": sorted(t for t, outcome in outcomes.items() if outcome is None)[:_MAX_NAMES],
        "exit": end.code,
        "timed_out": end.timed_out,
        "seconds": round(end.seconds, 3),
    }
    parts = {"passed": float(len(passed)), "total": float(len(tests))}
    for group, names in expected.groups.items():
        parts[group] = len(passed & set(names)) / len(names) if names else 1.0
    return Verdict(Reward(share if expected.partial else float(good), parts), details)


def _give_reason(lacking: int, total: int, end: Exit, *, good: bool) -> str:
    if good:
        return "passed"
    if lacking:
        return f"{lacking} of {total} tests did not pass"
    return f"all tests passed, but the exit code is {end.code}"


def _find_trouble(report: TestReport, end: Exit) -> str:
    if end.timed_out:
        return f"time limit reached after {end.seconds:.1f} s"
    if end.cause is not None:
        return f"ended by {end.cause.value}"
    if end.code < 0:
        return f"ended by signal {-end.code}"
    if not report.outcomes:
        return report.inconsistency or f"no test was reported (exit {end.code})"
    if not report.complete:
        return f"the test run did not finish (exit {end.code})"
    if end.code and TestOutcome.FAIL not in report.outcomes.values():
        return f"no test was reported as failed, but the exit code is {end.code}"
    return report.inconsistency and f"the report is inconsistent: {report.inconsistency}"
