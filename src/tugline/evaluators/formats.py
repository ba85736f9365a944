"""Formats of test results: how each is read, and whose tests they are.

A reader is pure: bytes in, `TestReport` out, in time linear in the bytes; garbage is no test, never
an exception. `read_report` has large outputs read in a process with limits. What can be forged is
in docs/evaluators.md.
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
    """Read an XML report, as pytest, Maven, Gradle, gotestsum and many others write it.

    Names are ``classname::name``, such as ``tests.test_bill.TestZero::test_zero``. A skipped test
    has not passed. A truncated report is no report.
    """
    report = TestReport()
    report.complete = _add_junit(report, data)
    return report


def _read_pytest(data: bytes) -> TestReport:
    """Read the reports of all runs of a command, one after the other; all must be whole."""
    report = TestReport()
    # pytest escapes what tests print, so this cannot stand inside of a report.
    runs = re.split(rb"(?=<\?xml )", data)
    whole = [_add_junit(report, run) for run in runs if run.strip()]
    report.complete = bool(whole) and all(whole)
    return report


def _add_junit(report: TestReport, data: bytes) -> bool:
    """Add the results of one report; return whether it is whole."""
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
        """Report the package's tests."""
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
        if not line.startswith("{"):  # what compilers wrote
            continue
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            event = _GO_DECODER.decode(line)
            _read_go_event(report, packages.setdefault(event.package, _GoPackage()), event)
    report.complete = report.complete and not any(package.ran for package in packages.values())
    return report


def _read_go_event(report: TestReport, package: _GoPackage, event: _GoEvent) -> None:
    if event.action == "output":
        # Older Go takes the end of a test that wrote without a newline for output.
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
    if passed > counted:
        report.inconsistency = f"{passed} tests are reported as passed, cargo counted {counted}"


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
    top, points = levels[0], [point for level in levels for point in level.points]
    for point in points:
        report.add(*point)
    if (points or top.plan is not None) and not top.is_complete():
        report.complete = False
    if top.plan is not None and top.numbers and max(top.numbers) > top.plan:
        report.inconsistency = f"test {max(top.numbers)} is not in the plan of {top.plan}"


# --------------------------------------------------------------------------- all of them
class Format(NamedTuple):
    """How to run a test program and read its results."""

    read: Callable[[bytes], TestReport]
    languages: tuple[str, ...]
    """Whose tests they are: keys of `filters.TESTS`."""
    normalize: Callable[[str], str] = lambda name: name
    """Return a test's name as the format has it, from other ways to write it."""
    reports: str = ""
    """How the command writes a report to ``{report}``; empty if the output is read."""
    env: Mapping[str, str] = {}
    """Variables that make each run of the test program write its report to ``{report}``."""


_PYTEST_ENV = {"PYTEST_ADDOPTS": "--junitxml={report} -o junit_family=xunit1"}
FORMATS = {
    "junit": Format(
        read_junit, ("python", "java"), normalize_junit, "--junitxml={report} for pytest"
    ),
    "pytest": Format(_read_pytest, ("python",), normalize_junit, env=_PYTEST_ENV),
    "go": Format(read_go, ("go",)),
    "cargo": Format(read_cargo, ("rust",)),
    "jest": Format(_read_jest, ("node",), reports="--json --outputFile={report}"),
    "tap": Format(read_tap, ("node", "tap")),
}
_SMALL_BYTES = 64 << 10
"""Of an output that is read in this process: in milliseconds."""
_READ = """
import msgspec
from tugline.evaluators.formats import FORMATS
report = FORMATS[given].read(open(path, "rb").read())
open(path + ".out", "wb").write(msgspec.json.encode(report))
"""


async def read_report(name: str, data: bytes) -> TestReport:
    """Read an output in the format `name`; one that cannot be read has no results."""
    if len(data) <= _SMALL_BYTES:
        return FORMATS[name].read(data)
    try:
        return msgspec.json.decode(await parse_apart(_READ, data, name), type=TestReport)
    except ValueError as error:
        return TestReport(inconsistency=str(error))
