"""What ``python -m unittest -v`` writes, on any Python; also Django's runner.

Names are dotted, such as ``tests.test_bill.Zero.test_zero``; a test is also known by the way that
unittest shows it, ``test_zero (tests.test_bill.Zero)``.
"""

from __future__ import annotations

import re

from tugline.evaluators.formats.base import TestOutcome, TestReport, lines

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


def name(given: str) -> str:
    """The dotted name of a test."""
    found = _TEST.match(given)
    if not found:
        return given
    function, where = found.groups()
    return where if where.endswith(f".{function}") else f"{where}.{function}"


def read(data: bytes) -> TestReport:
    """What was said, line by line; the lists of failures at the end count too."""
    told = TestReport()
    running, ran, after_rule = "", 0, False
    for line in lines(data):
        trouble = _TROUBLE.match(line) if after_rule else None
        after_rule = line == "=" * 70
        count = _RAN.match(line)
        if count:
            ran, told.complete, running = ran + int(count[1]), True, ""
        elif trouble:
            told.add(name(trouble[2]), TestOutcome.FAIL)
            running = ""
        else:
            running = _step(told, running, line)
    tests = sum(test.rpartition(".")[2] not in _FIXTURES for test in told.marks)
    if told.complete and tests > ran:
        told.oddity = f"{tests} tests are told of, unittest ran {ran}"
    return told


def _step(told: TestReport, running: str, line: str) -> str:
    """The test that runs after this line."""
    start = _TEST.match(line)
    if start:
        running = name(start[0])
    # A test may have written between its name and its end, or its docstring stands there.
    end = line.rpartition(" ... ")[2] if " ... " in line else line
    if start and line.count(" ... ") > 1:
        return running  # its own output looks like a test
    mark = TestOutcome.SKIP if end.startswith("skipped ") else _ENDS.get(end.strip())
    if running and mark is not None:
        told.add(running, mark, end if mark is TestOutcome.SKIP else "")
        return ""
    return running
