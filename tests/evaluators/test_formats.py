"""Readers of test results, on output of the real tools (`golden`) and on forgeries.

pytest 9.2 with xdist 3.8, Go 1.19, cargo 1.95, Jest 30 and Node 20.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tugline.evaluators import formats
from tugline.evaluators.filters import TESTS
from tugline.evaluators.formats import FORMATS, read_report
from tugline.evaluators.scoring import TestOutcome, TestReport
from tugline.evaluators.script import parse_apart
from tugline.schema import read_values

GOLDEN = Path(__file__).parent / "golden"
P, F = TestOutcome.PASS, TestOutcome.FAIL

OUTPUTS = read_values(GOLDEN / "outputs.yaml")
REAL = [tool for tool, output in OUTPUTS.items() if "file" in output]
Case = tuple[str, bytes, dict[str, TestOutcome]]


def load(tool: str) -> Case:
    """The format of what a tool has written, the output, and the outcomes in it."""
    output = OUTPUTS[tool]
    text = (GOLDEN / output["file"]).read_bytes() if "file" in output else output["text"].encode()
    return output["format"], text, output["outcomes"]


def load_half(tool: str) -> tuple[str, bytes]:
    """Its format, and what has come of its output by then."""
    format_name, text, _ = load(tool)
    return format_name, text[: len(text) // 2]


def go(*events: str) -> str:
    """What ``go test -json`` writes for events ``ACTION [TEST]`` or ``output TEXT``."""
    lines = []
    for event in events:
        action, _, rest = event.partition(" ")
        field = {"Output": f"{rest}\n"} if action == "output" else {"Test": rest}
        lines.append(json.dumps({"Action": action, "Package": "shop", **(field if rest else {})}))
    return "\n".join(lines) + "\n"


PROVE = """\
t/a.t .. \n1..2\nok 1 - adds\nok 2 - subs\nok
{}All tests successful.
Files=1, Tests=2,  0 wallclock secs ( 0.00 usr +  0.01 sys =  0.01 CPU)
Result: PASS
"""


def read(format_name: str, text: str | bytes) -> TestReport:
    """What a format makes of it."""
    return FORMATS[format_name].read(text.encode() if isinstance(text, str) else text)


@pytest.mark.parametrize("tool", OUTPUTS)
def test_what_the_real_tools_write_is_understood(tool: str) -> None:
    """Every test has its outcome, whatever tests print and however the tool is called."""
    format_name, text, outcomes = load(tool)
    report = read(format_name, text)
    assert report.outcomes == outcomes
    assert (report.complete, report.inconsistency) == (True, "")


@pytest.mark.parametrize("tool", ["go", "cargo", "node"])
def test_terminals_and_bad_bytes_change_nothing(tool: str) -> None:
    """Carriage returns, colours and bytes that are no UTF-8 between the lines are passed over."""
    format_name, text, outcomes = load(tool)
    raw = text.replace(b"\n", b"\x1b[0m\r\n") + b"\xff\xfe\x80\n"
    assert read(format_name, raw).outcomes == outcomes


BOMB = (
    f'<!DOCTYPE a [<!ENTITY b "{"x" * 1000}">'
    + "".join(f'<!ENTITY b{i} "{"&b;" * 1000}">' for i in range(3))
    + f"]><a>{'&b0;' * 1000}</a>"
)
XML = '<?xml version="1.0" encoding="{}"?><testsuite/>'
NO_ENDS: dict[str, tuple[str, str | bytes]] = {
    "tap bails out": ("tap", "1..2\nok 1 - a\nBail out! no database\n"),
    "tap lacks a test": ("tap", "1..2\nok 1 - a\n"),
    "tap lacks a plan": ("tap", "ok 1 - a\n"),
    "a bomb of entities": ("junit", BOMB),
    **{name: ("junit", XML.format(name)) for name in ("x-foo", "rot13", "undefined", "utf-16")},
    **{f"half of {tool}": load_half(tool) for tool in REAL},
}


@pytest.mark.parametrize("case", NO_ENDS)
def test_a_run_that_was_cut_off_is_not_complete(case: str) -> None:
    """What a killed runner leaves, or code that can write the report, is not taken for a whole."""
    assert not read(*NO_ENDS[case]).complete


def test_reasons_are_kept() -> None:
    """Why a test failed is report in one line, where the output says so."""
    report = read(*load("pytest")[:2])
    assert report.find_reason("test_a::test_fail") == "AssertionError: no - good"
    report = read(*load("jest")[:2])
    assert report.find_reason("group fails").startswith("Error: expect(received)")


def test_a_test_passes_when_all_its_cases_do() -> None:
    """A name without brackets stands for all cases; one with them for itself."""
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
        ("junit", "org.Shop::adds", "org.Shop::adds"),
        ("go", "TestAdd/x", "TestAdd/x"),
    ],
)
def test_names_may_be_written_as_people_write_them(format_name: str, given: str, name: str) -> None:
    """Data sets name tests in several ways; they mean the same."""
    assert FORMATS[format_name].normalize(given) == name


LINES = {
    "go another": go("output --- PASS: TestHidden (0.00s)"),
    "go the same": go("output --- PASS: TestA (0.00s)"),
    "cargo another": "test hidden ... ok",
    "cargo the same": "test a ... ok",
    "tap another": "ok 2 - hidden",
    "tap the same": "ok 1 - a",
}
HONEST = {
    "go": f"{go('run TestA')}HERE\n{go('fail TestA', 'fail')}",
    "cargo": "running 1 test\nHERE\ntest a ... FAILED\ntest result: FAILED. 0 passed; 1 failed;\n",
    "tap": "TAP version 13\nnot ok 1 - a\nHERE\n1..1\n",
}


@pytest.mark.parametrize("forged", LINES)
def test_one_forged_line_does_not_pass(forged: str) -> None:
    """The runner's own count contradicts it, or of two results of one test the worse counts."""
    format_name = forged.partition(" ")[0]
    honest = read(format_name, HONEST[format_name].replace("HERE", ""))
    assert (list(honest.outcomes.values())[0], honest.inconsistency) == (F, "")  # noqa: RUF015
    report = read(format_name, HONEST[format_name].replace("HERE", LINES[forged]))
    assert P not in report.outcomes.values() or report.inconsistency


