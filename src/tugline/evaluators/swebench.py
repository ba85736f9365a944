"""Evaluate a SWE row like SWE-bench: run its script and grade the log with the package `swebench`.

The package (extra ``swe``) reads the log and decides whether the row is resolved. Only the agent's
filtered changes are applied to the fresh sandbox, which has no network unless requested.

If there is no readable result: tests that started but timed out, or exceeded the sandbox's memory
or disk, count as the agent's failure, because its code ran. Otherwise the script is run without the
agent's work; if there is no result either, the task is broken and there is no verdict (I5).

Not covered: the agent's code runs in the process that prints the results, so it can be written to
print forged ones, or to read the names of the tests from the script. The marks around the results
have a random part, so no test prints them by accident.
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from tugline.errors import ConfigError, EvaluatorError
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.evaluators.filters import PYTHON, Patterns, Rules
from tugline.evaluators.isolation import serve_programs
from tugline.evaluators.script import TAIL, ScriptRunner, allow_network, open_runner, parse_apart
from tugline.patch import Patch, format_patch
from tugline.sandbox.base import Exit, check_path
from tugline.schema import PositiveFloat
from tugline.types import Reward, Task

_SCRIPT = "eval.sh"
_START = '. "$0"'
"""Reads all of the script before its first command, so that no command changes the rest."""
_MAX_SCRIPT = 64 << 20
_LOG = "eval"
_NO_ENV: Mapping[str, str] = MappingProxyType({})
_MARK = ">>>>>"
_MARKS = (f"{_MARK} Start Test Output", f"{_MARK} End Test Output", f"{_MARK} Test Exit Code")
_MAX_NAMES = 50
"""Maximum number of failed tests named in a report."""


class _ScriptRun(NamedTuple):
    """A run of the script."""

    exit: Exit
    log: str
    refused: Mapping[str, str]
    """Paths of the patch that were not applied, with reasons."""
    report: Mapping[str, Any] = {}
    """The result of `swebench`."""

    @property
    def began(self) -> bool:
        """Whether the tests, and with them the agent's code, were started."""
        return _MARKS[0] in self.log

    @property
    def has_result(self) -> bool:
        """Whether results could be read."""
        return "tests_status" in self.report

    @property
    def stopped(self) -> bool:
        """Whether the script was stopped by its timeout or a limit."""
        return self.exit.timed_out or self.exit.cause is not None

    @property
    def tail(self) -> str:
        """End of the log."""
        return self.log[-TAIL:].strip()


@dataclass(kw_only=True, eq=False)
class SweBenchEvaluator(Evaluator):
    """Runs the tests by `eval_script`; `log_parser` names the `swebench` parser of its output.

    `fail_to_pass` and `pass_to_pass` are the tests that must pass after the agent's work; with
    `partial`, the reward is the fraction of `fail_to_pass` that pass if all of `pass_to_pass` do.
    Changes to `protected_files` (files or folders of the repository) are refused, as are those
    that match `protected` or configure pytest, unless they match `editable`. `hides` are folders
    of the image that are empty for the agent. With `network` the script reaches the hosts that the
    runtime allows. With `isolate` the script runs on the task's original files, and the agent's
    work in another sandbox, where ``$JUDGED`` runs programs.
    """

    max_log = 64 << 20
    """Maximum bytes read of a log, from its beginning and its end."""
    log_end = 1 << 20
    """Bytes of `max_log` that are read from the end."""
    parse_s = 60
    """Limit of processor time for parsing a log, in seconds."""

    instance: str
    eval_script: str
    log_parser: str
    fail_to_pass: Annotated[Sequence[str], Meta(min_length=1)]
    pass_to_pass: Sequence[str] = ()
    eval_type: str = "pass_and_fail"
    repo: str = ""
    version: str = ""
    protected_files: Sequence[str] = ()
    protected: Patterns = ()
    editable: Patterns = ()
    hides: Sequence[Annotated[str, Meta(pattern="^/")]] = ()
    partial: bool = False
    network: bool = False
    isolate: bool = False
    timeout_s: PositiveFloat = 1800.0

    def __post_init__(self) -> None:
        for mark in _MARKS[:2]:
            if mark not in self.eval_script:
                script = f"{self.eval_script!r:.200}"
                msg = f"evaluator 'swebench': eval_script is {script}, must print {mark!r}"
                raise ConfigError(msg)
        self._rules = Rules(
            trusted=tuple(check_path(path) for path in self.protected_files),
            protected=(*PYTHON, *self.protected),
            editable=self.editable,
            scripts=(self.eval_script,),
        )
        self.sandboxes = 1 + self.isolate
        self._proven = False
        """Whether the script has given a result on this machine."""

    def check_available(self) -> str | None:
        """Return what to install if the package is missing."""
        return None if find_spec("swebench") else "it needs pip install 'tugline[swe]'"

    def hidden(self, task: Task) -> tuple[str, ...]:
        """Return the folders that are empty for the agent."""
        return tuple(self.hides)

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Run the row's tests on the agent's work."""
        run = await self._run(outcome)
        if not (run.has_result or (run.began and run.stopped) or self._proven):
            await self._check_without_work(outcome)
        self._proven |= run.has_result
        diff = format_patch(outcome.task.files, outcome.patch)
        return Verdict(self._reward(run), {**_describe(run), "diff": diff})

    async def _run(self, outcome: SessionOutcome) -> _ScriptRun:
        """Run the script on the agent's work in a fresh sandbox, or beside it if `isolate`."""
        async with open_runner(outcome, self._rules) as work:
            if not self.isolate:
                return await self._run_script(work, work)
            async with outcome.open_sandbox(outcome.task.files) as sandbox:
                judge = ScriptRunner(sandbox, outcome)
                async with serve_programs(judge, work) as env:
                    return await self._run_script(judge, work, env)

    async def _run_script(
        self, runner: ScriptRunner, work: ScriptRunner, env: Mapping[str, str] = _NO_ENV
    ) -> _ScriptRun:
        """Run the script with `env` in the sandbox of `runner`, and grade its log."""
        spec = await asyncio.to_thread(self._make_spec)
        token = secrets.token_hex(8)
        sandbox = runner.sandbox
        path = sandbox.home / _SCRIPT
        script = _randomize_marks(spec.eval_script, token)
        await sandbox.put(sandbox.home, {_SCRIPT: script})
        if self.network:
            await allow_network(sandbox)
        argv = ("bash", "-c", _START, str(path))
        end = await runner.run(argv, env=env, timeout_s=self.timeout_s, log_name=_LOG)
        data = await runner.read_log(_LOG, head=self.max_log - self.log_end, tail=self.log_end)
        log = data.decode("utf-8", errors="replace").replace("\r\n", "\n")
        log = log.replace(_MARK, ">>>").replace(token, _MARK)
        run = _ScriptRun(end, log, work.refused)
        if run.stopped:  # results would be incomplete
            return run
        if await sandbox.get(path, max_bytes=_MAX_SCRIPT) != script.encode():
            return run._replace(
                report={"infra_failure_reason": "the run changed the evaluation script"}
            )
        return run._replace(report=await _grade(spec, run.log, self.parse_s))

    async def _check_without_work(self, outcome: SessionOutcome) -> None:
        """Raise `EvaluatorError` if the script gives no result without the agent's work either."""
        run = await self._run(replace(outcome, patch=Patch()))
        if not run.has_result:
            failure = "gave no result" if run.began else "did not start"
            reason = run.report.get("infra_failure_reason", "")
            raise EvaluatorError(
                f"{self.instance}: the tests {failure}, even without the agent's work"
                f"{reason and f' ({reason})'}: {run.tail or run.exit}"
            )
        self._proven = True

    def _make_spec(self) -> Any:
        known = _import_swebench("log_parsers").PARSER_REGISTRY
        if self.log_parser not in known:
            msg = f"log_parser is {self.log_parser!r}, must be one of {', '.join(known)}"
            raise EvaluatorError(msg)
        row = {
            "instance_id": self.instance,
            "image": "",
            "repo": self.repo,
            "version": self.version,
            "eval_script": self.eval_script,
            "log_parser": self.log_parser,
            "eval_type": self.eval_type,
            "FAIL_TO_PASS": list(self.fail_to_pass),
            "PASS_TO_PASS": list(self.pass_to_pass),
        }
        return _import_swebench("utils").make_test_spec(row)

    def _reward(self, run: _ScriptRun) -> Reward:
        resolved = bool(run.report.get("resolved"))
        tests = run.report.get("tests_status", {})
        fixed, passing = (_share(tests.get(name)) for name in ("FAIL_TO_PASS", "PASS_TO_PASS"))
        value = fixed if self.partial and passing == 1 else 0.0
        parts = {"resolved": float(resolved), "fail_to_pass": fixed, "pass_to_pass": passing}
        return Reward(1.0 if resolved else value, parts)


