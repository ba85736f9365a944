"""Judge by a Harbor task's own script: ``tests/test.sh`` writes ``/logs/verifier/reward.txt``.

The script runs in a clean box: the task's workspace, the agent's sifted patch over it, and the
task's tests at ``/tests``, read-only. So nothing that the agent planted outside of its work counts,
and it never saw the tests. With `in_place` it runs where the agent was, for tasks whose outcome is
not in the workdir; the tests come there after the agent's end, over whatever it had put in their
place. What it made of the programs and settings of that sandbox then remains: see
docs/evaluators.md.

A script that leaves no readable reward is the agent's doing only if the same script leaves one in
a box that the agent never touched; then the reward is 0. Otherwise the task is broken, and that is
no verdict (I5).

Not covered: the agent's code that the script runs is the same user, and can write the reward file
itself. A script that must rule that out runs it as another one.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec

from tugline.errors import ConfigError, EvaluatorError
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.evaluators.filters import Rules, check_patterns, laid, matches, shadowing, sift
from tugline.evaluators.fresh import tail
from tugline.evaluators.network import open_doors
from tugline.sandbox.base import Content, Exit, Mount, Sandbox
from tugline.sandbox.patch import FileChange
from tugline.sandbox.variables import check_variables, filled
from tugline.types import Reward, Task

TESTS = PurePosixPath("/tests")
LOGS = PurePosixPath("/logs/verifier")
SCRIPT = "test.sh"
_START = 'if command -v bash >/dev/null 2>&1; then exec bash "$0"; else exec sh "$0"; fi'
_PLACE = (
    'for d in /tests /logs/verifier; do rm -rf "$d"/* "$d"/.[!.]* "$d"/..?*; done; '
    'cp -R "$0"/. /tests/ && rm -rf "$0"'
)
_PLACE_S = 60.0
_MOST = 1 << 20
_MOST_TESTS = 64 << 20


class _Ran(NamedTuple):
    """How the script ended, and the rewards that it left; None with the reason why not."""

    exit: Exit
    rewards: Mapping[str, float] | None
    why: str
    said: str


class HarborEvaluator(Evaluator):
    """`tests` is the folder of the task's tests, on the node. Made by the task set ``harbor``.

    `env` is the script's environment, where ``${NAME}`` stands for a variable of the node that
    `pass_env` lists. With `network` it reaches the hosts that the runtime allows. `reward` names
    the one of several rewards that counts (default: ``reward``, else their mean). `protected` are
    patterns of paths that no patch may change, `editable` those it may although they look like
    Python's or a test runner's own.
    """

    def __init__(  # noqa: PLR0913 - each is an option
        self,
        *,
        tests: str,
        timeout_s: float = 600.0,
        env: Mapping[str, str] | None = None,
        pass_env: Sequence[str] = (),
        in_place: bool = False,
        network: bool = False,
        reward: str | None = None,
        protected: Sequence[str] = (),
        editable: Sequence[str] = (),
    ) -> None:
        if not Path(tests).is_absolute():
            msg = f"evaluator 'harbor': tests is {tests!r}, must be an absolute path"
            raise ConfigError(msg)
        if not timeout_s > 0:
            msg = f"evaluator 'harbor': timeout_s is {timeout_s!r}, must be more than 0"
            raise ConfigError(msg)
        self._tests, self._timeout_s, self._reward = Path(tests), timeout_s, reward
        self._env, self._pass = dict(env or {}), frozenset(pass_env)
        check_variables(self._env, self._pass, "evaluator 'harbor': env")
        self._protected = check_patterns("evaluator 'harbor': protected", protected)
        self._editable = check_patterns("evaluator 'harbor': editable", editable)
        self.in_place, self._network = in_place, network
        self._works = False

    def mounts(self, _task: Task) -> tuple[Mount, ...]:
        """The tests, unless the agent could see them there, and a place for the reward."""
        source = None if self.in_place else str(self._tests)
        return (Mount(str(TESTS), source), Mount(str(LOGS)))

    def hidden(self, _task: Task) -> tuple[str, ...]:
        """Tests that somebody left in the image are none of the agent's business."""
        return () if self.in_place else (str(TESTS),)

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Run the script on the agent's work, or where it was."""
        if not (self._tests / SCRIPT).is_file():
            msg = f"evaluator 'harbor': there is no {SCRIPT} in {self._tests} on this node"
            raise EvaluatorError(msg)
        refused: dict[str, str] = {}
        if self.in_place:
            if outcome.sandbox is None:
                msg = "evaluator 'harbor': in_place needs the agent's box, which is gone"
                raise EvaluatorError(msg)
            ran = await self._run(outcome.sandbox, outcome.timeout_s)
        else:
            async with outcome.open_sandbox({}) as box:
                files, refused = await self._sifted(outcome, box)
                await box.put(box.workdir, files)
                ran = await self._run(box, outcome.timeout_s)
        if ran.rewards is None and not ran.exit.timed_out:
            await self._check_script(outcome, ran)
        return self._verdict(ran, outcome, refused)

    async def _sifted(
        self, outcome: SessionOutcome, box: Sandbox
    ) -> tuple[dict[str, Content], dict[str, str]]:
        """What is laid over the workspace, and what is not, with reasons."""
        tops = {PurePosixPath(path).parts[0] for path in outcome.patch.files}
        known = {top for top in tops if matches(PurePosixPath(top), self._editable)}
        named = shadowing(outcome.patch)
        known |= {path for path in named if await box.get(box.workdir / path) is not None}
        rules = Rules(
            protected=self._protected,
            editable=self._editable,
            known=known | {PurePosixPath(path).parts[0] for path in outcome.task.files},
            workdir=box.workdir,
            mounts=self.mounts(outcome.task),
        )
        patch, refused = sift(outcome.patch, rules)
        return laid(outcome.task.files, patch, {}), refused

    async def _run(self, box: Sandbox, most_s: float) -> _Ran:
        """Run the script in a box that has the work, and read what it left."""
        if self.in_place:
            placed = await self._put_tests(box)
            if placed is not None:
                return placed
        if self._network:
            await open_doors(box)
        seconds = min(self._timeout_s, most_s)
        end = await box.run(
            ("sh", "-c", _START, str(TESTS / SCRIPT)),
            env={"HOME": str(box.home), **filled(self._env, self._pass)},
            timeout_s=seconds,
            log_name="tests",
        )
        said = await tail(box, "tests")
        if end.timed_out:
            return _Ran(end, None, f"not done within {seconds:g} s", said)
        try:
            rewards = await _rewards(box)
        except ValueError as error:
            return _Ran(end, None, str(error), said)
        if rewards is None:
            return _Ran(end, None, f"no reward was written (exit {end.code})", said)
        return _Ran(end, rewards, "", said)

    async def _put_tests(self, box: Sandbox) -> _Ran | None:
        """Put the tests where the agent was. None if that worked, and nothing else is there."""
        files = await asyncio.to_thread(_read_folder, self._tests)
        folder = f".tests-{secrets.token_hex(8)}"
        await box.put(box.home, {f"{folder}/{path}": change for path, change in files.items()})
        end = await box.run(
            ("sh", "-c", _PLACE, str(box.home / folder)),
            env={"HOME": str(box.home)},
            timeout_s=_PLACE_S,
            log_name="place",
        )
        for path, change in files.items():
            if await box.get(TESTS / path, max_bytes=_MOST_TESTS) != change.data:
                return _Ran(end, None, f"{TESTS / path} could not be put there", "")
        if await _rewards_there(box):
            return _Ran(end, None, f"{LOGS} could not be emptied", "")
        return None

    async def _check_script(self, outcome: SessionOutcome, ran: _Ran) -> None:
        """Does it leave a reward where the agent never was? Raises `EvaluatorError` if not."""
        if self._works:
            return
        async with outcome.open_sandbox(outcome.task.files) as box:
            control = await self._run(box, outcome.timeout_s)
        if control.rewards is None:
            msg = f"{self._tests / SCRIPT}: {ran.why}, and without the agent's work: {control.why}"
            raise EvaluatorError(f"{msg}: {control.said[-300:]}" if control.said else msg)
        self._works = True

    def _verdict(self, ran: _Ran, outcome: SessionOutcome, refused: Mapping[str, str]) -> Verdict:
        parts = dict(ran.rewards or {})
        report: dict[str, Any] = {
            "reason": ran.why or "rewarded by the task's script",
            "exit_code": ran.exit.code,
            "timed_out": ran.exit.timed_out,
            "seconds": ran.exit.seconds,
            "changed": sorted(outcome.patch.files)[:100],
            "notes": list(outcome.patch.notes),
            "refused": dict(refused),
            "log": ran.said,
        }
        return Verdict(Reward(self._counts(parts) if parts else 0.0, parts), report)

    def _counts(self, parts: Mapping[str, float]) -> float:
        name = self._reward or "reward"
        if name in parts:
            return parts[name]
        if self._reward is not None:
            msg = f"evaluator 'harbor': reward is {name!r}, the script wrote {', '.join(parts)}"
            raise EvaluatorError(msg)
        return sum(parts.values()) / len(parts)


