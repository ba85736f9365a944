"""What Jest says: its ``--json`` report (Vitest's too), or the tree that ``--verbose`` draws.

Names are full: the titles of the groups and of the test with one space between them.
"""

from __future__ import annotations

import re

import msgspec

from tugline.evaluators.formats.base import TestOutcome, TestReport, lines

_MARKS = {
    "passed": TestOutcome.PASS,
    "failed": TestOutcome.FAIL,
    "pending": TestOutcome.SKIP,
    "skipped": TestOutcome.SKIP,
    "disabled": TestOutcome.SKIP,
    "todo": TestOutcome.SKIP,
}
_SIGNS = dict.fromkeys("✓✔√", TestOutcome.PASS) | dict.fromkeys("✕✗×", TestOutcome.FAIL)  # noqa: RUF001
_SIGNS |= dict.fromkeys("○✎", TestOutcome.SKIP)
_FILE = re.compile(r" ?(PASS|FAIL)\s+\S+")
_TOOK = re.compile(r" \(\d[\d.]* m?s\)$")
_COUNT = re.compile(r"Tests: +(?:\d+ [a-z]+, )*?(?:(\d{1,9}) passed, )?\d+ total$")


class _Case(msgspec.Struct):
    status: str
    full_name: str = msgspec.field(name="fullName")
    messages: list[str] = msgspec.field(name="failureMessages", default_factory=list)


class _File(msgspec.Struct):
    cases: list[_Case] = msgspec.field(name="assertionResults")
    status: str = ""


class _Report(msgspec.Struct):
    files: list[_File] = msgspec.field(name="testResults")


def read(data: bytes) -> TestReport:
    """The report where it is one, else the tree."""
    if data.lstrip()[:1] != b"{":
        return _tree(data)
    told = TestReport()
    try:
        report = msgspec.json.decode(data, type=_Report)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return told
    for case in (case for file in report.files for case in file.cases):
        mark = _MARKS.get(case.status, TestOutcome.FAIL)
        told.add(case.full_name, mark, case.messages[0] if case.messages else "")
    told.complete = True
    return told


def _tree(data: bytes) -> TestReport:
    told = TestReport()
    titles: list[str] = []
    inside, passed = False, set[str]()
    for line in lines(data):
        text = line.strip()
        if _FILE.match(line):
            inside, titles = True, []
        elif not text:
            inside = False
        elif count := _COUNT.match(line):
            claimed, inside, told.complete = int(count[1] or 0), False, True
            if len(passed) > claimed:
                told.oddity = _contradicted(len(passed), claimed)
            passed = set()
        elif inside:
            depth = (len(line) - len(line.lstrip())) // 2 - 1
            del titles[max(depth, 0) :]
            mark = _SIGNS.get(text[0])
            if mark is None:
                titles.append(text)
            else:
                title = _TOOK.sub("", text[1:].strip())
                if mark is TestOutcome.SKIP:
                    title = title.removeprefix("skipped ").removeprefix("todo ")
                name = " ".join([*titles, title])
                told.add(name, mark)
                passed |= {name} if mark is TestOutcome.PASS else frozenset()
    if passed and told.complete:
        told.oddity = _contradicted(len(passed), 0)
    return told


def _contradicted(passed: int, claimed: int) -> str:
    return f"{passed} tests are said to have passed, Jest counted {claimed}"
