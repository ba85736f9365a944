"""The Test Anything Protocol, versions 12 to 14, with subtests indented by four.

A test's name is its description; a subtest's begins with those above it: ``group > inner``. Each
number may be used once and must be in the plan.
"""

from __future__ import annotations

import re

from tugline.evaluators.formats.base import TestOutcome, TestReport, read_lines

_POINT = re.compile(r"((?: {4})*)(not )?ok\b(?: +(\d+))?(?: +- +| +|$)(.*)")
_PLAN = re.compile(r"((?: {4})*)1\.\.(\d{1,9})\b")
_DIRECTIVE = re.compile(r"(?<!\\)# *(SKIP|TODO)\b *(.*)", re.IGNORECASE)
_FILE = re.compile(r"\S+ \.{2,} $")
"""Start of a file's output by prove, which ends with a lone ``ok``."""
_INDENT, _DEEPEST = 4, 8


class _Level:
    """Test points of one depth whose parent has not ended."""

    def __init__(self) -> None:
        self.points: list[tuple[str, TestOutcome, str]] = []
        self.numbers: set[int] = set()
        self.last = 0
        self.plan: int | None = None

    def is_complete(self) -> bool:
        """Return whether there are as many points as planned."""
        return len(self.numbers) == self.plan


def read(data: bytes) -> TestReport:
    """Read an output, line by line."""
    report = TestReport()
    levels = [_Level()]
    documents = [levels]
    block = ""
    for line in read_lines(data):
        if block:
            block = "" if line.rstrip() == block else block
        elif line.strip() == "---" and line.startswith(" "):
            block = line.rstrip().replace("---", "...")
        elif line.startswith("Bail out!"):
            return report
        elif plan := _PLAN.match(line):
            _find_level(levels, len(plan[1])).plan = int(plan[2])
        elif line.startswith("TAP version ") or _FILE.match(line):
            levels = [_Level()]
            documents.append(levels)
        elif (point := _POINT.match(line)) and not (line == "ok" and levels[0].is_complete()):
            _read_point(report, levels, point)
    report.complete = any(levels[0].is_complete() for levels in documents)
    for levels in documents:
        _close(report, levels)
    return report


def _find_level(levels: list[_Level], indent: int) -> _Level:
    """Return the level of an indent; make it if it is one deeper than the last."""
    depth = min(indent // _INDENT, len(levels), _DEEPEST)
    if depth == len(levels):
        levels.append(_Level())
    return levels[depth]


def _read_point(report: TestReport, levels: list[_Level], point: re.Match[str]) -> None:
    level = _find_level(levels, len(point[1]))
    number = int(point[3][:9]) if point[3] else level.last + 1
    level.last = number
    if number in level.numbers:
        report.inconsistency = f"test {number} is reported twice"
    level.numbers.add(number)
    directive = _DIRECTIVE.search(point[4])
    title = point[4][: directive.start()] if directive else point[4]
    title = title.strip().replace("\\#", "#").replace("\\\\", "\\")
    word = directive[1].upper() if directive else ""
    outcome = TestOutcome.FAIL if point[2] else TestOutcome.PASS
    if word:
        outcome = (
            TestOutcome.SKIP
            if word == "SKIP"
            else TestOutcome.XFAIL
            if point[2]
            else TestOutcome.PASS
        )
    depth = levels.index(level)
    for deeper in levels[depth + 1 :]:
        level.points += [(f"{title} > {name}", m, why) for name, m, why in deeper.points]
    del levels[depth + 1 :]
    level.points.append((title, outcome, directive[2] if directive else ""))


def _close(report: TestReport, levels: list[_Level]) -> None:
    """End a document, which is complete if it has all tests of its plan."""
    top, said = levels[0], False
    for level in levels:
        for name, outcome, why in level.points:
            report.add(name, outcome, why)
            said = True
    if (said or top.plan is not None) and not top.is_complete():
        report.complete = False
    if top.plan is not None and top.numbers and max(top.numbers) > top.plan:
        report.inconsistency = f"test {max(top.numbers)} is not in the plan of {top.plan}"
