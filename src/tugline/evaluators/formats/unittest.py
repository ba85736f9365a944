"""Output of ``python -m unittest -v`` on any Python, and of Django's runner.

Names are dotted, such as ``tests.test_bill.Zero.test_zero``, or as unittest prints them,
``test_zero (tests.test_bill.Zero)``.
"""

from __future__ import annotations

import re

from tugline.evaluators.formats.base import TestOutcome, TestReport, read_lines

_TEST = re.compile(r" {0,2}(\w+) \(([\w.<>]+)\)")
_ENDS = {
    "ok": TestOutcome.PASS,
    "FAIL": TestOutcome.FAIL,
    "ERROR": TestOutcome.FAIL,
    "expected failure": TestOutcome.XFAIL,
    "unexpected success": TestOutcome.FAIL,
}
_TROUBLE = re.compile(r"(ERROR|FAIL|UNEXPECTED SUCCESS): (\w+ \([\w.<>]+\))")
_FIXTURES = {"setUpClass", "tearDownClass", "setUpModule", "tearDownModule"}
_RAN = re.compile(r"Ran (\d{1,9}) tests? in ")


def normalize(name: str) -> str:
    """Return the dotted name of a test."""
    found = _TEST.match(name)
    if not found:
        return name
    function, where = found.groups()
    return where if where.endswith(f".{function}") else f"{where}.{function}"


def read(data: bytes) -> TestReport:
    """Read an output line by line; the lists of failures at the end count too."""
    report = TestReport()
    running, ran, after_rule = "", 0, False
    for line in read_lines(data):
        trouble = _TROUBLE.match(line) if after_rule else None
        after_rule = line == "=" * 70
        count = _RAN.match(line)
        if count:
            ran, report.complete, running = ran + int(count[1]), True, ""
        elif trouble:
            report.add(normalize(trouble[2]), TestOutcome.FAIL)
            running = ""
        else:
            running = _step(report, running, line)
    tests = sum(test.rpartition(".")[2] not in _FIXTURES for test in report.outcomes)
    if report.complete and tests > ran:
        report.inconsistency = f"{tests} tests are reported, unittest ran {ran}"
    return report


def _step(report: TestReport, running: str, line: str) -> str:
    """Return the test that runs after this line."""
    start = _TEST.match(line)
    if start:
        running = normalize(start[0])
    # A test may have written between its name and its end, or its docstring stands there.
    end = line.rpartition(" ... ")[2] if " ... " in line else line
    if start and line.count(" ... ") > 1:
        return running  # its own output looks like a test
    outcome = TestOutcome.SKIP if end.startswith("skipped ") else _ENDS.get(end.strip())
    if running and outcome is not None:
        report.add(running, outcome, end if outcome is TestOutcome.SKIP else "")
        return ""
    return running
