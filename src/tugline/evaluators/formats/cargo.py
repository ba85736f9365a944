"""What ``cargo test`` (libtest) writes: unit tests, integration tests and doc tests.

Names are as shown, ``tests::adds`` or ``src/lib.rs - add (line 2)``. Each program of tests says how
many it runs and how many passed; more than that is an oddity.
"""

from __future__ import annotations

import re

from tugline.evaluators.formats.base import TestOutcome, TestReport, lines

_RUNNING = re.compile(r"running (\d+) tests?$")
_RESULT = re.compile(r"test result: (ok|FAILED)\. (\d{1,9}) passed; (\d+) failed;")
_NOTE = re.compile(r" - (should panic|compile fail|compile)$")
_FILE = re.compile(r"\.rs( \[should [a-z ]+\])?$")
"""What trybuild says of its files, on which libtest has no hold; other runners have such tests."""
_MARKS = {"ok": TestOutcome.PASS, "FAILED": TestOutcome.FAIL, "ignored": TestOutcome.SKIP}


def read(data: bytes) -> TestReport:
    """What was said, line by line."""
    told = TestReport()
    section, pending, passed, open_programs = "", "", 0, 0
    files: list[tuple[str, TestOutcome]] = []
    for line in lines(data):
        result = _RESULT.match(line)
        if _RUNNING.match(line):
            section, passed, open_programs, files = "tests", 0, open_programs + 1, []
        elif result:
            _close(told, passed, files, int(result[2]))
            section, pending, passed = "", "", 0
            open_programs -= 1
            told.complete = True
        elif line == "failures:":
            section = line
        elif section == "tests":
            test, mark = _said(line, pending)
            if _FILE.search(test):
                files += [(test, mark)] if mark else []
                continue
            pending = test
            if mark is not None and pending:
                told.add(pending, mark)
                passed += mark is TestOutcome.PASS
                pending = ""
    told.complete = told.complete and open_programs == 0
    return told


def _close(
    told: TestReport, passed: int, files: list[tuple[str, TestOutcome]], counted: int
) -> None:
    """The end of a program of tests; tests that are files are its own if it counted them."""
    passed_files = sum(mark is TestOutcome.PASS for _, mark in files)
    if passed < counted or not passed_files:
        passed += passed_files
        for each in files:
            told.add(*each)
    if passed > counted:
        told.oddity = f"{passed} tests are said to have passed, cargo counted {counted}"


def _said(line: str, pending: str) -> tuple[str, TestOutcome | None]:
    """The test of this line or, where its end stands alone after its output, the one before."""
    if line.startswith("test ") and " ... " in line:
        test, _, end = line[5:].rpartition(" ... ")
        if " ... " in test:
            test, end = test.partition(" ... ")[0], ""
        return _NOTE.sub("", test), _MARKS.get(end.partition(",")[0])
    return pending, _MARKS.get(line)
