"""Judge a SWE row as SWE-bench does: its own script in a clean box, graded by `swebench` itself.

The package `swebench` (extra ``swe``) reads the log and decides what counts as resolved; nothing
of that is ours. What is ours is the way there: only the agent's changes get into the new box,
without the files that judge (`filters`), and without network unless it is asked for.

Whose fault it is when no result can be read: tests that began and did not end in time, or took more
than the box gives, are the agent's doing, for its code ran. Other silence may be the task's: if the
same script, run without the agent's work, tells nothing either, there is no verdict (I5).

Not covered: the agent's code runs in the process that prints the results, so a program written to
print other ones can, and one that looks for the script finds the names of the tests there. The
marks between which results are read cannot be printed by accident (`_sealed`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn

from tugline.errors import ConfigError, EvaluatorError
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.evaluators.diff import unified
from tugline.evaluators.filters import PYTHON, Rules, check_patterns, laid, shadowing, sift
from tugline.evaluators.network import open_doors
from tugline.sandbox.base import Exit, Sandbox, check_path
from tugline.sandbox.patch import Patch
from tugline.types import Reward, Task

_SCRIPT = "eval.sh"
_LOG = "eval"
_MARK = ">>>>>"
_MARKS = (f"{_MARK} Start Test Output", f"{_MARK} End Test Output", f"{_MARK} Test Exit Code")
_MOST = 64 << 20
"""Bytes of a log that are read."""
_END = 1 << 20
"""Of those, so many from its end."""
_TAIL = 2000
_NAMED = 50
"""Failed tests that a report names."""


class _Ran(NamedTuple):
    """One run of the script."""

    exit: Exit
    log: str
    report: Mapping[str, Any] = {}
    """What `swebench` makes of it."""
    refused: Mapping[str, str] = {}
    """What was not laid on, with reasons."""

    @property
    def began(self) -> bool:
        """Whether the tests were started, and so the agent's code was."""
        return _MARKS[0] in self.log

    @property
    def found(self) -> bool:
        """Whether results could be read."""
        return "tests_status" in self.report

    @property
    def stopped(self) -> bool:
        """Whether it did not end by itself."""
        return self.exit.timed_out or self.exit.cause is not None

    @property
    def tail(self) -> str:
        """What it said last."""
        return self.log[-_TAIL:].strip()


