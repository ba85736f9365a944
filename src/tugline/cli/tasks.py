"""``tugline tasks list | validate | prefetch``: what is in a task set, and whether it can be done.

A task is fine when its reference solution earns 1 and doing nothing earns less. Anything else
would teach a model nothing, or the wrong thing, and is found here without one.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tugline.cli.options import Json
from tugline.datasets.base import INSTANCE
from tugline.datasets.files import SelectedTasks, gather
from tugline.errors import ConfigError, UsageError
from tugline.rollout.parts import Parts
from tugline.rollout.task_validation import TaskValidation, fingerprint, validate_task
from tugline.types import Cause, PluginSpec, Task, Workspace

tasks = typer.Typer(help="Task sets.", no_args_is_help=True)

Paths = Annotated[
    list[str],
    typer.Argument(metavar="PATH...", help="Task-set files, task files, or Harbor folders."),
]
_RIGHT = 1.0 - 1e-6
"""The least reward of a solution, with room for rounding."""


class State(StrEnum):
    """What is to be said of a task."""

    FINE = "fine"
    BROKEN = "broken"
    """Its reference solution does not earn 1."""
    SOLVED = "solved"
    """Doing nothing earns 1."""
    ERROR = "error"
    """There was no reward."""
    UNPROVEN = "unproven"
    """It has no reference solution; nothing else is wrong."""


_GOOD = frozenset({State.FINE, State.UNPROVEN})


class Proved(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``--out``."""

    task: str
    digest: str
    """Of the task, its solution and their files; when one changes, it is tried again."""
    state: State
    reference: float | None = None
    """What the reference solution earned."""
    empty: float | None = None
    """What doing nothing earned."""
    why: str = ""
    cause: Cause | None = None
    seconds: float = 0.0


class Listed(msgspec.Struct, frozen=True):
    """A line of ``list --json``."""

    id: str
    samples: int
    tags: dict[str, str]


@tasks.command(name="list")
def list_tasks(paths: Paths, *, as_json: Json = False) -> None:
    """List tasks with their tags."""
    found = [task for task, _ in gather(paths, folders=True)]
    if as_json:
        for task in found:
            typer.echo(msgspec.json.encode(Listed(task.id, task.samples, task.tags)))
        return
    table = Table("id", "samples", "tags", box=None)
    for task in found:
        tags = (f"{name}={value}" for name, value in task.tags.items() if name != INSTANCE)
        table.add_row(task.id, str(task.samples), Text(" ".join(tags), style="dim"))
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{len(found)} tasks, {sum(task.samples for task in found)} sessions")


@tasks.command()
def prefetch(paths: Paths, *, as_json: Json = False) -> None:
    """Have the images and repositories of tasks on this machine before sessions ask for them."""
    wanted: dict[bytes, tuple[PluginSpec, list[Workspace]]] = {}
    for task, _ in gather(paths, folders=True):
        key = msgspec.msgpack.encode(task.runtime, order="deterministic")
        wanted.setdefault(key, (task.runtime, []))[1].append(task.workspace)
    failed = asyncio.run(_prefetch(list(wanted.values())))
    count = sum(len(set(workspaces)) for _, workspaces in wanted.values())
    if as_json:
        typer.echo(msgspec.json.encode({"workspaces": count, "failed": failed}))
    else:
        for why in failed:
            typer.echo(why)
        typer.echo(f"{count - len(failed)} of {count} workspaces are here")
    if failed:
        raise typer.Exit(1)


async def _prefetch(wanted: Sequence[tuple[PluginSpec, Sequence[Workspace]]]) -> list[str]:
    failed: list[str] = []
    with Console(stderr=True, highlight=False).status("prefetching") as status:
        for part, workspaces in wanted:
            for number, one in enumerate(dict.fromkeys(workspaces), 1):
                status.update(f"{part.name}: workspace {number} of {len(set(workspaces))}")
                failed += await Parts().runtime(part).prefetch([one])
    return failed


