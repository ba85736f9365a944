"""The two ways to run tests: our own pytest, or a command of the task's."""

import ast
import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import Annotated, NamedTuple, TypeGuard

import msgspec

from tugline.errors import ConfigError, EvaluatorError
from tugline.evaluators.base import SessionOutcome, Verdict
from tugline.evaluators.formats import FORMATS, read_report
from tugline.evaluators.scoring import ExpectedTests, TestReport, score
from tugline.evaluators.script import ScriptRunner, has_base
from tugline.sandbox.base import Content, Exit, check_path
from tugline.types import Task

MAX_OUTPUT, MAX_REPORT = 100 << 20, 16 << 20
"""Bytes that are read."""
_REPORT = "{report}"
_CANNOT_RUN = (126, 127)
_COLLECT = Path(__file__).with_name("collect_reports.sh").read_text(encoding="utf-8")
"""Runs a command whose programs write reports to a pipe, and appends all of them to one file.

A path would only have the report of the last program.
"""
_PYTEST_TIMEOUT_S = 30.0

Command = str | Annotated[Sequence[str], msgspec.Meta(min_length=1)]
"""A shell command, or a program and its arguments."""


class _Selection(NamedTuple):
    """What one run of the tests is measured by."""

    expected: ExpectedTests
    codes: tuple[int, ...]
    """Exit codes of a run in which all tests may have passed; empty: any."""
    paths: Sequence[str] = ()
    """Further arguments of the command."""


