"""Output of ``go test -v`` and ``go test -json``.

A test has two names: ``TestTable/one_case``, and with its package
``example.org/shop/calc::TestTable/one_case``. A test that was not reported to run has not passed.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tugline.evaluators.formats.base import TestOutcome, TestReport, read_lines

_RUN = re.compile(r"=== RUN   (\S+)$")
# A test that wrote without a newline has its end on the same line.
_END = re.compile(r"--- (PASS|FAIL|SKIP): (\S+) \(\d[\d.]*s\)$")
_PACKAGE = re.compile(r"(ok|FAIL)\s+(\S+)\s+(\d[\d.]*s|\(cached\)|\[[a-z ]+\])")
_OUTCOMES = {"pass": TestOutcome.PASS, "fail": TestOutcome.FAIL, "skip": TestOutcome.SKIP}
_DECODER = msgspec.json.Decoder(dict[str, Any])


class _Package:
    """Tests of one package, until its last line names it."""

    def __init__(self) -> None:
        self.ran: set[str] = set()
        self.ends: list[tuple[str, TestOutcome]] = []

    def read_line(self, line: str) -> None:
        """Read a line of its output."""
        start = _RUN.search(line)
        # A test that wrote without a newline has the beginning of its subtest on the same line.
        if start and (start.start() == 0 or start[1].partition("/")[0] in self.ran):
            self.ran.add(start[1])
        elif end := _END.search(line):
            self.ends.append((end[2], _OUTCOMES[end[1].lower()]))

    def close(self, report: TestReport, package: str) -> None:
        """Report the package's tests."""
        for test, outcome in self.ends:
            if test in self.ran:
                report.add(test, outcome)
                report.add(f"{package}::{test}", outcome)
        ended = {test for test, _ in self.ends}
        for test in self.ran - ended:
            report.add(test, TestOutcome.FAIL, "it did not end")
            report.add(f"{package}::{test}", TestOutcome.FAIL)
        report.complete = True
        self.ran, self.ends = set(), []


def read(data: bytes) -> TestReport:
    """Read either form; a line that is a JSON event begins the second."""
    report = TestReport()
    events: dict[str, _Package] = {}
    text = _Package()
    for line in read_lines(data):
        if line.startswith('{"') and (event := _parse_event(line)) is not None:
            _read_event(report, events, event)
            continue
        text.read_line(line)
        if (end := _PACKAGE.match(line)) and not events:
            text.close(report, end[2])
    if any(package.ran for package in (text, *events.values())):
        report.complete = False
    return report


def _parse_event(line: str) -> dict[str, Any] | None:
    try:
        event = _DECODER.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return event if isinstance(event.get("Action"), str) and "Package" in event else None


def _read_event(report: TestReport, packages: dict[str, _Package], event: dict[str, Any]) -> None:
    action, name, test = event["Action"], str(event["Package"]), event.get("Test")
    package = packages.setdefault(name, _Package())
    if action == "output":
        # Older Go takes the end of a test that wrote without a newline for output.
        end = _END.search(str(event.get("Output", "")).rstrip("\n"))
        if end and end[2] in package.ran:
            package.ends.append((end[2], _OUTCOMES[end[1].lower()]))
    elif isinstance(test, str):
        if action == "run":
            package.ran.add(test)
        elif action in _OUTCOMES:
            package.ends.append((test, _OUTCOMES[action]))
    elif action in _OUTCOMES:
        package.close(report, name)
