"""``tugline tasks list | validate | prefetch``: list, validate and prefetch the tasks of a set.

A task is fine if its reference solution earns 1 and doing nothing earns less. Any other task would
teach a model nothing, or the wrong thing.
"""

import asyncio
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tugline.cli.options import Count, Json, Required
from tugline.cli.output import make_bar, print_json
from tugline.datasets.base import INSTANCE
from tugline.datasets.files import SelectedTasks, gather
from tugline.errors import ConfigError, UsageError
from tugline.rollout.parts import Parts
from tugline.rollout.task_validation import TaskValidation, fingerprint, validate_task
from tugline.types import Cause, PluginSpec, Task, Workspace

tasks = App(help="Task sets.")

Paths = Annotated[Required, Parameter(help="Task-set files, task files, or Harbor folders.")]
_RIGHT = 1.0 - 1e-6
"""The least reward of a solution, with room for rounding."""


class CheckState(StrEnum):
    """The result of validating a task."""

    FINE = "fine"
    BROKEN = "broken"
    """Its reference solution does not earn 1."""
    SOLVED = "solved"
    """Doing nothing earns 1."""
    ERROR = "error"
    """There was no reward."""
    UNPROVEN = "unproven"
    """It has no reference solution; nothing else is wrong."""


_GOOD = frozenset({CheckState.FINE, CheckState.UNPROVEN})


class TaskCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``--out``."""

    task: str
    digest: str
    """Of the task, its solution and their files; if one changes, it is validated again."""
    state: CheckState
    reference: float | None = None
    """Reward of the reference solution."""
    empty: float | None = None
    """Reward of doing nothing."""
    reason: str = ""
    cause: Cause | None = None
    seconds: float = 0.0


@tasks.command(name="list")
def list_tasks(*paths: Paths, as_json: Json = False) -> None:
    """List tasks with their tags."""
    found = [task for task, _ in gather(paths, folders=True)]
    if as_json:
        for task in found:
            print_json({"id": task.id, "samples": task.samples, "tags": task.tags})
        return
    table = Table("id", "samples", "tags", box=None)
    for task in found:
        tags = (f"{name}={value}" for name, value in task.tags.items() if name != INSTANCE)
        table.add_row(task.id, str(task.samples), Text(" ".join(tags), style="dim"))
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{len(found)} tasks, {sum(task.samples for task in found)} sessions")


@tasks.command
def prefetch(*paths: Paths, as_json: Json = False) -> None:
    """Fetch the images and repositories of tasks ahead of time."""
    wanted: dict[bytes, tuple[PluginSpec, list[Workspace]]] = {}
    for task, _ in gather(paths, folders=True):
        key = msgspec.msgpack.encode(task.runtime, order="deterministic")
        wanted.setdefault(key, (task.runtime, []))[1].append(task.workspace)
    failed = asyncio.run(_prefetch(list(wanted.values())))
    count = sum(len(set(workspaces)) for _, workspaces in wanted.values())
    if as_json:
        print_json({"workspaces": count, "failed": failed})
    else:
        for reason in failed:
            print(reason)
        print(f"{count - len(failed)} of {count} workspaces are here")
    if failed:
        sys.exit(1)


async def _prefetch(wanted: Sequence[tuple[PluginSpec, Sequence[Workspace]]]) -> list[str]:
    failed: list[str] = []
    with Console(stderr=True, highlight=False).status("prefetching") as status:
        for part, workspaces in wanted:
            for number, one in enumerate(dict.fromkeys(workspaces), 1):
                status.update(f"{part.name}: workspace {number} of {len(set(workspaces))}")
                failed += await Parts().runtime(part).prefetch([one])
    return failed


@tasks.command
def validate(
    *paths: Paths,
    runtime: str | None = None,
    jobs: Count = 2,
    out: Path | None = None,
    as_json: Json = False,
) -> None:
    """Validate tasks by reference solutions and empty ones; exit 1 if any is not fine.

    Args:
        runtime: Use this runtime instead of the tasks' own.
        jobs: Tasks to validate at once.
        out: Append a line for each task; tasks that are fine there are skipped.
    """
    found = gather(paths, folders=True)
    if runtime is not None:
        selected = PluginSpec(runtime)
        found = [(msgspec.structs.replace(task, runtime=selected), of) for task, of in found]
    parts = Parts()
    _check_runtimes(parts, [task for task, _ in found])
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    earlier = _read_results(out) if out else {}
    keys = [_key(task, selected) for task, selected in found]
    done = [earlier[key] for key in keys if key in earlier]
    left = [
        (task, selected, digest)
        for (task, selected), (name, digest) in zip(found, keys, strict=True)
        if (name, digest) not in earlier
    ]
    if done:
        console.print(f"validated before: {len(done)}, see {out}", markup=False)
    done += asyncio.run(_check_all(left, parts, jobs, out, console))
    if as_json:
        for one in done:
            print_json(one)
    else:
        _show(done)
    if any(one.state not in _GOOD for one in done):
        sys.exit(1)


def _check_runtimes(parts: Parts, tasks: Sequence[Task]) -> None:
    """Raises `UsageError` for a runtime that cannot be used on this machine."""
    for part in {msgspec.json.encode(task.runtime): task.runtime for task in tasks}.values():
        reason = parts.runtime(part).check_available()
        if reason is not None:
            raise UsageError(f"runtime {part.name!r} cannot be used here: {reason}")


async def _check_all(
    entries: Sequence[tuple[Task, SelectedTasks | None, str]],
    parts: Parts,
    jobs: int,
    out: Path | None,
    console: Console,
) -> list[TaskCheck]:
    places = asyncio.Semaphore(jobs)
    with (
        tempfile.TemporaryDirectory(prefix="tugline-") as folder,
        make_bar(console, TimeElapsedColumn()) as bar,
    ):
        line = bar.add_task("tasks", total=len(entries))

        async def check_one(
            number: int, task: Task, selected: SelectedTasks | None, digest: str
        ) -> TaskCheck:
            async with places:
                check = await _check_task(task, selected, digest, Path(folder) / str(number), parts)
            if out is not None:
                await asyncio.to_thread(_append_result, out, check)
            bar.advance(line)
            if not console.is_terminal:
                console.print(f"{check.task}: {check.state}", markup=False)
            return check

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(check_one(n, *each)) for n, each in enumerate(entries)]
    return [task.result() for task in running]


async def _check_task(
    task: Task, selected: SelectedTasks | None, digest: str, folder: Path, parts: Parts
) -> TaskCheck:
    """Evaluate both solutions, one after the other."""
    try:
        solution = await asyncio.to_thread(selected.solution, task) if selected else None
        solved = await validate_task(task, solution, folder / "solved", parts) if solution else None
        empty = await validate_task(task, None, folder / "empty", parts)
    except UsageError as error:  # a part that cannot be made
        return TaskCheck(task=task.id, digest=digest, state=CheckState.ERROR, reason=str(error))
    return _classify(task, digest, solved, empty)


def _classify(
    task: Task, digest: str, solved: TaskValidation | None, empty: TaskValidation
) -> TaskCheck:
    state, reason = CheckState.FINE, ""
    failed = next((one for one in (solved, empty) if one and one.failure), None)
    if failed is not None:
        which = "reference" if failed is solved else "empty"
        state, reason = CheckState.ERROR, f"{which}: {failed.reason}"
    elif empty.reward is not None and empty.reward >= _RIGHT:
        state, reason = CheckState.SOLVED, f"empty: {empty.reason}"
    elif solved is None:
        state = CheckState.UNPROVEN
    elif solved.reward is not None and solved.reward < _RIGHT:
        state, reason = CheckState.BROKEN, f"reference: {solved.reason}"
    return TaskCheck(
        task=task.id,
        digest=digest,
        state=state,
        reference=solved.reward if solved else None,
        empty=empty.reward,
        reason=reason,
        cause=failed.failure.cause if failed and failed.failure else None,
        seconds=empty.seconds + (solved.seconds if solved else 0.0),
    )


def _key(task: Task, selected: SelectedTasks | None) -> tuple[str, str]:
    try:
        return task.id, fingerprint(task, selected.solution(task) if selected else None)
    except (UsageError, OSError, TypeError):  # said when it is tried
        return task.id, ""


def _read_results(out: Path) -> dict[tuple[str, str], TaskCheck]:
    """Read earlier results that are still valid. Raises `ConfigError`."""
    with out.open("a+b") as file:  # also to find out now whether it can be written
        file.seek(0)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:  # a truncated line is validated again
        os.truncate(out, len(whole))
    valid: dict[tuple[str, str], TaskCheck] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            one = msgspec.json.decode(line, type=TaskCheck)
        except msgspec.DecodeError as error:
            msg = f"{out}, line {number} is not a line of this command: {error}"
            raise ConfigError(msg) from error
        if one.state in _GOOD and one.digest:  # without a digest it is unknown what was validated
            valid[one.task, one.digest] = one
    return valid


def _append_result(out: Path, check: TaskCheck) -> None:
    with out.open("ab") as file:
        file.write(msgspec.json.encode(check) + b"\n")


def _show(done: Sequence[TaskCheck]) -> None:
    console = Console(highlight=False)
    table = Table("task", "state", "reference", "empty", "reason", box=None)
    for one in done:
        rewards = ("-" if r is None else f"{r:g}" for r in (one.reference, one.empty))
        reason = f"{one.cause}: {one.reason}" if one.cause else one.reason
        table.add_row(one.task, one.state, *rewards, Text(reason[:300]))
    console.print(table)
    counts = Counter(one.state for one in done)
    console.print(", ".join(f"{state}: {counts[state]}" for state in CheckState if counts[state]))