class CommandRunner:
    """Runs `command` in a sandbox that has the agent's work, and reads its report or its output.

    A report goes to a path with a random name (``{report}`` in the command), which no file that
    was there before can have.
    """

    def __init__(  # noqa: PLR0913 - the options of a task
        self,
        expected: ExpectedTests,
        *,
        command: Command,
        output: str,
        report: str | None = None,
        env: Mapping[str, str],
        setup: Command | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._expected, self._output = expected, output
        self._format = FORMATS[output]
        self.env = _add_env(env, self._format.env)
        self._argv = _parse_command("command", command)
        self._setup = _parse_command("setup", setup) if setup is not None else None
        self._report = check_path(report) if report is not None else None
        self._random = any(_REPORT in word for word in (*self._argv, *self.env.values()))
        self._timeout_s = timeout_s or math.inf
        if self._format.reports and not self._random and report is None:
            raise ConfigError(
                f"evaluator 'tests': command is {command!r:.80}, needs {_REPORT} in it "
                f"({self._format.reports}), or the option `report`"
            )
        self._proven: set[str] = set()
        """Programs that are known to work without an agent's changes."""

    def trusted_files(self, task: Task, files: Mapping[str, str]) -> dict[str, Content]:
        """Return what is put over the agent's work last: hidden `files`; None removes a file.

        A report that exists before the tests is removed.
        """
        return {**files, **({self._report: None} if self._report else {})}

    async def run(
        self, outcome: SessionOutcome, runner: ScriptRunner, trusted: Mapping[str, Content]
    ) -> Verdict:
        """Run `setup` on the agent's work, then put `trusted` there and run the tests."""
        sandbox = runner.sandbox
        if self._setup is not None:
            end = await self._start(runner, self._setup, "setup")
            if end.code != 0 or end.timed_out:
                return await self._score_failed_setup(outcome, runner, self._setup, end)
        await sandbox.put(sandbox.workdir, trusted)
        selected = self._select(trusted)
        path = sandbox.workdir / self._report if self._report else None
        if self._random:
            path = sandbox.home / f"{secrets.token_hex(16)}.report"
        end = await self._start(runner, (*self._argv, *selected.paths), "tests", path)
        if path is not None:
            data = await sandbox.get(path, max_bytes=MAX_REPORT) or b""
        else:
            data = await runner.read_log("tests", head=MAX_OUTPUT, tail=0)
        report = await read_report(self._output, data)
        if not end.timed_out:
            await self._check_program(outcome, report, end)
        normalize, codes = self._format.normalize, selected.codes
        verdict = score(report, selected.expected, end, normalize, codes=codes)
        verdict.report["output"] = await runner.read_tail("tests")
        return verdict

    async def _score_failed_setup(
        self, outcome: SessionOutcome, runner: ScriptRunner, setup: Sequence[str], end: Exit
    ) -> Verdict:
        if not end.timed_out:
            await self._check_without_work(outcome, "setup", setup)
        verdict = score(TestReport(), self._expected, end)
        how = "was out of time" if end.timed_out else f"ended with exit code {end.code}"
        verdict.report.update(reason=f"setup {how}", output=await runner.read_tail("setup"))
        return verdict

    def _select(self, trusted: Mapping[str, Content]) -> _Selection:
        return _Selection(self._expected, (0,) if self._expected.tests is None else ())

    async def _check_program(self, outcome: SessionOutcome, report: TestReport, end: Exit) -> None:
        """Raises `EvaluatorError` if the test program cannot run at all."""
        if end.code in _CANNOT_RUN and not report.outcomes:
            await self._check_without_work(outcome, "command", self._argv, failures=_CANNOT_RUN)

    async def _start(
        self, runner: ScriptRunner, argv: Sequence[str], name: str, report: PurePath | None = None
    ) -> Exit:
        path = str(report or "")
        if report is not None and self._format.env:
            argv, path = ("sh", "-c", _COLLECT, path, *argv), f"{path}.pipe"
        return await runner.run(
            [word.replace(_REPORT, path) for word in argv],
            env={key: value.replace(_REPORT, path) for key, value in self.env.items()},
            timeout_s=self._timeout_s,
            log_name=name,
        )

    async def _check_without_work(
        self,
        outcome: SessionOutcome,
        program: str,
        argv: Sequence[str],
        failures: Collection[int] = (),
    ) -> None:
        """Raises `EvaluatorError` if a program fails without the agent's changes as well.

        `failures` are its exit codes then; empty: all but 0.
        """
        if program in self._proven:
            return
        async with outcome.open_sandbox(outcome.task.files) as sandbox:
            control = ScriptRunner(sandbox, outcome)
            end = await self._start(control, argv, "control")
            failed = end.code in failures if failures else end.code != 0
            if failed and not end.timed_out:
                output = await control.read_tail("control", 300)
                raise EvaluatorError(
                    f"evaluator 'tests': {program} ends with exit code {end.code} also without "
                    f"the agent's changes: {output.strip()}"
                )
        self._proven.add(program)


def _add_env(env: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Append `added` to variables of the same name."""
    return {**env, **{k: f"{env[k]} {v}" if env.get(k) else v for k, v in added.items()}}


def _parse_command(option: str, command: Command) -> tuple[str, ...]:
    """Return the words of a list, or a shell that runs a string."""
    if not isinstance(command, str):
        return tuple(command)
    if not command.strip():
        raise ConfigError(f"evaluator 'tests': {option} is {command!r}, must be a command")
    return ("sh", "-c", command)


# --------------------------------------------------------------------------- pytest
_CONFIGS = {
    "pytest.ini": "",
    ".pytest.ini": "",
    "pytest.toml": "",
    ".pytest.toml": "",
    "tox.ini": "[pytest]",
    "setup.cfg": "[tool:pytest]",
    "pyproject.toml": "[tool.pytest",
}
"""Files at the top of a task, and the section that makes each a configuration of pytest."""
# `-I` and the late path entry: pytest is imported before anything of the agent's can be.
_START = "import sys, pytest; sys.path.insert(0, '.'); sys.exit(pytest.main(sys.argv[1:]))"
_PYTEST = (
    *("python3", "-I", "-B", "-c", _START, "-p", "no:cacheprovider", "-q"),
    *("-o", "junit_family=xunit1", f"--junitxml={_REPORT}"),
)
_IMPORT_PYTEST = ("python3", "-I", "-c", "import pytest")


class PytestRunner(CommandRunner):
    """Runs our own pytest on every test file that can be trusted.

    Expected tests are read from trusted source text, so that tests that vanish, are skipped or
    never finish are missing, not fewer.
    """

    def __init__(self, expected: ExpectedTests, timeout_s: float | None) -> None:
        super().__init__(
            expected,
            command=_PYTEST,
            output="junit",
            env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            timeout_s=timeout_s or _PYTEST_TIMEOUT_S,
        )

    def trusted_files(self, task: Task, files: Mapping[str, str]) -> dict[str, Content]:
        """Return the task's own tests and settings, and hidden `files` over them."""
        trusted = {path: task.files[path] for path in find_test_files(task.files)} | dict(files)
        given = {**task.files, **trusted}
        configured = any(p in given and section in given[p] for p, section in _CONFIGS.items())
        if not configured and not has_base(task.workspace):
            # Without a file of its own pytest would look for one in the folders above.
            trusted["pytest.ini"] = "[pytest]\n"
        return dict(trusted)

    def _select(self, trusted: Mapping[str, Content]) -> _Selection:
        sources = {p: text for p, text in trusted.items() if isinstance(text, str)}
        paths = find_test_files(sources)
        expected = self._expected
        codes: tuple[int, ...] = (0, 1)  # 1: some test failed, perhaps one that is not expected
        if expected.tests is None:
            names = _find_expected({path: sources[path] for path in paths})
            expected, codes = msgspec.structs.replace(expected, tests=names), (0,)
        return _Selection(expected, () if expected.partial else codes, paths)

    async def _check_program(self, outcome: SessionOutcome, report: TestReport, end: Exit) -> None:
        if not report.complete:
            await self._check_without_work(outcome, "pytest", _IMPORT_PYTEST)


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


def _find_expected(sources: Mapping[str, str]) -> tuple[str, ...]:
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
