"""Which tests should run, by reading their source, and which did, by reading pytest's report.

Neither side executes anything here. Expected tests come from trusted source text, so that tests
which vanish, are skipped or never finish are missed rather than not counted.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TypeGuard
from xml.etree import ElementTree as ET

import msgspec

MAX_REPORT = 8 << 20
"""Bytes of a report that are read; a longer one is none."""


class Tally(msgspec.Struct, frozen=True):
    """Names look like ``tests.test_bill::test_total`` or ``tests.test_bill.TestTax::test_zero``."""

    passed: frozenset[str]
    failed: dict[str, str]
    """Name to the first line of why."""

    def missing(self, expected: frozenset[str]) -> list[str]:
        """Expected tests of which nothing was heard."""
        return sorted(expected - self.passed - set(self.failed))


def expected_tests(path: str, source: str) -> frozenset[str]:
    """Tests that pytest's default rules find in this file. Raises `SyntaxError`."""
    module = ".".join(PurePosixPath(path).with_suffix("").parts)
    found = set()
    for node in ast.parse(source, filename=path).body:
        if _is_test(node):
            found.add(f"{module}::{node.name}")
        elif isinstance(node, ast.ClassDef) and _is_suite(node):
            found |= {f"{module}.{node.name}::{n.name}" for n in node.body if _is_test(n)}
    return frozenset(found)


def _is_test(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")


def _is_suite(node: ast.ClassDef) -> bool:
    bases = (
        base.attr if isinstance(base, ast.Attribute) else ast.unparse(base) for base in node.bases
    )
    return node.name.startswith("Test") or any(base.endswith("TestCase") for base in bases)


def read_report(data: bytes) -> Tally | None:
    """What a JUnit report says; None when it is no such report.

    The cases of a parametrized test count as one, which passes when all of them do. A skipped
    test has not passed.
    """
    if len(data) > MAX_REPORT:
        return None
    try:
        root = ET.fromstring(data)  # noqa: S314 - expat limits entity expansion
    except ET.ParseError:
        return None
    seen: set[str] = set()
    failed: dict[str, str] = {}
    for case in root.iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '').partition('[')[0]}"
        seen.add(name)
        for trouble in case:
            if trouble.tag in ("failure", "error", "skipped"):
                lines = (trouble.get("message") or trouble.text or trouble.tag).splitlines()
                failed.setdefault(name, lines[0][:300] if lines else trouble.tag)
    return Tally(frozenset(seen - set(failed)), failed)


def pick(files: Mapping[str, str]) -> list[str]:
    """Paths that pytest's default rules take for test files."""
    names = ((path, PurePosixPath(path).name) for path in files)
    return sorted(
        path
        for path, name in names
        if name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))
    )
