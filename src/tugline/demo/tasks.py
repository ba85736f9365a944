"""Tasks of the demo, made from its problems."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import islice

from tugline.datasets.base import TaskSet, TaskTemplate
from tugline.demo.family import RepairProblem, Split, generate
from tugline.demo.settings import DemoSettings
from tugline.errors import ConfigError
from tugline.types import Group, Limits, PluginSpec, Sampling, Task

ATTEMPTS = 20
"""Attempts per session; each kill of the run costs the running sessions one."""
HELD_OUT_SEED = 1_000_003
"""Seed of the held-out problems; independent of the run, so runs can be compared."""


class RepairTasks(TaskSet):
    """The demo's problems as a task set: ``tugline.demo.tasks:RepairTasks``."""

    def __init__(self, split: Split = "train", seed: int = 0, count: int = 96) -> None:
        self._split, self._seed, self._count = split, seed, count

    def tasks(self, template: TaskTemplate) -> Iterator[Task]:
        """Yield the first `count` problems of a split and a seed."""
        for problem in islice(generate(self._split, self._seed), self._count):
            yield template.make(
                problem.id,
                problem.instruction,
                evaluator=PluginSpec("tests", {"cache": True}),
                files=problem.files,
                tags=problem.tags,
            )


def harness_spec(settings: DemoSettings) -> PluginSpec:
    """The harness and its options. Raises `ConfigError` if the command is missing or unused."""
    if settings.harness == "shell":
        if not settings.command:
            msg = "harness 'shell' needs the agent's command: add --command \"python my_agent.py\""
            raise ConfigError(msg)
        return PluginSpec("shell", {"command": settings.command})
    if settings.command:
        msg = f"command is for the harness 'shell' only, not for {settings.harness!r}"
        raise ConfigError(msg)
    return PluginSpec(settings.harness)


def training_tasks(settings: DemoSettings, step: int) -> list[Task]:
    """Groups of one step, counted from 1."""
    first = (step - 1) * settings.tasks_per_step
    chosen = islice(generate("train", settings.seed), first, first + settings.tasks_per_step)
    return [
        make_task(settings, f"step{step:03d}-{i}", problem, samples=settings.samples)
        for i, problem in enumerate(chosen)
    ]


def heldout_tasks(settings: DemoSettings, name: str) -> list[Task]:
    """Tasks of the evaluation `name`; problems and seeds do not depend on the name."""
    problems = islice(generate("heldout", HELD_OUT_SEED), settings.heldout)
    return [
        make_task(settings, f"{name}-{i:03d}", problem, samples=1)
        for i, problem in enumerate(problems)
    ]


def make_task(settings: DemoSettings, name: str, problem: RepairProblem, *, samples: int) -> Task:
    """Make a task; the seed of a single sample ignores the part of `name` before the dash."""
    seed_name = name.partition("-")[2] if samples == 1 else name
    return Task(
        id=name,
        instruction=problem.instruction,
        harness=harness_spec(settings),
        evaluator=PluginSpec("tests", {"cache": True}),
        # The start policy was trained on the paths that this runtime shows.
        runtime=PluginSpec("local"),
        builder=PluginSpec(settings.builder),
        files=problem.files,
        samples=samples,
        limits=Limits(agent_s=settings.agent_s, max_turns=settings.max_turns),
        group=Group(attempts=ATTEMPTS),
        sampling=Sampling(
            temperature=1.0,
            top_p=1.0,
            max_tokens=settings.max_answer,
            seed=_seed(settings.seed, seed_name),
        ),
        tags=problem.tags,
    )


def _seed(seed: int, name: str) -> int:
    return zlib.crc32(f"{seed}/{name}".encode())
