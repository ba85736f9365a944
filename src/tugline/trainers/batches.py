"""Selection of the tasks that each step trains on, and of the held-out tasks.

The selection depends only on the configuration and the step, and with `choose: pass_rate` on the
results of earlier steps, which are in the checkpoint. So a resumed run submits the same tasks.
"""

import hashlib
import math
import random
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import cycle
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tugline.atomic import write_file
from tugline.datasets.base import task_id
from tugline.datasets.files import SelectedTasks, SetFile, TaskSelection, instance_of, read_set
from tugline.errors import ConfigError, UsageError
from tugline.launch.server import check_runnable
from tugline.rollout.parts import Parts
from tugline.trainers.config import Schedule, TaskSource, TrainConfig, add_digests
from tugline.trainers.questions import ask
from tugline.types import HELD_OUT, INSTANCE, Task, Trajectory

ATTEMPTS = 20
"""Minimum attempts of a sample; each restart because of stale weights uses one attempt."""
_FIRST = 10
"""Priority of evaluations, because publishing waits for them."""
_MAX_ID = 128
_TASKS = "tasks.json"
"""File of a run's folder with the digests of its tasks."""
_LEAST = 0.05
"""Minimum weight of a task."""
_UNKNOWN = 0.5
"""Pass rate of a task without results."""
_KEPT = 0.5
"""Factor of the moving average of results."""


