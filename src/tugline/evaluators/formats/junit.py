"""JUnit's XML report, as pytest, Maven, Gradle, gotestsum, Jest and many others write it.

Names are ``classname::name``, such as ``tests.test_bill.TestZero::test_zero``; pytest's node ids
are understood as well. A skipped test has not passed. A truncated report is no report.
"""

from __future__ import annotations

from xml.etree import ElementTree as ET

from tugline.evaluators.formats.base import TestOutcome, TestReport


def normalize(name: str) -> str:
    """Return ``classname::name`` for a node id; other names unchanged."""
    path, colons, rest = name.partition(".py::")
    if not colons:
        return name
    test, bracket, case = rest.partition("[")
    *classes, function = test.split("::")
    return f"{'.'.join([path.replace('/', '.'), *classes])}::{function}{bracket}{case}"


def read(data: bytes) -> TestReport:
    """Read a report."""
    report = TestReport()
    try:
        root = ET.fromstring(data)  # noqa: S314 - expat limits entity expansion
    except (ET.ParseError, ValueError, LookupError):
        return report
    for case in root.iter("testcase"):
        classname, title = case.get("classname", ""), case.get("name", "")
        outcome, reason = TestOutcome.PASS, ""
        for child in case:
            if child.tag in {"failure", "error", "skipped"}:
                expected = child.get("type") == "pytest.xfail"
                skipped = TestOutcome.XFAIL if expected else TestOutcome.SKIP
                outcome = skipped if child.tag == "skipped" else TestOutcome.FAIL
                reason = child.get("message") or child.text or child.tag
                if outcome is TestOutcome.FAIL:
                    break
        report.add(f"{classname}::{title}" if classname else title, outcome, reason)
    report.complete = root.tag in {"testsuites", "testsuite"}
    return report
