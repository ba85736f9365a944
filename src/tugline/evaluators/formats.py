"""Formats of test results: readers, and the languages of the tests.

A reader is a pure function from bytes to a `TestReport`, in linear time. Invalid input yields no
results, never an exception. `read_report` parses large outputs in a process with limits.
docs/evaluators.md lists what can be forged.
"""

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple
from xml.etree import ElementTree as ET

import msgspec

from tugline.evaluators.scoring import TestOutcome, TestReport, read_lines
from tugline.evaluators.script import parse_apart


# --------------------------------------------------------------------------- JUnit
def normalize_junit(name: str) -> str:
    """Return ``classname::name`` for one of pytest's node ids; other names unchanged."""
    path, colons, rest = name.partition(".py::")
    if not colons:
        return name
    test, bracket, case = rest.partition("[")
    *classes, function = test.split("::")
    return f"{'.'.join([path.replace('/', '.'), *classes])}::{function}{bracket}{case}"


def read_junit(data: bytes) -> TestReport:
    """Read a JUnit XML report, as written by pytest, Maven, Gradle, gotestsum and others.

    Names are ``classname::name``, such as ``tests.test_bill.TestZero::test_zero``. A skipped test
    has not passed. A truncated report has no results.
    """
    report = TestReport()
    report.complete = _add_junit(report, data)
    return report


def _read_pytest(data: bytes) -> TestReport:
    """Read the concatenated reports of all pytest runs of a command; all must be complete."""
    report = TestReport()
    # pytest escapes the output of tests, so an XML declaration cannot be inside of a report.
    runs = re.split(rb"(?=<\?xml )", data)
    whole = [_add_junit(report, run) for run in runs if run.strip()]
    report.complete = bool(whole) and all(whole)
    return report


def _add_junit(report: TestReport, data: bytes) -> bool:
    """Add the results of one report; return whether it is complete."""
    try:
        root = ET.fromstring(data)  # noqa: S314 - expat limits entity expansion
    except (ET.ParseError, ValueError, LookupError):
        return False
    for case in root.iter("testcase"):
        classname, title = case.get("classname", ""), case.get("name", "")
        outcome, reason = TestOutcome.PASS, ""
        for child in case:
            if child.tag in {"failure", "error", "skipped"}:
                outcome = TestOutcome.SKIP if child.tag == "skipped" else TestOutcome.FAIL
                reason = child.get("message") or child.text or child.tag
                if outcome is TestOutcome.FAIL:
                    break
        report.add(f"{classname}::{title}" if classname else title, outcome, reason)
    return root.tag in {"testsuites", "testsuite"}


# --------------------------------------------------------------------------- Jest
_JEST_OUTCOMES = dict.fromkeys(("pending", "skipped", "disabled", "todo"), TestOutcome.SKIP)
_JEST_OUTCOMES["passed"] = TestOutcome.PASS


class _JestCase(msgspec.Struct, rename="camel"):
    status: str
    full_name: str
    failure_messages: list[str] = []


class _JestFile(msgspec.Struct, rename="camel"):
    assertion_results: list[_JestCase]


class _JestReport(msgspec.Struct, rename="camel"):
    test_results: list[_JestFile]


def _read_jest(data: bytes) -> TestReport:
    """Read Jest's ``--json`` report, or Vitest's.

    Names are the titles of the groups and of the test, separated by one space.
    """
    report = TestReport()
    try:
        decoded = msgspec.json.decode(data, type=_JestReport)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return report
    for case in (case for file in decoded.test_results for case in file.assertion_results):
        outcome = _JEST_OUTCOMES.get(case.status, TestOutcome.FAIL)
        report.add(case.full_name, outcome, "".join(case.failure_messages[:1]))
    report.complete = True
    return report


# --------------------------------------------------------------------------- Go
_GO_END = re.compile(r"--- (PASS|FAIL|SKIP): (\S+) \(\d[\d.]*s\)$")
_GO_OUTCOMES = {"pass": TestOutcome.PASS, "fail": TestOutcome.FAIL, "skip": TestOutcome.SKIP}


class _GoEvent(msgspec.Struct, rename="pascal"):
    action: str
    package: str
    test: str = ""
    output: str = ""


_GO_DECODER = msgspec.json.Decoder(_GoEvent)


class _GoPackage:
    """Tests of one package."""

    def __init__(self) -> None:
        self.ran: set[str] = set()
        self.ends: list[tuple[str, TestOutcome]] = []

    def close(self, report: TestReport, package: str) -> None:
        """Add the results of the package's tests to the report."""
        ended = {test for test, _ in self.ends}
        self.ends += [(test, TestOutcome.FAIL) for test in self.ran - ended]
        for test, outcome in self.ends:
            if test in self.ran:
                reason = "" if test in ended else "it did not end"
                report.add(test, outcome, reason)
                report.add(f"{package}::{test}", outcome, reason)
        report.complete = True
        self.ran, self.ends = set(), []


def read_go(data: bytes) -> TestReport:
    """Read output of ``go test -json``.

    A test has two names: ``TestTable/one_case``, and with its package
    ``example.org/shop/calc::TestTable/one_case``. A test that was not reported to run has not
    passed.
    """
    report = TestReport()
    packages: dict[str, _GoPackage] = {}
    for line in read_lines(data):
        if not line.startswith("{"):  # output of compilers
            continue
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            event = _GO_DECODER.decode(line)
            _read_go_event(report, packages.setdefault(event.package, _GoPackage()), event)
    report.complete = report.complete and not any(package.ran for package in packages.values())
    return report