class TaskBatches:
    """The batches of a run. Raises `ConfigError` for tasks that cannot be read."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        """`folder` is the folder of the configuration file."""
        self._schedule = config.schedule
        self._is_local = config.server is None
        self.run = ""
        """Prefix of all task ids, for a server that has tasks of other runs as well."""
        self.trained = _read(config.tasks, config, folder, "tasks")
        self._kinds = _read_tags(self.trained, config.schedule.balance)
        held_out = config.heldout
        self.samples = held_out.samples if held_out else 0
        """Sessions per held-out task."""
        self.held_out = _read(held_out, config, folder, "heldout") if held_out else []
        both = set(map(instance_of, self.trained)) & set(map(instance_of, self.held_out))
        if both:
            msg = (
                f"heldout shares {len(both)} instances with the training tasks, such as "
                f"{min(both)!r}"
            )
            raise ConfigError(msg, "heldout")

    def check(self) -> None:
        """Check the first batch and a held-out task.

        Raises `Invalid` if one cannot be run, `UsageError` if its runtime cannot be used here,
        unless nodes of another server run the sessions.
        """
        tasks = [*self.batch(0, self.choose(1, {})), *self.held_out[:1]]
        for task in tasks:
            check_runnable(task)
        if self._is_local:
            Parts().check_available(tasks)

    def list_weaknesses(self) -> list[str]:
        """Return a line for each runtime of the tasks that does not fully isolate agents here.

        None if nodes of another server run the sessions.
        """
        parts = Parts()
        tasks = [*self.trained, *self.held_out] if self._is_local else []
        specs = {task.runtime.name: task.runtime for task in tasks}
        gaps = {name: parts.describe_weaknesses(spec) for name, spec in specs.items()}
        return [
            f"runtime {name!r} does not fully isolate agents: {text}"
            for name, text in gaps.items()
            if text
        ]

    def store(self, folder: Path) -> None:
        """Store the digests of the tasks. Raises `UsageError` if an earlier start had others.

        Steps refer to tasks by their position, so a changed file would train other tasks.
        """
        path = folder / _TASKS
        now = {"tasks": _digest(self.trained), "heldout": _digest(self.held_out)}
        if path.exists():
            stored = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, str]])
            changes = [text for name in now if (text := _compare(stored.get(name, {}), now[name]))]
            if changes:
                msg = f"the tasks have changed since {folder} was started: {'; '.join(changes)}"
                raise UsageError(f"{msg}. Restore them, or choose another --out")
        write_file(path, msgspec.json.format(msgspec.json.encode(now)))

    def choose(
        self, step: int, rates: Mapping[int, float], start: int | None = None
    ) -> tuple[int, ...]:
        """Return the tasks of a step, counted from 1, as their numbers in `trained`.

        `rates` are the pass rates known so far, `start` is the place of its first task in the
        order; None: that without refill. A drawn task has the same kind as the task that it
        replaces in the order.
        """
        size = self._schedule.tasks_per_step
        first = (step - 1) * size if start is None else start
        return self._choose(str(step), rates, range(first, first + size), ())

    def choose_further(
        self, step: int, rates: Mapping[int, float], places: range, chosen: Sequence[int]
    ) -> tuple[int, ...]:
        """Return the tasks of a further round of a step, at `places` of the order.

        Tasks that are drawn are others than those of the earlier rounds, `chosen`, if possible.
        """
        return self._choose(f"{step}/{places.start}", rates, places, chosen)

    def _choose(
        self, draw: str, rates: Mapping[int, float], places: range, chosen: Sequence[int]
    ) -> tuple[int, ...]:
        plan = self._schedule
        count = len(self.trained)
        order = [_order(self._kinds, f"{plan.seed}/{n // count}")[n % count] for n in places]
        if plan.choose == "order" or places.stop <= count:
            return tuple(order)
        first = order[: max(0, count - places.start)]
        drawn = self._draw(f"{plan.seed}/{draw}", rates, [*chosen, *first])
        return (*first, *(next(drawn[self._kinds[number]]) for number in order[len(first) :]))

    def _draw(
        self, seed: str, rates: Mapping[int, float], last: Sequence[int]
    ) -> dict[str, Iterator[int]]:
        """Draw the tasks of each kind by weight, without replacement; those in `last` come last."""
        source = random.Random(seed)
        waits = []
        for number in range(len(self.trained)):
            rate = rates.get(number, _UNKNOWN)
            wait = source.expovariate(max(_LEAST, rate * (1 - rate)))  # least is first
            waits.append((number in last, wait, number))
        kinds: dict[str, list[int]] = {}
        for *_, number in sorted(waits):
            kinds.setdefault(self._kinds[number], []).append(number)
        return {kind: cycle(numbers) for kind, numbers in kinds.items()}

    def update_rates(
        self, rates: Mapping[int, float], groups: Mapping[str, int], results: Sequence[Trajectory]
    ) -> dict[int, float]:
        """Update pass rates with `results`; `groups` maps task ids to numbers in `trained`."""
        if self._schedule.choose == "order":
            return {}
        earned: dict[int, list[float]] = {}
        for result in results:
            if (reward := result.reward) is not None and math.isfinite(reward.value):
                earned.setdefault(groups[result.task], []).append(min(1.0, max(0.0, reward.value)))
        known = dict(rates)
        for number, rewards in earned.items():
            newest = sum(rewards) / len(rewards)
            known[number] = newest + _KEPT * (known.get(number, newest) - newest)
        return known

    def batch(self, start: int, chosen: Sequence[int], *, further: bool = False) -> list[Task]:
        """Return the chosen tasks, each of which is a group, from place `start` of the order on.

        Tasks of `further` rounds run before those of later batches, because a step waits for them.
        """
        tasks = [
            self.make(f"g{at:07d}", self.trained[n], str(at), samples=self._schedule.samples)
            for at, n in enumerate(chosen, start)
        ]
        if further:
            tasks = [replace(task, priority=min(_FIRST, task.priority + 1)) for task in tasks]
        return tasks

    def evaluation(self, version: int) -> list[Task]:
        """Return the held-out tasks for a version; sampling seeds are equal for every version."""
        prefix = f"eval{version:06d}"
        own = {"samples": self.samples, "priority": _FIRST}
        tasks = [
            self.make(prefix, task, f"heldout/{instance_of(task)}", **own) for task in self.held_out
        ]
        return [replace(task, tags=task.tags | {HELD_OUT: "true"}) for task in tasks]

    def make(self, prefix: str, task: Task, draw: str, **own: int) -> Task:
        """Return `task` with an id that begins with `prefix`, and with the fields `own` replaced.

        Tasks with equal `draw` have equal sampling seeds.
        """
        seed = zlib.crc32(f"{self._schedule.seed}/{draw}".encode())
        return replace(
            task,
            id=task_id(f"{self.run}{prefix}-{task.id}"[:_MAX_ID]),
            tags=task.tags | {INSTANCE: instance_of(task)},
            sampling=replace(task.sampling, seed=seed),
            group=replace(task.group, attempts=max(ATTEMPTS, task.group.attempts)),
            **own,
        )


def _digest(tasks: Sequence[Task]) -> dict[str, str]:
    """Return a digest of each task's own content by its id, in order."""
    own = ((task.id, (task.instruction, task.files, task.tags)) for task in tasks)
    encode = msgspec.msgpack.Encoder(order="deterministic").encode
    return {name: hashlib.sha256(encode(content)).hexdigest()[:16] for name, content in own}