async def _rewards(box: Sandbox) -> Mapping[str, float] | None:
    """What the script left; reward.json comes first. Raises `ValueError` for what is no reward."""
    for name, read in (("reward.json", read_json), ("reward.txt", read_text)):
        data = await box.get(LOGS / name, max_bytes=_MOST)
        if data is not None:
            return read(data)
    return None


def read_json(data: bytes) -> dict[str, float]:
    """Rewards by name of a reward.json. Raises `ValueError`."""
    try:
        found = msgspec.json.decode(data, type=dict[str, float | bool] | float | bool)
    except (msgspec.DecodeError, RecursionError) as error:
        msg = f"reward.json is no number and no object of numbers: {error}"
        raise ValueError(msg) from error
    named = found if isinstance(found, dict) else {"reward": found}
    rewards = {name: float(value) for name, value in named.items()}
    if not rewards or not all(map(math.isfinite, rewards.values())):
        msg = f"reward.json is {data[:80]!r}, must have finite numbers"
        raise ValueError(msg)
    return rewards


def read_text(data: bytes) -> dict[str, float]:
    """The reward of a reward.txt. Raises `ValueError`."""
    try:
        value = float(data.strip())
    except ValueError as error:
        msg = f"reward.txt is {data[:80]!r}, must be a number"
        raise ValueError(msg) from error
    if not math.isfinite(value):
        msg = f"reward.txt is {data[:80]!r}, must be finite"
        raise ValueError(msg)
    return {"reward": value}


async def _rewards_there(box: Sandbox) -> bool:
    found = [await box.get(LOGS / name, max_bytes=_MOST) for name in ("reward.json", "reward.txt")]
    return any(data is not None for data in found)


def _read_folder(folder: Path) -> dict[str, FileChange]:
    """The task's tests as changes. Raises `EvaluatorError` if they are too many to bring along."""
    files: dict[str, FileChange] = {}
    size = 0
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            size += len(data)
            files[path.relative_to(folder).as_posix()] = FileChange(data, os.access(path, os.X_OK))
        if size > _MOST_TESTS:
            msg = f"{folder}: more than {_MOST_TESTS >> 20} MB of tests, too much for in_place"
            raise EvaluatorError(msg)
    return files