@pytest.mark.parametrize(
    ("format_name", "text"),
    [
        ("cargo", ("running 2 tests\ntest a.rs ... ok\ntest forged ... ok\ntest b.rs ... ok\n"
         "test result: ok. 2 passed; 0 failed;\n")),
        ("tap", PROVE.format("t/b.t .. \n1..3\nok 1 - b\n")),
        ("tap", PROVE.format("t/b.t .. \nok 1 - b\n")),
        ("tap", PROVE.format("ok 2 - forged\n")),
    ],
)  # fmt: skip
def test_a_second_run_or_name_lends_no_belief(format_name: str, text: str) -> None:
    """Every run, file and program is measured by its own count or plan."""
    report = read(format_name, text)
    assert P not in report.outcomes.values() or report.inconsistency or not report.complete


@pytest.mark.parametrize(
    ("format_name", "text"),
    [
        ("cargo", "running {0} tests\ntest result: ok. {0} passed; 0 failed;\n"),
        ("tap", "1..{0}\nok {0}\n"),
    ],
)
def test_numbers_without_end_are_no_numbers(format_name: str, text: str) -> None:
    """Python refuses to read them; that must neither end the evaluation nor hold it up."""
    began = time.process_time()
    read(format_name, text.format("9" * 5000) * 50)
    assert time.process_time() - began < 5.0


def test_every_format_protects_the_tests_of_its_languages() -> None:
    """A format whose language has no patterns would leave the tests to the agent."""
    languages = {name: each.languages for name, each in FORMATS.items()}
    assert languages == {
        "junit": ("python", "java"),
        "pytest": ("python",),
        "go": ("go",),
        "cargo": ("rust",),
        "jest": ("node",),
        "tap": ("node", "tap"),
    }
    assert {language for each in languages.values() for language in each} == set(TESTS)


@pytest.mark.parametrize("format_name", FORMATS)
@given(data=st.binary(max_size=400))
def test_garbage_is_no_test(format_name: str, data: bytes) -> None:
    """Whatever the bytes are, reading them raises nothing."""
    read(format_name, data)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(
    "unit", ["t::a PASSED (", "x ... ", "1..", "test a ... ", '{"Package":', "ok 1 # ", "([\x1b["]
)
def test_reading_takes_linear_time(format_name: str, unit: str) -> None:
    """Lines without end, made of what readers look for, hold nobody up."""
    data = (unit * 50_000)[:400_000].encode()
    began = time.process_time()
    read(format_name, data)
    read(format_name, data.replace(b" ", b"\n"))
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize("tool", ["pytest", "jest", "go"])
async def test_a_large_output_is_read_alike_in_another_process(
    monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    """Outcomes, cases and reasons come back as they were read there."""
    name, data, _ = load(tool)
    here = await read_report(name, data)
    monkeypatch.setattr(formats, "_SMALL_BYTES", 0)
    assert await read_report(name, data) == here == FORMATS[name].read(data)
    assert here.outcomes


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("while True: pass", "took over 1 s of processor time"),
        ("bytes(9 << 30)", "MemoryError"),
        ("int('x')", "invalid literal"),
    ],
)
async def test_an_output_that_exhausts_its_reader_has_no_results(code: str, reason: str) -> None:
    """It has processor time and memory of its own, and ends nothing else."""
    with pytest.raises(ValueError, match=reason):
        await parse_apart(code, b"", None, 1)


async def test_what_cannot_be_read_is_no_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report says why, and earns nothing."""
    monkeypatch.setattr(formats, "_READ", "bytes(9 << 30)")
    report = await read_report("tap", b"ok 1 - a\n1..1\n" * 9999)
    assert not report.outcomes
    assert "MemoryError" in report.inconsistency
