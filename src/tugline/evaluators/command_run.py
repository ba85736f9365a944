"""Tests by a command of the task's own, in any language, read from what its runner tells.

The command runs where the work is: over the workspace lie the task's files, the agent's changes
and, last and after `setup`, the evaluator's own files. A report goes to a file whose name nobody
could know before (``{report}`` in the command); the log is read where a runner has no report.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from tugline.errors import ConfigError, EvaluatorError
from tugline.evaluators.base import SessionOutcome, Verdict
from tugline.evaluators.formats import FORMATS, Format
from tugline.evaluators.formats.base import TestReport
from tugline.evaluators.fresh import tail
from tugline.evaluators.scoring import ExpectedTests, score
from tugline.sandbox.base import Content, Exit, Sandbox, check_path
from tugline.types import Task

_MOST_OUTPUT, _MOST_REPORT = 100 << 20, 16 << 20
"""Bytes that are read."""
_REPORT = "{report}"
_CANNOT_RUN = (126, 127)

Command = str | Sequence[str]


class CommandRun:
    """Runs `command` and reads its output as `output`, a format, tells."""

    def __init__(  # noqa: PLR0913 - the options of a task
        self,
        asked: ExpectedTests,
        *,
        command: Command,
        output: Format,
        report: str | None = None,
        env: Mapping[str, str],
        setup: Command | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._asked, self._format, self._env = asked, output, env
        self._argv = _argv("command", command)
        self._setup = _argv("setup", setup) if setup is not None else None
        self._report = check_path(report) if report is not None else None
        self._secret = any(_REPORT in word for word in (*self._argv, *env.values()))
        self._timeout_s = timeout_s or math.inf
        if output is FORMATS["junit"] and not self._secret and report is None:
            msg = f"evaluator 'tests': format 'junit' needs {_REPORT} in the command, or `report`"
            raise ConfigError(msg)
        self._works: set[str] = set()
        """Options that are known to work without anybody's changes."""

    def trusted(self, task: Task, files: Mapping[str, str]) -> dict[str, Content]:
        """Hidden `files`; and a report that is there before the tests is none of theirs."""
        return {**files, **({self._report: None} if self._report else {})}

    async def prepare(self, outcome: SessionOutcome, box: Sandbox) -> Verdict | None:
        """Run `setup` on the agent's work; a verdict when that does not go well."""
        if self._setup is None:
            return None
        end = await self._start(outcome, box, self._setup, "setup")
        if end.code == 0 and not end.timed_out:
            return None
        await self._check(outcome, self._setup, "setup", end)
        verdict = score(TestReport(), self._asked, end)
        how = "was out of time" if end.timed_out else f"ended with exit code {end.code}"
        verdict.report.update(reason=f"setup {how}", output=await tail(box, "setup"))
        return verdict

    async def run(
        self, outcome: SessionOutcome, box: Sandbox, trusted: Mapping[str, Content]
    ) -> Verdict:
        """Run the command in a box that has all files."""
        report = box.workdir / self._report if self._report else None
        if self._secret:
            report = box.home / f"{secrets.token_hex(16)}.report"
        end = await self._start(outcome, box, self._argv, "tests", report)
        if report is not None:
            data = await box.get(report, max_bytes=_MOST_REPORT) or b""
        else:
            data = await asyncio.to_thread(_head, box.logs / "tests.log")
        told = await asyncio.to_thread(self._format.read, data)
        if end.code in _CANNOT_RUN and not told.marks:
            await self._check(outcome, self._argv, "command", end)
        codes = (0,) if self._asked.tests is None else ()
        verdict = score(told, self._asked, end, self._format.name, codes=codes)
        verdict.report["output"] = await tail(box, "tests")
        return verdict

    async def _start(
        self,
        outcome: SessionOutcome,
        box: Sandbox,
        argv: Sequence[str],
        log_name: str,
        report: PurePath | None = None,
    ) -> Exit:
        where = str(report or "")
        return await box.run(
            [word.replace(_REPORT, where) for word in argv],
            env={name: value.replace(_REPORT, where) for name, value in self._env.items()},
            timeout_s=min(self._timeout_s, outcome.timeout_s),
            log_name=log_name,
        )

    async def _check(
        self, outcome: SessionOutcome, argv: Sequence[str], option: str, end: Exit
    ) -> None:
        """Is it the agent's doing? Without its changes the same must go otherwise."""
        if end.timed_out or option in self._works:
            return
        left = replace(outcome, timeout_s=max(1.0, outcome.timeout_s - end.seconds))
        async with outcome.open_sandbox(outcome.task.files) as box:
            control = await self._start(left, box, argv, "control")
            fine = control.code == 0 if option == "setup" else control.code not in _CANNOT_RUN
            if not fine and not control.timed_out:
                said = await tail(box, "control", 300)
                msg = (
                    f"evaluator 'tests': {option} ends with exit code {control.code} also without "
                    f"the agent's changes: {said.strip()}"
                )
                raise EvaluatorError(msg)
        self._works.add(option)


def _argv(option: str, command: object) -> tuple[str, ...]:
    """A list is a program and its arguments, a string goes to the shell."""
    if isinstance(command, str) and command.strip():
        return ("sh", "-c", command)
    words = isinstance(command, list | tuple) and all(isinstance(word, str) for word in command)
    if words and command:
        return tuple(command)  # type: ignore[arg-type] # mypy does not see through `words`
    msg = f"evaluator 'tests': {option} is {command!r}, must be a command or a list of its words"
    raise ConfigError(msg)


def _head(log: Path) -> bytes:
    with log.open("rb") as file:
        return file.read(_MOST_OUTPUT)
