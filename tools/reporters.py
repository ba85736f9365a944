"""Compare our readers with public reporters: ``python tools/reporters.py [CLONE ...]``.

Each project states beside its fixtures what it reads from them: snapshots, results, golden reports,
assertions of its tests. Clones are folders of git repositories, bare ones too, whose paths contain
the names of their projects; projects without one are cloned from GitHub. Nothing is kept. The last
line of the table must have 0 wrong.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

from tugline.evaluators.formats import FORMATS
from tugline.evaluators.scoring import TestOutcome, TestReport

PASS, SKIP, FAIL = TestOutcome.PASS, TestOutcome.SKIP, TestOutcome.FAIL
Outcomes = dict[str, TestOutcome]  # the worst by title: a name without its class or package
_WORDS = {
    "success": PASS,
    **dict.fromkeys(("skipped", "disabled"), SKIP),
    **dict.fromkeys(("failed", "failure", "error"), FAIL),
}
_REPEATED = "tests of one name, each of which it counts; here the worst counts"


class Stated(NamedTuple):
    """What a project states about one of its fixtures."""

    file: str
    format: str
    outcomes: Outcomes | None = None
    total: int | None = None
    skipped: int | None = None
    failed: int | None = None
    ok: bool | None = None
    """Whether the whole document is valid and passes, for TAP."""
    unreadable: str = ""  # why it cannot be compared


class Repository:
    """Files of the newest commit of a clone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listing = self._git("ls-tree", "-r", "-z", "--name-only", "HEAD").decode()
        self.files = listing.split("\0")[:-1]

    def find(self, pattern: str) -> Iterator[re.Match[str]]:
        """Yield the paths that match an expression as a whole."""
        return filter(None, (re.fullmatch(pattern, file) for file in self.files))

    def read(self, file: str) -> bytes:
        """Return a file's content."""
        return self._git("show", f"HEAD:{file}")

    def read_text(self, file: str) -> str:
        """Return a text."""
        return self.read(file).decode(errors="replace")

    def _git(self, *arguments: str) -> bytes:
        command = ["git", "-C", str(self.folder), *arguments]
        return subprocess.run(command, check=True, capture_output=True, timeout=120).stdout


def _title(name: str) -> str:
    return " ".join(name.rpartition("::")[2].split())


def _worst(results: Iterator[tuple[str, TestOutcome]]) -> Outcomes:
    outcomes: Outcomes = {}
    order = [FAIL, SKIP, PASS]
    for name, outcome in results:
        title = _title(name)
        outcomes[title] = min(outcomes.get(title, PASS), outcome, key=order.index)
    return outcomes


# --------------------------------------------------------------------------- projects
def read_dorny(repository: Repository) -> Iterator[Stated]:
    """Snapshots of Jest, with the results of each fixture."""
    line = re.compile(
        r'"name": (null|"(?:(?!"name": ).)*?"),\n\s+"(tests|result)": (\[|"\w+",)\n', re.DOTALL
    )
    for snapshot in repository.find(r"__tests__/__snapshots__/(.*)\.test\.ts\.snap"):
        form = snapshot[1]
        for section in repository.read_text(snapshot[0]).split("\nexports[")[1:]:
            if (path := re.search(r'"path": "(fixtures/[^"]+)"', section)) is None:
                continue
            name = "go" if form == "golang-json" else "junit"
            lines = line.findall(re.sub(r"\\([\\`$])", r"\1", section))
            results = _read_groups(lines, nested=name == "go")
            outcomes = _worst(results)
            if form == "tester-junit":  # it gives the tests names of its own
                numbers = Counter(outcomes.values())
                yield Stated(f"__tests__/{path[1]}", name, None, numbers.total(), numbers[SKIP])
                continue
            known = "junit" in form or "xunit" in form or name == "go"
            lacking = "" if known and not path[1].endswith(".trx") else f"{form}, not JUnit"
            yield Stated(f"__tests__/{path[1]}", name, outcomes, unreadable=lacking)


def _read_groups(
    lines: list[tuple[str, str, str]], *, nested: bool
) -> Iterator[tuple[str, TestOutcome]]:
    """Yield the tests of a snapshot's groups; a nested test's group begins its name."""
    group = ""
    for name, kind, word in lines:
        if kind == "tests":
            group = "" if name == "null" or not nested else name.strip('"') + "/"
        else:
            yield group + name[1:-1], _WORDS[word.strip('",')]


