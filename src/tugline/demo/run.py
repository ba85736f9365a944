"""The demo: a training run on generated tasks, and the summary of its results.

The training loop and its files are those of ``tugline train`` (`tugline.trainers.loop`). The
summary shows the token ledger (I2) and the difference between captured and recomputed logprobs
(I1), because a reward curve does not show whether the right tokens were trained.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta
from msgspec.structs import replace
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tugline.atomic import write_file
from tugline.config import Config, from_mapping, load
from tugline.demo.tasks import HELD_OUT_SEED
from tugline.errors import ConfigError, UsageError
from tugline.launch.settings import EngineSettings, GatewaySettings
from tugline.node.settings import NodeSettings
from tugline.rollout.parts import Parts
from tugline.schema import NonNegativeInt, Port, PositiveFloat, PositiveInt
from tugline.traces.base import make_builder
from tugline.trainers.batches import TaskBatches
from tugline.trainers.config import HeldOut, Schedule, TaskSource, TrainConfig
from tugline.trainers.evaluation import Estimate
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.loop import train
from tugline.trainers.metrics import TrainState
from tugline.trainers.progress import VisibleProgress
from tugline.trainers.sinks import METRICS, PLOT, make_sinks, read_lines
from tugline.types import PluginSpec, Reason

SUMMARY = "summary.json"
SETTINGS = "settings.yaml"
FILES = (PLOT, SUMMARY, METRICS, "checkpoints", "recordings", "log.jsonl")
"""Results of a run in its folder, which the closing report lists."""
WARM_START = Path(__file__).parent / "warm_start_model"
"""Initial policy, a Hugging Face folder made by ``tools/warm_start/rebuild.py``."""


class DemoSettings(Config, frozen=True):
    """Settings of a demo run: harness, amount of training, and limits of sessions."""

    harness: str = "pi"
    """Agent to train: `pi`, `shell`, or ``module:Class``."""
    command: str | None = None
    """Command line of the agent, for the `shell` harness."""
    builder: str = "prefix_merging"
    """Builder of traces: `prefix_merging` or `per_request`."""
    seed: NonNegativeInt = 0
    """Seed of the training tasks, the order of updates and the sampling."""
    steps: PositiveInt = 6
    """Number of GRPO steps."""
    tasks_per_step: PositiveInt = 6
    """Groups per step."""
    samples: Annotated[int, Meta(ge=2)] = 8
    """Sessions per group."""
    heldout: PositiveInt = 64
    """Held-out tasks, each attempted once before and once after training."""
    minutes: PositiveFloat = 9.5
    """Time limit in minutes; training stops early so that the run ends within it."""
    slots: PositiveInt = 6
    """Number of sessions that run at the same time."""
    window: PositiveInt = 4096
    """Context window of the engine in tokens."""
    max_turns: PositiveInt = 6
    """Maximum model calls of a session."""
    max_answer: PositiveInt = 128
    """Maximum tokens of an answer."""
    agent_s: PositiveFloat = 60.0
    """Timeout of an agent in seconds."""
    port: Port = 0
    """Port of the gateway on the loopback interface; 0: any free port."""
    grpo: GrpoConfig = GrpoConfig(lr=3e-4)
    """The trainer's settings; without `decay_updates` the learning rate falls until the last step.
    """


class DemoSummary(msgspec.Struct, frozen=True, kw_only=True):
    """``summary.json``, and the output of ``--json``."""

    harness: str
    harness_version: str
    seed: int
    before: Estimate
    """pass@1 on the held-out tasks, each attempted once."""
    after: Estimate
    """pass@1 on the same tasks after training."""
    state: TrainState
    """Steps, sessions, token ledger and evaluations of the training run."""
    cpu_seconds: float
    """CPU time of this process (server, gateway, engine, trainer) since its start."""
    cpu_seconds_sessions: float
    """CPU time of its child processes (agents and tests) since its start."""
    replay_max_abs_dlogprob: float | None
    """Largest difference between a captured and a recomputed logprob over all steps, nats."""


def harness_spec(settings: DemoSettings) -> PluginSpec:
    """Return the harness and its options. Raises `ConfigError` for a missing or unused command."""
    if settings.harness == "shell":
        if not settings.command:
            msg = "harness 'shell' needs the agent's command: give --command \"python my_agent.py\""
            raise ConfigError(msg)
        return PluginSpec("shell", {"command": settings.command})
    if settings.command:
        raise ConfigError(
            f"command requires the harness 'shell', but harness is {settings.harness!r}"
        )
    return PluginSpec(settings.harness)


def choose_settings(folder: Path, given: Mapping[str, Any], config: Path | None) -> DemoSettings:
    """Return the settings of the run in `folder`; `given` overrides the file at `config`.

    A resumed run keeps its settings. Raises `UsageError` if different settings are given.
    """
    stored = load(folder / SETTINGS, DemoSettings) if (folder / SETTINGS).exists() else None
    base = load(config, DemoSettings) if config is not None else stored or DemoSettings()
    settings = from_mapping({**msgspec.to_builtins(base), **given}, DemoSettings, source="options")
    if stored is not None and settings != stored:
        names = DemoSettings.__struct_fields__
        changed = (name for name in names if getattr(stored, name) != getattr(settings, name))
        msg = f"{folder} was started with other settings ({', '.join(changed)}); leave them out"
        raise UsageError(f"{msg} to resume it")
    return settings


def store_settings(folder: Path, settings: DemoSettings) -> None:
    """Store the settings of a run for resuming it."""
    text = yaml.safe_dump(msgspec.to_builtins(settings), sort_keys=False)
    write_file(folder / SETTINGS, text.encode())


def make_config(settings: DemoSettings) -> TrainConfig:
    """Return the training configuration for the settings. Raises `ConfigError`."""
    Parts().harness(harness_spec(settings))  # check both names before writing files
    make_builder(PluginSpec(settings.builder))

    def problems(split: str, seed: int, count: int) -> PluginSpec:
        options = {"split": split, "seed": seed, "count": count}
        return PluginSpec("tugline.demo.tasks:RepairTasks", options)

    count = settings.steps * settings.tasks_per_step
    updates = settings.grpo.decay_updates or settings.steps  # each step makes one update
    return TrainConfig(
        model=WARM_START,
        tasks=TaskSource(taskset=problems("train", settings.seed, count)),
        heldout=HeldOut(
            taskset=problems("heldout", HELD_OUT_SEED, settings.heldout), every=settings.steps
        ),
        template={
            "harness": msgspec.to_builtins(harness_spec(settings)),
            # The initial policy was trained with the paths of this runtime.
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
            balance="family",
            seed=settings.seed,
            minutes=settings.minutes,
            patience=0.0,
            keep=2,
        ),
        metrics=(PluginSpec("plots"),),
    )  # fmt: skip


async def run_demo(
    folder: Path, settings: DemoSettings, config: TrainConfig, console: Console
) -> DemoSummary:
    """Run or resume the demo in `folder`, and write its summary there."""
    batches = TaskBatches(config, folder)
    batches.check()
    harness = Parts().harness(harness_spec(settings))
    progress = VisibleProgress(console)
    with progress.line:
        progress.begin_phase(f"installing {harness.name}")
        await harness.install()
        sinks = make_sinks(config.metrics, console, served=True)
        state = (await train(config, batches, folder, sinks, progress, console=True)).state
    ends = (state.scores[0], state.scores[-1])
    before, after = (score.evaluation.pass_at.get(1, NOTHING) for score in ends)
    rows = read_lines(folder / METRICS)
    cpu = os.times()
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
    return summary


NOTHING = Estimate(0.0, 0.0, 1.0, 0)
"""Estimate of an evaluation without a rewarded session."""
_MISMATCH = "update/mismatch/total/max_abs"


# --------------------------------------------------------------------------- the closing report
def closing(summary: DemoSummary, files: Sequence[Path]) -> RenderableType:
    """Return the summary for a terminal: results, trained tokens, and paths of files."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in _facts(summary):
        table.add_row(name, value)
    for path in files:
        table.add_row("written", Text(str(path), style="cyan", overflow="fold"))
    return Panel(Group(_headline(summary), "", table), title="tugline demo", expand=False)