@tasks.command()
def validate(
    paths: Paths,
    *,
    runtime: Annotated[
        str | None, typer.Option(help="Try them in this runtime instead of their own.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Tasks that are tried at once.")] = 2,
    out: Annotated[
        Path | None,
        typer.Option(help="Add a line for each task; what is fine there is not tried again."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Try reference solutions and empty ones, without a model; exit code 1 if any is not fine."""
    found = gather(paths, folders=True)
    if runtime is not None:
        selected = PluginSpec(runtime)
        found = [(msgspec.structs.replace(task, runtime=selected), of) for task, of in found]
    parts = Parts()
    _check_runtimes(parts, [task for task, _ in found])
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    proved = _kept(out) if out else {}
    keys = [_key(task, selected) for task, selected in found]
    done = [proved[key] for key in keys if key in proved]
    left = [
        (task, selected, digest)
        for (task, selected), (name, digest) in zip(found, keys, strict=True)
        if (name, digest) not in proved
    ]
    if done:
        console.print(f"tried before: {len(done)}, see {out}", markup=False)
    done += asyncio.run(_try_all(left, parts, jobs, out, console))
    if as_json:
        for one in done:
            typer.echo(msgspec.json.encode(one))
    else:
        _show(done)
    if any(one.state not in _GOOD for one in done):
        raise typer.Exit(1)


def _check_runtimes(parts: Parts, found: Sequence[Task]) -> None:
    """Raises `UsageError` for one that cannot be used here: no task is to blame for that."""
    for part in {msgspec.json.encode(task.runtime): task.runtime for task in found}.values():
        why = parts.runtime(part).check_available()
        if why is not None:
            msg = f"runtime {part.name!r} cannot be used here: {why}"
            raise UsageError(msg)


async def _try_all(
    found: Sequence[tuple[Task, SelectedTasks | None, str]],
    parts: Parts,
    jobs: int,
    out: Path | None,
    console: Console,
) -> list[Proved]:
    places = asyncio.Semaphore(jobs)
    with tempfile.TemporaryDirectory(prefix="tugline-") as folder, _bar(console) as bar:
        line = bar.add_task("tasks", total=len(found))

        async def one(
            number: int, task: Task, selected: SelectedTasks | None, digest: str
        ) -> Proved:
            async with places:
                proved = await _try(task, selected, digest, Path(folder) / str(number), parts)
            if out is not None:
                await asyncio.to_thread(_keep, out, proved)
            bar.advance(line)
            if not console.is_terminal:
                console.print(f"{proved.task}: {proved.state}", markup=False)
            return proved

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(n, *each)) for n, each in enumerate(found)]
    return [task.result() for task in running]


async def _try(
    task: Task, selected: SelectedTasks | None, digest: str, folder: Path, parts: Parts
) -> Proved:
    """Both solutions, one after the other."""
    try:
        solution = await asyncio.to_thread(selected.solution, task) if selected else None
        solved = await validate_task(task, solution, folder / "solved", parts) if solution else None
        empty = await validate_task(task, None, folder / "empty", parts)
    except UsageError as error:  # a part that cannot be made
        return Proved(task=task.id, digest=digest, state=State.ERROR, why=str(error))
    return _judged(task, digest, solved, empty)


def _judged(
    task: Task, digest: str, solved: TaskValidation | None, empty: TaskValidation
) -> Proved:
    state, why = State.FINE, ""
    failed = next((one for one in (solved, empty) if one and one.failure), None)
    if failed is not None:
        which = "reference" if failed is solved else "empty"
        state, why = State.ERROR, f"{which}: {failed.why}"
    elif empty.reward is not None and empty.reward >= _RIGHT:
        state, why = State.SOLVED, f"empty: {empty.why}"
    elif solved is None:
        state = State.UNPROVEN
    elif solved.reward is not None and solved.reward < _RIGHT:
        state, why = State.BROKEN, f"reference: {solved.why}"
    return Proved(
        task=task.id,
        digest=digest,
        state=state,
        reference=solved.reward if solved else None,
        empty=empty.reward,
        why=why,
        cause=failed.failure.cause if failed and failed.failure else None,
        seconds=empty.seconds + (solved.seconds if solved else 0.0),
    )


def _key(task: Task, selected: SelectedTasks | None) -> tuple[str, str]:
    try:
        return task.id, fingerprint(task, selected.solution(task) if selected else None)
    except (UsageError, OSError, TypeError):  # said when it is tried
        return task.id, ""


def _kept(out: Path) -> dict[tuple[str, str], Proved]:
    """What was tried before and needs no second look. Raises `ConfigError`."""
    with out.open("a+b") as file:  # also to see now whether it can be written
        file.seek(0)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:  # cut short: it is tried again
        os.truncate(out, len(whole))
    kept: dict[tuple[str, str], Proved] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            one = msgspec.json.decode(line, type=Proved)
        except msgspec.DecodeError as error:
            msg = f"{out}, line {number} is none of this command's: {error}"
            raise ConfigError(msg) from error
        if one.state in _GOOD and one.digest:  # without one, nobody knows what was tried
            kept[one.task, one.digest] = one
    return kept


def _keep(out: Path, proved: Proved) -> None:
    with out.open("ab") as file:
        file.write(msgspec.json.encode(proved) + b"\n")


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _show(done: Sequence[Proved]) -> None:
    console = Console(highlight=False)
    table = Table("task", "state", "reference", "empty", "why", box=None)
    for one in done:
        rewards = ("-" if r is None else f"{r:g}" for r in (one.reference, one.empty))
        why = f"{one.cause}: {one.why}" if one.cause else one.why
        table.add_row(one.task, one.state, *rewards, Text(why[:300]))
    console.print(table)
    counts = Counter(one.state for one in done)
    console.print(", ".join(f"{state}: {counts[state]}" for state in State if counts[state]))
