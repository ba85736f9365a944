"""One odd value in one test of a report neither changes nor loses the verdicts of the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from xml.sax.saxutils import quoteattr

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tugline.evaluators.formats import FORMATS
from tugline.evaluators.scoring import TestOutcome

P, F, S = TestOutcome.PASS, TestOutcome.FAIL, TestOutcome.SKIP
OTHERS = {"one": P, "two": F, "three": S}

ODD = ["\x00", "\x01", "\x0b", "\x1b", "\x1b[31m", "\x1b]0;", "\x7f", "\x85", "\u2028", "\ufeff"]
ODD += ["\ufffe", "\ud800", "\udfff\ud83d", "&#27;", "&#x1b;", "&#0;", "&#xD800;", "&#1114112;"]
ODD += ["&nbsp;", "&", "&#;", "&#" + "9" * 5000 + ";", "\\ud800", "\\u0000", "\t", "\\", "]]", "%s"]
ODD += ["<a>", "<b c='", "</testcase>", "<!--", "]]>", "<![CDATA[", "/>"]
ODD += ["{", "}", "---", "...", "# ", "\x0c", "(line 3)", "[", "::", " - ", "'", "< ", "<3"]
NOISE = [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88", b"\x80", b""]
words = st.lists(st.one_of(st.sampled_from(ODD), st.text(max_size=3)), max_size=5).map("".join)
lines = words.map(lambda text: " ".join(text.replace("\r", "\n").split("\n")))


def _raw(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def junit(odd: str, noise: bytes) -> bytes:
    """Write a report whose writer escapes markup only, as many do."""
    value = quoteattr(odd.replace("&", "\0")).replace("\0", "&")
    cases = [
        '<testcase name="one"/>',
        f"<testcase name={value} x={value} status={value}><failure message={value}/></testcase>",
        '<testcase name="two"><failure message="no"/></testcase>',
        '<testcase name="three"><skipped/></testcase>',
    ]
    text = f"<testsuite name={value}>{''.join(cases)}<system-out>NOISE</system-out></testsuite>"
    return _raw(f'<?xml version="1.0" encoding="utf-8"?>\n{text}').replace(b"NOISE", noise)


def junit_unescaped(odd: str, noise: bytes) -> bytes:
    """Write a report whose writer escapes quotes only."""
    value = '"' + odd.replace('"', "'") + '"'
    cases = [
        '<testcase name="one"/>',
        f"<testcase name={value} time={value}><failure message={value}/></testcase>",
        '<testcase name="two"><failure message="no"/></testcase>',
        '<testcase name="three"><skipped/></testcase>',
    ]
    return _raw(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>") + noise[:0]


def junit_namespace(odd: str, noise: bytes) -> bytes:
    """Write a report whose elements have a namespace, declared or not."""
    report = junit(odd, noise)
    for tag in (b"testsuite", b"testcase", b"failure", b"skipped"):
        report = report.replace(b"<" + tag, b"<j:" + tag).replace(b"</" + tag, b"</j:" + tag)
    return report.replace(b"<j:testsuite ", b'<j:testsuite xmlns="urn:x" xml:lang="en" ', 1)


def jest(odd: str, noise: bytes) -> bytes:
    """Write JSON with raw characters, references to surrogates, and values of other types."""

    def case(name: str, status: str, messages: object = None) -> dict[str, object]:
        return {"fullName": name, "status": status, "failureMessages": messages, odd or "x": odd}

    results = [case("one", "passed", [None]), case("two", "failed", [odd, None, 3]), None, odd]
    results += [{"fullName": None, "title": odd, "ancestorTitles": None, "status": odd}]
    results += [case("three", "pending", odd)]
    files = [None, {"assertionResults": None}, {"assertionResults": results}]
    text = json.dumps({"noise": "NOISE", "testResults": files}, ensure_ascii=len(odd) % 2 == 0)
    return _raw(text).replace(b"NOISE", noise)


def go(odd: str, noise: bytes) -> bytes:
    """Write events of which some have values of other types."""
    ends = {"one": "pass", "two": "fail", "three": "skip"}
    events: list[object] = [{"Action": "run", "Test": test, "Time": None} for test in ends]
    events += [{"Action": "run", "Test": "odd", "Output": odd}, None, odd, {"Action": 3, odd: odd}]
    events += [{"Action": "pass", "Test": "odd", "Output": {"x": odd}, "Elapsed": odd}]
    events += [{"Action": "output", "Test": odd, "Output": [odd]}]
    events += [{"Action": end, "Test": test, "Output": None} for test, end in ends.items()]
    events += [{"Action": "fail", "Elapsed": None}]
    each = [event | {"Package": "p"} if isinstance(event, dict) else event for event in events]
    return _raw("\n".join(json.dumps(event) for event in each) + "\nNOISE").replace(b"NOISE", noise)


def cargo(odd: str, noise: bytes) -> bytes:
    """Write output between whose lines a test prints."""
    text = (
        "running 3 tests\ntest one ... ok\ntest two ... FAILED\ntest three ... ignored\n"
        f"\nsuccesses:\n\n---- one stdout ----\n{odd}\nNOISE\n\n"
        f"failures:\n\n---- two stdout ----\n{odd}\nNOISE\n\n"
        "test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out\n"
    )
    return _raw(text).replace(b"NOISE", noise)


def tap(odd: str, noise: bytes) -> bytes:
    """Write points of which one has an odd title and an odd diagnostic."""
    text = (
        f"TAP version 14\n1..4\nok 1 - one\n{odd}\nnot ok 2 - two\n"
        f'  ---\n  message: "{odd}"\n  {odd} NOISE\n  ...\n'
        f"ok 3 - odd {odd} NOISE\nok 4 - three # SKIP {odd}\n"
    )
    return _raw(text).replace(b"NOISE", noise)


def tap_braces(odd: str, noise: bytes) -> bytes:
    """Write points in braces, of which one has an odd title."""
    text = (
        f"TAP version 13\n1..1\nnot ok 1 - {odd}NOISE # time=1.2ms {{\n    1..3\n"
        f"    ok 1 - one # time=0.3ms\n    not ok 2 - two # time=3ms\n"
        f"    ok 3 - three # SKIP {odd}\n}}\n"
    )
    return _raw(text).replace(b"NOISE", noise)


WRITERS: dict[str, tuple[str, Callable[[str, bytes], bytes]]] = {
    "junit": ("junit", junit),
    "junit with a namespace": ("junit", junit_namespace),
    "junit without escapes": ("junit", junit_unescaped),
    "pytest": ("pytest", junit),
    "jest": ("jest", jest),
    "go": ("go", go),
    "cargo": ("cargo", cargo),
    "tap": ("tap", tap),
    "tap with braces": ("tap", tap_braces),
}


@pytest.mark.parametrize("writer", WRITERS)
@given(odd=lines, noise=st.sampled_from(NOISE))
def test_an_odd_value_leaves_the_other_verdicts(writer: str, odd: str, noise: bytes) -> None:
    """Control characters, references, invalid UTF-8 or null may be anywhere in a report."""
    format_name, write = WRITERS[writer]
    report = FORMATS[format_name].read(write(odd, noise))
    found = {name.rpartition("> ")[2]: outcome for name, outcome in report.outcomes.items()}
    assert {test: found.get(test) for test in OTHERS} == OTHERS
    assert (report.complete, report.inconsistency) == (True, "")
    json.dumps([*report.outcomes], ensure_ascii=False).encode()
