"""Evaluate with a Harbor task's own script: ``tests/test.sh`` writes ``/logs/verifier/reward.txt``.

The script runs in a fresh sandbox: the task's workspace, the agent's filtered patch over it, and
the task's tests at ``/tests``, read-only. Changes outside of the workdir have no effect, and the
agent never saw the tests. With `in_place` the script runs in the agent's sandbox, for tasks whose
outcome is not in the workdir; the tests are written there after the agent's end and replace what it
left at their paths. Its changes to programs and settings of that sandbox remain: see
docs/evaluators.md.

If the script writes no readable reward, it is run again in a sandbox without the agent's work. If
that run has a reward, the agent caused the failure and its reward is 0. Otherwise the task is
broken, and there is no verdict (I5).

The script runs the agent's code as the same user, so that code can write the reward file. With
`isolate` it cannot: the script has the task's original files, and its program ``$JUDGED`` runs its
arguments in another sandbox, which has the agent's work and neither tests nor reward.
"""

import asyncio
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from tugline.errors import ConfigError, EvaluatorError
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.evaluators.filters import Patterns, Rules
from tugline.evaluators.isolation import serve_programs
from tugline.evaluators.script import TAIL, ScriptRunner, allow_network, open_runner
from tugline.patch import FileChange, Patch
from tugline.sandbox.base import Exit, Mount, Sandbox, check_variables, expand_variables
from tugline.schema import PositiveFloat
from tugline.types import Reward, Task

TESTS = PurePosixPath("/tests")
LOGS = PurePosixPath("/logs/verifier")
SCRIPT = "test.sh"
_START = 'if command -v bash >/dev/null 2>&1; then exec bash "$0"; else exec sh "$0"; fi'
_PLACE = Path(__file__).with_name("place_tests.sh").read_text(encoding="utf-8")
_PLACE_S = 60.0
_NO_ENV: Mapping[str, str] = MappingProxyType({})
_MAX_REWARD_BYTES = 1 << 20
_REWARDS = ("reward.json", "reward.txt")
_JSON_REWARDS = dict[str, float | bool] | float | bool
_MAX_TESTS_BYTES = 64 << 20


class _HarborRun(NamedTuple):
    """Exit of the script and its rewards, or None with the reason why there are none."""

    exit: Exit
    rewards: Mapping[str, float] | None
    reason: str
    log: str = ""
    refused: Mapping[str, str] = {}
    """Paths of the patch that were not applied, with reasons."""