class SweBenchEvaluator(Evaluator):
    """`eval_script` runs the tests; `log_parser` is who reads its output, of `swebench`.

    `fail_to_pass` and `pass_to_pass` are the tests that must pass after the agent's work; with
    `partial`, the reward is the share of the first that pass as long as none of the second fails.
    `judges_files` are files (or folders) of the repository that judge: changes to them are left
    out, as are those that fit `protected` or configure pytest, unless they fit `editable`. `hides`
    are folders of the image that the agent sees empty. With `network` the script reaches the hosts
    that the runtime allows.
    """

    def __init__(  # noqa: PLR0913 - what a row says
        self,
        *,
        instance: str,
        eval_script: str,
        log_parser: str,
        fail_to_pass: Sequence[str],
        pass_to_pass: Sequence[str] = (),
        eval_type: str = "pass_and_fail",
        repo: str = "",
        version: str = "",
        judges_files: Sequence[str] = (),
        protected: Sequence[str] = (),
        editable: Sequence[str] = (),
        hides: Sequence[str] = (),
        partial: bool = False,
        network: bool = False,
        timeout_s: float = 1800.0,
    ) -> None:
        for mark in _MARKS[:2]:
            if mark not in eval_script:
                _refuse("eval_script", eval_script, f"a script that prints {mark!r}")
        if not fail_to_pass:
            _refuse("fail_to_pass", fail_to_pass, "a list of at least one test")
        if not timeout_s > 0:
            _refuse("timeout_s", timeout_s, "more than 0")
        for path in hides:
            if not path.startswith("/"):
                _refuse("hides", path, "absolute paths")
        self._judges = tuple(check_path(path) for path in judges_files)
        self._protected = (*PYTHON, *check_patterns("protected", protected))
        self._editable = check_patterns("editable", editable)
        self._hides = tuple(hides)
        self._partial, self._network, self._timeout_s = partial, network, timeout_s
        self._row = {
            "instance_id": instance,
            "image": "",
            "repo": repo,
            "version": version,
            "eval_script": eval_script,
            "log_parser": log_parser,
            "eval_type": eval_type,
            "FAIL_TO_PASS": list(fail_to_pass),
            "PASS_TO_PASS": list(pass_to_pass),
        }
        self._works = False
        """Whether the script has told a result on this machine."""

    def hidden(self, task: Task) -> tuple[str, ...]:
        """Folders that the agent sees empty."""
        return self._hides

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Run the row's tests on the agent's work."""
        ends = time.monotonic() + outcome.timeout_s
        ran = await self._run(outcome, outcome.patch, ends)
        ran_over = ran.began and ran.stopped
        if not (ran.found or ran_over or self._works):
            await self._check_works(outcome, ends)
        self._works |= ran.found
        report = {
            **_told(ran),
            "refused": ran.refused,
            "diff": unified(outcome.task.files, outcome.patch),
        }
        return Verdict(self._reward(ran), report)

    async def _run(self, outcome: SessionOutcome, work: Patch, ends: float) -> _Ran:
        """Run the script on some work, in a new box."""
        spec = await asyncio.to_thread(self._spec)
        seal = secrets.token_hex(8)
        async with outcome.open_sandbox({}) as box:
            patch, refused = sift(work, await self._rules(box, work))
            await box.put(box.workdir, laid(outcome.task.files, patch, {}))
            await box.put(box.home, {_SCRIPT: _sealed(spec.eval_script, seal)})
            if self._network:
                await open_doors(box)
            end = await box.run(
                ("bash", str(box.home / _SCRIPT)),
                env={"HOME": str(box.home)},
                timeout_s=max(min(self._timeout_s, ends - time.monotonic()), 1.0),
                log_name=_LOG,
            )
            ran = await asyncio.to_thread(self._graded, spec, end, box.logs, seal)
            return ran._replace(refused=refused)

    async def _rules(self, box: Sandbox, work: Patch) -> Rules:
        """What may not be laid on; a file that is there already is not new to shadow anything."""
        there = [path for path in shadowing(work) if await box.get(box.workdir / path) is not None]
        return Rules(
            trusted=self._judges,
            protected=self._protected,
            editable=self._editable,
            known={*there, *(PurePosixPath(path).parts[0] for path in self._editable)},
            workdir=box.workdir,
        )

    async def _check_works(self, outcome: SessionOutcome, ends: float) -> None:
        """Nothing was told: is it the agent's doing? Without its work, something must be."""
        ran = await self._run(outcome, Patch(), ends)
        if not ran.found:
            how = "tell nothing" if ran.began else "do not begin"
            why = ran.report.get("infra_failure_reason", "")
            msg = (
                f"{self._row['instance_id']}: its tests {how}, also without the agent's work"
                f"{why and f' ({why})'}: {ran.tail or ran.exit}"
            )
            raise EvaluatorError(msg)
        self._works = True

    def _spec(self) -> Any:
        known = _swebench("swebench.harness.log_parsers").PARSER_REGISTRY
        if self._row["log_parser"] not in known:
            msg = f"log_parser is {self._row['log_parser']!r}, must be one of {', '.join(known)}"
            raise EvaluatorError(msg)
        return _swebench("swebench.harness.utils").make_test_spec(self._row)

    def _graded(self, spec: Any, end: Exit, logs: Path, seal: str) -> _Ran:
        """What a run told, as `swebench` reads it; tests that were stopped have told nothing."""
        ran = _Ran(end, _unsealed(_read(logs / f"{_LOG}.log"), seal))
        if ran.stopped:
            return ran
        path = logs / "graded.log"
        path.write_text(ran.log, encoding="utf-8")
        prediction = {"instance_id": spec.instance_id, "model_patch": ""}
        grading = _swebench("swebench.harness.grading")
        try:
            reports = grading.get_eval_report(spec, prediction, str(path), True)
        except (ValueError, LookupError, AttributeError) as error:
            msg = f"{spec.instance_id}: swebench cannot read its log: {error!r}"
            raise EvaluatorError(msg) from error
        return ran._replace(report=reports[spec.instance_id])

    def _reward(self, ran: _Ran) -> Reward:
        resolved = bool(ran.report.get("resolved"))
        tests = ran.report.get("tests_status", {})
        fixed, kept = (_share(tests.get(name)) for name in ("FAIL_TO_PASS", "PASS_TO_PASS"))
        value = fixed if self._partial and kept == 1 else 0.0
        parts = {"resolved": float(resolved), "fail_to_pass": fixed, "pass_to_pass": kept}
        return Reward(1.0 if resolved else value, parts)


def _told(ran: _Ran) -> dict[str, Any]:
    """A run, for people."""
    tests = ran.report.get("tests_status", {})
    failed = {name: tests[name]["failure"] for name in ("FAIL_TO_PASS", "PASS_TO_PASS") if tests}
    return {
        "resolved": bool(ran.report.get("resolved")),
        "failed": {name: tests[:_NAMED] for name, tests in failed.items()},
        "failures": sum(len(tests) for tests in failed.values()),
        "told": ran.found,
        "timed_out": ran.exit.timed_out,
        "seconds": ran.exit.seconds,
        "cause": ran.exit.cause,
        "log": ran.tail,
    }


def _share(status: Mapping[str, Sequence[str]] | None) -> float:
    """Of tests, how many passed; nothing is heard of none, and none that were asked for pass."""
    if status is None:
        return 0.0
    passed, failed = len(status["success"]), len(status["failure"])
    return passed / (passed + failed) if passed + failed else 1.0


def _sealed(script: str, seal: str) -> str:
    """`script` with marks that nobody else knows, so that no test can end its own output."""
    for mark in _MARKS:
        script = script.replace(mark, mark.replace(_MARK, seal))
    return script


def _unsealed(log: str, seal: str) -> str:
    return log.replace(_MARK, ">>>").replace(seal, _MARK)


def _read(path: Path) -> str:
    """A log of any length and content."""
    with path.open("rb") as file:
        data = file.read(_MOST - _END)
        size = path.stat().st_size
        if size > _MOST:
            file.seek(size - _END)
            data += b"\n(cut here)\n"
        data += file.read(_END)
    return data.decode("utf-8", errors="replace").replace("\r\n", "\n")


def _swebench(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        msg = f"swebench cannot be used ({error}): pip install 'tugline[swe]' on every node"
        raise EvaluatorError(msg) from error


def _refuse(option: str, value: object, right: str) -> NoReturn:
    msg = f"evaluator 'swebench': {option} is {value!r:.200}, must be {right}"
    raise ConfigError(msg)
