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

import asyncio
import itertools
import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from types import MappingProxyType
from typing import Annotated

import msgspec

from tugline.errors import ConfigError, EvaluatorError
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.evaluators.filters import FOLDERS, PYTHON, TESTS, Patterns, Rules
from tugline.evaluators.formats import FORMATS, read_report
from tugline.evaluators.guard import LIMITS, Guard
from tugline.evaluators.isolation import serve_programs
from tugline.evaluators.outputs import copy_outputs
from tugline.evaluators.own_pytest import (
    IMPORT_PYTEST,
    PYTEST,
    PYTEST_ENV,
    PYTEST_S,
    find_pytest_files,
    select_tests,
)
from tugline.evaluators.scoring import Names, TestReport, parse_expected, score
from tugline.evaluators.script import FAILURE_TAIL, TAIL, ScriptRunner, open_runner
from tugline.sandbox.base import Content, Exit, check_path
from tugline.schema import PositiveFloat
from tugline.types import Reward, Task

MAX_OUTPUT = 100 << 20
"""Maximum bytes read of an output."""
MAX_REPORT = 16 << 20
"""Maximum bytes read of a report."""
_REPORT = "{report}"
_CANNOT_RUN = (126, 127)
_LEAST_SETUP_S = 10.0
_SETUP_NOTE = (
    "outside of the workdir, `setup` has the effects that it has on the task's original files;"
    " let it write what depends on a solution to the workdir, and put everything else in the image"
)
_MAX_NAMED = 20
_NO_ENV: Mapping[str, str] = MappingProxyType({})
_COLLECT = Path(__file__).with_name("collect_reports.sh").read_text(encoding="utf-8")
"""Runs a command whose programs write reports to a pipe, and appends all reports to one file.

With a regular file, each program would overwrite the report of the last one.
"""

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
    `protected` adds patterns of paths whose changes are refused, `editable` adds exceptions. With
    `isolate` the tests run on the task's original files, and the agent's work in another sandbox,
    where ``$JUDGED`` runs programs.
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
    isolate: bool = False

    def __post_init__(self) -> None:
        self._files = {check_path(path): text for path, text in (self.files or {}).items()}
        groups = {"fail_to_pass": self.fail_to_pass, "pass_to_pass": self.pass_to_pass}
        self._expected = parse_expected(self.expected, groups, partial=self.partial)
        command = self.command
        output = self.format
        env = self.env or {}
        self._own_pytest = command is None
        if command is None:
            for option in ("format", "report", "env", "setup"):
                if (value := getattr(self, option)) is not None:
                    reason = f"{option} is {value!r:.80}, but this option requires `command`"
                    raise ConfigError(f"evaluator 'tests': {reason}")
            command = PYTEST
            output = "junit"
            env = PYTEST_ENV
        elif output not in FORMATS:
            known = ", ".join(FORMATS)
            raise ConfigError(f"evaluator 'tests': format is {output!r}, must be one of {known}")
        self._output = output
        self._format = FORMATS[output]
        defaults = [TESTS[language] for language in self._format.languages]
        if self._own_pytest:
            defaults = [PYTHON, FOLDERS]
        protected = (*itertools.chain(*defaults), *self.protected)
        self._rules = Rules(protected=protected, editable=self.editable)
        added = self._format.env.items()  # appended to variables of the same names
        self._env = {**env, **{k: f"{env[k]} {v}" if env.get(k) else v for k, v in added}}
        self._argv = _parse_command("command", command)
        self._rules = msgspec.structs.replace(self._rules, scripts=self._argv, command=self._argv)
        self._setup = _parse_command("setup", self.setup) if self.setup is not None else None
        self._report = check_path(self.report) if self.report is not None else None
        self._random = any(_REPORT in word for word in (*self._argv, *self._env.values()))
        self._timeout_s = self.timeout_s or (PYTEST_S if self._own_pytest else math.inf)
        if self._format.reports and not self._random and self._report is None:
            raise ConfigError(
                f"evaluator 'tests': command is {command!r:.80}, must contain {_REPORT} "
                f"({self._format.reports}), unless the option `report` is set"
            )
        self.sandboxes = 1 + (self.isolate or self._setup is not None)
        self._proven: set[str] = set()
        """Programs that have run successfully without an agent's changes."""
        self._own_changes: set[str] = set()
        """Files that decide, and that the tests change without an agent's work."""

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Run the expected tests on the agent's work."""
        trusted = self._find_trusted_files(outcome.task)
        async with open_runner(
            outcome, self._rules, trusted=trusted, env=self._env, with_diff=True
        ) as work:
            if self._setup is None and not self.isolate:
                verdict = await self._run_tests(outcome, work, work, trusted)
            else:
                verdict = await self._judge_apart(outcome, work, trusted)
            report = {"diff": work.diff, "refused": work.refused}
        return Verdict(verdict.reward, {**verdict.report, **report})

    async def _judge_apart(
        self, outcome: SessionOutcome, work: ScriptRunner, trusted: Mapping[str, Content]
    ) -> Verdict:
        """Run the tests in another sandbox than the one where the agent's code was set up."""
        files = outcome.task.files
        async with outcome.open_sandbox(files) as sandbox:
            judge = ScriptRunner(sandbox, outcome)
            failed = await self._set_up(work, judge)
            if failed is not None:
                return failed
            if self.isolate:
                async with serve_programs(judge, work) as env:
                    return await self._run_tests(outcome, judge, work, trusted, env)
            report = await copy_outputs(work, judge, files, trusted, self._env, self._setup)
            verdict = await self._run_tests(outcome, judge, work, trusted)
            if verdict.reward.value < 1.0:
                report["setup"] = _SETUP_NOTE
            return Verdict(verdict.reward, {**verdict.report, **report})

    def _find_trusted_files(self, task: Task) -> dict[str, Content]:
        """Return the files that replace the agent's as the last step; None removes a file.

        Includes None for `report`, so that no report exists before the tests.
        """
        files = task.files.items()
        protected = {p: text for p, text in files if self._rules.find_protected(PurePosixPath(p))}
        if self._own_pytest:
            return {**protected, **find_pytest_files(task, self._files)}
        return {**protected, **self._files, **({self._report: None} if self._report else {})}

    async def _set_up(self, work: ScriptRunner, judge: ScriptRunner) -> Verdict | None:
        """Run `setup` on the agent's work and on the task's files; return a verdict if it fails.

        Raises `EvaluatorError` if it fails on both.
        """
        if self._setup is None:
            return None
        original = asyncio.create_task(self._start(judge, self._setup, "setup"))
        try:
            end = await self._start(work, self._setup, "setup")
            if end.code == 0 and not end.timed_out:
                # Without the work it may never end.
                timeout_s = max(_LEAST_SETUP_S, end.seconds)
                for done in (await asyncio.wait({original}, timeout=timeout_s))[0]:
                    done.result()
                return None
            if not end.timed_out and (control := await original).code and not control.timed_out:
                raise _fail("setup", control)
        finally:
            original.cancel()
            await asyncio.wait({original})
        verdict = score(TestReport(), self._expected, end)
        failure = "reached its time limit" if end.timed_out else f"ended with exit code {end.code}"
        verdict.report.update(reason=f"setup {failure}", output=end.output[-TAIL:])
        return verdict

    async def _run_tests(
        self,
        outcome: SessionOutcome,
        judge: ScriptRunner,
        work: ScriptRunner,
        trusted: Mapping[str, Content],
        env: Mapping[str, str] = _NO_ENV,
    ) -> Verdict:
        """Run the tests with `env` in `judge`'s sandbox, which gets the `trusted` files first."""
        sandbox = judge.sandbox
        argv = self._argv
        expected = self._expected
        codes: tuple[int, ...] = (0,) if expected.tests is None else ()
        if self._own_pytest:
            sources = {p: text for p, text in trusted.items() if isinstance(text, str)}
            expected, codes, paths = select_tests(expected, sources)
            argv = (*argv, *paths)
        path = sandbox.workdir / self._report if self._report else None
        if self._random:
            path = sandbox.home / f"{secrets.token_hex(16)}.report"
        await sandbox.put(sandbox.workdir, trusted)
        guard = None
        if outcome.patch.files and not self.isolate:
            guard = Guard(judge, work, trusted)
            await guard.begin()
        end = await self._start(judge, argv, "tests", path, env)
        if path is not None:
            data = await sandbox.get(path, max_bytes=MAX_REPORT) or b""
        else:
            data = await judge.read_log("tests", head=MAX_OUTPUT, tail=0)
        report = await read_report(self._output, data)
        if not end.timed_out:
            await self._check_program(outcome, report, end)
        verdict = score(report, expected, end, self._format.normalize, codes=codes)
        verdict.report["output"] = end.output[-TAIL:]
        if guard is None or verdict.reward.value <= 0.0:
            return verdict
        changes = await guard.find_changes()
        if changes - self._own_changes:
            self._own_changes |= await self._find_own_changes(outcome, work, trusted, argv)
        return _refuse(verdict, forged) if (forged := changes - self._own_changes) else verdict

    async def _find_own_changes(
        self,
        outcome: SessionOutcome,
        work: ScriptRunner,
        trusted: Mapping[str, Content],
        argv: Sequence[str],
    ) -> set[str]:
        """Return the files that decide, and that the tests change without the agent's work."""
        async with outcome.open_sandbox(outcome.task.files) as sandbox:
            control = ScriptRunner(sandbox, outcome)
            control.present = {*work.rules.fresh.files, *outcome.task.files}
            if self._setup is not None:
                await self._start(control, self._setup, "setup")
                control.present |= set((await sandbox.diff(LIMITS)).files)
            await sandbox.put(sandbox.workdir, trusted)
            guard = Guard(control, work, trusted)
            await guard.begin()
            report = sandbox.home / f"{secrets.token_hex(16)}.report"
            await self._start(control, argv, "tests", report)
            return await guard.find_changes()

    async def _check_program(self, outcome: SessionOutcome, report: TestReport, end: Exit) -> None:
        """Raise `EvaluatorError` if the test program cannot run at all."""
        if self._own_pytest:
            if not report.complete:
                await self._check_without_work(outcome, "pytest", IMPORT_PYTEST)
        elif end.code in _CANNOT_RUN and not report.outcomes:
            await self._check_without_work(outcome, "command", self._argv, failures=_CANNOT_RUN)

    async def _start(
        self,
        runner: ScriptRunner,
        argv: Sequence[str],
        name: str,
        report: PurePath | None = None,
        env: Mapping[str, str] = _NO_ENV,
    ) -> Exit:
        path = str(report or "")
        if report is not None and self._format.env:
            argv = ("sh", "-c", _COLLECT, path, *argv)
            path = f"{path}.pipe"
        own = {key: value.replace(_REPORT, path) for key, value in self._env.items()}
        return await runner.run(
            [word.replace(_REPORT, path) for word in argv],
            env={**env, **own},
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
                raise _fail(program, end)
        self._proven.add(program)


def _fail(program: str, end: Exit) -> EvaluatorError:
    """Return the error of a program that fails without the agent's changes as well."""
    return EvaluatorError(
        f"evaluator 'tests': {program} ends with exit code {end.code} even without the agent's "
        f"changes: {end.output[-FAILURE_TAIL:].strip()}"
    )


def _refuse(verdict: Verdict, forged: Collection[str]) -> Verdict:
    """Return a reward of 0 for a run that changed `forged`, files that decide."""
    named = ", ".join(sorted(forged)[:_MAX_NAMED])
    reason = f"the run changed files that determine the verdict: {named}"
    return Verdict(Reward(0.0, verdict.reward.parts), {**verdict.report, "reason": reason})


def _parse_command(option: str, command: Command) -> tuple[str, ...]:
    """Return a list as it is, or the arguments of a shell that runs a string."""
    if not isinstance(command, str):
        return tuple(command)
    if not command.strip():
        raise ConfigError(f"evaluator 'tests': {option} is {command!r}, must be a command")
    return ("sh", "-c", command)