def _compare(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Describe how two lists of tasks differ; empty if they are equal."""
    if list(before.items()) == list(now.items()):
        return ""
    gone = before.keys() - now.keys()
    new = now.keys() - before.keys()
    other = {name for name in before.keys() & now.keys() if before[name] != now[name]}
    counts = {"removed": gone, "added": new, "changed": other}
    texts = [
        f"{len(names)} {what}, such as {min(names)!r}" for what, names in counts.items() if names
    ]
    return ", ".join(texts) or "their order is different"


@lru_cache(maxsize=2)
def _order(kinds: Sequence[str], seed: str) -> Sequence[int]:
    """Return a random order of tasks in which the tasks of each kind are evenly spread."""
    order = list(range(len(kinds)))
    random.Random(seed).shuffle(order)
    sizes = Counter(kinds)
    seen = Counter[str]()
    places = {}
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


def _read(source: TaskSource | str, config: TrainConfig, folder: Path, where: str) -> list[Task]:
    source = TaskSource(file=Path(source)) if isinstance(source, str) else source
    if source.taskset is not None:
        file = SetFile(source.taskset, config.template, source.select or TaskSelection())
        return SelectedTasks(file, where, folder).tasks()
    path = folder / (source.file or Path()).expanduser()
    selected = read_set(path, {f"template.{key}": value for key, value in config.template.items()})
    if selected is None:
        msg = f"{path} is not a task-set file, which has the keys taskset and template"
        raise ConfigError(msg, where)
    return selected.tasks()


def describe(config: TrainConfig, batches: TaskBatches, folder: Path, *, rows: int = 0) -> str:
    """Return a readable description of a run; `rows` is the number of supervised rows."""
    plan = config.schedule
    size = len(batches.trained)
    groups = plan.steps * plan.tasks_per_step
    engine = ", ".join(config.engine.urls) or "in this process"
    kind = f"asynchronous, staleness <= {plan.staleness}" if plan.staleness else "synchronous"
    if plan.staleness and config.grpo.importance is None:
        kind += "; stale tokens are clipped: set grpo.importance to truncate"
    order = ", on average" if plan.choose == "pass_rate" else ""
    often = f"{plan.checkpoint_minutes:g} minutes"
    if plan.checkpoint_every is not None:
        often = f"{plan.checkpoint_every} steps"
    held_out = config.heldout
    grpo = add_digests(config.grpo)
    objective = f"loss {grpo.loss}, advantage {grpo.advantage}, credit {grpo.credit}"
    for option, digest in grpo.digests.items():
        objective += f"; {option} of sha256 {digest[:12]}"
    weights = {
        "token": "by its trained tokens: one with ten traces like it counts ten times",
        "sequence": "once, whatever its number of traces",
        "constant": "by its trained tokens: one with ten traces like it counts ten times",
    }
    most = f" to {plan.refill_limit * groups * plan.samples}" if plan.refill else ""
    lines = [
        f"model       {config.model}",
        f"engine      {engine}; new weights after each step, running calls: {plan.pause}",
        f"tasks       {size}, each trained {groups / size:.1f} times{order}",
        f"steps       {plan.steps} of {plan.tasks_per_step} groups, {kind}",
        _describe_refill(plan),
        f"held out    {len(batches.held_out)} tasks, {held_out.samples} sessions each, every"
        f" {held_out.every} steps"
        if held_out
        else "",
        f"objective   {objective}",
        _describe_supervised(config, rows),
        f"weights     a session counts {weights[grpo.normalisation]}",
        f"sessions    {groups * plan.samples}{most}, {plan.samples} in a group",
        f"checkpoints every {often}, the last {plan.keep} are kept",
        f"metrics     console, metrics.jsonl {' '.join(sink.name for sink in config.metrics)}",
        f"folder      {folder}{' (resumed)' if folder.exists() else ''}",
        *(f"question    {text}" for text in ask(config, size)),
    ]
    return "\n".join(filter(None, lines))


def _describe_refill(plan: Schedule) -> str:
    if not plan.refill:
        return ""
    least = plan.tasks_per_step
    limit = plan.refill_limit * least
    return f"refill      until {least} groups have a signal, at most {limit} groups a step"


def _describe_supervised(config: TrainConfig, rows: int) -> str:
    if config.supervised is None:
        return ""
    weight = config.grpo.cross_entropy
    text = f"supervised  {config.supervised.rows} of {rows} rows in each step, weight {weight:g}"
    return text + (", and tool output, with the same" if config.grpo.tool_tokens else "")
