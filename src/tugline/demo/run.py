"""The demo: a training run of its own tasks, and the figures that it ends with.

The loop is that of ``tugline train`` (`tugline.trainers.loop`), and so are its files.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec.structs import replace
from rich.console import Console

from tugline.config import from_mapping, load
from tugline.demo.report import DemoSummary, picture
from tugline.demo.settings import DemoSettings, harness_spec
from tugline.demo.tasks import HELD_OUT_SEED
from tugline.errors import UsageError
from tugline.launch.settings import EngineSettings, GatewaySettings
from tugline.node.settings import NodeSettings
from tugline.rollout.parts import Parts
from tugline.trainers.batches import TaskBatches
from tugline.trainers.config import HeldOut, Schedule, TaskSource, TrainConfig
from tugline.trainers.evaluation import Estimate
from tugline.trainers.loop import train
from tugline.trainers.sinks import METRICS, make_report, make_sinks, read_lines
from tugline.types import PluginSpec

PICTURE = "learning.png"
SUMMARY = "summary.json"
SETTINGS = "settings.yaml"
FILES = (PICTURE, SUMMARY, METRICS, "checkpoints", "recordings", "log.jsonl")
"""What a run leaves in its folder."""
WARM_START = Path(__file__).parent / "warm_start_model"
"""The shipped start policy, a Hugging Face folder made by ``tools/warm_start/rebuild.py``."""


def choose_settings(folder: Path, given: Mapping[str, Any], config: Path | None) -> DemoSettings:
    """Return the settings of the run in `folder`; `given` overrides the file at `config`.

    A resumed run keeps its settings. Raises `UsageError` if other ones are given.
    """
    base = load(config, DemoSettings) if config is not None else DemoSettings()
    settings = from_mapping({**msgspec.to_builtins(base), **given}, DemoSettings, source="options")
    if not (folder / SETTINGS).exists():
        return settings
    stored = load(folder / SETTINGS, DemoSettings)
    changed = [key for key, value in given.items() if getattr(stored, key) != value]
    if changed or (config is not None and stored != settings):
        what = ", ".join(changed) or config
        msg = f"{folder} was started with other settings ({what}); leave them out to resume it"
        raise UsageError(msg)
    return stored


def store_settings(folder: Path, settings: DemoSettings) -> None:
    """Store the settings of a run, with which it is resumed."""
    draft = folder / f"{SETTINGS}.part"
    draft.write_text(yaml.safe_dump(msgspec.to_builtins(settings), sort_keys=False))
    draft.replace(folder / SETTINGS)


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
    )
    (folder / SUMMARY).write_bytes(msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
    rewards = {row["step"]: row["rollout/reward"] for row in rows if "rollout/reward" in row}
    picture(rewards, summary, folder / PICTURE)
    return summary


NOTHING = Estimate(0.0, 0.0, 1.0, 0)
"""Of an evaluation in which no session earned a reward."""
_MISMATCH = "update/mismatch/total/max_abs"
