"""A task tried without a model: what its reference solution earns, and what nothing at all earns.

The solution runs where an agent would, and its outcome goes the way of an agent's: changes are
taken out, the box is gone, the evaluator judges in new ones. So what earns 1 here can be earned,
and what goes wrong here would go wrong in a thousand sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec

from tugline.datasets.base import Solution
from tugline.evaluators import base as evaluators
from tugline.evaluators.base import Outcome, Verdict
from tugline.rollout.failures import failure_of
from tugline.rollout.parts import Parts
from tugline.sandbox.base import Content, Exit, Sandbox, SandboxSpec
from tugline.sandbox.files import remove
from tugline.types import Failure, Status, Task

_GRACE_S = 10.0
_TAIL = 400


class TaskValidation(msgspec.Struct, frozen=True):
    """What came of one try."""

    reward: float | None
    why: str
    """What the evaluator says, or the solution's last words where it failed."""
    failure: Failure | None = None
    """Why there is no reward."""
    seconds: float = 0.0


class _Try:
    """One solution of one task, in folders of its own."""

    def __init__(self, task: Task, directory: Path, parts: Parts) -> None:
        self._task, self._directory = task, directory
        self._runtime = parts.runtime(task.runtime)
        self._evaluator = parts.evaluator(task.evaluator)
        self._boxes = 0
        self.at = Status.INIT

    async def verdict(self, solution: Solution | None) -> tuple[Verdict, str]:
        """The evaluator's word, and why the solution's program failed if it did."""
        in_place = evaluators.in_place(self._evaluator)
        limits = self._task.limits
        async with contextlib.AsyncExitStack() as place:
            async with asyncio.timeout(limits.init_s):
                box = await place.enter_async_context(self._agents_box(solution, in_place=in_place))
            self.at = Status.RUN
            end, said = await self._solve(box, solution or Solution())
            patch = await box.diff()
            if not in_place:
                await place.aclose()
            self.at = Status.EVAL
            outcome = Outcome(
                task=self._task,
                patch=patch,
                open_box=self._open_box,
                timeout_s=limits.eval_s,
                exit=end,
                box=box if in_place else None,
            )
            async with asyncio.timeout(limits.eval_s + _GRACE_S):
                return await self._evaluator.evaluate(outcome), said

    async def _solve(self, box: Sandbox, solution: Solution) -> tuple[Exit, str]:
        await box.put(box.workdir, solution.changes)
        await box.put(box.home, solution.home)
        if not solution.argv:
            return Exit(0, timed_out=False, seconds=0.0), ""
        env = {"HOME": str(box.home), **solution.env}
        seconds = self._task.limits.agent_s
        end = await box.run(solution.argv, env=env, timeout_s=seconds, log_name="solution")
        if end.code == 0 and not end.timed_out:
            return end, ""
        how = "ran out of time" if end.timed_out else f"ended with exit code {end.code}"
        said = await asyncio.to_thread(_tail, box.logs / "solution.log")
        return end, f"the solution {how}: {said}"

    def _agents_box(
        self, solution: Solution | None, *, in_place: bool
    ) -> AbstractAsyncContextManager[Sandbox]:
        mounts = solution.mounts if solution else ()
        mounts += evaluators.hidden(self._evaluator, self._task)
        if in_place:
            mounts += evaluators.mounts(self._evaluator, self._task)
        place = SandboxSpec(workspace=self._task.workspace, files=self._task.files, mounts=mounts)
        return self._runtime.open(self._directory / "agent", place)

    @contextlib.asynccontextmanager
    async def _open_box(self, files: Mapping[str, Content]) -> AsyncIterator[Sandbox]:
        self._boxes += 1
        mounts = evaluators.mounts(self._evaluator, self._task)
        place = SandboxSpec(workspace=self._task.workspace, mounts=mounts)
        async with self._runtime.open(self._directory / f"eval-{self._boxes}", place) as box:
            await box.put(box.workdir, files)
            yield box


async def prove(
    task: Task, solution: Solution | None, directory: Path, parts: Parts
) -> TaskValidation:
    """What a solution earns; None is the empty one. `directory` is new, and gone afterwards.

    Raises `ConfigError` and `UnknownPlugin` for parts that cannot be made.
    """
    began = time.monotonic()
    trial = _Try(task, directory, parts)
    await parts.introduce(task.runtime)
    try:
        verdict, said = await trial.verdict(solution)
    except Exception as error:  # noqa: BLE001 - one task's trouble is not that of the others
        failure = failure_of(trial.at, error)
        return TaskValidation(None, failure.message, failure, time.monotonic() - began)
    finally:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(remove, directory.parent, directory.name)
    why = said or str(verdict.report.get("reason", ""))
    if refused := verdict.report.get("refused"):
        why += f" (not laid on: {', '.join(refused)})"
    return TaskValidation(verdict.reward.value, why, None, time.monotonic() - began)


def fingerprint(task: Task, solution: Solution | None) -> str:
    """Changes with whatever a proof depends on: the task, the solution, and files they name."""
    told = hashlib.sha256(msgspec.msgpack.encode((task, solution), order="deterministic"))
    for place in sorted(_named(task, solution)):
        for path in sorted([place, *place.rglob("*")]):
            if path.is_file():
                told.update(f"\0{path}\0".encode(errors="surrogateescape"))
                with path.open("rb") as file:
                    told.update(hashlib.file_digest(file, "sha256").digest())
    return told.hexdigest()[:16]


def _named(task: Task, solution: Solution | None) -> set[Path]:
    """Files and folders of this machine besides the workspace's own repository or folder."""
    names = {task.workspace.build, *(one.source for one in (solution.mounts if solution else ()))}
    names |= set(_texts(task.evaluator.options))
    return {Path(name) for name in names if name and _is_there(name)}


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _is_there(name: str) -> bool:
    with contextlib.suppress(OSError, ValueError):  # a text that is no path
        return Path(name).is_absolute() and Path(name).exists()
    return False


def _tail(log: Path) -> str:
    try:
        return log.read_bytes()[-_TAIL:].decode(errors="replace").strip()
    except OSError:
        return ""
