"""Formats of test results: readers, and the languages of the tests.

A reader is a pure function from bytes to a `TestReport`, in linear time. Invalid input yields no
results, never an exception. `read_report` parses large outputs in a process with limits.
docs/evaluators.md lists what can be forged.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from tugline.evaluators.junit import normalize_junit, read_junit, read_pytest
from tugline.evaluators.scoring import TestOutcome, TestReport, decode_marked, read_lines
from tugline.evaluators.script import parse_apart
from tugline.evaluators.tap import normalize_tap, read_tap

# --------------------------------------------------------------------------- Jest
_JEST_OUTCOMES = dict.fromkeys(("pending", "skipped", "disabled", "todo"), TestOutcome.SKIP)
_JEST_OUTCOMES["passed"] = TestOutcome.PASS


def _read_jest(data: bytes) -> TestReport:
    """Read Jest's ``--json`` report, or Vitest's.

    Names are the titles of the groups and of the test, separated by one space. A test is found by
    its name and status alone, whatever else is reported of it.
    """
    report = TestReport()
    files = _as_dict(_decode_json(data)).get("testResults")
    for file in _as_list(files):
        for case in map(_as_dict, _as_list(_as_dict(file).get("assertionResults"))):
            name = case.get("fullName")
            if not isinstance(name, str):
                titles = [*_as_list(case.get("ancestorTitles")), case.get("title")]
                name = " ".join(title for title in titles if isinstance(title, str))
            outcome = _JEST_OUTCOMES.get(str(case.get("status")), TestOutcome.FAIL)
            reasons = (each for each in _as_list(case.get("failureMessages")) if each)
            report.add(name, outcome, str(next(reasons, "")))
    report.complete = isinstance(files, list)
    return report


# --------------------------------------------------------------------------- JSON
def _decode_json(data: bytes) -> Any:
    """Decode JSON, also with control characters, lone surrogates or invalid UTF-8; else None."""
    text = decode_marked(data) or data.decode(errors="replace")
    try:  # `float` reads numbers of any length
        return json.loads(text, strict=False, parse_int=float)
    except (ValueError, RecursionError):
        return None


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# --------------------------------------------------------------------------- Go
_GO_END = re.compile(r"--- (PASS|FAIL|SKIP): (\S+) \(\d[\d.]*s\)$")
_GO_OUTCOMES = {"pass": TestOutcome.PASS, "fail": TestOutcome.FAIL, "skip": TestOutcome.SKIP}


class _GoPackage:
    """Tests of one package."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ran: set[str] = set()
        self.ends: list[tuple[str, TestOutcome]] = []

    def close(self, report: TestReport) -> None:
        """Add the results of the package's tests to the report."""
        ended = {test for test, _ in self.ends}
        self.ends += [(test, TestOutcome.FAIL) for test in self.ran - ended]
        for test, outcome in self.ends:
            if test in self.ran:
                reason = "" if test in ended else "the test did not finish"
                report.add(test, outcome, reason)
                report.add(f"{self.name}::{test}", outcome, reason)
        report.complete = True
        self.ran = set()
        self.ends = []


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
        event = _as_dict(_decode_json(line.encode()))
        # One odd value loses no event.
        fields = (event.get(key) for key in ("Package", "Action", "Test", "Output"))
        package, *rest = (each if isinstance(each, str) else "" for each in fields)
        _read_go_event(report, packages.setdefault(package, _GoPackage(package)), *rest)
    report.complete = report.complete and not any(package.ran for package in packages.values())
    return report


def _read_go_event(
    report: TestReport, package: _GoPackage, action: str, test: str, output: str
) -> None:
    if action == "output":
        # Older Go reports the end of a test as output if the test printed no final newline.
        end = _GO_END.search(output.rstrip("\n"))
        if end and end[2] in package.ran:
            package.ends.append((end[2], _GO_OUTCOMES[end[1].lower()]))
    elif test and action == "run":
        package.ran.add(test)
    elif test and action in _GO_OUTCOMES:
        package.ends.append((test, _GO_OUTCOMES[action]))
    elif action in _GO_OUTCOMES:
        package.close(report)


