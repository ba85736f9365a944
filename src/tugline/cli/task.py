"""``tugline task``: commands for task files and task sets, without a server.

`validate` evaluates tasks without a model. A task is fine if its reference solution has reward 1
and the empty solution has less. Other tasks give no learning signal, or a wrong one.
"""

import asyncio
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from tugline.cli.options import Count, Json, Required
from tugline.cli.output import (
    make_table,
    print_json,
    print_report,
    print_text,
    show_progress,
    track,
)
from tugline.datasets.files import SelectedTasks, gather, load_tasks
from tugline.errors import ConfigError, Invalid, TuglineError, UsageError
from tugline.launch.progress import WorkProgress
from tugline.rollout.parts import Parts
from tugline.rollout.task_checks import Reasons, find_mistakes, find_notes
from tugline.rollout.task_validation import TaskValidation, fingerprint, validate_task
from tugline.server.validation import check_task
from tugline.task_files import make_template
from tugline.types import INSTANCE, Cause, PluginSpec, Task, is_pass

task = App(name="task")
VALIDATION = "validation"
"""Tag for the state of validation."""

Paths = Annotated[Required, Parameter(help="Task or task-set files, folders of them, or patterns.")]
SetPaths = Annotated[Required, Parameter(help="Task-set files, task files, or Harbor folders.")]


@task.command
def init(path: Path = Path("task.yaml"), /, *, force: bool = False) -> None:
    """Write a task file with every field and its description.

    Args:
        path: File to write.
        force: Overwrite an existing file.
    """
    if path.suffix not in {".yaml", ".yml"}:
        raise UsageError(f"{path} must end in .yaml, because the file is YAML")
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(make_template())
    except FileExistsError as error:
        msg = f"{path} already exists; choose another file, or overwrite it with --force"
        raise UsageError(msg) from error
    print(f"wrote {path}; try `tugline task check {path}`")


@task.command
def check(*paths: Paths) -> None:
    """Check that tasks are valid and their plug-ins can be created on this machine."""
    with show_progress("reading the tasks"):
        tasks = load_tasks(paths)
    parts = Parts()
    notes: Counter[str] = Counter()
    reasons: Reasons = {}

    def check_one(task: Task) -> None:
        problems = [*find_mistakes(task)]
        for check in (check_task, parts.check):
            try:
                check(task)
            except Invalid as error:
                problems.append(error)
        if problems:
            raise Invalid.combine(problems)
        notes.update(find_notes(task, parts, reasons))

    one_file = len(paths) == 1 and Path(paths[0]).is_file()
    _check_each(tasks, check_one, f"{paths[0]}: " if one_file else "")
    for note, count in notes.items():
        print_text(f"note on {count} of {len(tasks)} tasks: {note}", style="yellow", stderr=True)
    sessions = sum(each.samples for each in tasks)
    print(f"well-formed tasks: {len(tasks)}, sessions: {sessions}")


def read_checked(
    paths: Sequence[str], *, prefix: str = "", validated: Path | None = None
) -> list[Task]:
    """Load tasks from files and check their values. Raises `UsageError`, `Invalid`.

    Ids get the `prefix`; tasks in the file `validated` get their last state as a tag.
    """
    states = {line.task: line.state for line in _read_lines(validated)} if validated else {}
    tasks = [
        replace(
            each,
            id=prefix + each.id,
            tags=each.tags | ({VALIDATION: states[each.id]} if each.id in states else {}),
        )
        for each in load_tasks(paths)
    ]
    _check_each(tasks, check_task)
    return tasks


def _check_each(tasks: Sequence[Task], check: Callable[[Task], None], where: str = "") -> None:
    """Check all tasks. Raises one error with the problems of all, each with its task."""
    problems: list[TuglineError] = []
    for each in track(tasks, "checking", "tasks"):
        try:
            check(each)
        except (UsageError, Invalid) as error:
            problems.append(TuglineError.combine([error], f"{where}task {each.id!r}"))
    if problems:
        raise TuglineError.combine(problems)


