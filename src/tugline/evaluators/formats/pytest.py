"""pytest's own words: ``-v`` lines, also by xdist, and the summary that ``-rA`` asks for.

What stands between the headings of captured output is passed over; of several summaries of
one run the last is pytest's. Names are node ids: ``tests/test_bill.py::TestZero::test_zero[a b]``.
"""

from __future__ import annotations

import re

from tugline.evaluators.formats.base import Mark, Told, lines

_WORDS = {
    "PASSED": Mark.PASS,
    "XPASS": Mark.PASS,
    "FAILED": Mark.FAIL,
    "ERROR": Mark.FAIL,
    "SKIPPED": Mark.SKIP,
    "XFAIL": Mark.XFAIL,
}
_HEADING = re.compile(r"={3,} ([\w ()]+) ={3,}$")
_COUNTED = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|xpassed|deselected)\b")
_END = re.compile(r"(=+ )?\d+ [a-z]+(, \d+ [a-z]+)* in \d[\d.]*s( \([\d:]+\))?( =+)?$")
_WORKER = re.compile(r"\[gw\d+\] \[ *\d+%\] ")
_START, _SUMMARY = "test session starts", "short test summary info"


class _Session:
    """What one run of pytest said."""

    def __init__(self) -> None:
        self.run, self.summary = Told(), Told()
        self.passed = -1
        """By its own last line."""


def read(data: bytes) -> Told:
    """What was said, line by line; several runs are one."""
    sessions, section = [_Session()], ""
    for line in lines(data):
        now = sessions[-1]
        heading = _HEADING.match(line)
        if _END.match(line):
            counts = {word: int(number) for number, word in _COUNTED.findall(line)}
            now.passed, section = counts.get("passed", 0) + counts.get("xpassed", 0), ""
        elif heading:
            section = heading[1]
            if section == _SUMMARY:
                now.summary = Told()
            elif section == _START and now.passed >= 0:
                sessions.append(_Session())
        elif section == _SUMMARY:
            _add(now.summary, _first(line))
        elif section in {"", _START}:
            worker = _WORKER.match(line)
            _add(now.run, _first(line[worker.end() :]) if worker else _last(line))
    return _together(sessions)


def _together(sessions: list[_Session]) -> Told:
    told = Told()
    for part in (part for session in sessions for part in (session.run, session.summary)):
        for name, mark in part.marks.items():
            told.add(name, mark, part.reason(name))
    told.complete = all(session.passed >= 0 for session in sessions)
    passed, claimed = told.count(Mark.PASS), sum(session.passed for session in sessions)
    if told.complete and passed > claimed:
        told.oddity = f"{passed} tests are said to have passed, pytest counted {claimed}"
    return told


def _add(told: Told, said: tuple[str, Mark, str] | None) -> None:
    if said is not None:
        told.add(*said)


def _first(line: str) -> tuple[str, Mark, str] | None:
    """From ``FAILED path::name - why``."""
    word, _, rest = line.partition(" ")
    if word not in _WORDS or "::" not in rest:
        return None
    rest = rest.rstrip()
    if _WORDS[word] in {Mark.PASS, Mark.SKIP}:
        return rest, _WORDS[word], ""
    # A parameter may hold " - " too.
    cut = rest.find("] - ") + 1 if "[" in rest.partition(" - ")[0] else rest.find(" - ")
    return (rest[:cut], _WORDS[word], rest[cut + 3 :]) if cut > 0 else (rest, _WORDS[word], "")


def _last(line: str) -> tuple[str, Mark, str] | None:
    """From ``path::name PASSED  [ 10%]``."""
    text = line.rstrip()
    if text.endswith("%]"):
        text = text[: text.rfind("[")].rstrip()
    colons = text.find("::")
    if colons < 1 or text[0].isspace():
        return None
    for word, mark in _WORDS.items():
        at = text.find(f" {word}", colons)
        after = text[at + 1 + len(word) :]
        if at > 0 and (not after or after.startswith(" (")):
            return text[:at].rstrip(), mark, after.strip(" ()")
    return None