@dataclass(kw_only=True, eq=False)
class HarborEvaluator(Evaluator):
    """Runs the script in `tests`, a folder on the node. Created by the task set ``harbor``.

    `env` is the script's environment, in which ``${NAME}`` stands for a variable of the node that
    `pass_env` lists. With `network` the script reaches the hosts that the runtime allows. `reward`
    selects one of several rewards (default: ``reward``, else their mean), whose value must be
    within `reward_range` (minimum, maximum). `protected` are patterns of paths that a patch may not
    change, `editable` exceptions (see `Rules`). With `isolate` the agent's work runs in another
    sandbox than the script; `in_place` ignores this.
    """

    tests: str
    timeout_s: PositiveFloat = 600.0
    env: Mapping[str, str] | None = None
    pass_env: Sequence[str] = ()
    in_place: bool = False
    network: bool = False
    isolate: bool = False
    reward: str | None = None
    reward_range: tuple[float, float] = (0.0, 1.0)
    protected: Patterns = ()
    editable: Patterns = ()

    def __post_init__(self) -> None:
        self._tests = Path(self.tests)
        if not self._tests.is_absolute():
            msg = f"evaluator 'harbor': tests is {self.tests!r}, must be an absolute path"
            raise ConfigError(msg)
        self._env = dict(self.env or {})
        self._pass = frozenset(self.pass_env)
        check_variables(self._env, self._pass, "evaluator 'harbor': env")
        self._isolate = self.isolate and not self.in_place
        self.sandboxes = 1 + self._isolate
        # If the agent's code could see mounted tests, `_put_tests` writes them instead.
        source = None if self.in_place or self.isolate else self.tests
        self._mounts = (Mount(str(TESTS), source), Mount(str(LOGS)))
        self._rules = Rules(protected=self.protected, editable=self.editable, mounts=self._mounts)
        self._proven = False
        """Whether the script has written a reward without an agent's work."""

    def mounts(self, _task: Task) -> tuple[Mount, ...]:
        """Return the tests, unless agent code could see them, and the folder for the reward."""
        return self._mounts

    def hidden(self, _task: Task) -> tuple[str, ...]:
        """Return the tests' folder, to hide tests in the image from the agent."""
        return () if self.in_place else (str(TESTS),)

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Run the script on the agent's work, or in the agent's sandbox if `in_place`."""
        if not (self._tests / SCRIPT).is_file():
            msg = f"evaluator 'harbor': there is no {SCRIPT} in {self._tests} on this node"
            raise EvaluatorError(msg)
        if self.in_place:
            if outcome.sandbox is None:
                msg = (
                    "evaluator 'harbor': in_place needs the agent's sandbox, which no longer exists"
                )
                raise EvaluatorError(msg)
            run = await self._run(ScriptRunner(outcome.sandbox, outcome))
        else:
            run = await self._run_on_work(outcome)
        if run.rewards is None and not (run.exit.timed_out or self._proven):
            await self._check_without_work(outcome, run)
        return self._score(run, outcome)

    async def _run_on_work(self, outcome: SessionOutcome) -> _HarborRun:
        """Run the script on a fresh copy with the patch."""
        env = expand_variables(self._env, self._pass)
        text = await asyncio.to_thread((self._tests / SCRIPT).read_text, errors="replace")
        rules = msgspec.structs.replace(self._rules, scripts=(text,))
        async with open_runner(outcome, rules, env=env) as work:
            if not self._isolate:
                return (await self._run(work))._replace(refused=work.refused)
            async with outcome.open_sandbox(outcome.task.files) as sandbox:
                script = ScriptRunner(sandbox, outcome)
                async with serve_programs(script, work) as judged:
                    run = await self._run(script, judged)
                return run._replace(refused=work.refused)

    async def _run(self, runner: ScriptRunner, env: Mapping[str, str] = _NO_ENV) -> _HarborRun:
        """Run the script with `env` in the runner's sandbox and read the rewards."""
        sandbox = runner.sandbox
        if self.in_place or self._isolate:
            failed = await self._put_tests(runner)
            if failed is not None:
                return failed
        if self.network:
            await allow_network(sandbox)
        end = await runner.run(
            ("sh", "-c", _START, str(TESTS / SCRIPT)),
            env={**env, **expand_variables(self._env, self._pass)},
            timeout_s=self.timeout_s,
            log_name="tests",
        )
        log = end.output[-TAIL:]
        try:
            return _HarborRun(end, await self._read_rewards(sandbox, end), "", log)
        except ValueError as error:
            return _HarborRun(end, None, str(error), log)

    async def _put_tests(self, runner: ScriptRunner) -> _HarborRun | None:
        """Write the tests to the sandbox and verify them; return None if they are in place."""
        sandbox = runner.sandbox
        files = await asyncio.to_thread(_read_folder, self._tests)
        folder = f".tests-{secrets.token_hex(8)}"
        await sandbox.put(sandbox.home, {f"{folder}/{path}": file for path, file in files.items()})
        argv = ("sh", "-c", _PLACE, str(sandbox.home / folder))
        end = await runner.run(argv, timeout_s=_PLACE_S, log_name="place")
        for path, file in files.items():
            if await sandbox.get(TESTS / path, max_bytes=_MAX_TESTS_BYTES) != file.data:
                return _HarborRun(end, None, f"{TESTS / path} could not be written")
        for name in _REWARDS:
            if await sandbox.get(LOGS / name, max_bytes=_MAX_REWARD_BYTES) is not None:
                return _HarborRun(end, None, f"{LOGS} could not be emptied")
        return None

    async def _check_without_work(self, outcome: SessionOutcome, run: _HarborRun) -> None:
        """Raise `EvaluatorError` if there is no reward without the agent's work either."""
        control = await self._run_on_work(replace(outcome, patch=Patch()))
        if control.rewards is None:
            msg = f"{self._tests / SCRIPT}: {run.reason}, and without the work: {control.reason}"
            raise EvaluatorError(f"{msg}: {control.log[-300:]}" if control.log else msg)
        self._proven = True

    def _score(self, run: _HarborRun, outcome: SessionOutcome) -> Verdict:
        parts = dict(run.rewards or {})
        report: dict[str, Any] = {
            "reason": run.reason or "rewarded by the task's script",
            "exit_code": run.exit.code,
            "timed_out": run.exit.timed_out,
            "seconds": run.exit.seconds,
            "changed": sorted(outcome.patch.files)[:100],
            "notes": list(outcome.patch.notes),
            "refused": dict(run.refused),
            "log": run.log,
        }
        return Verdict(Reward(self._select_reward(parts) if parts else 0.0, parts), report)

    async def _read_rewards(self, sandbox: Sandbox, end: Exit) -> Mapping[str, float]:
        """Return the script's rewards. Raises `ValueError` if they are missing or invalid.

        Of two files the smaller reward counts: the agent's code may have written one of them.
        """
        if end.timed_out:
            raise ValueError(f"not finished within {end.seconds:.0f} s")
        if end.code < 0:
            raise ValueError(f"ended by signal {-end.code}")
        files = [
            parse_rewards(name, data)
            for name in _REWARDS
            if (data := await sandbox.get(LOGS / name, max_bytes=_MAX_REWARD_BYTES)) is not None
        ]
        if not files:
            raise ValueError(f"no reward was written (exit {end.code})")
        rewards = files[0]
        value = self._select_reward(rewards)
        if len(files) > 1:
            value = min(value, *files[1].values())
            rewards = {**rewards, self.reward or "reward": value}
        least, greatest = self.reward_range
        if not least <= value <= greatest:
            limits = f"from {least:g} to {greatest:g} (reward_range)"
            raise ValueError(f"the reward is {value:g}, must be {limits}")
        return rewards

    def _select_reward(self, parts: Mapping[str, float]) -> float:
        name = self.reward or "reward"
        if name in parts:
            return parts[name]
        if self.reward is not None:
            raise ValueError(
                f"the script wrote {', '.join(parts)}, but the option `reward` names {name}"
            )
        return sum(parts.values()) / len(parts)