# --------------------------------------------------------------------------- cargo
_CARGO_RUNNING = re.compile(r"running (\d{1,9}) tests?$")
_CARGO_RESULT = re.compile(
    r"test result: (?:ok|FAILED)\. (\d{1,9}) passed; (\d{1,9}) failed;"
    r"(?: (\d{1,9}) ignored;)?(?: (\d{1,9}) measured;)?"
)
_CARGO_NOTE = re.compile(r" - (should panic|compile fail|compile)$")
_CARGO_DOCTEST = re.compile(r"\S+ - (.* )?\(line \d+\)$")
_CARGO_SECTIONS = frozenset({"successes:", "failures:"})
"""Lines before what tests printed, and before lists of their names."""
_TRYBUILD = re.compile(r"\.rs( \[should [a-z ]+\])?$")
"""File results of trybuild, which libtest does not count; other programs' tests match as well."""
_CARGO_OUTCOMES = {"ok": TestOutcome.PASS, "FAILED": TestOutcome.FAIL, "ignored": TestOutcome.SKIP}


def normalize_cargo(name: str) -> str:
    """Return a test's name without what cargo prints after it."""
    return _CARGO_NOTE.sub("", name)


def read_cargo(data: bytes) -> TestReport:
    """Read output of ``cargo test`` (libtest): unit tests, integration tests and doc tests.

    Names are as printed, ``tests::adds`` or ``src/lib.rs - add (line 2)``. Each test program prints
    how many tests it runs and how many passed; more results than that are an inconsistency. What
    tests printed may look like that: after the results, only their whole number ends a program.
    """
    report = TestReport()
    section = ""
    pending = ""
    passed = 0
    open_programs = 0
    running = 0
    files: list[tuple[str, TestOutcome]] = []
    for line in read_lines(data):
        result = _CARGO_RESULT.match(line)
        if section in _CARGO_SECTIONS and not (result and _count_cargo(result) == running):
            continue
        if begins := _CARGO_RUNNING.match(line):
            section = "tests"
            passed = 0
            open_programs += 1
            files = []
            running = int(begins[1])
        elif result:
            _close_cargo(report, passed, files, int(result[1]))
            section = ""
            pending = ""
            passed = 0
            open_programs -= 1
            report.complete = True
        elif line in _CARGO_SECTIONS:
            section = line
        elif section == "tests":
            test, outcome = _parse_cargo(line, pending)
            if _TRYBUILD.search(test):
                files += [(test, outcome)] if outcome else []
                continue
            pending = test
            if outcome is not None and pending:
                add = report.add_doctest if _CARGO_DOCTEST.match(pending) else report.add
                add(pending, outcome)
                passed += outcome is TestOutcome.PASS
                pending = ""
    report.complete = report.complete and open_programs == 0
    return report


def _count_cargo(result: re.Match[str]) -> int:
    return sum(int(number or 0) for number in result.groups())


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
        report.inconsistency = f"{passed} tests are reported as passed, but cargo counted {counted}"


def _parse_cargo(line: str, pending: str) -> tuple[str, TestOutcome | None]:
    """Return test and outcome of a line; a line with only an outcome belongs to `pending`."""
    if line.startswith("test ") and " ... " in line:
        test, _, end = line[5:].rpartition(" ... ")
        if " ... " in test:
            test = test.partition(" ... ")[0]
            end = ""
        return normalize_cargo(test), _CARGO_OUTCOMES.get(end.partition(",")[0])
    return pending, _CARGO_OUTCOMES.get(line)


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
        (
            *("python", "java", "node", "go", "rust", "ruby", "php"),
            *("c", "dotnet", "elixir", "swift", "scala", "kotlin"),
        ),
        normalize_junit,
        "--junitxml={report} for pytest",
    ),
    "pytest": Format(read_pytest, ("python",), normalize_junit, env=_PYTEST_ENV),
    "go": Format(read_go, ("go",)),
    "cargo": Format(read_cargo, ("rust",), normalize_cargo),
    "jest": Format(_read_jest, ("node",), reports="--json --outputFile={report}"),
    "tap": Format(read_tap, ("node", "tap"), normalize_tap),
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
