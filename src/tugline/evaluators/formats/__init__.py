"""Formats of test results, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tugline.evaluators.formats import cargo, go, jest, junit, tap, unittest
from tugline.evaluators.formats.base import TestReport


class Format(NamedTuple):
    """How to read the results of a test program."""

    read: Callable[[bytes], TestReport]
    languages: tuple[str, ...]
    """Whose tests they are: keys of `filters.TESTS`."""
    normalize: Callable[[str], str] = lambda name: name
    """Return a test's name as the format has it, from other ways to write it."""
    env: Mapping[str, str] = {}
    """Variables that make the test program write a JUnit report to ``{report}``."""


FORMATS = {
    "junit": Format(junit.read, ("python", "java"), junit.normalize),
    "pytest": Format(
        junit.read,
        ("python",),
        junit.normalize,
        {"PYTEST_ADDOPTS": "--junitxml={report} -o junit_family=xunit1"},
    ),
    "unittest": Format(unittest.read, ("python",), unittest.normalize),
    "go": Format(go.read, ("go",)),
    "cargo": Format(cargo.read, ("rust",)),
    "jest": Format(jest.read, ("node",)),
    "tap": Format(tap.read, ("node", "tap")),
}
