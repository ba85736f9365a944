"""Evaluate by tests: the agent's changes on a fresh copy of the task, in a new sandbox.

The reward is 1 only if every expected test ran and passed. What an agent could do instead of
solving the task, and the result:

- edit or delete tests or the configuration of their runner, or add such files: refused (`filters`);
- shadow the runner or the standard library with files of their names: refused;
- end the process early with code 0, skip, or break collection: expected tests are missing;
- print results: those that the runner's count contradicts do not count (`formats`);
- loop for ever: time runs out, reward 0.

Not covered: its code shares a process with the tests, so a program written to forge a report from
the inside can. Evaluate by a program of your own where that must be ruled out.
"""

from collections.abc import Mapping
from pathlib import PurePosixPath

from tugline.errors import ConfigError
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.evaluators.filters import FOLDERS, PYTHON, TESTS, Patterns, Rules
from tugline.evaluators.formats import FORMATS
from tugline.evaluators.scoring import Names, parse_expected
from tugline.evaluators.script import open_runner
from tugline.evaluators.test_runners import Command, CommandRunner, PytestRunner
from tugline.sandbox.base import Content, check_path
from tugline.schema import PositiveFloat
from tugline.types import Task


class TestsEvaluator(Evaluator):
    """`files` are tests that the agent never saw; they are applied last.

    Without a `command`, our own pytest runs those of `files` and of the task's that look like
    tests. With one, `command` runs in the workdir with `env`, after `setup`, and its output, or the
    file `report`, is read as `format`.

    `expected` names the tests that must pass, `fail_to_pass` and `pass_to_pass` do so in two lists;
    without them all must. With `partial`, the reward is the share that did. `protected` adds
    patterns of paths whose changes are refused, `editable` takes some out.
    """

    __test__ = False  # the name is not meant for pytest's own collection

    def __init__(  # noqa: PLR0913 - options
        self,
        *,
        files: Mapping[str, str] | None = None,
        command: Command | None = None,
        format: str | None = None,  # noqa: A002 - the option's name
        report: str | None = None,
        env: Mapping[str, str] | None = None,
        setup: Command | None = None,
        expected: Names | None = None,
        fail_to_pass: Names | None = None,
        pass_to_pass: Names | None = None,
        partial: bool = False,
        protected: Patterns = (),
        editable: Patterns = (),
        timeout_s: PositiveFloat | None = None,
    ) -> None:
        for path in files or {}:
            check_path(path)
        self._files = dict(files or {})
        groups = {"fail_to_pass": fail_to_pass, "pass_to_pass": pass_to_pass}
        expected_tests = parse_expected(expected, groups, partial=partial)
        self._runner: CommandRunner
        if command is None:
            _refuse_without_command(format=format, report=report, env=env, setup=setup)
            self._rules = Rules(protected=(*PYTHON, *FOLDERS, *protected), editable=editable)
            self._runner = PytestRunner(expected_tests, timeout_s)
            return
        if format not in FORMATS:
            known = ", ".join(FORMATS)
            raise ConfigError(f"evaluator 'tests': format is {format!r}, must be one of {known}")
        usual = (pattern for language in FORMATS[format].languages for pattern in TESTS[language])
        self._rules = Rules(protected=(*usual, *protected), editable=editable)
        self._runner = CommandRunner(
            expected_tests,
            command=command,
            output=format,
            report=report,
            env=dict(env or {}),
            setup=setup,
            timeout_s=timeout_s,
        )

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Run the expected tests on the agent's work."""
        trusted = self._trusted_files(outcome.task)
        async with open_runner(
            outcome, self._rules, trusted=trusted, env=self._runner.env, with_diff=True
        ) as runner:
            verdict = await self._runner.run(outcome, runner, trusted)
            report = {"diff": runner.diff, "refused": runner.refused}
        return Verdict(verdict.reward, {**verdict.report, **report})

    def _trusted_files(self, task: Task) -> dict[str, Content]:
        """Return files whose text is the task's, whatever the agent did to them."""
        files = task.files.items()
        own = {p: text for p, text in files if self._rules.find_protected(PurePosixPath(p))}
        return {**own, **self._runner.trusted_files(task, self._files)}


def _refuse_without_command(**options: object) -> None:
    for name, value in options.items():
        if value is not None:
            msg = f"evaluator 'tests': {name} is {value!r:.80}, but it is for tests with a command"
            raise ConfigError(msg)
