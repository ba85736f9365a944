"""Task-set files: a task set, a template of its tasks and a selection of them.

They are accepted wherever task files are; `load_tasks` reads both, strictly. A selection is the
same each time and on any machine: shares and shuffling use a hash of the instance's name, so that
adding or removing tasks does not move others. Difficulty is computed from the results of earlier
runs, saved by `tugline run --out` or `tugline results --out`.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from tugline.config import NO_CHANGES, change
from tugline.datasets.base import SPLIT, TASKSET, Solution, TaskSet, TaskTemplate, task_id
from tugline.errors import ConfigError, UsageError
from tugline.plugins import import_beside, make
from tugline.recording.trajectories import read_results
from tugline.schema import PositiveFloat, PositiveInt, decode, read_values
from tugline.task_files import find_files, read_tasks
from tugline.types import INSTANCE, PluginSpec, Task

HARBOR_TASK = "task.toml"
"""The file that marks a folder as a Harbor task."""
_INSPECTION = {"harness": {"name": "shell", "options": {"command": "true"}}}
"""Template of a folder of Harbor tasks without a task-set file."""
_WHOLE = 1.0 + 1e-9
"""Maximum sum of shares, with a margin for rounding, as in .7 + .2 + .1."""


class Difficulty(msgspec.Struct, frozen=True):
    """Keep tasks by their mean reward in an earlier run."""

    results: str
    """Folder of results, or its `results.jsonl`; relative to the task-set file."""
    min: float = 0.0
    """Least mean reward."""
    max: float = 1.0
    """Highest mean reward."""
    samples: int = 1
    """Least number of rewarded samples; the difficulty of tasks with fewer is unknown."""
    unknown: bool = True
    """Whether tasks of unknown difficulty are kept."""
    prefix: str | None = None
    """Prefix of the earlier run's task ids; None: that of this file."""


class TaskSelection(msgspec.Struct, frozen=True):
    """Conditions that selected tasks must meet; all must hold."""

    split: str | None = None
    """Tasks of this split, one of `shares` or of the source."""
    shares: dict[str, PositiveFloat] = {}
    """Splits to make, with their shares, which add up to at most 1."""
    include: tuple[str, ...] = ()
    """Patterns of instance names, of which at least one must match; empty: all names match."""
    exclude: tuple[str, ...] = ()
    """Patterns of instance names, none of which may match."""
    tags: dict[str, str] = {}
    """Patterns of values, by tag."""
    difficulty: Difficulty | None = None
    """Condition on the rewards of earlier runs."""
    shuffle: int | None = None
    """Seed of a random order; None: the order of the source."""
    limit: PositiveInt | None = None
    """Maximum number of tasks, of those that meet all conditions."""

    def check(self, where: str) -> None:
        """Check that values are consistent. Raises `ConfigError`."""
        wrong = None
        if math.fsum(self.shares.values()) > _WHOLE:
            wrong = f"shares is {self.shares}, must add up to at most 1"
        elif self.shares and self.split is not None and self.split not in self.shares:
            wrong = f"split is {self.split!r}, must be one of shares: {', '.join(self.shares)}"
        elif self.difficulty and not self.difficulty.min <= self.difficulty.max:
            wrong = f"difficulty.min is {self.difficulty.min}, must be at most difficulty.max"
        if wrong:
            raise ConfigError(f"{where}: select.{wrong}")

    def pick(self, tasks: Iterable[Task], *, folder: Path, prefix: str = "") -> list[Task]:
        """Select tasks. The path of results is relative to `folder`."""
        known = _read_rewards(folder / self.difficulty.results) if self.difficulty else {}
        selected = [
            task
            for task in map(self._assign_split, tasks)
            if self._matches(task) and self._matches_difficulty(task, known, prefix)
        ]
        if self.shuffle is not None:
            selected.sort(key=lambda task: _hash(f"{self.shuffle}:{instance_of(task)}"))
        return selected[: self.limit]

    def _assign_split(self, task: Task) -> Task:
        if not self.shares:
            return task
        name = choose_share(self.shares, instance_of(task), otherwise="")
        return msgspec.structs.replace(task, tags={**task.tags, SPLIT: name})

    def _matches(self, task: Task) -> bool:
        name = instance_of(task)
        tags = task.tags
        return (
            (self.split is None or tags.get(SPLIT) == self.split)
            and (not self.include or any(fnmatchcase(name, each) for each in self.include))
            and not any(fnmatchcase(name, each) for each in self.exclude)
            and all(fnmatchcase(tags.get(tag, ""), each) for tag, each in self.tags.items())
        )

    def _matches_difficulty(
        self, task: Task, known: Mapping[str, list[float]], prefix: str
    ) -> bool:
        if self.difficulty is None:
            return True
        before = self.difficulty.prefix
        name = task_id((prefix if before is None else before) + instance_of(task))
        rewards = known.get(name, [])
        if len(rewards) < max(self.difficulty.samples, 1):
            return self.difficulty.unknown
        mean = sum(rewards) / len(rewards)
        return self.difficulty.min <= mean <= self.difficulty.max


def instance_of(task: Task) -> str:
    """Return the name of a task's instance, or the task's id if it has none."""
    return task.tags.get(INSTANCE, task.id)


def choose_share(shares: Mapping[str, float], name: str, *, otherwise: str) -> str:
    """Return the share that the hash of `name` falls into; `otherwise` beyond the last."""
    position = _hash(name)
    ends = accumulate(shares.values())
    return next(
        (share for share, end in zip(shares, ends, strict=True) if position < end), otherwise
    )


