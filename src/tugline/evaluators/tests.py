"""Evaluate with tests: the agent's changes on a fresh copy of the task, in a new sandbox.

The reward is 1 only if every expected test ran and passed. Attempts of an agent to pass without
solving the task, and their results:

- edit, delete or add tests or the configuration of their runner: refused (`filters`);
- shadow the runner or the standard library with files of their names: refused;
- end the process early with code 0, skip, or break collection: expected tests are missing;
- print results: ignored if they contradict the runner's count (`formats`);
- loop for ever: timeout, reward 0.

Not covered: the agent's code shares a process with the tests, so it can be written to forge a
report from the inside. To rule that out, evaluate with a program that runs the work separately.
"""

import ast
import itertools
import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Annotated, TypeGuard

import msgspec

from tugline.errors import ConfigError, EvaluatorError
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.evaluators.filters import FOLDERS, PYTEST_CONFIGS, PYTHON, TESTS, Patterns, Rules
from tugline.evaluators.formats import FORMATS, read_report
from tugline.evaluators.scoring import ExpectedTests, Names, TestReport, parse_expected, score
from tugline.evaluators.script import ScriptRunner, has_base, open_runner
from tugline.sandbox.base import Content, Exit, check_path
from tugline.schema import PositiveFloat
from tugline.types import Task

MAX_OUTPUT, MAX_REPORT = 100 << 20, 16 << 20
"""Maximum bytes read of an output and of a report."""
_REPORT = "{report}"
_CANNOT_RUN = (126, 127)
_COLLECT = Path(__file__).with_name("collect_reports.sh").read_text(encoding="utf-8")
"""Runs a command whose programs write reports to a pipe, and appends all reports to one file.

With a regular file, each program would overwrite the report of the last one.
"""

# `-I` and the late path entry: pytest is imported before any module of the agent can be.
_START = "import sys, pytest; sys.path.insert(0, '.'); sys.exit(pytest.main(sys.argv[1:]))"
_PYTEST = (
    *("python3", "-I", "-B", "-c", _START, "-p", "no:cacheprovider", "-q"),
    *("-o", "junit_family=xunit1", "--junitxml={report}"),
)
_IMPORT_PYTEST = ("python3", "-I", "-c", "import pytest")
_PYTEST_ENV = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
_PYTEST_S = 30.0

Command = str | Annotated[Sequence[str], msgspec.Meta(min_length=1)]
"""A shell command, or a program and its arguments."""


