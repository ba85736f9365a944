"""The demo: a training run of its own tasks, and the figures that it ends with.

The loop is that of ``tugline train`` (`tugline.trainers.loop`), and so are its files.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace
from rich.console import Console

from tugline.demo.report import picture
from tugline.demo.settings import DemoSettings
from tugline.demo.summary import BuilderCost, DemoSummary
from tugline.demo.tasks import HELD_OUT_SEED, harness_spec
from tugline.launch.settings import EngineSettings, GatewaySettings
from tugline.node.settings import NodeSettings
from tugline.plugins import make
from tugline.recording import file as recordings
from tugline.recording.folder import list_recordings, parse_name
from tugline.rollout.parts import Parts
from tugline.traces.base import Builder
from tugline.trainers.batches import TaskBatches
from tugline.trainers.config import HeldOut, Schedule, TaskSource, TrainConfig
from tugline.trainers.evaluation import Estimate
from tugline.trainers.loop import train
from tugline.trainers.sinks import METRICS, make_report, make_sinks, read_lines
from tugline.types import PluginSpec

BUILDERS = ("per_request", "prefix_merging")
"""Builders compared at the end."""
PICTURE = "learning.png"
SUMMARY = "summary.json"
WARM_START = Path(__file__).parent / "warm_start_model"
"""The shipped start policy, a Hugging Face folder made by ``tools/warm_start/rebuild.py``."""


def make_config(settings: DemoSettings) -> TrainConfig:
    """Return the training run that the settings describe. Raises `ConfigError`."""

    def problems(split: str, seed: int, count: int) -> PluginSpec:
        options = {"split": split, "seed": seed, "count": count}
        return PluginSpec("tugline.demo.tasks:RepairTasks", options)

    count = settings.steps * settings.tasks_per_step
    updates = settings.grpo.decay_updates or settings.steps  # a step has one update
    return TrainConfig(
        model=WARM_START,
        tasks=TaskSource(taskset=problems("train", settings.seed, count)),
        heldout=HeldOut(
            taskset=problems("heldout", HELD_OUT_SEED, settings.heldout), every=settings.steps
        ),
        template={
            "harness": msgspec.to_builtins(harness_spec(settings)),
            # The start policy was trained on the paths that this runtime shows.
            "runtime": {"name": "local"},
            "builder": {"name": settings.builder},
            "limits": {"agent_s": settings.agent_s, "max_turns": settings.max_turns},
            "sampling": {
                "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": settings.max_answer,
            },
        },
        engine=EngineSettings(renderer="qwen3"),
        window=settings.window,
        node=NodeSettings(slots=settings.slots),
        gateway=GatewaySettings(port=settings.port),
        grpo=replace(settings.grpo, seed=settings.seed, decay_updates=updates),
        schedule=Schedule(
            steps=settings.steps,
            tasks_per_step=settings.tasks_per_step,
            samples=settings.samples,
            seed=settings.seed,
            minutes=settings.minutes,
            keep=2,
        ),
    )  # fmt: skip


async def run_demo(
    folder: Path, settings: DemoSettings, config: TrainConfig, console: Console
) -> DemoSummary:
    """Run what is missing in `folder`, and write the summary and the picture there."""
    batches = TaskBatches(config, folder)
    batches.check()
    harness = Parts().harness(harness_spec(settings))
    console.print(f"installing {harness.name} ...")
    await harness.install()
    sinks = make_sinks((), console)
    state = (await train(config, batches, folder, sinks, make_report(console))).state
    ends = (state.scores[0], state.scores[-1])
    before, after = (score.evaluation.pass_at.get(1, NOTHING) for score in ends)
    rows, cpu = read_lines(folder / METRICS), os.times()
    summary = DemoSummary(
        harness=harness.name,
        harness_version=harness.version or "",
        seed=settings.seed,
        before=before,
        after=after,
        state=state,
        cpu_seconds=cpu.user + cpu.system,
        cpu_seconds_sessions=cpu.children_user + cpu.children_system,
        replay_max_abs_dlogprob=max(
            (row[_MISMATCH] for row in rows if _MISMATCH in row), default=None
        ),
        builders=compare_builders(folder, [task.id for task in batches.batch(state.step)]),
    )
    (folder / SUMMARY).write_bytes(msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
    rewards = {row["step"]: row["rollout/reward"] for row in rows if "rollout/reward" in row}
    picture(rewards, summary, folder / PICTURE)
    return summary


NOTHING = Estimate(0.0, 0.0, 1.0, 0)
"""Of an evaluation in which no session earned a reward."""
_MISMATCH = "update/mismatch/total/max_abs"


def compare_builders(folder: Path, tasks: Sequence[str]) -> tuple[BuilderCost, ...]:
    """Build the recorded sessions of these tasks with each builder, and count their tokens."""
    paths = sorted(list_recordings(folder / "recordings"), key=parse_name)
    calls = {  # of the last attempt
        one.header.session.id: one.calls
        for one in (recordings.read(path, bodies=False) for path in paths)
        if one.calls and one.header and one.header.session.task in tasks
    }
    costs = []
    for name in BUILDERS:
        builder = make("builder", PluginSpec(name), Builder)
        traces = [trace for made in calls.values() for trace in builder.build(made)[0]]
        costs.append(
            BuilderCost(
                builder=name,
                sessions=len(calls),
                traces=len(traces),
                tokens_trained=sum(int(trace.mask.sum()) for trace in traces),
                tokens_forwarded=sum(len(trace.ids) for trace in traces),
            )
        )
    return tuple(costs)