def _headline(summary: DemoSummary) -> Text:
    style = "bold green" if summary.after.value > summary.before.value else "bold red"
    return Text.assemble(
        "held-out pass@1, before  ",
        (f"{_share(summary.before)}\n", "bold"),
        "held-out pass@1, after   ",
        (_share(summary.after), style),
    )


def _share(rate: Estimate) -> str:
    passed = f"{round(rate.value * rate.tasks)} of {rate.tasks}"
    return f"{rate.value:.0%} ({passed}; interval {rate.low:.0%} to {rate.high:.0%})"


def _facts(summary: DemoSummary) -> list[tuple[str, str]]:
    state = summary.state
    ledger = summary.state.ledger
    held_out = [score.evaluation for score in state.scores]
    sessions = state.sessions + sum(e.attempts + e.unrewarded for e in held_out)
    failed = state.failed + sum(e.unrewarded for e in held_out)
    masked, dropped = sum(ledger.masked.values()), sum(ledger.dropped.values())
    updates = f"{state.step} steps, {state.updates} updates"
    trained = f"{state.training_s / 60:.1f} of them in the trainer"
    tokens = f"{ledger.sampled:,} sampled = {ledger.trained:,} trained"
    cpu = f"{summary.cpu_seconds_sessions:.0f} s in agents and tests, {summary.cpu_seconds:.0f} s"
    compared = "captured and recomputed were not compared"
    if (gap := summary.replay_max_abs_dlogprob) is not None:
        compared = f"captured and recomputed differ by at most {gap:.1e} nats"
    return [
        ("harness", f"{summary.harness} {summary.harness_version}".rstrip() + ", unmodified"),
        ("training", f"{updates}; {state.elapsed_s / 60:.1f} min in all, {trained}"),
        ("CPU", f"{cpu} in server, gateway, engine and trainer"),
        ("sessions", f"{sessions:,}, {failed:,} failed"),
        ("tokens", f"{tokens} + {masked:,} masked + {dropped:,} dropped"),
        ("", f"masked: {_reasons(ledger.masked)}; dropped: {_reasons(ledger.dropped)}"),
        ("logprobs", compared),
    ]


def _reasons(counts: Mapping[Reason, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items()) or "none"
