"""Validate a task without a model: evaluate its reference solution, and doing nothing.

The solution runs where an agent would, and its outcome is evaluated like an agent's: the changes
are extracted, the sandbox is closed, the evaluator opens new ones.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tugline.datasets.base import Solution
from tugline.evaluators.base import SessionOutcome, Verdict
from tugline.rollout.parts import Parts
from tugline.rollout.sandboxes import PrewarmedSandbox, TaskSandboxes, read_tail
from tugline.rollout.stages import classify
from tugline.sandbox.base import Exit, Sandbox
from tugline.sandbox.files import hash_file, remove
from tugline.types import Failure, Status, Task

_EVAL_GRACE_S = 10.0


class TaskValidation(msgspec.Struct, frozen=True):
    """The evaluation of one solution."""

    reward: float | None
    reason: str
    """The evaluator's reason, or the end of the solution's output where it failed."""
    failure: Failure | None = None
    """Why there is no reward."""
    seconds: float = 0.0


class _SolutionRun:
    """One solution of one task; `stage` is where it is."""

    def __init__(self, task: Task, directory: Path, parts: Parts) -> None:
        self._task = task
        self._evaluator = parts.evaluator(task.evaluator)
        self._sandboxes = TaskSandboxes(task, directory, parts)
        self.stage = Status.INIT

    async def evaluate(self, solution: Solution) -> tuple[Verdict, str]:
        """The verdict, and why the solution's program failed if it did."""
        in_place = self._evaluator.in_place
        limits = self._task.limits
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(limits.init_s):
                opening = self._sandboxes.open_agent(solution.mounts)
                sandbox = await stack.enter_async_context(opening)
            self.stage = Status.RUN
            end, error = await self._run_solution(sandbox, solution)
            patch = await sandbox.diff()
            if not in_place:
                await stack.aclose()
            self.stage = Status.EVAL
            outcome = SessionOutcome(
                task=self._task,
                patch=patch,
                open_sandbox=PrewarmedSandbox(self._sandboxes.open_evaluation).open,
                timeout_s=limits.eval_s,
                exit=end,
                sandbox=sandbox if in_place else None,
            )
            async with asyncio.timeout(limits.eval_s + _EVAL_GRACE_S):
                return await self._evaluator.evaluate(outcome), error

    async def _run_solution(self, sandbox: Sandbox, solution: Solution) -> tuple[Exit, str]:
        await sandbox.put(sandbox.workdir, solution.changes)
        await sandbox.put(sandbox.home, solution.home)
        if not solution.argv:
            return Exit(0, timed_out=False, seconds=0.0), ""
        timeout_s = self._task.limits.agent_s
        end = await sandbox.run(
            solution.argv, env=solution.env, timeout_s=timeout_s, log_name="solution"
        )
        if end.code == 0 and not end.timed_out:
            return end, ""
        how = "ran out of time" if end.timed_out else f"ended with exit code {end.code}"
        tail = await asyncio.to_thread(read_tail, sandbox.logs / "solution.log")
        return end, f"the solution {how}: {tail}"


async def validate_task(
    task: Task, solution: Solution | None, directory: Path, parts: Parts
) -> TaskValidation:
    """Evaluate a solution (None: doing nothing) in the new `directory`, removed at the end.

    Raises `ConfigError` and `UnknownPlugin` for plug-ins that cannot be made.
    """
    began = time.monotonic()
    run = _SolutionRun(task, directory, parts)
    await parts.report_weaknesses(task.runtime)
    try:
        verdict, error_text = await run.evaluate(solution or Solution())
    except Exception as error:  # noqa: BLE001 - one task's failure must not end the others
        failure = classify(run.stage, error)
        return TaskValidation(None, failure.message, failure, time.monotonic() - began)
    finally:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(remove, directory.parent, directory.name)
    reason = error_text or str(verdict.report.get("reason", ""))
    if refused := verdict.report.get("refused"):
        reason += f" (not applied: {', '.join(refused)})"
    return TaskValidation(verdict.reward.value, reason, None, time.monotonic() - began)


def fingerprint(task: Task, solution: Solution | None) -> str:
    """A digest of all that a validation depends on: task, solution and the files they name."""
    digest = hashlib.sha256(msgspec.msgpack.encode((task, solution), order="deterministic"))
    for root in sorted(_find_paths(task, solution)):
        for path in sorted([root, *root.rglob("*")]):
            if path.is_file():
                hash_file(digest, path.resolve(), str(path))
    return digest.hexdigest()[:16]


def _find_paths(task: Task, solution: Solution | None) -> set[Path]:
    """Local files and folders besides the workspace's own repository or folder."""
    names = {task.workspace.build, *(one.source for one in (solution.mounts if solution else ()))}
    names |= set(_strings_of(task.evaluator.options))
    return {Path(name) for name in names if name and _exists(name)}


def _strings_of(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings_of(item)


def _exists(name: str) -> bool:
    with contextlib.suppress(OSError, ValueError):  # a string that is no path
        return Path(name).is_absolute() and Path(name).exists()
    return False
