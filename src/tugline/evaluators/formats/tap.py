"""The Test Anything Protocol, versions 12 to 14, with subtests indented by four.

A test is known by its description, a subtest with those above it: ``group > inner``. Each number
may be given once and must be in the plan.
"""

from __future__ import annotations

import re

from tugline.evaluators.formats.base import TestOutcome, TestReport, lines

_POINT = re.compile(r"((?: {4})*)(not )?ok\b(?: +(\d+))?(?: +- +| +|$)(.*)")
_PLAN = re.compile(r"((?: {4})*)1\.\.(\d{1,9})\b")
_DIRECTIVE = re.compile(r"(?<!\\)# *(SKIP|TODO)\b *(.*)", re.IGNORECASE)
_FILE = re.compile(r"\S+ \.{2,} $")
"""Where the output of a file begins, by prove; ``ok`` and no more is where it ends."""
_INDENT, _DEEPEST = 4, 8


class _Level:
    """Points of one depth that still wait for their parent."""

    def __init__(self) -> None:
        self.points: list[tuple[str, TestOutcome, str]] = []
        self.numbers: set[int] = set()
        self.last = 0
        self.plan: int | None = None

    def full(self) -> bool:
        """Whether as many points were heard as are planned."""
        return len(self.numbers) == self.plan


def read(data: bytes) -> TestReport:
    """What was said, line by line."""
    told = TestReport()
    levels = [_Level()]
    documents = [levels]
    block = ""
    for line in lines(data):
        if block:
            block = "" if line.rstrip() == block else block
        elif line.strip() == "---" and line.startswith(" "):
            block = line.rstrip().replace("---", "...")
        elif line.startswith("Bail out!"):
            return told
        elif plan := _PLAN.match(line):
            _level(levels, len(plan[1])).plan = int(plan[2])
        elif line.startswith("TAP version ") or _FILE.match(line):
            levels = [_Level()]
            documents.append(levels)
        elif (point := _POINT.match(line)) and not (line == "ok" and levels[0].full()):
            _hear(told, levels, point)
    told.complete = any(levels[0].full() for levels in documents)
    for levels in documents:
        _close(told, levels)
    return told


def _level(levels: list[_Level], indent: int) -> _Level:
    """The level of this depth, made when it is one deeper than the last."""
    depth = min(indent // _INDENT, len(levels), _DEEPEST)
    if depth == len(levels):
        levels.append(_Level())
    return levels[depth]


def _hear(told: TestReport, levels: list[_Level], point: re.Match[str]) -> None:
    level = _level(levels, len(point[1]))
    number = int(point[3][:9]) if point[3] else level.last + 1
    level.last = number
    if number in level.numbers:
        told.oddity = f"test {number} is told twice"
    level.numbers.add(number)
    directive = _DIRECTIVE.search(point[4])
    title = point[4][: directive.start()] if directive else point[4]
    title = title.strip().replace("\\#", "#").replace("\\\\", "\\")
    word = directive[1].upper() if directive else ""
    mark = TestOutcome.FAIL if point[2] else TestOutcome.PASS
    if word:
        mark = (
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
    level.points.append((title, mark, directive[2] if directive else ""))


def _close(told: TestReport, levels: list[_Level]) -> None:
    """The end of a document: its plan is what makes it complete."""
    top, said = levels[0], False
    for level in levels:
        for name, mark, why in level.points:
            told.add(name, mark, why)
            said = True
    if (said or top.plan is not None) and not top.full():
        told.complete = False
    if top.plan is not None and top.numbers and max(top.numbers) > top.plan:
        told.oddity = f"test {max(top.numbers)} is not in the plan of {top.plan}"