def _read_go_event(report: TestReport, package: _GoPackage, event: _GoEvent) -> None:
    if event.action == "output":
        # Older Go reports the end of a test as output if the test printed no final newline.
        end = _GO_END.search(event.output.rstrip("\n"))
        if end and end[2] in package.ran:
            package.ends.append((end[2], _GO_OUTCOMES[end[1].lower()]))
    elif event.test and event.action == "run":
        package.ran.add(event.test)
    elif event.test and event.action in _GO_OUTCOMES:
        package.ends.append((event.test, _GO_OUTCOMES[event.action]))
    elif event.action in _GO_OUTCOMES:
        package.close(report, event.package)


# --------------------------------------------------------------------------- cargo
_CARGO_RUNNING = re.compile(r"running (\d+) tests?$")
_CARGO_RESULT = re.compile(r"test result: (ok|FAILED)\. (\d{1,9}) passed; (\d+) failed;")
_CARGO_NOTE = re.compile(r" - (should panic|compile fail|compile)$")
_TRYBUILD = re.compile(r"\.rs( \[should [a-z ]+\])?$")
"""File results of trybuild, which libtest does not count; other programs' tests match as well."""
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
    """End a test program; add results of `files` if its count includes them or none passed."""
    passed_files = sum(outcome is TestOutcome.PASS for _, outcome in files)
    if passed < counted or not passed_files:
        passed += passed_files
        for each in files:
            report.add(*each)
    if passed > counted:
        report.inconsistency = f"{passed} tests are reported as passed, cargo counted {counted}"


def _parse_cargo(line: str, pending: str) -> tuple[str, TestOutcome | None]:
    """Return test and outcome of a line; a line with only an outcome belongs to `pending`."""
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
"""First line of a file's output by prove; the last line is only ``ok``."""
_INDENT, _DEEPEST = 4, 8


class _TapLevel:
    """Test points at one depth whose parent has not ended."""

    def __init__(self) -> None:
        self.points: list[tuple[str, TestOutcome, str]] = []
        self.numbers: set[int] = set()
        self.last = 0
        self.plan: int | None = None

    def is_complete(self) -> bool:
        """Return whether there are as many points as in the plan."""
        return len(self.numbers) == self.plan


def read_tap(data: bytes) -> TestReport:
    """Read the Test Anything Protocol, versions 12 to 14, with subtests indented by four spaces.

    A test's name is its description, for a subtest with those of its parents: ``group > inner``.
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
    """Return the level of an indentation; create it if it is one deeper than the last."""
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
        level.points += [(f"{title} > {name}", mark, note) for name, mark, note in deeper.points]
    del levels[depth + 1 :]
    level.points.append((title, outcome, directive[2] if directive else ""))


def _close_tap(report: TestReport, levels: list[_TapLevel]) -> None:
    """End a document: add its results, and check them against its plan."""
    top, points = levels[0], [point for level in levels for point in level.points]
    for point in points:
        report.add(*point)
    if (points or top.plan is not None) and not top.is_complete():
        report.complete = False
    if top.plan is not None and top.numbers and max(top.numbers) > top.plan:
        report.inconsistency = f"test {max(top.numbers)} is not in the plan of {top.plan}"


# --------------------------------------------------------------------------- table of formats
class Format(NamedTuple):
    """A format of test results: its reader and the settings of test programs."""

    read: Callable[[bytes], TestReport]
    languages: tuple[str, ...]
    """Languages of the tests, keys of `filters.TESTS`."""
    normalize: Callable[[str], str] = lambda name: name
    """Converts other spellings of a test's name to that of the format."""
    reports: str = ""
    """Arguments by which a command writes a report to ``{report}``; empty to read its output."""
    env: Mapping[str, str] = {}
    """Variables by which each run of the test program writes its report to ``{report}``."""


_PYTEST_ENV = {"PYTEST_ADDOPTS": "--junitxml={report} -o junit_family=xunit1"}
FORMATS = {
    "junit": Format(
        read_junit,
        ("python", "java", "node", "go", "rust", "ruby", "php"),
        normalize_junit,
        "--junitxml={report} for pytest",
    ),
    "pytest": Format(_read_pytest, ("python",), normalize_junit, env=_PYTEST_ENV),
    "go": Format(read_go, ("go",)),
    "cargo": Format(read_cargo, ("rust",)),
    "jest": Format(_read_jest, ("node",), reports="--json --outputFile={report}"),
    "tap": Format(read_tap, ("node", "tap")),
}
_SMALL_BYTES = 64 << 10
"""Maximum size of an output that is parsed in this process, which takes milliseconds."""
_READ = """
import msgspec
from tugline.evaluators.formats import FORMATS
report = FORMATS[given].read(open(path, "rb").read())
open(path + ".out", "wb").write(msgspec.json.encode(report))
"""


async def read_report(name: str, data: bytes) -> TestReport:
    """Read an output in the format `name`; an unreadable one has no results."""
    if len(data) <= _SMALL_BYTES:
        return FORMATS[name].read(data)
    try:
        return msgspec.json.decode(await parse_apart(_READ, data, name), type=TestReport)
    except ValueError as error:
        return TestReport(inconsistency=str(error))
