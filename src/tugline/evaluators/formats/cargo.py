"""Output of ``cargo test`` (libtest): unit tests, integration tests and doc tests.

Names are as printed, ``tests::adds`` or ``src/lib.rs - add (line 2)``. Each test program prints how
many tests it runs and how many passed; more results than that are an inconsistency.
"""

from __future__ import annotations

import re

from tugline.evaluators.formats.base import TestOutcome, TestReport, read_lines

_RUNNING = re.compile(r"running (\d+) tests?$")
_RESULT = re.compile(r"test result: (ok|FAILED)\. (\d{1,9}) passed; (\d+) failed;")
_NOTE = re.compile(r" - (should panic|compile fail|compile)$")
_FILE = re.compile(r"\.rs( \[should [a-z ]+\])?$")
"""Lines of trybuild, which libtest does not count; other test programs have such names."""
_OUTCOMES = {"ok": TestOutcome.PASS, "FAILED": TestOutcome.FAIL, "ignored": TestOutcome.SKIP}


def read(data: bytes) -> TestReport:
    """Read an output, line by line."""
    report = TestReport()
    section, pending, passed, open_programs = "", "", 0, 0
    files: list[tuple[str, TestOutcome]] = []
    for line in read_lines(data):
        result = _RESULT.match(line)
        if _RUNNING.match(line):
            section, passed, open_programs, files = "tests", 0, open_programs + 1, []
        elif result:
            _close(report, passed, files, int(result[2]))
            section, pending, passed = "", "", 0
            open_programs -= 1
            report.complete = True
        elif line == "failures:":
            section = line
        elif section == "tests":
            test, outcome = _parse(line, pending)
            if _FILE.search(test):
                files += [(test, outcome)] if outcome else []
                continue
            pending = test
            if outcome is not None and pending:
                report.add(pending, outcome)
                passed += outcome is TestOutcome.PASS
                pending = ""
    report.complete = report.complete and open_programs == 0
    return report


def _close(
    report: TestReport, passed: int, files: list[tuple[str, TestOutcome]], counted: int
) -> None:
    """End a test program; results of files are its own if it counted them."""
    passed_files = sum(outcome is TestOutcome.PASS for _, outcome in files)
    if passed < counted or not passed_files:
        passed += passed_files
        for each in files:
            report.add(*each)
    report.check_passed(passed, counted, "cargo")


def _parse(line: str, pending: str) -> tuple[str, TestOutcome | None]:
    """Return the test of a line or, if only a result follows a test's output, the one before."""
    if line.startswith("test ") and " ... " in line:
        test, _, end = line[5:].rpartition(" ... ")
        if " ... " in test:
            test, end = test.partition(" ... ")[0], ""
        return _NOTE.sub("", test), _OUTCOMES.get(end.partition(",")[0])
    return pending, _OUTCOMES.get(line)
