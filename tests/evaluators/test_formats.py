"""Parsers of test results, with output of the real tools (`golden`) and forged output.

pytest 9.2 with xdist 3.8, Go 1.19, cargo 1.95, Jest 30 and Node 20.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tugline.evaluators import formats
from tugline.evaluators.filters import TESTS
from tugline.evaluators.formats import FORMATS, read_report
from tugline.evaluators.junit import normalize_junit
from tugline.evaluators.scoring import TestOutcome, TestReport
from tugline.evaluators.script import parse_apart
from tugline.schema import read_values

GOLDEN = Path(__file__).parent / "golden"
P, F = TestOutcome.PASS, TestOutcome.FAIL

OUTPUTS = read_values(GOLDEN / "outputs.yaml")
FORGED = read_values(GOLDEN / "forged.yaml")
REAL = [tool for tool, output in OUTPUTS.items() if "file" in output]
Case = tuple[str, bytes, dict[str, TestOutcome]]


def load(tool: str) -> Case:
    """Format, output and outcomes of a tool."""
    output = OUTPUTS[tool]
    text = (GOLDEN / output["file"]).read_bytes() if "file" in output else output["text"].encode()
    return output["format"], text, output["outcomes"]


def load_half(tool: str) -> tuple[str, bytes]:
    """The format and the first half of the output of a tool."""
    format_name, text, _ = load(tool)
    return format_name, text[: len(text) // 2]


def read(format_name: str, text: str | bytes) -> TestReport:
    """Parse text of a format."""
    return FORMATS[format_name].read(text.encode() if isinstance(text, str) else text)


@pytest.mark.parametrize("tool", OUTPUTS)
def test_output_of_real_tools_is_parsed(tool: str) -> None:
    """Every test has its outcome, whatever tests print and however the tool is called."""
    format_name, text, outcomes = load(tool)
    report = read(format_name, text)
    assert report.outcomes == outcomes
    assert (report.complete, report.inconsistency) == (True, "")


@pytest.mark.parametrize("tool", ["go", "cargo", "node"])
def test_terminal_codes_and_bad_bytes_are_ignored(tool: str) -> None:
    """Carriage returns, colours and bytes that are not UTF-8 change no outcome."""
    format_name, text, outcomes = load(tool)
    raw = text.replace(b"\n", b"\x1b[0m\r\n") + b"\xff\xfe\x80\n"
    assert read(format_name, raw).outcomes == outcomes


BOMB = (
    f'<!DOCTYPE a [<!ENTITY b "{"x" * 1000}">'
    + "".join(f'<!ENTITY b{i} "{"&b;" * 1000}">' for i in range(3))
    + f"]><a>{'&b0;' * 1000}</a>"
)
XML = '<?xml version="1.0" encoding="{}"?><testsuite/>'
INCOMPLETE: dict[str, tuple[str, str | bytes]] = {
    "tap bails out": ("tap", "1..2\nok 1 - a\nBail out! no database\n"),
    "tap lacks a test": ("tap", "1..2\nok 1 - a\n"),
    "tap lacks a plan": ("tap", "ok 1 - a\n"),
    "a bomb of entities": ("junit", BOMB),
    **{name: ("junit", XML.format(name)) for name in ("x-foo", "rot13", "undefined", "utf-16")},
    **{f"half of {tool}": load_half(tool) for tool in REAL},
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_truncated_output_is_not_complete(case: str) -> None:
    """Output of a killed runner, or of code that can write the report, is not complete."""
    assert not read(*INCOMPLETE[case]).complete


def test_failures_have_a_reason() -> None:
    """The reason of a failure is one line, where the output has one."""
    report = read(*load("pytest")[:2])
    assert report.find_reason("test_a::test_fail") == "AssertionError: no - good"
    report = read(*load("jest")[:2])
    assert report.find_reason("group fails").startswith("Error: expect(received)")


def test_a_test_passes_when_all_its_cases_do() -> None:
    """A name without brackets stands for all cases, a name with brackets for one."""
    report = TestReport()
    report.add("t::a[1]", P)
    report.add("t::a[2]", F, "no\nmore")
    report.add("t::b[1]", P)
    assert (report.find("t::a"), report.find("t::a[1]"), report.find("t::b")) == (F, P, P)
    assert report.find_reason("t::a") == "no"
    assert report.find("t::c") is None


@pytest.mark.parametrize(
    ("format_name", "given", "name"),
    [
        ("junit", "tests/test_m.py::T::test_a[x/y.py::z]", "tests.test_m.T::test_a[x/y.py::z]"),
        ("junit", "docs/usage.rst::usage.rst", "docs.usage.rst::usage.rst"),
        ("junit", "case.yaml::group::one[a::b]", "case.yaml.group::one[a::b]"),
        ("junit", "pages/[id]/test_m.py::test_a[1]", "pages.[id].test_m::test_a[1]"),
        ("junit", "org.Shop::adds", "org.Shop::adds"),
        ("junit", "adds", "adds"),
        ("go", "TestAdd/x", "TestAdd/x"),
    ],
)
def test_names_of_tests_are_normalized(format_name: str, given: str, name: str) -> None:
    """A name is the same in each of the forms in which data sets write it."""
    assert FORMATS[format_name].normalize(given) == name


_PLUGIN = """
import pytest
class Item(pytest.Item):
    def runtest(self): pass