def read_enricomi(repository: Repository) -> Iterator[Stated]:
    """Parsed results as Python's repr, of JUnit reports and of others converted to JUnit."""
    for stated in repository.find(r"(python/test/files/(?:.*/)?)([^/]+)\.results"):
        own = stated[0].removesuffix(".results")
        named = own + ".xml"
        file = named if "/junit-xml/" in own and named in repository.files else own + ".junit-xml"
        if file not in repository.files:
            continue
        tree = ast.parse(repository.read_text(stated[0]), mode="eval")
        unnamed = re.search(rb"<testcase\s*/?>", repository.read(file))
        lacking = "tests without a name, which it leaves out" if unnamed else ""
        yield Stated(file, "junit", _worst(_read_cases(tree)), unreadable=lacking)


def _read_cases(tree: ast.AST) -> Iterator[tuple[str, TestOutcome]]:
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "UnitTestCase":
            fields = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
            yield fields["test_name"] or "", _WORDS[fields["result"]]


def read_mikepenz(repository: Repository) -> Iterator[Stated]:
    """Numbers that its tests assert after they first parse a file, with the fewest options."""
    seen = set()
    text = repository.read_text("__tests__/testParser.test.ts")
    for part in re.split(r"\bparseFile\(", text)[1:]:
        path = re.match(r"\s*'([^']+)'", part)
        body = part.partition("\n  it(")[0]
        total = re.search(r"expect\(totalCount\)\.toBe\((\d+)\)", body)
        if path is None or total is None or path[1] in seen:
            continue
        seen.add(path[1])
        numbers: dict[str, Any] = {
            key: int(found[1]) if (found := re.search(rf"\({key}Count\)\.toBe\((\d+)\)", body))
            else None
            for key in ("skipped", "failed")
        }  # fmt: skip
        names = re.findall(rb'<testcase\b[^>]*?\sname="([^"]*)"', repository.read(path[1]))
        lacking = _REPEATED if len({*names}) < len(names) else ""
        yield Stated(path[1], "junit", None, int(total[1]), **numbers, unreadable=lacking)


def read_gotestsum(repository: Repository) -> Iterator[Stated]:
    """Summaries and golden JUnit reports of outputs of ``go test -json``."""
    tests = repository.read_text("testjson/summary_test.go")
    pairs = re.findall(r'FromGolden\("([^"]+)"\),\s+expectedOut:\s+"([^"]+)"', tests)
    files = [(f"testjson/testdata/{a}", f"testjson/testdata/{b}") for a, b in pairs]
    files += [
        (f"cmd/testdata/input/go-test-json-{each}.out", f"cmd/testdata/expected/{each}-summary")
        for each in ("panic-race-1", "panic-race-2")
    ]
    for file, summary in files:
        yield _read_summary(file, repository.read_text(summary))
    for report in repository.find(r"internal/junitxml/testdata/.*\.golden"):
        yield _read_attributes(report[0], repository.read(report[0]))
    golden = "internal/junitxml/testdata/junitxml-report.golden"
    yield _read_golden("testjson/testdata/input/go-test-json.out", repository.read(golden))


def _read_summary(file: str, text: str) -> Stated:
    named = re.findall(r"^=== (SKIP|FAIL): \S* (\S*) \(", text, re.MULTILINE)
    worst = _worst((name, SKIP if word == "SKIP" else FAIL) for word, name in named if name)
    total = re.search(r"^DONE (\d+) tests", text, re.MULTILINE)
    return Stated(file, "go", worst, total=int(total[1]) if total else None)


def read_jstemmer(repository: Repository) -> Iterator[Stated]:
    """Golden JUnit reports of outputs of ``go test``."""
    for report in repository.find(r"testdata/(\d+)-report\.xml"):
        data = repository.read(report[0])
        yield _read_attributes(report[0], data)
        for output in repository.find(rf"testdata/{report[1]}-.*\.txt"):
            if output[0].endswith(".gojson.txt"):
                yield _read_golden(output[0], data)
            else:
                yield Stated(output[0], "go", unreadable="text of go test, not its JSON")


