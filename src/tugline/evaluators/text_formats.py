"""Test programs that write nothing but text: cargo and whatever speaks TAP."""

import re

from tugline.evaluators.scoring import TestOutcome, TestReport, read_lines

# --------------------------------------------------------------------------- cargo
_CARGO_RUNNING = re.compile(r"running (\d+) tests?$")
_CARGO_RESULT = re.compile(r"test result: (ok|FAILED)\. (\d{1,9}) passed; (\d+) failed;")
_CARGO_NOTE = re.compile(r" - (should panic|compile fail|compile)$")
_TRYBUILD = re.compile(r"\.rs( \[should [a-z ]+\])?$")
"""Lines of trybuild, which libtest does not count; other test programs have such names."""
_CARGO_OUTCOMES = {"ok": TestOutcome.PASS, "FAILED": TestOutcome.FAIL, "ignored": TestOutcome.SKIP}


def read_cargo(data: bytes) -> TestReport:
    """Read output of ``cargo test`` (libtest): unit tests, integration tests and doc tests.

    Names are as printed, ``tests::adds`` or ``src/lib.rs - add (line 2)``. Each test program prints
    how many tests it runs and how many passed; more results than that are an inconsistency.
    """
    report = TestReport()
    section, pending, passed, open_programs = "", "", 0, 0
    files: list[tuple[str, TestOutcome]] = []
    for line in read_lines(data):
        result = _CARGO_RESULT.match(line)
        if _CARGO_RUNNING.match(line):
            section, passed, open_programs, files = "tests", 0, open_programs + 1, []
        elif result:
            _close_cargo(report, passed, files, int(result[2]))
            section, pending, passed = "", "", 0
            open_programs -= 1
            report.complete = True
        elif line == "failures:":
            section = line
        elif section == "tests":
            test, outcome = _parse_cargo(line, pending)
            if _TRYBUILD.search(test):
                files += [(test, outcome)] if outcome else []
                continue
            pending = test
            if outcome is not None and pending:
                report.add(pending, outcome)
                passed += outcome is TestOutcome.PASS
                pending = ""
    report.complete = report.complete and open_programs == 0
    return report


def _close_cargo(
    report: TestReport, passed: int, files: list[tuple[str, TestOutcome]], counted: int
) -> None:
    """End a test program; results of files are its own if it counted them."""
    passed_files = sum(outcome is TestOutcome.PASS for _, outcome in files)
    if passed < counted or not passed_files:
        passed += passed_files
        for each in files:
            report.add(*each)
    report.check_passed(passed, counted, "cargo")


def _parse_cargo(line: str, pending: str) -> tuple[str, TestOutcome | None]:
    """Return the test of a line or, if only a result follows a test's output, the one before."""
    if line.startswith("test ") and " ... " in line:
        test, _, end = line[5:].rpartition(" ... ")
        if " ... " in test:
            test, end = test.partition(" ... ")[0], ""
        return _CARGO_NOTE.sub("", test), _CARGO_OUTCOMES.get(end.partition(",")[0])
    return pending, _CARGO_OUTCOMES.get(line)


# --------------------------------------------------------------------------- TAP
_POINT = re.compile(r"((?: {4})*)(not )?ok\b(?: +(\d+))?(?: +- +| +|$)(.*)")
_PLAN = re.compile(r"((?: {4})*)1\.\.(\d{1,9})\b")
_DIRECTIVE = re.compile(r"(?<!\\)# *(SKIP|TODO)\b *(.*)", re.IGNORECASE)
_PROVE_FILE = re.compile(r"\S+ \.{2,} $")
"""Start of a file's output by prove, which ends with a lone ``ok``."""
_INDENT, _DEEPEST = 4, 8


class _TapLevel:
    """Test points of one depth whose parent has not ended."""

    def __init__(self) -> None:
        self.points: list[tuple[str, TestOutcome, str]] = []
        self.numbers: set[int] = set()
        self.last = 0
        self.plan: int | None = None

    def is_complete(self) -> bool:
        """Return whether there are as many points as planned."""
        return len(self.numbers) == self.plan


def read_tap(data: bytes) -> TestReport:
    """Read the Test Anything Protocol, versions 12 to 14, with subtests indented by four.

    A test's name is its description; a subtest's begins with those above it: ``group > inner``.
    Each number may be used once and must be in the plan.
    """
    report = TestReport()
    levels = [_TapLevel()]
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
        elif line.startswith("TAP version ") or _PROVE_FILE.match(line):
            levels = [_TapLevel()]
            documents.append(levels)
        elif (point := _POINT.match(line)) and not (line == "ok" and levels[0].is_complete()):
            _read_point(report, levels, point)
    report.complete = any(levels[0].is_complete() for levels in documents)
    for levels in documents:
        _close_tap(report, levels)
    return report


def _find_level(levels: list[_TapLevel], indent: int) -> _TapLevel:
    """Return the level of an indent; make it if it is one deeper than the last."""
    depth = min(indent // _INDENT, len(levels), _DEEPEST)
    if depth == len(levels):
        levels.append(_TapLevel())
    return levels[depth]


def _read_point(report: TestReport, levels: list[_TapLevel], point: re.Match[str]) -> None:
    level = _find_level(levels, len(point[1]))
    number = int(point[3][:9]) if point[3] else level.last + 1
    level.last = number
    if number in level.numbers:
        report.inconsistency = f"test {number} is reported twice"
    level.numbers.add(number)
    directive = _DIRECTIVE.search(point[4])
    title = point[4][: directive.start()] if directive else point[4]
    title = title.strip().replace("\\#", "#").replace("\\\\", "\\")
    outcome = TestOutcome.PASS
    if directive and (point[2] or directive[1].upper() == "SKIP"):
        outcome = TestOutcome.SKIP
    elif point[2]:
        outcome = TestOutcome.FAIL
    depth = levels.index(level)
    for deeper in levels[depth + 1 :]:
        level.points += [(f"{title} > {name}", m, why) for name, m, why in deeper.points]
    del levels[depth + 1 :]
    level.points.append((title, outcome, directive[2] if directive else ""))


def _close_tap(report: TestReport, levels: list[_TapLevel]) -> None:
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
