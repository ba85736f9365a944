"""What ``cargo test`` (libtest) writes: unit tests, integration tests and doc tests.

Names are as shown, ``tests::adds`` or ``src/lib.rs - add (line 2)``. Each program of tests says how
many it runs and how many passed; more than that is an oddity.
"""

from __future__ import annotations

import re

from tugline.evaluators.formats.base import Mark, Told, lines

_RUNNING = re.compile(r"running (\d+) tests?$")
_RESULT = re.compile(r"test result: (ok|FAILED)\. (\d+) passed; (\d+) failed;")
_NOTE = re.compile(r" - (should panic|compile fail|compile)$")
_MARKS = {"ok": Mark.PASS, "FAILED": Mark.FAIL, "ignored": Mark.SKIP}


def read(data: bytes) -> Told:
    """What was said, line by line."""
    told = Told()
    section, pending, passed, open_programs = "", "", 0, 0
    for line in lines(data):
        result = _RESULT.match(line)
        if _RUNNING.match(line):
            section, passed, open_programs = "tests", 0, open_programs + 1
        elif result:
            if passed > int(result[2]):
                told.oddity = f"{passed} tests are said to have passed, cargo counted {result[2]}"
            section, pending, passed = "", "", 0
            open_programs -= 1
            told.complete = True
        elif line == "failures:":
            section = line
        elif section == "tests":
            pending, mark = _said(line, pending)
            if mark is not None and pending:
                told.add(pending, mark)
                passed += mark is Mark.PASS
                pending = ""
    told.complete = told.complete and open_programs == 0
    return told


def _said(line: str, pending: str) -> tuple[str, Mark | None]:
    """The test of this line or, where its end stands alone after its output, the one before."""
    if line.startswith("test ") and " ... " in line:
        test, _, end = line[5:].rpartition(" ... ")
        if " ... " in test:
            test, end = test.partition(" ... ")[0], ""
        return _NOTE.sub("", test), _MARKS.get(end.partition(",")[0])
    return pending, _MARKS.get(line)