def _read_golden(file: str, data: bytes) -> Stated:
    """Read a golden report as a statement on the output of which it was made."""
    results = [
        (case.get("name", ""), next((_GOLDEN[e.tag] for e in case if e.tag in _GOLDEN), PASS))
        for case in ET.fromstring(data).iter("testcase")  # noqa: S314 - of the project itself
        if case.get("classname")  # others stand for a whole package
    ]
    benchmarks = any(name.startswith("Benchmark") for name, _ in results)
    tests = ((name, outcome) for name, outcome in results if re.match("Test|Example", name))
    lacking = "benchmarks, which are output of a test there" if benchmarks else ""
    return Stated(file, "go", _worst(tests), unreadable=lacking)


_GOLDEN = {"failure": FAIL, "error": FAIL, "skipped": SKIP}


def _read_attributes(file: str, data: bytes) -> Stated:
    """Read the numbers that a golden report states of itself, as JUnit."""
    root = ET.fromstring(data)  # noqa: S314 - of the project itself
    total, skipped = (
        sum(int(suite.get(key, 0)) for suite in root.iter("testsuite"))
        for key in ("tests", "skipped")
    )
    cases = [(case.get("classname"), case.get("name")) for case in root.iter("testcase")]
    if total != len(cases):
        return Stated(file, "junit", unreadable="its numbers are not those of its own tests")
    lacking = _REPEATED if len({*cases}) < len(cases) else ""
    return Stated(file, "junit", total=total, skipped=skipped, unreadable=lacking)


def read_tapjs(repository: Repository) -> Iterator[Stated]:
    """Snapshots of the parser's events for each document of TAP."""
    snapshots = "src/parser/tap-snapshots/test/parser"
    for fixture in repository.find(r"src/parser/test/fixtures/(.*)\.tap"):
        text = repository.read_text(f"{snapshots}/{fixture[1]}.tap.test.cjs")
        section = re.search(r"output bail=false 1`\] = `(.*?)\n`\n", text, re.DOTALL)
        if section is None:
            continue
        events = _decode_snapshot(section[1])
        end: dict[str, Any] = next(each[1] for each in events if each[0] == "complete")
        lacking = _TAP_DIFFERS.get(fixture[1], "")
        points = _worst(_read_points(events))
        yield Stated(fixture[0], "tap", points, ok=bool(end["ok"]), unreadable=lacking)


_TAP_DIFFERS = {
    **dict.fromkeys(("die", "empty", "out_err_mix"), "no test, which it takes as passed"),
    "skip-all-with-assert": "a point outside of the plan, which it ignores",
    "hashes": "a directive after a hash that is not escaped, which it ignores",
    "out_of_order": "a plan between the points, after which it ignores them",
    "plan-in-bad-places-post": "several plans, the last of which counts here",
    "plan-in-bad-places-pre": "several plans, the last of which counts here",
    "space_after_plan": "a blank after the plan, which it takes as no plan",
    "subtest-confusing": "a title that ends in a brace which is never closed",
    **dict.fromkeys(
        ("plan-invalid-strict", "pragma-mid-child-strict", "strict", "version_old-strict"),
        "`pragma +strict`, by which other output is a failure",
    ),
}
"""Why a document is read otherwise on purpose."""
_SNAPSHOT = re.compile(
    r'("(?:[^"\\]|\\.)*")|(String\(\n.*?\n\s*\)(?=,?\n))'
    r"|[A-Za-z]+ (?=[\[{])|,(?=\s*[\]}])|\b(undefined|Infinity|NaN)\b",
    re.DOTALL,
)


def _decode_snapshot(text: str) -> list[Any]:
    text = re.sub(r"\\([\\`$])", r"\1", text)
    text = _SNAPSHOT.sub(lambda part: part[1] or ("null" if part[2] or part[3] else ""), text)
    decoded: list[Any] = json.loads(text, strict=False)
    return decoded


def _read_points(events: list[Any]) -> Iterator[tuple[str, TestOutcome]]:
    """Yield the points of a level; a point's subtests are the events of the child before it."""
    children: list[tuple[str, TestOutcome]] = []
    for kind, *values in events:
        if kind == "child":
            children += _read_points(values[0])
        elif kind == "assert":
            point = values[0]
            if point["tapError"] and point["id"] is None:
                continue
            skip = bool(point["skip"] is not False or point["todo"] is not False)
            name = point["name"]
            yield name, SKIP if skip else PASS if point["ok"] else FAIL
            yield from ((f"{name} > {inner}", outcome) for inner, outcome in children)
            children = []
    yield from children


