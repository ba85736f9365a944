"""Validate a task without a model: evaluate its reference solution, or no change at all.

The solution runs in the agent's sandbox, and its outcome is evaluated like an agent's: the changes
are extracted, the sandbox is closed, and the evaluator opens new ones.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from tugline.datasets.base import Solution
from tugline.evaluators.base import SessionOutcome
from tugline.evaluators.verdict import evaluate
from tugline.rollout.failures import classify
from tugline.rollout.parts import LOG_TAIL, Parts, PrewarmedSandboxes, TaskSandboxes
from tugline.sandbox.base import Exit, ProgramTimeout, Sandbox
from tugline.sandbox.files import hash_file, remove
from tugline.types import Failure, PluginSpec, Status, Task

_EVAL_GRACE_S = 10.0


class TaskValidation(msgspec.Struct, frozen=True):
    """Result of evaluating one solution."""

    reward: float | None
    reason: str
    """The evaluator's reason, or the end of the solution's output if it failed."""
    failure: Failure | None = None
    """Failure because of which there is no reward."""
    seconds: float = 0.0


async def validate_task(
    task: Task, solution: Solution | None, directory: Path, parts: Parts
) -> TaskValidation:
    """Evaluate a solution (None: no change) in the new folder `directory`, removed at the end.

    Raises `ConfigError` and `UnknownPlugin` for plug-ins that cannot be created.
    """
    began = time.monotonic()
    limits = task.limits
    solution = solution or Solution()
    evaluator = parts.evaluator(task.evaluator)
    sandboxes = TaskSandboxes(task, directory, parts)
    await parts.report_weaknesses(task.runtime)
    stage = Status.INIT
    try:
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(limits.init_s):
                opening = sandboxes.open_agent(solution.mounts)
                sandbox = await stack.enter_async_context(opening)
            stage = Status.RUN
            end, reason = await _run_solution(sandbox, solution, limits.agent_s)
            patch = await sandbox.diff()
            if not evaluator.in_place:
                await stack.aclose()
            stage = Status.EVAL
            limit = ProgramTimeout(limits.eval_s + _EVAL_GRACE_S)
            outcome = SessionOutcome(
                task=task,
                patch=patch,
                open_sandbox=PrewarmedSandboxes(sandboxes.open_evaluation).open,
                timeout_s=limits.eval_s,
                limit=limit,
                exit=end,
                sandbox=sandbox if evaluator.in_place else None,
            )
            async with limit.enforce():
                verdict = await evaluate(evaluator, outcome)
    except Exception as error:  # noqa: BLE001 - one task's failure must not end the others
        failure = classify(stage, error)
        return TaskValidation(None, failure.message, failure, time.monotonic() - began)
    finally:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(remove, directory.parent, directory.name)
    reason = reason or str(verdict.report.get("reason", ""))
    if refused := verdict.report.get("refused"):
        reason += f" (not applied: {', '.join(refused)})"
    if kept := verdict.report.get("setup_refused"):
        reason += f" (outputs of setup not applied: {', '.join(kept)})"
    if note := verdict.report.get("setup"):
        reason += f" ({note})"
    return TaskValidation(verdict.reward.value, reason, None, time.monotonic() - began)


async def _run_solution(sandbox: Sandbox, solution: Solution, timeout_s: float) -> tuple[Exit, str]:
    """Apply and run the solution; return its exit, and the reason if it failed."""
    await sandbox.put(sandbox.workdir, solution.changes)
    await sandbox.put(sandbox.home, solution.home)
    if not solution.argv:
        return Exit(0, timed_out=False, seconds=0.0), ""
    end = await sandbox.run(
        solution.argv, env=solution.env, timeout_s=timeout_s, log_name="solution"
    )
    if end.code == 0 and not end.timed_out:
        return end, ""
    failure = "ran out of time" if end.timed_out else f"ended with exit code {end.code}"
    return end, f"the solution {failure}: {end.output[-LOG_TAIL:].strip()}"


def fingerprint(task: Task, solution: Solution | None) -> str:
    """Return a digest of the inputs of a validation: task, solution and the files they name."""
    digest = hashlib.sha256(msgspec.msgpack.encode((task, solution), order="deterministic"))
    _hash_paths(digest, _find_paths(task, solution))
    return digest.hexdigest()[:16]


def fingerprint_evaluator(spec: PluginSpec) -> str:
    """Return a digest of an evaluator's name and options, and of the files that these name."""
    digest = hashlib.sha256(msgspec.msgpack.encode(spec, order="deterministic"))
    _hash_paths(digest, {Path(name) for name in _strings_of(spec.options) if _exists(name)})
    return digest.hexdigest()[:16]


def _hash_paths(digest: "hashlib._Hash", roots: Iterable[Path]) -> None:
    for root in sorted(roots):
        for path in sorted([root, *root.rglob("*")]):
            if path.is_file():
                hash_file(digest, path.resolve(), str(path))


def _find_paths(task: Task, solution: Solution | None) -> set[Path]:
    """Return local files and folders, except the workspace's own repository or folder."""
    names = {task.workspace.build, *(each.source for each in (solution.mounts if solution else ()))}
    names |= set(_strings_of(task.evaluator.options))
    return {Path(name) for name in names if name and _exists(name)}


def _strings_of(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings_of(item)


def _exists(name: str) -> bool:
    with contextlib.suppress(OSError, ValueError):  # the string is not a path
        return Path(name).is_absolute() and Path(name).exists()
    return False