@dataclass(kw_only=True, eq=False)
class TestsEvaluator(Evaluator):
    """Runs tests; `files` are tests that the agent never saw and that are applied last.

    Without a `command`, Tugline's pytest runs the test files in `files` and in the task. With one,
    `command` runs in the workdir with `env`, after `setup`, and its output, or the file `report`,
    is read as `format`. ``{report}`` in a command is a path with a random name, which no existing
    file can have.

    `expected` lists the tests that must pass, or `fail_to_pass` and `pass_to_pass` in two lists;
    without these all tests must pass. With `partial`, the reward is the fraction that passed.
    `protected` adds patterns of paths whose changes are refused, `editable` adds exceptions.
    """

    __test__ = False  # not a class of tests for pytest

    files: Mapping[str, str] | None = None
    command: Command | None = None
    format: str | None = None
    report: str | None = None
    env: Mapping[str, str] | None = None
    setup: Command | None = None
    expected: Names | None = None
    fail_to_pass: Names | None = None
    pass_to_pass: Names | None = None
    partial: bool = False
    protected: Patterns = ()
    editable: Patterns = ()
    timeout_s: PositiveFloat | None = None

    def __post_init__(self) -> None:
        self._files = {check_path(path): text for path, text in (self.files or {}).items()}
        groups = {"fail_to_pass": self.fail_to_pass, "pass_to_pass": self.pass_to_pass}
        self._expected = parse_expected(self.expected, groups, partial=self.partial)
        command, output, env = self.command, self.format, self.env or {}
        self._own_pytest = command is None
        if command is None:
            for option in ("format", "report", "env", "setup"):
                if (value := getattr(self, option)) is not None:
                    reason = f"{option} is {value!r:.80}, but it is for tests with a command"
                    raise ConfigError(f"evaluator 'tests': {reason}")
            command, output, env = _PYTEST, "junit", _PYTEST_ENV
        elif output not in FORMATS:
            known = ", ".join(FORMATS)
            raise ConfigError(f"evaluator 'tests': format is {output!r}, must be one of {known}")
        self._output, self._format = output, FORMATS[output]
        defaults = [TESTS[language] for language in self._format.languages]
        if self._own_pytest:
            defaults = [PYTHON, FOLDERS]
        protected = (*itertools.chain(*defaults), *self.protected)
        self._rules = Rules(protected=protected, editable=self.editable)
        added = self._format.env.items()  # appended to variables of the same names
        self._env = {**env, **{k: f"{env[k]} {v}" if env.get(k) else v for k, v in added}}
        self._argv = _parse_command("command", command)
        self._rules = msgspec.structs.replace(self._rules, scripts=self._argv)
        self._setup = _parse_command("setup", self.setup) if self.setup is not None else None
        self._report = check_path(self.report) if self.report is not None else None
        self._random = any(_REPORT in word for word in (*self._argv, *self._env.values()))
        self._timeout_s = self.timeout_s or (_PYTEST_S if self._own_pytest else math.inf)
        if self._format.reports and not self._random and self._report is None:
            raise ConfigError(
                f"evaluator 'tests': command is {command!r:.80}, needs {_REPORT} in it "
                f"({self._format.reports}), or the option `report`"
            )
        self._proven: set[str] = set()
        """Programs that have run successfully without an agent's changes."""

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Run the expected tests on the agent's work."""
        trusted = self._find_trusted_files(outcome.task)
        async with open_runner(
            outcome, self._rules, trusted=trusted, env=self._env, with_diff=True
        ) as runner:
            verdict = await self._set_up(outcome, runner)
            if verdict is None:
                await runner.sandbox.put(runner.sandbox.workdir, trusted)
                verdict = await self._run_tests(outcome, runner, trusted)
            report = {"diff": runner.diff, "refused": runner.refused}
        return Verdict(verdict.reward, {**verdict.report, **report})

    def _find_trusted_files(self, task: Task) -> dict[str, Content]:
        """Return the files that replace the agent's as the last step; None removes a file.

        Includes None for `report`, so that no report exists before the tests.
        """
        files = task.files.items()
        protected = {p: text for p, text in files if self._rules.find_protected(PurePosixPath(p))}
        if self._own_pytest:
            return {**protected, **_find_pytest_files(task, self._files)}
        return {**protected, **self._files, **({self._report: None} if self._report else {})}

    async def _set_up(self, outcome: SessionOutcome, runner: ScriptRunner) -> Verdict | None:
        """Run `setup` on the agent's work; return a verdict if it fails."""
        if self._setup is None:
            return None
        end = await self._start(runner, self._setup, "setup")
        if end.code == 0 and not end.timed_out:
            return None
        if not end.timed_out:
            await self._check_without_work(outcome, "setup", self._setup)
        verdict = score(TestReport(), self._expected, end)
        failure = "was out of time" if end.timed_out else f"ended with exit code {end.code}"
        verdict.report.update(reason=f"setup {failure}", output=await runner.read_tail("setup"))
        return verdict

    async def _run_tests(
        self, outcome: SessionOutcome, runner: ScriptRunner, trusted: Mapping[str, Content]
    ) -> Verdict:
        """Run the tests in a sandbox that has the work and the `trusted` files."""
        sandbox, argv, expected = runner.sandbox, self._argv, self._expected
        codes: tuple[int, ...] = (0,) if expected.tests is None else ()
        if self._own_pytest:
            sources = {p: text for p, text in trusted.items() if isinstance(text, str)}
            expected, codes, paths = _select_for_pytest(expected, sources)
            argv = (*argv, *paths)
        path = sandbox.workdir / self._report if self._report else None
        if self._random:
            path = sandbox.home / f"{secrets.token_hex(16)}.report"
        end = await self._start(runner, argv, "tests", path)
        if path is not None:
            data = await sandbox.get(path, max_bytes=MAX_REPORT) or b""
        else:
            data = await runner.read_log("tests", head=MAX_OUTPUT, tail=0)
        report = await read_report(self._output, data)
        if not end.timed_out:
            await self._check_program(outcome, report, end)
        verdict = score(report, expected, end, self._format.normalize, codes=codes)
        verdict.report["output"] = await runner.read_tail("tests")
        return verdict

    async def _check_program(self, outcome: SessionOutcome, report: TestReport, end: Exit) -> None:
        """Raise `EvaluatorError` if the test program cannot run at all."""
        if self._own_pytest:
            if not report.complete:
                await self._check_without_work(outcome, "pytest", _IMPORT_PYTEST)
        elif end.code in _CANNOT_RUN and not report.outcomes:
            await self._check_without_work(outcome, "command", self._argv, failures=_CANNOT_RUN)

    async def _start(
        self, runner: ScriptRunner, argv: Sequence[str], name: str, report: PurePath | None = None
    ) -> Exit:
        path = str(report or "")
        if report is not None and self._format.env:
            argv, path = ("sh", "-c", _COLLECT, path, *argv), f"{path}.pipe"
        return await runner.run(
            [word.replace(_REPORT, path) for word in argv],
            env={key: value.replace(_REPORT, path) for key, value in self._env.items()},
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
        """Raise `EvaluatorError` if a program fails without the agent's changes as well.

        `failures` are the exit codes that count as failures; empty means all but 0.
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


def _select_for_pytest(
    expected: ExpectedTests, sources: Mapping[str, str]
) -> tuple[ExpectedTests, tuple[int, ...], list[str]]:
    """Return the expected tests, the exit codes of a good run (empty: any), and the test files."""
    paths = _find_test_files(sources)
    codes: tuple[int, ...] = (0, 1)  # 1: a test failed, perhaps one that is not expected
    if expected.tests is None:
        names = _find_expected_tests({path: sources[path] for path in paths})
        expected, codes = msgspec.structs.replace(expected, tests=names), (0,)
    return expected, () if expected.partial else codes, paths


def _parse_command(option: str, command: Command) -> tuple[str, ...]:
    """Return a list as it is, or the arguments of a shell that runs a string."""
    if not isinstance(command, str):
        return tuple(command)
    if not command.strip():
        raise ConfigError(f"evaluator 'tests': {option} is {command!r}, must be a command")
    return ("sh", "-c", command)


# --------------------------------------------------------------------------- our own pytest
# Expected tests are read from trusted source text, so that tests that are not collected, skipped or
# never finished count as missing.
def _find_pytest_files(task: Task, files: Mapping[str, str]) -> dict[str, str]:
    """Return the task's tests and pytest settings, replaced by `files` of the same paths."""
    trusted = {path: task.files[path] for path in _find_test_files(task.files)} | dict(files)
    merged = {**task.files, **trusted}
    configured = any(p in merged and section in merged[p] for p, section in PYTEST_CONFIGS.items())
    if not configured and not has_base(task.workspace):
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
        msg = f"evaluator 'tests': no test functions in {list(sources)}; give files with tests"
        raise EvaluatorError(msg)
    return tuple(sorted(names))
