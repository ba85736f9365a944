"""What a test program reported about each test.

A reader is pure: bytes in, `TestReport` out, in time linear in the bytes; garbage is no test,
never an exception. Output may have been written by the code under test, so a reader trusts as
little as its format allows: of two results of one test the worse counts, captured output is
skipped, and results that the program's own count contradicts are an `inconsistency`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from enum import StrEnum

_MAX_LINE = 8192
"""Characters of a line that are read."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_MAX_REASON = 300
_MAX_TESTS = 100_000


class TestOutcome(StrEnum):
    """The outcome of one test, worst first."""

    __test__ = False  # not a class of tests for pytest

    FAIL = "fail"
    SKIP = "skip"
    XFAIL = "xfail"
    """An expected failure."""
    PASS = "pass"  # noqa: S105 - no secret


_WORST_FIRST = list(TestOutcome)


class TestReport:
    """Outcomes by test name, as one run reported them."""

    __test__ = False  # not a class of tests for pytest

    def __init__(self) -> None:
        self.outcomes: dict[str, TestOutcome] = {}
        self.complete = False
        """Whether the test program ran to its end and said so."""
        self.inconsistency = ""
        """How the report contradicts itself; then nothing of it counts."""
        self._cases: dict[str, TestOutcome] = {}
        """Worst outcomes of parametrized tests, by the name that the cases share."""
        self._reasons: dict[str, str] = {}

    def add(self, name: str, outcome: TestOutcome, reason: str = "") -> None:
        """Add a result; of several of one test the worst counts."""
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

    def find(self, name: str) -> TestOutcome | None:
        """Return a test's outcome; for the name of a parametrized test, that of its worst case."""
        return self.outcomes.get(name) or self._cases.get(name)

    def find_reason(self, name: str) -> str:
        """Return one line on why a test did not pass, if it was reported."""
        return self._reasons.get(name, "")

    def check_passed(self, passed: int, counted: int, program: str) -> None:
        """Note an inconsistency if more tests are reported as passed than the program counted."""
        if passed > counted:
            self.inconsistency = (
                f"{passed} tests are reported as passed, {program} counted {counted}"
            )


def read_lines(data: bytes) -> Iterator[str]:
    """Yield lines without colours, control sequences and line ends."""
    for raw in io.BytesIO(data):
        text = raw[:_MAX_LINE].decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
        yield _ESCAPES.sub("", text) if "\x1b" in text else text


def _worse(first: TestOutcome, other: TestOutcome) -> TestOutcome:
    return min(first, other, key=_WORST_FIRST.index)
