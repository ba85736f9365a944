"""What a test runner said about each test, and how its output is read without trust.

A reader is pure: bytes in, `TestReport` out, in time linear in the bytes; garbage is no test,
never an exception. Output may have been written by the code under test, so a reader believes
as little as its format allows: of two results for one test the worse counts, captured output is
passed over, and claims that the runner's own closing count contradicts are an `oddity`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from enum import StrEnum

_LONGEST = 8192
"""Characters of a line that are read."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_WHY = 300
_MOST = 100_000
"""Tests of one run that are kept."""


class TestOutcome(StrEnum):
    """The outcome of one test, worst first."""

    __test__ = False  # not a class of tests for pytest

    FAIL = "fail"
    SKIP = "skip"
    XFAIL = "xfail"
    """It failed, and said before that it would."""
    PASS = "pass"  # noqa: S105 - no secret


_WORSE = list(TestOutcome)


class TestReport:
    """Outcomes by test name, as one run reported them."""

    __test__ = False  # not a class of tests for pytest

    def __init__(self) -> None:
        self.marks: dict[str, TestOutcome] = {}
        self.complete = False
        """Whether the runner came to its end and said so."""
        self.oddity = ""
        """How what is claimed contradicts itself; nothing of it counts then."""
        self._cases: dict[str, TestOutcome] = {}
        """Marks of parametrized tests by the name that all their cases share."""
        self._why: dict[str, str] = {}

    def add(self, name: str, mark: TestOutcome, why: str = "") -> None:
        """Once more told of a test."""
        if len(self.marks) >= _MOST and name not in self.marks:
            self.oddity = f"more than {_MOST} tests are told of"
            return
        self.marks[name] = _worse(self.marks.get(name, mark), mark)
        shared = name.partition("[")[0] if name.endswith("]") else name
        if shared != name:
            self._cases[shared] = _worse(self._cases.get(shared, mark), mark)
        if why.strip() and mark is not TestOutcome.PASS:
            said = why.strip().partition("\n")[0][:_WHY]
            self._why.setdefault(name, said)
            self._why.setdefault(shared, said)

    def look(self, name: str) -> TestOutcome | None:
        """Its mark; for a name that only cases of a parametrized test have, their worst."""
        return self.marks.get(name) or self._cases.get(name)

    def reason(self, name: str) -> str:
        """Why it did not pass, in one line, as far as that was said."""
        return self._why.get(name, "")

    def count(self, mark: TestOutcome) -> int:
        """How many tests have this mark."""
        return sum(each is mark for each in self.marks.values())


def lines(data: bytes) -> Iterator[str]:
    """Lines as people would see them: no colours, no control of the terminal, no end of line."""
    for raw in io.BytesIO(data):
        text = raw[:_LONGEST].decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
        yield _ESCAPES.sub("", text) if "\x1b" in text else text


def as_given(name: str) -> str:
    """A format whose names have one spelling."""
    return name


def _worse(one: TestOutcome, other: TestOutcome) -> TestOutcome:
    return min(one, other, key=_WORSE.index)
