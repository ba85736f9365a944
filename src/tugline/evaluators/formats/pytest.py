"""pytest's own words: ``-v`` lines, also by xdist, and the summary that ``-rA`` asks for.

What stands between the headings of captured output is passed over; of several summaries of
one run the last is pytest's. Names are node ids: ``tests/test_bill.py::TestZero::test_zero[a b]``.
"""

from __future__ import annotations

import re

from tugline.evaluators.formats.base import TestOutcome, TestReport, lines

_WORDS = {
    "PASSED": TestOutcome.PASS,
    "XPASS": TestOutcome.PASS,
    "FAILED": TestOutcome.FAIL,
    "ERROR": TestOutcome.FAIL,
    "SKIPPED": TestOutcome.SKIP,
    "XFAIL": TestOutcome.XFAIL,
}
_HEADING = re.compile(r"={3,} ([\w ()]+) ={3,}$")
_COUNTED = re.compile(r"(\d{1,9}) (passed|failed|errors?|skipped|xfailed|xpassed|deselected)\b")
_END = re.compile(
    r"(=+ )?\d+ (subtests )?[a-z]+(, \d+ (subtests )?[a-z]+)* in \d[\d.]*s( \([\d:]+\))?( =+)?$"
)
_PROGRESS = r"(?:\[ *\d+(?:%|/\d+)\]|\d[\d.]*[mu]?s|\d+m \d+s|\d+h \d+m)"
_WORKER = re.compile(rf"\[gw\d+\] (?:{_PROGRESS} )?")
_AT_END = re.compile(rf" {_PROGRESS}$")
_ALONE = re.compile(r"PASSED$|FAILED$|ERROR$|(SKIPPED|XFAIL|XPASS)( \(.*\))?$")
"""The end of a test that wrote, or whose log is shown live, after its name."""
_SUBTEST = re.compile(r"(?:SUBFAILED(?:.*?[\])])?|[\[(].*?[\])] SUBFAIL) (\S+::.*)")
"""With the subtest's description before the name; the test itself may be told to have passed."""
_START, _SUMMARY = "test session starts", "short test summary info"


class _Session:
    """What one run of pytest said."""

    def __init__(self) -> None:
        self.run, self.summary = TestReport(), TestReport()
        self.passed = -1
        """By its own last line."""


def read(data: bytes) -> TestReport:
    """What was said, line by line; several runs are one."""
    sessions, section, begun = [_Session()], "", ""
    for line in lines(data):
        now = sessions[-1]
        heading = _HEADING.match(line)
        if _END.match(line):
            counts = {word: int(number) for number, word in _COUNTED.findall(line)}
            now.passed, section = counts.get("passed", 0) + counts.get("xpassed", 0), ""
            begun = ""
        elif heading:
            section, begun = heading[1], ""
            if section == _SUMMARY:
                now.summary = TestReport()
            elif section == _START and now.passed >= 0:
                sessions.append(_Session())
        elif section == _SUMMARY:
            _add(now.summary, _first(line))
        elif section in {"", _START}:
            worker = _WORKER.match(line)
            said = _first(line[worker.end() :]) if worker else _last(line)
            if said is not None:
                begun = ""
            elif begun and _ALONE.match(_bare(line)):
                said = _last(f"{begun} {line}")
            else:
                begun = _begun(line) or begun
            _add(now.run, said)
    return _together(sessions)


def _together(sessions: list[_Session]) -> TestReport:
    told = TestReport()
    for part in (part for session in sessions for part in (session.run, session.summary)):
        for name, mark in part.marks.items():
            told.add(name, mark, part.reason(name))
    told.complete = all(session.passed >= 0 for session in sessions)
    passed, claimed = told.count(TestOutcome.PASS), sum(session.passed for session in sessions)
    if told.complete and passed > claimed:
        told.oddity = f"{passed} tests are said to have passed, pytest counted {claimed}"
    return told


def _add(told: TestReport, said: tuple[str, TestOutcome, str] | None) -> None:
    if said is not None:
        name, mark, why = said
        # Where an inherited test was written follows its name.
        own, _, where = name.rpartition(" <- ")
        told.add(name if where.endswith("]") else own or name, mark, why)


def _bare(line: str) -> str:
    return _AT_END.sub("", line.rstrip()).rstrip()


def _begun(line: str) -> str:
    """The test whose name begins this line."""
    first, space, _ = line.partition(" ")
    if not space or ".py::" not in first:
        return ""
    return line[: line.find("] ") + 1] if "[" in first else first


def _first(line: str) -> tuple[str, TestOutcome, str] | None:
    """From ``FAILED path::name - why``."""
    if subtest := _SUBTEST.match(line):
        line = f"FAILED {subtest[1]}"
    word, _, rest = line.partition(" ")
    if word not in _WORDS or "::" not in rest:
        return None
    rest = rest.rstrip()
    if word in {"PASSED", "SKIPPED"}:
        return rest, _WORDS[word], ""
    # A parameter may hold " - " too; before pytest 8 no dash stood before why a test is an XPASS.
    dash = " " if word == "XPASS" else " - "
    bracket = "[" in rest.partition(dash)[0]
    cut = rest.find(f"]{dash}") + 1 if bracket else rest.find(dash, rest.find("::"))
    if cut < 1:
        return rest, _WORDS[word], ""
    return rest[:cut], _WORDS[word], rest[cut + 1 :].removeprefix("- ")


def _last(line: str) -> tuple[str, TestOutcome, str] | None:
    """From ``path::name PASSED  [ 10%]``."""
    text = _bare(line)
    colons = text.find("::")
    if colons < 1 or text[0].isspace():
        return None
    for word, mark in _WORDS.items():
        at = text.find(f" {word}", colons)
        after = text[at + 1 + len(word) :]
        if at > 0 and (not after or after.startswith(" (")):
            return text[:at].rstrip(), mark, after.strip(" ()")
    return None
