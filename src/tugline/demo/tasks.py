"""Tasks of the demo, made from its problems."""

from collections.abc import Iterator
from itertools import islice

from tugline.datasets.base import TaskSet, TaskTemplate
from tugline.demo.family import Split, generate
from tugline.demo.settings import DemoSettings
from tugline.errors import ConfigError
from tugline.types import PluginSpec, Task

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
