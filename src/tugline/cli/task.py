"""``tugline task init | check | schema``: task files, without a server."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from msgspec.structs import replace

from tugline.cli.options import Required
from tugline.datasets.files import load_tasks
from tugline.errors import Invalid, TuglineError, UsageError
from tugline.rollout.parts import Parts
from tugline.server.validation import check_task
from tugline.task_files import make_json_schema, make_template
from tugline.types import Task

task = App(help="Task files.")

Paths = Annotated[Required, Parameter(help="Task or task-set files, folders of them, or patterns.")]


@task.command
def init(path: Path = Path("task.yaml"), /, *, force: bool = False) -> None:
    """Write a task file with every field and what it means.

    Args:
        path: File to write.
        force: Overwrite an existing file.
    """
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(make_template())
    except FileExistsError as error:
        msg = f"{path} exists; name another file, or overwrite it with --force"
        raise UsageError(msg) from error
    print(f"wrote {path}; try `tugline task check {path}`")


@task.command
def check(*paths: Paths) -> None:
    """Check that tasks are valid and their plug-ins can be made here."""
    tasks = read_checked(paths)
    _check_each(tasks, Parts().check)
    sessions = sum(each.samples for each in tasks)
    print(f"well-formed tasks: {len(tasks)}, sessions: {sessions}")


@task.command
def schema() -> None:
    """Print the JSON schema of task files, for editors."""
    print(msgspec.json.format(msgspec.json.encode(make_json_schema()), indent=2).decode())


def read_checked(paths: Sequence[str], *, prefix: str = "") -> list[Task]:
    """Load tasks from files and check their values. Raises `UsageError`, `Invalid`.

    Each id gets the `prefix`.
    """
    tasks = [replace(each, id=prefix + each.id) for each in load_tasks(paths)]
    _check_each(tasks, check_task)
    return tasks


def _check_each(tasks: Sequence[Task], check: Callable[[Task], None]) -> None:
    """Check all tasks. Raises one error with the problems of all."""
    problems: list[TuglineError] = []
    for each in tasks:
        try:
            check(each)
        except (UsageError, Invalid) as error:
            problems.append(TuglineError.combine([error], f"task {each.id!r}"))
    if problems:
        raise TuglineError.combine(problems)
