"""Reader of the Test Anything Protocol, versions 12 to 14."""

import re
from collections.abc import Iterator

from tugline.evaluators.scoring import TestOutcome, TestReport, read_lines

_POINT = re.compile(r"((?: {4})*)(not )?ok\b(?: +(\d+))?(?: +- +| +|$)(.*)")
_PLAN = re.compile(r"((?: {4})*)(\d{1,9})\.\.(\d{1,9})\b")
_DIRECTIVE = re.compile(r"(?:^|(?<=\s)|(?<=[^\\]\\\\))# *((?:SKIP|TODO)\S*) *(.*)", re.IGNORECASE)
_TIME = re.compile(r"(?:^|\s)# time=[\d.]{1,20} ?m?s\s*$")
_OPEN = re.compile(r"((?: {4})*)\{\s*$")
_CLOSE = re.compile(r"((?: {4})*)\}\s*$")
_ESCAPE = re.compile(r"\\([\\#])")
_PROVE_FILE = re.compile(r"\S+ \.{2,} $")
"""First line of a file's output by prove; the last line is only ``ok``."""
_YAML = re.compile(r"( +)---\s*$")
_INDENT = 4
_DEEPEST = 64
_BETWEEN = " > "


def normalize_tap(name: str) -> str:
    """Return a test's name without blanks at the ends of its titles, as it is reported."""
    return _BETWEEN.join(title.strip() for title in name.split(_BETWEEN))


class _TapLevel:
    """Test points at one depth whose parent has not ended."""

    def __init__(self) -> None:
        self.points: list[tuple[str, TestOutcome, str]] = []
        self.numbers: set[int] = set()
        self.last = 0
        self.plan: range | None = None
        self.opened: str | None = None
        """Title of the last point, if its subtests may follow it in braces."""

    def is_complete(self) -> bool:
        """Return whether there are as many points as in the plan."""
        return self.plan is not None and len(self.numbers) == len(self.plan)


def read_tap(data: bytes) -> TestReport:
    """Read TAP with subtests indented by four spaces, before their parent or in braces after it.

    A test's name is its description, for a subtest with those of its parents: ``group > inner``.
    Each number may be used once and must be in the plan.
    """
    report = TestReport()
    levels = [_TapLevel()]
    documents = [levels]
    for line in _skip_yaml(read_lines(data)):
        if line.startswith("Bail out!"):
            return report
        if _PROVE_FILE.match(line) or (line.startswith("TAP version ") and levels[0].numbers):
            levels = [_TapLevel()]
            documents.append(levels)
        elif line != "ok" or not levels[0].is_complete():
            _read_line(report, levels, line)
    report.complete = any(levels[0].is_complete() for levels in documents)
    for levels in documents:
        _close_tap(report, levels)
    return report


def _skip_yaml(lines: Iterator[str]) -> Iterator[str]:
    """Yield lines without the blocks of YAML after test points.

    A block ends with its last line, or where a line is indented less. What a test itself prints
    begins no block.
    """
    block = ""
    after_point = False
    for line in lines:
        if block and line.startswith(block):
            block = "" if line.rstrip() == f"{block}..." else block
            continue
        block = block if block and not line.strip() else ""
        opens = _YAML.match(line) if after_point else None
        if opens:
            block = opens[1]
            continue
        after_point = bool(_POINT.match(line)) or (after_point and not line.strip())
        yield line


def _read_line(report: TestReport, levels: list[_TapLevel], line: str) -> None:
    if plan := _PLAN.match(line):
        _find_level(levels, len(plan[1])).plan = range(int(plan[2]), int(plan[3]) + 1)
    elif point := _POINT.match(line):
        _read_point(report, levels, point)
    elif brace := _OPEN.match(line):
        level = _find_level(levels, len(brace[1]))
        level.opened = level.points[-1][0] if level.points else None
    elif brace := _CLOSE.match(line):
        _close_brace(levels, _find_level(levels, len(brace[1])))


def _find_level(levels: list[_TapLevel], indent: int) -> _TapLevel:
    """Return the level of an indentation; subtests come before their parents' levels exist."""
    depth = min(indent // _INDENT, _DEEPEST)
    levels += [_TapLevel() for _ in range(depth + 1 - len(levels))]
    return levels[depth]


def _read_point(report: TestReport, levels: list[_TapLevel], point: re.Match[str]) -> None:
    level = _find_level(levels, len(point[1]))
    number = int(point[3][:9]) if point[3] else level.last + 1
    level.last = number
    if number in level.numbers:
        report.inconsistency = f"test {number} is reported twice"
    level.numbers.add(number)
    title, directive, note, opened = _parse_description(point[4])
    # A brace that nothing closes is part of the title, unless it is of the directive's reason.
    whole = f"{title} {{" if opened and not directive else title
    outcome = TestOutcome.FAIL if point[2] else TestOutcome.PASS
    if directive:  # also an unfinished test that passes: node marks those that it never ran
        outcome = TestOutcome.SKIP
    depth = levels.index(level)
    _end_subtests(levels, depth, title)
    level.points.append((whole, outcome, note))
    level.opened = title if opened else None


def _parse_description(text: str) -> tuple[str, str | None, str, bool]:
    """Return title, directive (None if there is none), its reason, and whether a brace follows."""
    text = _TIME.sub("", text.rstrip())  # before or after the brace
    opened = text.endswith(" {")
    text = _TIME.sub("", text.removesuffix(" {"))
    directive = _DIRECTIVE.search(text)
    title = text[: directive.start()] if directive else text
    word, note = directive.groups() if directive else (None, "")
    return _ESCAPE.sub(r"\1", title.strip()), word, note, opened


def _close_brace(levels: list[_TapLevel], level: _TapLevel) -> None:
    """End the subtests in braces; a title may also just end in a brace that nothing closes."""
    if level.opened is not None:
        _, outcome, note = level.points.pop()
        _end_subtests(levels, levels.index(level), level.opened)
        level.points.append((level.opened, outcome, note))
        level.opened = None


def _end_subtests(levels: list[_TapLevel], depth: int, parent: str) -> None:
    """Give the points below a depth the title of their parent."""
    level = levels[depth]
    for deeper in levels[depth + 1 :]:
        level.points += [
            (f"{parent}{_BETWEEN}{name}", outcome, note) for name, outcome, note in deeper.points
        ]
    del levels[depth + 1 :]


def _close_tap(report: TestReport, levels: list[_TapLevel]) -> None:
    """End a document: add its results, and check them against its plan."""
    top = levels[0]
    points = [point for level in levels for point in level.points]
    for point in points:
        report.add(*point)
    if (points or top.plan is not None) and not top.is_complete():
        report.complete = False
    extra = [] if top.plan is None else [n for n in top.numbers if n not in top.plan]
    if top.plan is not None and extra:
        first = top.plan.start
        last = top.plan.stop - 1
        report.inconsistency = f"test {max(extra)} is not in the plan {first}..{last}"
