"""Our own pytest: how it is run, its trusted files, and the tests that it must report.

Expected tests are read from trusted source text, so that tests that vanish, are skipped or never
finish are missing, not fewer.
"""

import ast
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TypeGuard

from tugline.errors import EvaluatorError
from tugline.evaluators.filters import PYTEST_CONFIGS
from tugline.evaluators.script import has_base
from tugline.types import Task

# `-I` and the late path entry: pytest is imported before anything of the agent's can be.
_START = "import sys, pytest; sys.path.insert(0, '.'); sys.exit(pytest.main(sys.argv[1:]))"
COMMAND = (
    *("python3", "-I", "-B", "-c", _START, "-p", "no:cacheprovider", "-q"),
    *("-o", "junit_family=xunit1", "--junitxml={report}"),
)
IMPORT = ("python3", "-I", "-c", "import pytest")
ENV = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
TIMEOUT_S = 30.0


def find_trusted_files(task: Task, files: Mapping[str, str]) -> dict[str, str]:
    """Return the task's own tests and settings, and hidden `files` over them."""
    trusted = {path: task.files[path] for path in find_test_files(task.files)} | dict(files)
    given = {**task.files, **trusted}
    configured = any(p in given and section in given[p] for p, section in PYTEST_CONFIGS.items())
    if not configured and not has_base(task.workspace):
        # Without a file of its own pytest would look for one in the folders above.
        trusted["pytest.ini"] = "[pytest]\n"
    return trusted


def find_test_files(files: Mapping[str, str]) -> list[str]:
    """Return the paths that pytest's default rules take for test files."""
    names = ((path, PurePosixPath(path).name) for path in files)
    return sorted(
        path
        for path, name in names
        if name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))
    )


def find_tests(path: str, source: str) -> frozenset[str]:
    """Return the tests that pytest's default rules find in a file. Raises `SyntaxError`."""
    module = ".".join(PurePosixPath(path).with_suffix("").parts)
    found = set()
    for node in ast.parse(source, filename=path).body:
        if _is_test(node):
            found.add(f"{module}::{node.name}")
        elif isinstance(node, ast.ClassDef) and _is_suite(node):
            found |= {f"{module}.{node.name}::{n.name}" for n in node.body if _is_test(n)}
    return frozenset(found)


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


def find_expected_tests(sources: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the tests in `sources`. Raises `EvaluatorError` if there are none."""
    names: set[str] = set()
    for path, source in sources.items():
        try:
            names |= find_tests(path, source)
        except (SyntaxError, ValueError) as error:
            msg = f"evaluator 'tests': {path} is not valid Python: {error}"
            raise EvaluatorError(msg) from error
    if not names:
        msg = f"evaluator 'tests': no test functions in {list(sources)}; give files with tests"
        raise EvaluatorError(msg)
    return tuple(sorted(names))
