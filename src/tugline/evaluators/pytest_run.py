"""Tests under our own pytest: hidden ones, and those that a task's files came with.

Expected tests are read from trusted source text, so that tests which vanish, are skipped or never
finish are missed rather than not counted; nothing is executed for that. pytest is imported before
anything of the agent's can be, and its report has a name that nobody could know before.
"""

from __future__ import annotations

import ast
import secrets
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import TypeGuard

from tugline.errors import EvaluatorError
from tugline.evaluators.base import SessionOutcome, Verdict
from tugline.evaluators.formats import FORMATS
from tugline.evaluators.formats.base import TestOutcome
from tugline.evaluators.fresh import has_base, tail
from tugline.evaluators.scoring import ExpectedTests, score
from tugline.sandbox.base import Content, Sandbox
from tugline.types import Task

# File at the top of a task, and what makes it a configuration of pytest.
_CONFIGS = {
    "pytest.ini": "",
    ".pytest.ini": "",
    "pytest.toml": "",
    ".pytest.toml": "",
    "tox.ini": "[pytest]",
    "setup.cfg": "[tool:pytest]",
    "pyproject.toml": "[tool.pytest",
}
# `-I` and the late path entry: pytest is imported before anything of the agent's can be.
_START = "import sys, pytest; sys.path.insert(0, '.'); sys.exit(pytest.main(sys.argv[1:]))"
_OPTIONS = ("-p", "no:cacheprovider", "-q", "-o", "junit_family=xunit1")
_CONTROL = "import pytest"
_MOST = 8 << 20
"""Bytes of a report that are read; a longer one is none."""
_TIME_S = 30.0


class PytestRun:
    """Runs pytest on `paths` (None: every test file that can be trusted)."""

    def __init__(
        self, asked: ExpectedTests, paths: Sequence[str] | None, timeout_s: float | None
    ) -> None:
        self._asked, self._paths = asked, paths
        self._timeout_s = timeout_s or _TIME_S
        self._works = False

    def trusted(self, task: Task, files: Mapping[str, str]) -> dict[str, Content]:
        """The task's own tests and settings, and hidden `files` over them."""
        trusted = {path: task.files[path] for path in pick(task.files)} | dict(files)
        given = {**task.files, **trusted}
        configured = any(p in given and section in given[p] for p, section in _CONFIGS.items())
        if not configured and not has_base(task.workspace):
            # Without a file of its own pytest would look for one in the folders above.
            trusted["pytest.ini"] = "[pytest]\n"
        return dict(trusted)

    async def prepare(self, outcome: SessionOutcome, box: Sandbox) -> Verdict | None:
        """Nothing has to be."""

    async def run(
        self, outcome: SessionOutcome, box: Sandbox, trusted: Mapping[str, Content]
    ) -> Verdict:
        """Run them in a box that has all files."""
        sources = {p: text for p, text in trusted.items() if isinstance(text, str)}
        paths = _under(self._paths, pick(sources))
        asked = self._asked
        codes: tuple[int, ...] = (0, 1)  # 1: some test failed; it may be one that is not asked for
        if asked.tests is None:
            expected = dict.fromkeys(_expected(sources, paths), TestOutcome.PASS)
            asked, codes = ExpectedTests(expected, asked.groups, asked.partial), (0,)
        report = box.home / f"{secrets.token_hex(16)}.xml"
        end = await box.run(
            ("python3", "-I", "-B", "-c", _START, *_OPTIONS, f"--junitxml={report}", *paths),
            env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HOME": str(box.home)},
            timeout_s=min(self._timeout_s, outcome.timeout_s),
            log_name="tests",
        )
        junit = FORMATS["junit"]
        told = junit.read(await box.get(report, max_bytes=_MOST) or b"")
        if not told.complete and not end.timed_out:
            await self._check_pytest(outcome)
        verdict = score(told, asked, end, junit.name, codes=codes if not asked.partial else ())
        verdict.report["output"] = await tail(box, "tests")
        return verdict

    async def _check_pytest(self, outcome: SessionOutcome) -> None:
        """No report: is it the agent's doing? In a box without its files, pytest must load."""
        if self._works:
            return
        async with outcome.open_sandbox({}) as box:
            argv = ("python3", "-I", "-c", _CONTROL)
            end = await box.run(argv, env={}, timeout_s=60.0, log_name="control")
            if end.code != 0:
                said = await tail(box, "control", 300)
                msg = f"pytest cannot be run by python3 in this runtime: {said.strip() or end}"
                raise EvaluatorError(msg)
        self._works = True


def pick(files: Mapping[str, str]) -> list[str]:
    """Paths that pytest's default rules take for test files."""
    names = ((path, PurePosixPath(path).name) for path in files)
    return sorted(
        path
        for path, name in names
        if name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))
    )


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
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    fixture = any(_last_name(one) == "fixture" for one in node.decorator_list)
    return node.name.startswith("test") and not fixture


def _is_suite(node: ast.ClassDef) -> bool:
    if any(ast.unparse(one) == "__test__ = False" for one in node.body):
        return False
    if any(_last_name(base).endswith("TestCase") for base in node.bases):
        return True
    made = any(isinstance(one, ast.FunctionDef) and one.name == "__init__" for one in node.body)
    return node.name.startswith("Test") and not made


def _last_name(node: ast.expr) -> str:
    """``fixture`` of ``@pytest.fixture(scope="module")``."""
    node = node.func if isinstance(node, ast.Call) else node
    return ast.unparse(node).rpartition(".")[2]


def _under(paths: Sequence[str] | None, tests: list[str]) -> list[str]:
    """Of `tests` those that `paths` name as files or folders; all of them for None."""
    if paths is None:
        return tests
    found = []
    for path in paths:
        inside = [test for test in tests if PurePosixPath(test).is_relative_to(path)]
        if not inside:
            known = ", ".join(tests) or "none"
            msg = f"evaluator 'tests': no test file at {path!r} (known: {known})"
            raise EvaluatorError(msg)
        found += inside
    return found


def _expected(sources: Mapping[str, str], paths: Sequence[str]) -> list[str]:
    """Names of the tests in `paths`. Raises `EvaluatorError` when there are none to be found."""
    found: set[str] = set()
    for path in paths:
        try:
            found |= expected_tests(path, sources[path])
        except (SyntaxError, ValueError) as error:
            msg = f"evaluator 'tests': {path} is not valid Python: {error}"
            raise EvaluatorError(msg) from error
    if not found:
        msg = f"evaluator 'tests': no test functions in {list(paths)}; give files with tests"
        raise EvaluatorError(msg)
    return sorted(found)
