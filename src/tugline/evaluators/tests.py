"""Judge by tests: the agent's changes on a fresh copy of the task, in a new box without network.

The reward is 1 only if every expected test ran and passed. What the agent could do instead of
solving the task, and what becomes of it:

- edit or delete tests and what configures their runner, or add such files: refused (`filters`);
- shadow the runner or the standard library with files of their names: refused;
- end the process early with code 0, skip, or break collection: expected tests are then missing;
- write results of its own: what the runner contradicts is not believed (`formats`);
- loop for ever: time runs out, reward 0.

Not covered: its code shares a process with the tests, so a program written to forge a report from
the inside can. Judge by a program of your own where that must be ruled out.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, Protocol

import msgspec

from tugline.errors import ConfigError
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.evaluators.command_run import Command, CommandRun
from tugline.evaluators.diff import unified
from tugline.evaluators.filters import (
    FOLDERS,
    PYTHON,
    TESTS,
    Rules,
    check_patterns,
    laid,
    matches,
    shadowing,
    sift,
)
from tugline.evaluators.formats import FORMATS
from tugline.evaluators.fresh import has_base, texts
from tugline.evaluators.pytest_run import PytestRun
from tugline.evaluators.scoring import wanted
from tugline.sandbox.base import Content, Sandbox, check_path
from tugline.types import Task

_CACHED = 4096


class _Run(Protocol):
    """How tests are run."""

    def trusted(self, task: Task, files: Mapping[str, str]) -> dict[str, Content]:
        """What lies over the agent's work in the end; None removes a file."""
        ...

    async def prepare(self, outcome: SessionOutcome, box: Sandbox) -> Verdict | None:
        """What has to be done before that; a verdict if it fails."""
        ...

    async def run(
        self, outcome: SessionOutcome, box: Sandbox, trusted: Mapping[str, Content]
    ) -> Verdict:
        """What the tests say."""
        ...


