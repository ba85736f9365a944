"""The demo's problems as tasks for the node: what is asked, with what, and how it is judged."""

from __future__ import annotations

import zlib
from itertools import islice

from tugline.demo.family import Problem, generate
from tugline.demo.settings import DemoSettings
from tugline.errors import ConfigError
from tugline.types import Group, Limits, PluginSpec, Sampling, Task

ATTEMPTS = 20
"""A session that was cut off by a killed run is tried again; each kill costs it one attempt."""
HELD_OUT_SEED = 1_000_003
"""The same held-out problems for every seed of a run, so that runs can be compared."""


def harness_part(settings: DemoSettings) -> PluginSpec:
    """The harness with its options. Raises `ConfigError` if the command is missing or idle."""
    if settings.harness == "shell":
        if not settings.command:
            msg = "harness 'shell' needs the agent's command: add --command \"python my_agent.py\""
            raise ConfigError(msg)
        return PluginSpec("shell", {"command": settings.command})
    if settings.command:
        msg = f"command is for the harness 'shell' only, not for {settings.harness!r}"
        raise ConfigError(msg)
    return PluginSpec(settings.harness)


def training(settings: DemoSettings, step: int) -> list[Task]:
    """The groups of one step, from 1."""
    first = (step - 1) * settings.tasks_per_step
    chosen = islice(generate("train", settings.seed), first, first + settings.tasks_per_step)
    return [
        as_task(settings, f"step{step:03d}-{i}", problem, samples=settings.samples)
        for i, problem in enumerate(chosen)
    ]


def held_out(settings: DemoSettings, name: str) -> list[Task]:
    """The evaluation called `name`: the same problems and draws whatever the name."""
    problems = islice(generate("heldout", HELD_OUT_SEED), settings.heldout)
    return [
        as_task(settings, f"{name}-{i:03d}", problem, samples=1)
        for i, problem in enumerate(problems)
    ]


def as_task(settings: DemoSettings, name: str, problem: Problem, *, samples: int) -> Task:
    """One problem under a name; a single sample draws the same whatever stands before the dash."""
    place = name.partition("-")[2] if samples == 1 else name
    return Task(
        id=name,
        instruction=problem.instruction,
        harness=harness_part(settings),
        evaluator=PluginSpec("tests", {"cache": True}),
        # Its model, which was warmed up on these paths, can do no more than its tools can.
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
            seed=_seed(settings.seed, place),
        ),
        tags=problem.tags,
    )


def _seed(seed: int, place: str) -> int:
    return zlib.crc32(f"{seed}/{place}".encode())