class Group(pytest.Collector):
    def collect(self):
        names = ("one", "a/b", "x::y", "p[1]", "two words", "a.py", "\u00e9")
        return [Item.from_parent(self, name=name) for name in names]
class File(pytest.File):
    def collect(self):
        yield Item.from_parent(self, name="plain")
        yield Group.from_parent(self, name="group")
def pytest_collect_file(file_path, parent):
    if file_path.suffix in (".yaml", ".pyx"):
        return File.from_parent(parent, path=file_path)
def pytest_collection_modifyitems(items):
    open("ids", "w").write("\\n".join(item.nodeid for item in items))
"""


def test_node_ids_of_files_that_are_not_python_are_found(tmp_path: Path) -> None:
    """Ids of doctests and of files of plug-ins, in any folder, name a result."""
    (tmp_path / "conftest.py").write_text(_PLUGIN, encoding="utf-8")
    for folder in ("", "docs", "two words", "pages/v1.2"):
        for name in ("usage.rst", "README.md", "notes.txt", "case.yaml", "fast.pyx", "mod.py"):
            file = tmp_path / folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text('"""\n>>> 1 + 1\n2\n\n"""\n', encoding="utf-8")
    flags = [f"--doctest-glob=*.{end}" for end in ("rst", "md", "txt")]
    flags += ["--doctest-modules", "--import-mode=importlib", "--junitxml=report.xml"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    report = read("junit", (tmp_path / "report.xml").read_bytes())
    ids = (tmp_path / "ids").read_text(encoding="utf-8").splitlines()
    found = {each: report.find(each) or report.find(normalize_junit(each)) for each in ids}
    assert found == dict.fromkeys(ids, P)
    assert len(ids) == len(report.outcomes) > 60


@pytest.mark.parametrize("case", FORGED["lines"])
def test_a_forged_line_does_not_pass(case: str) -> None:
    """A forged line contradicts the runner's count, or the worse of two results counts."""
    given = FORGED["lines"][case]
    honest = read(given["format"], given["output"].replace("HERE", ""))
    assert (set(honest.outcomes.values()), honest.inconsistency) == ({F}, "")
    report = read(given["format"], given["output"].replace("HERE", given["line"]))
    assert P not in report.outcomes.values() or report.inconsistency


@pytest.mark.parametrize("case", FORGED["runs"])
def test_each_run_is_checked_by_its_own_count(case: str) -> None:
    """Runs, files and programs have a count or plan of their own."""
    report = read(FORGED["runs"][case]["format"], FORGED["runs"][case]["output"])
    assert P not in report.outcomes.values() or report.inconsistency or not report.complete


def test_every_format_protects_the_tests_of_its_languages() -> None:
    """Every language of a format has patterns of protected files."""
    languages = {name: each.languages for name, each in FORMATS.items()}
    assert set(languages.pop("junit")) == {*TESTS} - {"tap"}
    assert languages == {
        "pytest": ("python",),
        "go": ("go",),
        "cargo": ("rust",),
        "jest": ("node",),
        "tap": ("node", "tap"),
    }


@pytest.mark.parametrize("format_name", FORMATS)
@given(data=st.binary(max_size=400))
def test_any_bytes_are_parsed(format_name: str, data: bytes) -> None:
    """No output makes the parser raise an error."""
    read(format_name, data)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(
    "unit",
    [
        *("t::a PASSED (", "x ... ", "1..", "test a ... ", '{"Package":', "ok 1 # ", "([\x1b["),
        *("1..BIG\nok BIG\n", "running BIG tests\ntest result: ok. BIG passed; 0 failed;\n"),
        *("<!--", "<![CDATA[", '<a "', "<a '\"", "<a b=\"'\" '", "\\\\# "),
    ],
)
def test_parsing_takes_linear_time(format_name: str, unit: str) -> None:
    """Lines without end and numbers with more digits than Python reads take linear time."""
    part = unit.replace("BIG", "9" * 5000)
    data = (part * (400_000 // len(part))).encode()
    began = time.process_time()
    read(format_name, data)
    read(format_name, data.replace(b" ", b"\n"))
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize("tool", ["pytest", "jest", "go"])
async def test_large_output_is_parsed_in_another_process(
    monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    """Outcomes, cases and reasons are the same as in this process."""
    name, data, _ = load(tool)
    here = await read_report(name, data)
    monkeypatch.setattr(formats, "_SMALL_BYTES", 0)
    assert await read_report(name, data) == here == FORMATS[name].read(data)
    assert here.outcomes


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("while True: pass", "took more than 1 s of CPU time"),
        ("bytes(9 << 30)", "MemoryError"),
        ("int('x')", "invalid literal"),
    ],
)
async def test_the_parsing_process_has_limits(code: str, reason: str) -> None:
    """Too much processor time or memory, or an exception, is an error."""
    with pytest.raises(ValueError, match=reason):
        await parse_apart(code, b"", None, 1)


async def test_output_that_cannot_be_parsed_has_no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output that raises an error has no results, and the report has the error."""
    monkeypatch.setattr(formats, "_READ", "bytes(9 << 30)")
    report = await read_report("tap", b"ok 1 - a\n1..1\n" * 9999)
    assert not report.outcomes
    assert "MemoryError" in report.inconsistency