@task.command(name="list")
def list_tasks(*paths: SetPaths, as_json: Json = False) -> None:
    """List tasks with their tags."""
    tasks = [each for each, _ in gather(paths, folders=True)]
    if as_json:
        for each in tasks:
            print_json({"id": each.id, "samples": each.samples, "tags": each.tags})
        return
    rows = ((each.id, each.samples, Text(_format_tags(each), style="dim")) for each in tasks)
    print_text(
        make_table(("id", "samples", "tags"), rows),
        f"{len(tasks)} tasks, {sum(each.samples for each in tasks)} sessions",
    )


def _format_tags(task: Task) -> str:
    return " ".join(f"{name}={value}" for name, value in task.tags.items() if name != INSTANCE)


@task.command
async def prefetch(*paths: SetPaths, as_json: Json = False) -> None:
    """Fetch the images and repositories of tasks in advance."""
    parts = Parts()
    failed = []
    wanted = {_encode((t.runtime, t.workspace)): t for t, _ in gather(paths, folders=True)}
    with show_progress("prefetching", "workspaces", len(wanted)) as progress:
        for each in wanted.values():
            progress.summary = f"now for {each.runtime.name}"
            failed += await parts.runtime(each.runtime).prefetch([each.workspace])
            progress.advance()
        progress.summary = ""
    summary = f"{len(wanted) - len(failed)} of {len(wanted)} workspaces are ready"
    print_report(
        {"workspaces": len(wanted), "failed": failed},
        lambda: print_text(*failed, summary),
        as_json=as_json,
        failed=bool(failed),
    )


def _encode(value: object) -> bytes:
    return msgspec.msgpack.encode(value, order="deterministic")


# --------------------------------------------------------------------------- validation
class CheckState(StrEnum):
    """State of a task after validation."""

    FINE = "fine"
    BROKEN = "broken"
    """The reference solution does not get reward 1."""
    SOLVED = "solved"
    """The empty solution gets reward 1."""
    ERROR = "error"
    """A solution got no reward."""
    UNPROVEN = "unproven"
    """The task has no reference solution; the empty solution is fine."""


_GOOD = frozenset({CheckState.FINE, CheckState.UNPROVEN})


class TaskCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Result of validating a task: a line of ``--out``."""

    task: str
    digest: str
    """Digest of task, solution and their files; if it changes, the task is validated again."""
    state: CheckState
    reference: float | None = None
    """Reward of the reference solution."""
    empty: float | None = None
    """Reward of the empty solution."""
    reason: str = ""
    cause: Cause | None = None
    seconds: float = 0.0


@task.command
async def validate(
    *paths: SetPaths,
    runtime: str | None = None,
    jobs: Count = 2,
    out: Path | None = None,
    as_json: Json = False,
) -> None:
    """Validate tasks with reference and empty solutions; exit 1 if any task is not fine.

    Args:
        runtime: Runtime to use instead of those of the tasks.
        jobs: Number of tasks to validate concurrently.
        out: File to append a line per task; tasks that are fine in it are skipped.
    """
    entries = gather(paths, folders=True)
    if runtime is not None:
        entries = [(replace(t, runtime=PluginSpec(runtime)), source) for t, source in entries]
    checks = await _check_all(entries, jobs, out)
    if as_json:
        for check in checks:
            print_json(check)
    else:
        _show(checks)
    if any(check.state not in _GOOD for check in checks):
        sys.exit(1)


async def _check_all(
    entries: Sequence[tuple[Task, SelectedTasks | None]], jobs: int, out: Path | None
) -> list[TaskCheck]:
    """Check tasks. Raises `UsageError` for a runtime that cannot be used on this machine."""
    parts = Parts()
    parts.check_available(each for each, _ in entries)
    earlier = _read_results(out) if out else {}
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    slots = asyncio.Semaphore(jobs)
    progress = WorkProgress(console, "tasks", len(entries), title="validating")
    with tempfile.TemporaryDirectory(prefix="tugline-") as folder, progress:

        async def check_one(number: int, task: Task, selected: SelectedTasks | None) -> TaskCheck:
            async with slots:
                own = Path(folder, str(number))
                check = await _check_task(task, selected, earlier, own, parts)
            known = (check.task, check.digest) in earlier
            progress.advance(new=not known)
            if not known:
                if out is not None:
                    await asyncio.to_thread(_append_result, out, check)
                if not console.is_terminal:
                    console.print(f"{check.task}: {check.state}")
            return check

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(check_one(n, *pair)) for n, pair in enumerate(entries)]
    checks = [each.result() for each in running]
    known = sum((check.task, check.digest) in earlier for check in checks)
    if known:
        console.print(f"validated before: {known}, see {out}")
    return checks


async def _check_task(
    task: Task,
    selected: SelectedTasks | None,
    earlier: Mapping[tuple[str, str], TaskCheck],
    folder: Path,
    parts: Parts,
) -> TaskCheck:
    """Evaluate the reference and the empty solution, unless the result is in `earlier`."""
    try:
        solution = await asyncio.to_thread(selected.solution, task) if selected else None
        digest = await asyncio.to_thread(fingerprint, task, solution)
        if (task.id, digest) in earlier:
            return earlier[task.id, digest]
        solved = await validate_task(task, solution, folder / "solved", parts) if solution else None
        empty = await validate_task(task, None, folder / "empty", parts)
    except (UsageError, OSError, TypeError) as error:  # a missing file, an unusable plug-in
        return TaskCheck(task=task.id, digest="", state=CheckState.ERROR, reason=str(error))
    return _classify(task, digest, solved, empty)


def _classify(
    task: Task, digest: str, solved: TaskValidation | None, empty: TaskValidation
) -> TaskCheck:
    state = CheckState.FINE
    reason = ""
    failed = next((run for run in (solved, empty) if run and run.failure), None)
    if failed is not None:
        which = "reference" if failed is solved else "empty"
        state = CheckState.ERROR
        reason = f"{which}: {failed.reason}"
    elif empty.reward is not None and is_pass(empty.reward):
        state = CheckState.SOLVED
        reason = f"empty: {empty.reason}"
    elif solved is None:
        state = CheckState.UNPROVEN
    elif solved.reward is not None and not is_pass(solved.reward):
        state = CheckState.BROKEN
        reason = f"reference: {solved.reason}"
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


def _read_results(out: Path) -> dict[tuple[str, str], TaskCheck]:
    """Read earlier results that are still valid. Raises `ConfigError`."""
    with out.open("a+b") as file:  # also checks that the file is writable
        file.seek(0)
        data = file.read()
    if (whole := data.rfind(b"\n") + 1) != len(data):  # a truncated line is validated again
        os.truncate(out, whole)
    valid: dict[tuple[str, str], TaskCheck] = {}
    for check in _read_lines(out):
        if check.state in _GOOD and check.digest:  # without a digest, the inputs are unknown
            valid[check.task, check.digest] = check
    return valid


def _read_lines(path: Path) -> Iterator[TaskCheck]:
    """Read the lines of `validate --out`. Raises `ConfigError`."""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            yield msgspec.json.decode(line, type=TaskCheck)
        except msgspec.DecodeError as error:
            msg = f"{path}, line {number} was not written by `tugline task validate --out`: {error}"
            raise ConfigError(msg) from error


def _append_result(out: Path, check: TaskCheck) -> None:
    with out.open("ab") as file:
        file.write(msgspec.json.encode(check) + b"\n")


def _show(checks: Sequence[TaskCheck]) -> None:
    rows = (
        (
            check.task,
            check.state,
            *("-" if n is None else f"{n:g}" for n in (check.reference, check.empty)),
            f"{check.cause}: {check.reason}"[:300] if check.cause else check.reason[:300],
        )
        for check in checks
    )
    counts = Counter(check.state for check in checks)
    print_text(
        make_table(("task", "state", "reference", "empty", "reason"), rows),
        ", ".join(f"{state}: {counts[state]}" for state in CheckState if counts[state]),
    )
