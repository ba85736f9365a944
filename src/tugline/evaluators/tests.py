"""Judge by tests: the agent's changes on a fresh copy of the task, in a new box, under pytest.

The reward is 1 only if every expected test ran and passed. What the agent could do instead of
solving the task, and what becomes of it:

- edit or delete tests, conftest.py, pytest.ini and the like: the task's own text is put back, and
  files of these names which the task does not have are left out;
- shadow pytest or the standard library with files of their names: left out;
- end the process early with code 0, skip, or break collection: expected tests are then missing;
- loop for ever: time runs out, reward 0.

Not covered: its code shares a process with the tests, so a program written to forge pytest's
report from the inside can. Judge by a program of your own where that must be ruled out.
"""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

import msgspec

from tugline.errors import ConfigError, EvaluatorError
from tugline.evaluators.base import Outcome, Verdict
from tugline.evaluators.diff import applied, unified
from tugline.evaluators.junit import Tally, expected_tests, pick, read_report
from tugline.runtimes.base import Box, Content, Exit, check_path
from tugline.runtimes.patch import Patch
from tugline.types import Reward

PROTECTED = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
    "*.pth",
)
"""File names, at any depth, that belong to the task alone."""

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
_SHADOWS = sys.stdlib_module_names | {"pytest", "_pytest", "pluggy", "iniconfig", "packaging"}
_REPORT = "report.xml"
# `-I` and the late path entry: pytest is imported before anything of the agent's can be.
_START = "import sys, pytest; sys.path.insert(0, '.'); sys.exit(pytest.main(sys.argv[1:]))"
_CONTROL = "import pytest"
_TAIL = 2000
_CACHED = 4096


class Tests:
    """`files` are tests that the agent never saw; without them the task's own test files count.

    `paths` are the test files or folders to run (default: all of `files` and the task's that look
    like tests). `expected` names the tests that must pass, such as
    ``tests.test_bill::test_total``; others may fail then (default: all must pass, and none that
    the source defines may be missing). `protected` adds file name patterns to `PROTECTED`.
    `cache` remembers verdicts by content, for tests whose result depends on nothing else.
    """

    __test__ = False  # the name is not meant for pytest's own collection

    def __init__(
        self,
        *,
        files: Mapping[str, str] | None = None,
        paths: Sequence[str] | None = None,
        expected: Sequence[str] | None = None,
        protected: Sequence[str] = (),
        timeout_s: float = 30.0,
        cache: bool = False,
    ) -> None:
        for path in (*(files or {}), *(paths or ())):
            check_path(path)
        if not timeout_s > 0:
            msg = f"evaluator 'tests': timeout_s is {timeout_s!r}, must be more than 0"
            raise ConfigError(msg)
        self._files = dict(files or {})
        self._paths = list(paths) if paths is not None else None
        self._expected = frozenset(expected) if expected is not None else None
        self._protected = (*PROTECTED, *protected)
        self._timeout_s = timeout_s
        self._cache: OrderedDict[str, Verdict] | None = OrderedDict() if cache else None
        self._works = False

    async def evaluate(self, outcome: Outcome) -> Verdict:
        """Run the expected tests on the agent's work."""
        trusted, patch, refused = self._trusted(outcome)
        paths = _under(self._paths, pick(trusted))
        expected = self._expected if self._expected is not None else _expected(trusted, paths)
        files, gave_way = applied(outcome.task.files, patch, trusted)
        report: dict[str, Any] = {
            "diff": unified(outcome.task.files, outcome.patch),
            "refused": sorted({*refused, *gave_way}),
        }
        key = _digest(files, paths, expected)
        if self._cache is not None and key in self._cache:
            self._cache.move_to_end(key)
            known = self._cache[key]
            return Verdict(known.reward, {**known.report, **report, "cached": True})
        verdict = await self._run(outcome, files, paths, expected)
        # Running out of time may be the machine's doing; that is not remembered.
        if self._cache is not None and not verdict.report["timed_out"]:
            self._cache[key] = verdict
            if len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        return Verdict(verdict.reward, {**verdict.report, **report, "cached": False})

    async def _run(
        self,
        outcome: Outcome,
        files: dict[str, Content],
        paths: list[str],
        expected: frozenset[str],
    ) -> Verdict:
        async with outcome.open_box(files) as box:
            target = box.home / _REPORT
            options = ("-p", "no:cacheprovider", "-q", "-o", "junit_family=xunit1")
            end = await box.run(
                ("python3", "-I", "-B", "-c", _START, *options, f"--junitxml={target}", *paths),
                env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HOME": str(box.home)},
                timeout_s=min(self._timeout_s, outcome.timeout_s),
                log_name="tests",
            )
            data = await box.get(target) or b""
            tail = _tail(box)
        tally = read_report(data)
        if tally is None:
            await self._check_pytest(outcome)
        return _verdict(tally, expected, end, tail, only=self._expected is not None)

    async def _check_pytest(self, outcome: Outcome) -> None:
        """No report: is it the agent's doing? In a box without its files, pytest must load."""
        if self._works:
            return
        async with outcome.open_box({}) as box:
            end = await box.run(
                ("python3", "-I", "-c", _CONTROL), env={}, timeout_s=60.0, log_name="control"
            )
            if end.code != 0:
                last = (box.logs / "control.log").read_text(errors="replace").strip()[-300:]
                msg = f"pytest cannot be run by python3 in this runtime: {last or end}"
                raise EvaluatorError(msg)
        self._works = True

    def _trusted(self, outcome: Outcome) -> tuple[dict[str, str], Patch, list[str]]:
        """Files whose text is the task's, the patch without them, and what it may not touch."""
        given = set(pick(outcome.task.files)) | {
            p for p in outcome.task.files if self._is_protected(p)
        }
        trusted = {path: outcome.task.files[path] for path in given} | self._files
        if not any(p in trusted and section in trusted[p] for p, section in _CONFIGS.items()):
            # Without a file of its own pytest would look for one in the folders above.
            trusted["pytest.ini"] = "[pytest]\n"
        refused = [
            path
            for path in outcome.patch.files
            if path in trusted or self._is_protected(path) or _shadows(path, outcome.task.files)
        ]
        kept = {p: text for p, text in outcome.patch.files.items() if p not in set(refused)}
        return trusted, Patch(kept, outcome.patch.notes), refused

    def _is_protected(self, path: str) -> bool:
        name = PurePosixPath(path).name
        return any(fnmatchcase(name, pattern) for pattern in self._protected)