PROJECTS: dict[str, Callable[[Repository], Iterator[Stated]]] = {
    "dorny/test-reporter": read_dorny,
    "EnricoMi/publish-unit-test-result-action": read_enricomi,
    "mikepenz/action-junit-report": read_mikepenz,
    "tapjs/tapjs": read_tapjs,
    "gotestyourself/gotestsum": read_gotestsum,
    "jstemmer/go-junit-report": read_jstemmer,
}


# --------------------------------------------------------------------------- comparison
class Compared(NamedTuple):
    """How many tests of a file are read as stated, what is not, and why it cannot be compared."""

    agree: int = 0
    wrong: tuple[str, ...] = ()
    reason: str = ""


def compare(stated: Stated, report: TestReport) -> Compared:
    """Compare what a project states with our report of the same file."""
    if stated.unreadable:
        return Compared(reason=stated.unreadable)
    ours = _worst(iter(report.outcomes.items()))
    wrong = []
    believed = report.complete and not report.inconsistency
    if stated.ok is not None and stated.ok != (believed and FAIL not in ours.values()):
        wrong.append(f"ok: {stated.ok} is stated; {report.complete} {report.inconsistency!r}")
    if stated.outcomes is None:
        return _compare_numbers(stated, report)
    theirs = stated.outcomes
    if stated.total is not None:  # the names of those that passed are not stated
        theirs = dict.fromkeys(ours, PASS) | theirs
    if stated.ok is False and not believed:  # then nothing counts, such as after "Bail out!"
        theirs = {name: outcome for name, outcome in theirs.items() if name in ours}
    names = sorted(theirs.keys() | ours.keys())
    wrong += [
        f"{name!r}: {theirs.get(name)} is stated; {ours.get(name)}"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]
    return Compared(len(names) - len(wrong), tuple(wrong))


def _compare_numbers(stated: Stated, report: TestReport) -> Compared:
    counts = Counter(report.outcomes.values())
    ours = {"total": counts.total(), "skipped": counts[SKIP], "failed": counts[FAIL]}
    wrong = tuple(
        f"{field}: {number} is stated; {ours[field]}"
        for field in ("total", "skipped", "failed")
        if (number := getattr(stated, field)) is not None and number != ours[field]
    )
    return Compared(0 if wrong else counts.total(), wrong)


def compare_project(name: str, repository: Repository, *, verbose: bool) -> tuple[str, int]:
    """Return a project's row of the table, and how many of its tests are read wrongly."""
    reasons: Counter[str] = Counter()
    results = []
    for stated in PROJECTS[name](repository):
        compared = compare(stated, FORMATS[stated.format].read(repository.read(stated.file)))
        if compared.reason:
            reasons[compared.reason] += 1
            continue
        results.append(compared)
        for each in compared.wrong if verbose else ():
            print(f"{stated.file}: {each}")
    agree = sum(each.agree for each in results)
    wrong = sum(len(each.wrong) for each in results)
    lacking = "; ".join(f"{count}: {reason}" for reason, count in sorted(reasons.items())) or "-"
    return f"| {name} | {len(results)} | {agree + wrong} | {agree} | {wrong} | {lacking} |", wrong


_RULE = "|---|---|---|---|---|---|"


def main() -> int:
    """Print the table; return 1 if anything is read otherwise than stated."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("clones", type=Path, nargs="*", help="folders of clones")
    parser.add_argument("--verbose", action="store_true", help="list what is read wrongly")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in PROJECTS:
            folder = _find_clone(name, arguments.clones) or _clone(name, Path(scratch))
            rows.append(compare_project(name, Repository(folder), verbose=arguments.verbose))
    print("| project | files | tests | agree | wrong | files not comparable |", _RULE, sep="\n")
    print(*(row for row, _ in rows), sep="\n")
    return int(any(wrong for _, wrong in rows))


def _find_clone(name: str, clones: list[Path]) -> Path | None:
    return next((each for each in clones if name.rpartition("/")[2] in str(each.resolve())), None)


def _clone(name: str, scratch: Path) -> Path:
    folder = scratch / name.replace("/", "+")
    command = ["git", "clone", "-q", "--bare", "--depth=1", f"https://github.com/{name}"]
    subprocess.run([*command, str(folder)], check=True, timeout=600)
    return folder


if __name__ == "__main__":
    sys.exit(main())
