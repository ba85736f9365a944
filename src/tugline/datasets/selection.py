"""Which tasks of a set a run takes, and in which order: the same ones each time, on any machine.

Shares and shuffling go by a hash of the instance's name, so a task stays where it is when others
come or go. How hard a task is is told by results of earlier runs, as `tugline run --out` and
`tugline results --out` keep them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from tugline.datasets.base import INSTANCE, SPLIT, task_id
from tugline.errors import ConfigError
from tugline.protocol import ResultView
from tugline.recording.trajectories import RESULTS
from tugline.types import Task

_WHOLE = 1.0 + 1e-9
"""Shares such as .7, .2 and .1, with room for rounding."""


class Difficulty(msgspec.Struct, frozen=True):
    """Keep tasks by the mean reward that they earned before."""

    results: str
    """Folder of results, or its `results.jsonl`; relative to the task-set file."""
    min: float = 0.0
    """Least mean reward."""
    max: float = 1.0
    """Highest mean reward."""
    samples: int = 1
    """Judged samples that it takes to know; tasks with fewer are unknown."""
    unknown: bool = True
    """Whether unknown tasks are kept."""
    prefix: str | None = None
    """Of the earlier run's task ids; None: that of this file."""


class Selection(msgspec.Struct, frozen=True):
    """What is taken; all conditions hold together."""

    split: str | None = None
    """Tasks of this split: of those that `shares` make, else as the source says."""
    shares: dict[str, float] = {}
    """Splits to make, with their shares, which add up to at most 1."""
    include: tuple[str, ...] = ()
    """Patterns of instance names; any of them. None means all."""
    exclude: tuple[str, ...] = ()
    """Patterns of instance names; none of them."""
    tags: dict[str, str] = {}
    """Tag to a pattern of its value."""
    difficulty: Difficulty | None = None
    """By what earlier runs earned."""
    shuffle: int | None = None
    """Seed of another order than the source's."""
    limit: int | None = None
    """How many are taken, of those that are left after all else."""

    def check(self, where: str) -> None:
        """Raises `ConfigError` for values that make no sense."""
        wrong = None
        if (
            any(not share > 0 for share in self.shares.values())
            or math.fsum(self.shares.values()) > _WHOLE
        ):
            wrong = f"shares is {self.shares}, must be more than 0 each and at most 1 together"
        elif self.shares and self.split is not None and self.split not in self.shares:
            wrong = f"split is {self.split!r}, must be one of shares: {', '.join(self.shares)}"
        elif self.limit is not None and self.limit < 1:
            wrong = f"limit is {self.limit}, must be at least 1"
        elif self.difficulty and not self.difficulty.min <= self.difficulty.max:
            wrong = f"difficulty.min is {self.difficulty.min}, must be at most difficulty.max"
        if wrong:
            msg = f"{where}: select.{wrong}"
            raise ConfigError(msg)

    def pick(self, tasks: Iterable[Task], *, folder: Path, prefix: str = "") -> list[Task]:
        """The tasks that are taken, in their order. `folder` is where the file lies."""
        known = _rates(folder / self.difficulty.results) if self.difficulty else {}
        taken = [
            task
            for task in map(self._in_its_share, tasks)
            if self._wanted(task) and self._hard_enough(task, known, prefix)
        ]
        if self.shuffle is not None:
            taken.sort(key=lambda task: _draw(f"{self.shuffle}:{_instance(task)}"))
        return taken[: self.limit]

    def _in_its_share(self, task: Task) -> Task:
        if not self.shares:
            return task
        drawn = _draw(_instance(task))
        name, edge = "", 0.0
        for split, share in self.shares.items():
            edge += share
            if drawn < edge:
                name = split
                break
        return msgspec.structs.replace(task, tags={**task.tags, SPLIT: name})

    def _wanted(self, task: Task) -> bool:
        name = _instance(task)
        tags = task.tags
        return (
            (self.split is None or tags.get(SPLIT) == self.split)
            and (not self.include or any(fnmatchcase(name, each) for each in self.include))
            and not any(fnmatchcase(name, each) for each in self.exclude)
            and all(fnmatchcase(tags.get(tag, ""), each) for tag, each in self.tags.items())
        )

    def _hard_enough(self, task: Task, known: Mapping[str, list[float]], prefix: str) -> bool:
        if self.difficulty is None:
            return True
        before = self.difficulty.prefix
        name = task_id((prefix if before is None else before) + _instance(task))
        rewards = known.get(name, [])
        if len(rewards) < max(self.difficulty.samples, 1):
            return self.difficulty.unknown
        mean = sum(rewards) / len(rewards)
        return self.difficulty.min <= mean <= self.difficulty.max


def _instance(task: Task) -> str:
    return task.tags.get(INSTANCE, task.id)


def _draw(name: str) -> float:
    """A number from 0 to 1 that belongs to `name`."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]) / (1 << 56)


def _rates(path: Path) -> dict[str, list[float]]:
    """Rewards by task, as far as they were judged. Raises `ConfigError`."""
    file = path / RESULTS if path.is_dir() else path
    rewards: dict[str, list[float]] = {}
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        msg = f"select.difficulty.results is {str(file)!r}, cannot be read: {error.strerror}"
        raise ConfigError(msg) from error
    for number, line in enumerate(lines, 1):
        try:
            view = msgspec.json.decode(line, type=ResultView)
        except msgspec.DecodeError as error:
            msg = f"{file}, line {number} is no result of `tugline results --json`: {error}"
            raise ConfigError(msg) from error
        if view.reward is not None:
            rewards.setdefault(view.task, []).append(view.reward)
    return rewards
