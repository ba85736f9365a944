"""JUnit's XML report, as pytest, Maven, Gradle, gotestsum, Jest and many others write it.

Names are ``classname::name``, such as ``tests.test_bill.TestZero::test_zero``; pytest's node ids
are understood as well. A skipped test has not passed. A report that is cut off is none.
"""

from __future__ import annotations

from xml.etree import ElementTree as ET

from tugline.evaluators.formats.base import TestOutcome, TestReport


def name(given: str) -> str:
    """``classname::name`` of a node id; other names as they are."""
    path, colons, rest = given.partition(".py::")
    if not colons:
        return given
    test, bracket, case = rest.partition("[")
    *classes, function = test.split("::")
    return f"{'.'.join([path.replace('/', '.'), *classes])}::{function}{bracket}{case}"


def read(data: bytes) -> TestReport:
    """What the report says of each case."""
    told = TestReport()
    try:
        root = ET.fromstring(data)  # noqa: S314 - expat limits entity expansion
    except (ET.ParseError, ValueError, LookupError):
        return told
    for case in root.iter("testcase"):
        where, title = case.get("classname", ""), case.get("name", "")
        mark, why = TestOutcome.PASS, ""
        for child in case:
            if child.tag in {"failure", "error", "skipped"}:
                expected = child.get("type") == "pytest.xfail"
                quiet = TestOutcome.XFAIL if expected else TestOutcome.SKIP
                mark = quiet if child.tag == "skipped" else TestOutcome.FAIL
                why = child.get("message") or child.text or child.tag
                if mark is TestOutcome.FAIL:
                    break
        told.add(f"{where}::{title}" if where else title, mark, why)
    told.complete = root.tag in {"testsuites", "testsuite"}
    return told