def _shadows(path: str, given: Mapping[str, str]) -> bool:
    """Whether a new top-level name would be imported in place of pytest or the library."""
    first = PurePosixPath(path).parts[0]
    known = any(PurePosixPath(old).parts[0] == first for old in given)
    return not known and first.partition(".")[0] in _SHADOWS


def _under(paths: Sequence[str] | None, tests: list[str]) -> list[str]:
    """Of `tests` those that `paths` name as files or folders; all of them for None."""
    if paths is None:
        return tests
    found = []
    for path in paths:
        inside = [test for test in tests if PurePosixPath(test).is_relative_to(path)]
        if not inside:
            msg = (
                f"evaluator 'tests': no test file at {path!r} (known: {', '.join(tests) or 'none'})"
            )
            raise EvaluatorError(msg)
        found += inside
    return found


def _expected(trusted: Mapping[str, str], paths: Sequence[str]) -> frozenset[str]:
    """Names of the tests in `paths`. Raises `EvaluatorError` when there are none to be found."""
    found: set[str] = set()
    for path in paths:
        try:
            found |= expected_tests(path, trusted[path])
        except (SyntaxError, ValueError) as error:
            msg = f"evaluator 'tests': {path} is not valid Python: {error}"
            raise EvaluatorError(msg) from error
    if not found:
        msg = f"evaluator 'tests': no test functions in {list(paths)}; give files with tests"
        raise EvaluatorError(msg)
    return frozenset(found)


def _verdict(
    tally: Tally | None, expected: frozenset[str], end: Exit, tail: str, *, only: bool
) -> Verdict:
    heard = tally or Tally(frozenset(), {})
    passed = len(expected & heard.passed)
    # Exit code 1 says that some test failed; with `only`, it may be one that is not asked for.
    good = passed == len(expected) and not end.timed_out and end.code in ((0, 1) if only else (0,))
    if end.timed_out:
        reason = f"out of time after {end.seconds:.1f} s"
    elif tally is None:
        reason = f"pytest left no report (exit {end.code})"
    else:
        reason = "passed" if good else f"{len(expected) - passed} of {len(expected)} not passed"
    report = {
        "reason": reason,
        "passed": passed,
        "total": len(expected),
        "failed": heard.failed,
        "missing": heard.missing(expected),
        "exit": end.code,
        "timed_out": end.timed_out,
        "seconds": round(end.seconds, 3),
        "output": tail,
    }
    parts = {"passed": float(passed), "total": float(len(expected))}
    return Verdict(Reward(float(good), parts), report)


def _digest(files: Mapping[str, Content], paths: Sequence[str], expected: frozenset[str]) -> str:
    content = (sorted(files.items()), list(paths), sorted(expected))
    return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()


def _tail(box: Box) -> str:
    with (box.logs / "tests.log").open("rb") as log:
        log.seek(0, 2)
        log.seek(max(0, log.tell() - _TAIL))
        return log.read().decode(errors="replace")
