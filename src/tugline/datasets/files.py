"""Task-set files: a task set, what its tasks have in common, and which of them are taken.

They stand beside task files wherever paths are given: `load` reads both. Like task files they are
read strictly, and what is wrong is told by file, key, value and what would be right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from tugline.datasets.base import INSTANCE, TASKSET, Solution, TaskSet, Template
from tugline.datasets.selection import Selection
from tugline.errors import ConfigError, UnknownPlugin
from tugline.plugins import find, make
from tugline.schema import decode, read_values
from tugline.task_files import find_files, read_tasks
from tugline.types import PluginSpec, Task

HARBOR_TASK = "task.toml"
"""What a Harbor task's folder is known by."""
_TRIAL = {"harness": {"name": "shell", "options": {"command": "true"}}}
"""A folder of Harbor tasks has no template; this one is enough to look at them."""


class SetFile(msgspec.Struct, frozen=True):
    """A task-set file."""

    taskset: PluginSpec
    """Which set, and where it is."""
    template: dict[str, Any]
    """What all tasks have, with the keys of a task file."""
    select: Selection = Selection()
    """Which tasks are taken."""
    prefix: str = ""
    """Put before each task's id, to run the same set again."""


class Chosen:
    """The tasks that a task-set file stands for, and their solutions."""

    def __init__(self, told: SetFile, where: str, folder: Path) -> None:
        """Raises `ConfigError` and `UnknownPlugin`."""
        self._folder, self._prefix, self._where = folder, told.prefix, where
        self._select, self._name = told.select, told.taskset.name
        self._select.check(where)
        self._set = made(told.taskset, folder)
        self._template = Template.read(
            told.template, f"{where}, template", folder, prefix=told.prefix
        )

    def tasks(self) -> list[Task]:
        """Those that are taken, in their order. Raises `ConfigError`, also where none is left."""
        every = self._set.tasks(self._template)
        named = (_tagged(task, self._name) for task in every)
        tasks = self._select.pick(named, folder=self._folder, prefix=self._prefix)
        if not tasks:
            msg = f"{self._where}: no task is left; see select and taskset.options"
            raise ConfigError(msg)
        return tasks

    def solution(self, task: Task) -> Solution | None:
        """The reference solution of one of the tasks."""
        return self._set.solution(task)


def load(paths: Iterable[Path | str]) -> list[Task]:
    """The tasks behind paths of task files and task-set files. Raises `UsageError`."""
    return [task for task, _ in gather(paths)]


def gather(
    paths: Iterable[Path | str], *, folders: bool = False
) -> list[tuple[Task, Chosen | None]]:
    """Tasks, each with the set that it is from; with `folders`, Harbor's need no file of ours.

    Raises `UsageError`.
    """
    tasks: list[tuple[Task, Chosen | None]] = []
    homes: dict[str, str] = {}
    for path in paths:
        harbor = harbor_folder(Path(path)) if folders else None
        for where, task, chosen in _of_set(str(path), harbor) if harbor else _of_files(path):
            if task.id in homes:
                msg = f"{where}: id {task.id!r} is taken, by {homes[task.id]}"
                raise ConfigError(msg)
            homes[task.id] = where
            tasks.append((task, chosen))
    return tasks


def _of_files(path: Path | str) -> Iterator[tuple[str, Task, Chosen | None]]:
    """The tasks of files, each with its place in words."""
    for file in find_files(path):
        chosen = read_set(file)
        if chosen is None:
            yield from ((where, task, None) for where, task in read_tasks(file))
        else:
            yield from _of_set(str(file), chosen)


def _of_set(where: str, chosen: Chosen) -> Iterator[tuple[str, Task, Chosen]]:
    yield from ((f"{where}, {task.tags[INSTANCE]}", task, chosen) for task in chosen.tasks())


def read_set(path: Path) -> Chosen | None:
    """What a task-set file stands for; None for another file. Raises `ConfigError`."""
    if path.suffix.lower() == ".jsonl" or path.is_dir():
        return None
    values = read_values(path)
    if not isinstance(values, dict) or "taskset" not in values:
        return None
    return Chosen(decode(values, SetFile, source=str(path)), str(path), path.parent)


def harbor_folder(path: Path) -> Chosen | None:
    """The tasks of a Harbor folder, to look at; None for another path."""
    if not path.is_dir() or not [*path.glob(HARBOR_TASK), *path.glob(f"*/{HARBOR_TASK}")]:
        return None
    told = SetFile(PluginSpec("harbor", {"path": str(path.absolute())}), dict(_TRIAL))
    return Chosen(told, str(path), path)


def made(part: PluginSpec, folder: Path) -> TaskSet:
    """A task set, with a `path` that is relative to `folder`. Raises `ConfigError`."""
    target = find("taskset", part.name)
    options = dict(part.options)
    if isinstance(options.get("path"), str):
        options["path"] = str((folder / Path(options["path"]).expanduser()).absolute())
    if not (isinstance(target, type) and issubclass(target, TaskSet)):
        msg = f"{part.name!r} is no taskset: it must be a subclass of TaskSet"
        raise UnknownPlugin(msg)
    taskset: TaskSet = make("taskset", part.name, target, options)
    return taskset


def _tagged(task: Task, name: str) -> Task:
    return msgspec.structs.replace(task, tags={TASKSET: name, **task.tags})
