"""Jest's ``--json`` report (Vitest's too), or the tree that ``--verbose`` prints.

Names are the titles of the groups and of the test, separated by one space.
"""

from __future__ import annotations

import re

import msgspec

from tugline.evaluators.formats.base import TestOutcome, TestReport, read_lines

_OUTCOMES = {
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
    """Read a JSON report, or else a tree."""
    if data.lstrip()[:1] != b"{":
        return _read_tree(data)
    report = TestReport()
    try:
        decoded = msgspec.json.decode(data, type=_Report)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return report
    for case in (case for file in decoded.files for case in file.cases):
        outcome = _OUTCOMES.get(case.status, TestOutcome.FAIL)
        report.add(case.full_name, outcome, case.messages[0] if case.messages else "")
    report.complete = True
    return report


def _read_tree(data: bytes) -> TestReport:
    report = TestReport()
    titles: list[str] = []
    inside, passed = False, set[str]()
    for line in read_lines(data):
        text = line.strip()
        if _FILE.match(line):
            inside, titles = True, []
        elif not text:
            inside = False
        elif count := _COUNT.match(line):
            claimed, inside, report.complete = int(count[1] or 0), False, True
            report.check_passed(len(passed), claimed, "Jest")
            passed = set()
        elif inside:
            depth = (len(line) - len(line.lstrip())) // 2 - 1
            del titles[max(depth, 0) :]
            outcome = _SIGNS.get(text[0])
            if outcome is None:
                titles.append(text)
            else:
                title = _TOOK.sub("", text[1:].strip())
                if outcome is TestOutcome.SKIP:
                    title = title.removeprefix("skipped ").removeprefix("todo ")
                name = " ".join([*titles, title])
                report.add(name, outcome)
                passed |= {name} if outcome is TestOutcome.PASS else frozenset()
    if report.complete:
        report.check_passed(len(passed), 0, "Jest")
    return report