class TestsEvaluator(Evaluator):
    """`files` are tests that the agent never saw; they are laid over last.

    Without a `command`, our own pytest runs `paths`, files or folders (default: all of `files` and
    the task's that look like tests). With one, `command` runs in the workdir with `env`, after
    `setup`, and its output, or the file `report`, is read as `format`.

    `expected` names the tests that must pass (or for each its outcome), `fail_to_pass` and
    `pass_to_pass` do so in two lists; without them all must. With `partial`, the reward is the
    share that came true. `protected` adds patterns of paths whose changes are refused, `editable`
    takes some out. `cache` remembers verdicts, for tests whose result depends on nothing else.
    """

    __test__ = False  # the name is not meant for pytest's own collection

    def __init__(  # noqa: PLR0913 - what a task can say
        self,
        *,
        files: Mapping[str, str] | None = None,
        paths: Sequence[str] | None = None,
        command: Command | None = None,
        format: str | None = None,  # noqa: A002 - the option's name
        report: str | None = None,
        env: Mapping[str, str] | None = None,
        setup: Command | None = None,
        expected: Sequence[str] | Mapping[str, str] | None = None,
        fail_to_pass: Sequence[str] | None = None,
        pass_to_pass: Sequence[str] | None = None,
        partial: bool = False,
        protected: Sequence[str] = (),
        editable: Sequence[str] = (),
        timeout_s: float | None = None,
        cache: bool = False,
    ) -> None:
        _check_texts("files", files or {})
        _check_texts("env", env or {})
        for path in (*(files or {}), *(paths or ())):
            check_path(path)
        if timeout_s is not None and not timeout_s > 0:
            msg = f"evaluator 'tests': timeout_s is {timeout_s!r}, must be more than 0"
            raise ConfigError(msg)
        self._files = dict(files or {})
        self._own = check_patterns("evaluator 'tests': protected", protected)
        self._editable = check_patterns("evaluator 'tests': editable", editable)
        self._cache: OrderedDict[str, Verdict] | None = OrderedDict() if cache else None
        groups = {"fail_to_pass": fail_to_pass, "pass_to_pass": pass_to_pass}
        asked = wanted(expected, groups, partial=partial)
        self._run: _Run
        if command is None:
            _only_with("a command", format=format, report=report, env=env, setup=setup)
            self._protected: tuple[str, ...] = (*PYTHON, *FOLDERS, *self._own)
            self._run = PytestRun(asked, paths, timeout_s)
            return
        _only_with("no command", paths=paths)
        if format not in FORMATS:
            known = ", ".join(FORMATS)
            msg = f"evaluator 'tests': format is {format!r}, must be one of {known}"
            raise ConfigError(msg)
        output = FORMATS[format]
        usual = (pattern for language in output.languages for pattern in TESTS[language])
        self._protected = (*usual, *self._own)
        self._run = CommandRun(
            asked,
            command=command,
            output=output,
            report=report,
            env=dict(env or {}),
            setup=setup,
            timeout_s=timeout_s,
        )

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Run the expected tests on the agent's work."""
        trusted = self._trusted(outcome.task)
        key = _digest(outcome, trusted) if self._cache is not None else ""
        if self._cache is not None and key in self._cache:
            self._cache.move_to_end(key)
            known = self._cache[key]
            return Verdict(known.reward, {**known.report, "cached": True})
        verdict = await self._judge(outcome, trusted)
        # Running out of time may be the machine's doing; that is not remembered.
        if self._cache is not None and not verdict.report["timed_out"]:
            self._cache[key] = verdict
            if len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        return Verdict(verdict.reward, {**verdict.report, "cached": False})

    async def _judge(self, outcome: SessionOutcome, trusted: Mapping[str, Content]) -> Verdict:
        began, task = time.monotonic(), outcome.task
        async with outcome.open_sandbox({}) as box:
            rules = await self._rules(outcome, box, trusted)
            patch, refused = sift(outcome.patch, rules)
            before = dict(task.files)
            if has_base(task.workspace):
                before = await texts(box, outcome.patch, task.files)
            diff = await asyncio.to_thread(unified, before, outcome.patch)
            report: dict[str, Any] = {"diff": diff, "refused": refused}
            work = laid(task.files, patch, trusted)
            await box.put(box.workdir, {p: c for p, c in work.items() if p not in trusted})
            verdict = await self._run.prepare(outcome, box)
            if verdict is None:
                await box.put(box.workdir, trusted)
                left = max(1.0, outcome.timeout_s - (time.monotonic() - began))
                outcome = replace(outcome, timeout_s=left)
                verdict = await self._run.run(outcome, box, trusted)
        return Verdict(verdict.reward, {**verdict.report, **report})

    def _trusted(self, task: Task) -> dict[str, Content]:
        """Files whose text is the task's, whatever the agent did to them."""
        own = {p: text for p, text in task.files.items() if self._is_protected(p)}
        return {**own, **self._run.trusted(task, self._files)}

    def _is_protected(self, path: str) -> bool:
        place = PurePosixPath(path)
        return bool(matches(place, self._protected) and not matches(place, self._editable))

    async def _rules(
        self, outcome: SessionOutcome, box: Sandbox, trusted: Mapping[str, Content]
    ) -> Rules:
        known = [PurePosixPath(path).parts[0] for path in outcome.task.files]
        if has_base(outcome.task.workspace):
            named = shadowing(outcome.patch)
            known += [path for path in named if await box.get(box.workdir / path) is not None]
        return Rules(
            trusted=tuple(trusted),
            protected=self._protected,
            editable=self._editable,
            known=known,
            workdir=box.workdir,
        )


def _check_texts(option: str, value: object) -> None:
    fine = isinstance(value, Mapping) and all(
        isinstance(each, str) for pair in value.items() for each in pair
    )
    if not fine:
        msg = f"evaluator 'tests': {option} is {value!r:.80}, must be a table of texts by name"
        raise ConfigError(msg)


def _only_with(what: str, **options: object) -> None:
    for name, value in options.items():
        if value is not None:
            msg = f"evaluator 'tests': {name} is {value!r:.80}, but it is for tests with {what}"
            raise ConfigError(msg)


def _digest(outcome: SessionOutcome, trusted: Mapping[str, Content]) -> str:
    task = outcome.task
    content = (task.workspace, task.files, outcome.patch.files, trusted)
    return hashlib.sha256(msgspec.msgpack.encode(content, order="deterministic")).hexdigest()