def _hash(name: str) -> float:
    """Return a number from 0 to 1 that depends on `name` alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]) / (1 << 56)


def _read_rewards(path: Path) -> dict[str, list[float]]:
    """Read the rewards of earlier results by task id. Raises `ConfigError`."""
    rewards: dict[str, list[float]] = {}
    try:
        views = read_results(path)
    except UsageError as error:
        raise ConfigError(f"select.difficulty.results: {error}") from error
    for view in views:
        if view.reward is not None:
            rewards.setdefault(view.task, []).append(view.reward)
    return rewards


class SetFile(msgspec.Struct, frozen=True):
    """The content of a task-set file."""

    taskset: PluginSpec
    """The task set and its options."""
    template: dict[str, Any]
    """Fields shared by all tasks, with the keys of a task file."""
    select: TaskSelection = TaskSelection()
    """Selection of the tasks."""
    prefix: str = ""
    """Prefix of each task's id, to run the same set again."""


class SelectedTasks:
    """The tasks that a task-set file selects, and their solutions."""

    def __init__(self, file: SetFile, where: str, folder: Path) -> None:
        """Raises `ConfigError` and `UnknownPlugin`."""
        self._folder, self._where, self._file = folder, where, file
        file.select.check(where)
        self._set = _make_task_set(file.taskset, folder)
        self._template = TaskTemplate.read(
            file.template, f"{where}, template", folder, prefix=file.prefix
        )

    def tasks(self) -> list[Task]:
        """List the selected tasks. Raises `ConfigError`, also if there are none."""
        name = self._file.taskset.name
        select = self._file.select
        tagged = (
            msgspec.structs.replace(task, tags={TASKSET: name, **task.tags})
            for task in self._set.tasks(self._template)
        )
        tasks = select.pick(tagged, folder=self._folder, prefix=self._file.prefix)
        if not tasks:
            raise ConfigError(
                f"{self._where}: no tasks are selected; check select and taskset.options"
            )
        return tasks

    def solution(self, task: Task) -> Solution | None:
        """Return the reference solution of one of the tasks."""
        return self._set.solution(task)


def load_tasks(paths: Iterable[Path | str], changes: Mapping[str, Any] = NO_CHANGES) -> list[Task]:
    """Load tasks from files, folders of files (not recursively) and glob patterns.

    `changes` override values of task-set files by dotted key. Raises `ConfigError` if a file is
    invalid or an id is used twice, `UsageError` if no file is found, or none for the changes.
    """
    gathered = gather(paths, changes=changes)
    if changes and not any(selected for _, selected in gathered):
        raise UsageError(f"--set {next(iter(changes))}: none of the files is a task-set file")
    return [task for task, _ in gathered]


def gather(
    paths: Iterable[Path | str], *, folders: bool = False, changes: Mapping[str, Any] = NO_CHANGES
) -> list[tuple[Task, SelectedTasks | None]]:
    """Load tasks, each with its set; with `folders` also folders of Harbor tasks.

    Raises `UsageError`.
    """
    tasks: list[tuple[Task, SelectedTasks | None]] = []
    sources: dict[str, str] = {}
    for path in paths:
        harbor = read_harbor_folder(Path(path)) if folders else None
        found = _list_set(str(path), harbor) if harbor else _read_files(path, changes)
        for where, task, selected in found:
            if task.id in sources:
                raise ConfigError(f"{where}: id {task.id!r} is already used by {sources[task.id]}")
            sources[task.id] = where
            tasks.append((task, selected))
    return tasks


def _read_files(
    path: Path | str, changes: Mapping[str, Any]
) -> Iterator[tuple[str, Task, SelectedTasks | None]]:
    """Yield the tasks of files, each with its source for messages."""
    for file in find_files(path):
        import_beside(file)
        selected = read_set(file, changes)
        if selected is None:
            yield from ((where, task, None) for where, task in read_tasks(file))
        else:
            yield from _list_set(str(file), selected)


def _list_set(where: str, selected: SelectedTasks) -> Iterator[tuple[str, Task, SelectedTasks]]:
    yield from ((f"{where}, {task.tags[INSTANCE]}", task, selected) for task in selected.tasks())


def read_set(path: Path, changes: Mapping[str, Any] = NO_CHANGES) -> SelectedTasks | None:
    """Read a task-set file with `changes`; None for another file. Raises `ConfigError`."""
    if path.suffix.lower() == ".jsonl" or path.is_dir():
        return None
    values = read_values(path)
    if not isinstance(values, dict) or "taskset" not in values:
        return None
    file = decode(values, SetFile, source=str(path))
    if changes:
        file = decode(change(values, changes), SetFile, source="--set")
    return SelectedTasks(file, str(path), path.parent)


def read_harbor_folder(path: Path) -> SelectedTasks | None:
    """Read a folder of Harbor tasks; None for another path."""
    if not path.is_dir() or not [*path.glob(HARBOR_TASK), *path.glob(f"*/{HARBOR_TASK}")]:
        return None
    file = SetFile(PluginSpec("harbor", {"path": str(path.absolute())}), dict(_INSPECTION))
    return SelectedTasks(file, str(path), path)


def _make_task_set(spec: PluginSpec, folder: Path) -> TaskSet:
    """Make a task set, whose `path` is relative to `folder`. Raises `ConfigError`."""
    options = dict(spec.options)
    if isinstance(options.get("path"), str):
        options["path"] = str((folder / Path(options["path"]).expanduser()).absolute())
    return make("taskset", PluginSpec(spec.name, options), TaskSet)
