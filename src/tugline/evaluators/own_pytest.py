"""The tests that Tugline's own pytest runs, and their names, read from trusted source text.

So tests that are not collected, skipped or never finished count as missing.
"""

import ast
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TypeGuard

import msgspec

from tugline.errors import EvaluatorError
from tugline.evaluators.pytest_settings import PYTEST_CONFIGS
from tugline.evaluators.scoring import ExpectedTests
from tugline.types import Task

_START = "import sys, pytest; sys.path.insert(0, '.'); sys.exit(pytest.main(sys.argv[1:]))"
PYTEST = (
    *("python3", "-I", "-B", "-c", _START, "-p", "no:cacheprovider", "-q"),
    *("-o", "junit_family=xunit1", "--junitxml={report}"),
)
"""The command: `-I` and the late path entry import pytest before any module of the agent can be."""
IMPORT_PYTEST = ("python3", "-I", "-c", "import pytest")
PYTEST_ENV = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
PYTEST_S = 30.0
"""Default time limit, in seconds."""


def select_tests(
    expected: ExpectedTests, sources: Mapping[str, str]
) -> tuple[ExpectedTests, tuple[int, ...], list[str]]:
    """Return the expected tests, the exit codes of a good run (empty: any), and the test files."""
    paths = _find_test_files(sources)
    codes: tuple[int, ...] = (0, 1)  # 1: a test failed, perhaps one that is not expected
    if expected.tests is None:
        names = _find_expected_tests({path: sources[path] for path in paths})
        expected = msgspec.structs.replace(expected, tests=names)
        codes = (0,)
    return expected, () if expected.partial else codes, paths


def find_pytest_files(task: Task, files: Mapping[str, str]) -> dict[str, str]:
    """Return the task's tests and pytest settings, replaced by `files` of the same paths."""
    trusted = {path: task.files[path] for path in _find_test_files(task.files)} | dict(files)
    merged = {**task.files, **trusted}
    configured = any(p in merged and section in merged[p] for p, section in PYTEST_CONFIGS.items())
    if not configured and not task.workspace.has_base:
        # Without this file, pytest would search the parent folders for a configuration.
        trusted["pytest.ini"] = "[pytest]\n"
    return trusted


def _find_test_files(files: Mapping[str, str]) -> list[str]:
    """Return the paths of test files by pytest's default rules."""
    names = ((path, PurePosixPath(path).name) for path in files)
    return sorted(
        path
        for path, name in names
        if name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))
    )


def find_tests(path: str, source: str) -> frozenset[str]:
    """Return the tests in a file by pytest's default rules. Raises `SyntaxError`."""
    module = ".".join(PurePosixPath(path).with_suffix("").parts)
    tests = set()
    for node in ast.parse(source, filename=path).body:
        if _is_test(node):
            tests.add(f"{module}::{node.name}")
        elif isinstance(node, ast.ClassDef) and _is_suite(node):
            tests |= {f"{module}.{node.name}::{n.name}" for n in node.body if _is_test(n)}
    return frozenset(tests)


def _is_test(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    fixture = any(_last_name(each) == "fixture" for each in node.decorator_list)
    return node.name.startswith("test") and not fixture


def _is_suite(node: ast.ClassDef) -> bool:
    if any(ast.unparse(each) == "__test__ = False" for each in node.body):
        return False
    if any(_last_name(base).endswith("TestCase") for base in node.bases):
        return True
    init = any(isinstance(each, ast.FunctionDef) and each.name == "__init__" for each in node.body)
    return node.name.startswith("Test") and not init


def _last_name(node: ast.expr) -> str:
    """Return ``fixture`` for ``@pytest.fixture(scope="module")``."""
    node = node.func if isinstance(node, ast.Call) else node
    return ast.unparse(node).rpartition(".")[2]


def _find_expected_tests(sources: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the tests in `sources`. Raises `EvaluatorError` if there are none."""
    names: set[str] = set()
    for path, source in sources.items():
        try:
            names |= find_tests(path, source)
        except (SyntaxError, ValueError) as error:
            msg = f"evaluator 'tests': {path} is not valid Python: {error}"
            raise EvaluatorError(msg) from error
    if not names:
        msg = f"evaluator 'tests': files {list(sources)} contain no test functions"
        raise EvaluatorError(msg)
    return tuple(sorted(names))