# The package's own `__init__` would import a Docker client, `datasets` and more.
_GRADE = """
import sys, types
from importlib.util import find_spec
for name in ("swebench", "swebench.harness"):
    stub = types.ModuleType(name)
    stub.__path__ = find_spec(name).submodule_search_locations
    sys.modules[name] = stub
from swebench.harness.grading import get_eval_report
from swebench.types import TestSpec
spec = TestSpec(**given)
prediction = {"instance_id": spec.instance_id, "model_patch": ""}
report = get_eval_report(spec, prediction, path, True)
json.dump(report[spec.instance_id], open(path + ".out", "w"))
"""


async def _grade(spec: Any, log: str, cpu_s: int) -> Mapping[str, Any]:
    """Grade a log with `swebench` in a limited process: some parsers take quadratic time."""
    try:
        data = await parse_apart(_GRADE, log.encode(), asdict(spec), cpu_s)
    except ValueError as error:
        return {"infra_failure_reason": str(error)}
    report: Mapping[str, Any] = msgspec.json.decode(data)
    return report


def _describe(run: _ScriptRun) -> dict[str, Any]:
    tests = run.report.get("tests_status", {})
    failed = {name: tests[name]["failure"] for name in ("FAIL_TO_PASS", "PASS_TO_PASS") if tests}
    return {
        "resolved": bool(run.report.get("resolved")),
        "failed": {name: tests[:_MAX_NAMES] for name, tests in failed.items()},
        "failures": sum(len(tests) for tests in failed.values()),
        "has_result": run.has_result,
        "timed_out": run.exit.timed_out,
        "seconds": run.exit.seconds,
        "cause": run.exit.cause,
        "log": run.tail,
        "refused": run.refused,
    }


def _share(status: Mapping[str, Sequence[str]] | None) -> float:
    """Return the fraction of tests that passed: 0 without a status, 1 if there are no tests."""
    if status is None:
        return 0.0
    passed = len(status["success"])
    failed = len(status["failure"])
    return passed / (passed + failed) if passed + failed else 1.0


def _randomize_marks(script: str, token: str) -> str:
    """Replace the marks around the results, so that no test can print them."""
    for mark in _MARKS:
        script = script.replace(mark, mark.replace(_MARK, token))
    return script


def _import_swebench(name: str) -> Any:
    try:
        return import_module(f"swebench.harness.{name}")
    except ImportError as error:
        msg = f"swebench cannot be used ({error}): pip install 'tugline[swe]' on every node"
        raise EvaluatorError(msg) from error
