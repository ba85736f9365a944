"""What ``go test -v`` and ``go test -json`` write.

A test is known by its name, ``TestTable/one_case``, and with its package before it,
``example.org/shop/calc::TestTable/one_case``. What was never said to run has not passed.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tugline.evaluators.formats.base import TestOutcome, TestReport, lines

_RUN = re.compile(r"=== RUN   (\S+)$")
# A test that wrote without a newline has its end on the same line.
_END = re.compile(r"--- (PASS|FAIL|SKIP): (\S+) \(\d[\d.]*s\)$")
_PACKAGE = re.compile(r"(ok|FAIL)\s+(\S+)\s+(\d[\d.]*s|\(cached\)|\[[a-z ]+\])")
_MARKS = {"pass": TestOutcome.PASS, "fail": TestOutcome.FAIL, "skip": TestOutcome.SKIP}
_DECODER = msgspec.json.Decoder(dict[str, Any])


class _Package:
    """Tests of one package, until its last line names it."""

    def __init__(self) -> None:
        self.ran: set[str] = set()
        self.ends: list[tuple[str, TestOutcome]] = []

    def hear(self, line: str) -> None:
        """A line of its output."""
        start = _RUN.search(line)
        # A test that wrote without a newline has the beginning of its subtest on the same line.
        if start and (start.start() == 0 or start[1].partition("/")[0] in self.ran):
            self.ran.add(start[1])
        elif end := _END.search(line):
            self.ends.append((end[2], _MARKS[end[1].lower()]))

    def close(self, told: TestReport, package: str) -> None:
        """Write down what is known of it."""
        for test, mark in self.ends:
            if test in self.ran:
                told.add(test, mark)
                told.add(f"{package}::{test}", mark)
        ended = {test for test, _ in self.ends}
        for test in self.ran - ended:
            told.add(test, TestOutcome.FAIL, "it did not come to an end")
            told.add(f"{package}::{test}", TestOutcome.FAIL)
        told.complete = True
        self.ran, self.ends = set(), []


def read(data: bytes) -> TestReport:
    """Either form, told apart by its first line that is JSON."""
    told = TestReport()
    events: dict[str, _Package] = {}
    text = _Package()
    for line in lines(data):
        if line.startswith('{"') and (event := _event(line)) is not None:
            _heard(told, events, event)
            continue
        text.hear(line)
        if (end := _PACKAGE.match(line)) and not events:
            text.close(told, end[2])
    if any(package.ran for package in (text, *events.values())):
        told.complete = False
    return told


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = _DECODER.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return event if isinstance(event.get("Action"), str) and "Package" in event else None


def _heard(told: TestReport, packages: dict[str, _Package], event: dict[str, Any]) -> None:
    action, name, test = event["Action"], str(event["Package"]), event.get("Test")
    package = packages.setdefault(name, _Package())
    if action == "output":
        # Older Go takes the end of a test that wrote without a newline for output.
        end = _END.search(str(event.get("Output", "")).rstrip("\n"))
        if end and end[2] in package.ran:
            package.ends.append((end[2], _MARKS[end[1].lower()]))
    elif isinstance(test, str):
        if action == "run":
            package.ran.add(test)
        elif action in _MARKS:
            package.ends.append((test, _MARKS[action]))
    elif action in _MARKS:
        package.close(told, name)
