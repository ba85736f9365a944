"""Output of test runners, by the name of its format."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tugline.evaluators.formats import cargo, go, jest, junit, pytest, tap, unittest
from tugline.evaluators.formats.base import TestReport, as_given


class Format(NamedTuple):
    """How to read one."""

    read: Callable[[bytes], TestReport]
    name: Callable[[str], str]
    """A test's name, from the ways that people write it."""
    languages: tuple[str, ...]
    """Whose tests it tells of: keys of `filters.TESTS`."""


FORMATS = {
    "junit": Format(junit.read, junit.name, ("python", "java")),
    "pytest": Format(pytest.read, as_given, ("python",)),
    "unittest": Format(unittest.read, unittest.name, ("python",)),
    "go": Format(go.read, as_given, ("go",)),
    "cargo": Format(cargo.read, as_given, ("rust",)),
    "jest": Format(jest.read, as_given, ("node",)),
    "tap": Format(tap.read, as_given, ("node", "tap")),
}