def parse_rewards(name: str, data: bytes) -> dict[str, float]:
    """Return the rewards in a file by name; a single number is ``reward``. Raises `ValueError`."""
    text = name == "reward.txt"
    try:
        content = float(data) if text else msgspec.json.decode(data, type=_JSON_REWARDS)
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        right = "a number" if text else "a number, or an object of numbers"
        raise ValueError(f"{name} is {data[:80]!r}, must be {right}: {error}") from error
    named = content if isinstance(content, dict) else {"reward": content}
    rewards = {key: float(value) for key, value in named.items()}
    if not rewards or not all(map(math.isfinite, rewards.values())):
        raise ValueError(f"{name} is {data[:80]!r}, must have finite numbers")
    return rewards


def _read_folder(folder: Path) -> dict[str, FileChange]:
    """Return the task's tests as changes. Raises `EvaluatorError` if they are too large."""
    files: dict[str, FileChange] = {}
    size = 0
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            size += len(data)
            files[path.relative_to(folder).as_posix()] = FileChange(data, os.access(path, os.X_OK))
        if size > _MAX_TESTS_BYTES:
            msg = f"{folder}: the tests exceed {_MAX_TESTS_BYTES >> 20} MB, the limit of in_place"
            raise EvaluatorError(msg)
    return files
