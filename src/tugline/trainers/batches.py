"""Which tasks each step trains on, and which are held out: a function of the configuration alone.

So a position in the data is one number, and a resumed run submits the very same tasks.
"""

import random
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from msgspec.structs import replace

from tugline.datasets.base import INSTANCE, task_id
from tugline.datasets.files import SelectedTasks, SetFile, TaskSelection
from tugline.errors import ConfigError
from tugline.launch.server import check_runnable
from tugline.trainers.config import TaskSource, TrainConfig
from tugline.types import Task

ATTEMPTS = 20
"""Least attempts of a sample; each restart because of stale weights spends one."""
_FIRST = 10
"""Priority of evaluations: publishing waits for them."""
_MAX_ID = 128


class TaskBatches:
    """The batches of a run. Raises `ConfigError` for tasks that cannot be read."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        """`folder` is that of the configuration file."""
        self._schedule = config.schedule
        self.run = ""
        """Begins the ids of all tasks, where a server has those of other runs as well."""
        self.trained = _read(config.tasks, config, folder, "tasks")
        self._kinds = _read_tags(self.trained, config.schedule.balance)
        held_out = config.heldout
        self.samples = held_out.samples if held_out else 0
        """Sessions of a held-out task."""
        self.held_out = _read(held_out, config, folder, "heldout") if held_out else []
        both = {_instance(task) for task in self.trained} & {
            _instance(task) for task in self.held_out
        }
        if both:
            msg = f"heldout: {len(both)} instances are trained on as well, such as {min(both)!r}"
            raise ConfigError(msg, "heldout")

    def __len__(self) -> int:
        """Tasks that are trained on."""
        return len(self.trained)

    def check(self) -> None:
        """Raises `Invalid` for the first task that could not be run."""
        for task in [*self.batch(1), *self.held_out[:1]]:
            check_runnable(task)

    def batch(self, step: int) -> list[Task]:
        """Return the tasks of a step, counted from 1, each of which is a group."""
        size = self._schedule.tasks_per_step
        return [self._group(index) for index in range((step - 1) * size, step * size)]

    def evaluation(self, version: int) -> list[Task]:
        """Return the held-out tasks for a version; their random draws are those of any version."""
        return [
            replace(
                self.make(f"eval{version:06d}", task, f"heldout/{_instance(task)}"),
                samples=self.samples,
                priority=_FIRST,
            )
            for task in self.held_out
        ]

    def _group(self, index: int) -> Task:
        epoch, place = divmod(index, len(self.trained))
        task = self.trained[_order(self._kinds, f"{self._schedule.seed}/{epoch}")[place]]
        made = self.make(f"g{index:07d}", task, str(index))
        return replace(made, samples=self._schedule.samples)

    def make(self, prefix: str, task: Task, draw: str) -> Task:
        """Return `task` under an id that begins with `prefix`; equal `draw`s sample alike."""
        seed = zlib.crc32(f"{self._schedule.seed}/{draw}".encode())
        return replace(
            task,
            id=task_id(f"{self.run}{prefix}-{task.id}"[:_MAX_ID]),
            sampling=replace(task.sampling, seed=seed),
            group=replace(task.group, attempts=max(ATTEMPTS, task.group.attempts)),
        )


@lru_cache(maxsize=2)
def _order(kinds: Sequence[str], seed: str) -> Sequence[int]:
    """Return a random order of tasks in which those of each kind are evenly spread."""
    order = list(range(len(kinds)))
    random.Random(seed).shuffle(order)
    sizes, seen, places = Counter(kinds), Counter[str](), {}
    for index in order:
        places[index] = (seen[kinds[index]] + 0.5) / sizes[kinds[index]]
        seen[kinds[index]] += 1
    return sorted(order, key=places.__getitem__)


def _read_tags(tasks: Sequence[Task], tag: str | None) -> tuple[str, ...]:
    """Return each task's value of a tag. Raises `ConfigError` if no task has it."""
    kinds = tuple(task.tags.get(tag or "", "") for task in tasks)
    if tag is not None and not any(kinds):
        known = ", ".join(sorted({name for task in tasks for name in task.tags}))
        msg = f"schedule.balance is {tag!r}, must be a tag of the tasks: {known}"
        raise ConfigError(msg, "schedule.balance")
    return kinds


def _read(source: TaskSource, config: TrainConfig, folder: Path, where: str) -> list[Task]:
    file = SetFile(source.taskset, config.template, source.select or TaskSelection())
    return SelectedTasks(file, where, folder).tasks()


def _instance(task: Task) -> str:
    return task.tags.get(INSTANCE, task.id)


def describe(config: TrainConfig, batches: TaskBatches, folder: Path) -> str:
    """Return what a run would do, for people."""
    plan, size = config.schedule, len(batches)
    groups = plan.steps * plan.tasks_per_step
    engine = ", ".join(config.engine.urls) or "in this process"
    kind = f"asynchronous, staleness <= {plan.staleness}" if plan.staleness else "synchronous"
    if plan.staleness and config.grpo.importance is None:
        kind += "; stale tokens are clipped: set grpo.importance to truncate"
    lines = [
        f"model       {config.model}",
        f"engine      {engine}; new weights after each step, running calls: {plan.pause}",
        f"tasks       {size}, each trained {groups / size:.1f} times",
        f"steps       {plan.steps} of {plan.tasks_per_step} groups, {kind}",
        f"sessions    {groups * plan.samples}, {plan.samples} in a group",
        f"checkpoints every {plan.checkpoint_every} steps, the last {plan.keep} are kept",
        f"figures     console, metrics.jsonl {' '.join(one.name for one in config.metrics)}",
        f"folder      {folder}{' (resumed)' if folder.exists() else ''}",
    ]
    if config.heldout:
        held_out = config.heldout
        lines.insert(
            4,
            f"held out    {len(batches.held_out)} tasks, {held_out.samples} sessions each, every"
            f" {held_out.every} steps",
        )
    return "\n".join(lines)
