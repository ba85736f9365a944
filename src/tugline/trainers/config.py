"""Configuration of ``tugline train``: tasks, engine, trainer and schedule in one strict file.

A run keeps it in its folder, and goes on with no other.
"""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from tugline.atomic import read_or_make, write_file
from tugline.config import Config, load
from tugline.datasets.files import TaskSelection
from tugline.errors import ConfigError, UsageError
from tugline.launch.settings import EngineSettings, GatewaySettings
from tugline.node.settings import NodeSettings
from tugline.protocol import PauseMode
from tugline.schema import NonNegativeInt, PositiveFloat, PositiveInt, decode
from tugline.trainers.grpo.config import GrpoConfig
from tugline.types import PluginSpec

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
MODEL = "model"
"""Folder of the trained model, below that of the run."""


class TaskSource(Config, frozen=True):
    """A task set and which of its tasks to take."""

    taskset: PluginSpec
    """The task set (`name`, `options`), as in a [task-set file](tasksets.md)."""
    select: TaskSelection | None = None
    """Selection of its tasks, as in a task-set file; None: all."""


class HeldOut(TaskSource, frozen=True):
    """Tasks that are never trained on."""

    every: PositiveInt = 10
    """Training steps between two evaluations; the first and the last weights are always measured.
    """
    samples: PositiveInt = 1
    """Sessions per task; pass@k is estimated for every power of two up to this."""


class Schedule(Config, frozen=True):
    """Amounts of sampling and training, and intervals of publishing and saving."""

    steps: PositiveInt = 100
    """Training steps in all."""
    tasks_per_step: PositiveInt = 8
    """Groups that one step trains on."""
    samples: Annotated[int, Meta(ge=2)] = 8
    """Sessions of one group."""
    balance: str | None = None
    """Tag, such as `family`, whose values every step has in the same proportion as all tasks; None:
    each step has any tasks."""
    choose: Literal["order", "pass_rate"] = "order"
    """Tasks of a step, once each was seen: all again in another order (`order`), or more often
    those that some sessions solve and others do not (`pass_rate`)."""
    staleness: NonNegativeInt = 0
    """Most versions that a session may be behind when it is trained on; 0: synchronous."""
    pause: PauseMode = PauseMode.WAIT
    """Handling of running model calls when new weights are loaded."""
    publish_s: PositiveFloat = 300.0
    """Seconds that one replica may take for new weights, and the gateways for a pause."""
    checkpoint_every: PositiveInt = 1
    """Steps between two checkpoints; steps after the last one are repeated by a resumed run."""
    keep: PositiveInt = 3
    """Checkpoints that are kept."""
    seed: NonNegativeInt = 0
    """Seed of the order of tasks, of the sampling and of the updates."""
    minutes: PositiveFloat | None = None
    """Stop training early, so that the last evaluation ends within this time; None: never."""


class Lora(Config, frozen=True):
    """A low-rank adapter (LoRA, arXiv 2106.09685): only it is trained."""

    rank: PositiveInt = 16
    """Rank of the update of each matrix."""
    alpha: PositiveInt = 32
    """The update is scaled by this, divided by `rank`."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers that get one, such as `q_proj`; none: all but the output layer."""
    publish: Literal["merged", "adapter"] = "merged"
    """Weights sent to engines: merged with the adapter, or the adapter alone (vLLM)."""


class TrainConfig(Config, frozen=True, kw_only=True):
    """A training run. Relative paths, except `out`, are relative to the file."""

    model: Path | None = None
    """Hugging Face folder of the first weights; None: the tiny one of the demo."""
    tasks: TaskSource
    """Tasks to train on."""
    heldout: HeldOut | None = None
    """Evaluation during training; None: no evaluation."""
    template: dict[str, Any]
    """Fields shared by all tasks (harness, runtime, limits ...), as in a task-set file."""
    engine: EngineSettings = EngineSettings()
    """The engine; `engine.model` is left out, and `engine.tokenizer` is the model's by default."""
    server: str | None = None
    """URL of a running server whose nodes run the sessions (its token is `TUGLINE_TOKEN`); None: a
    server with one node in this process. `node` and `gateway` are those of that node."""
    device: str | None = None
    """Device of the trainer and of an engine in this process; None: a GPU if there is one."""
    fsdp: bool = False
    """Under torchrun, shard the model over all processes (FSDP2) instead of copying it to each."""
    lora: Lora | None = None
    """Train an adapter with PEFT; None: all weights."""
    window: PositiveInt | None = None
    """Context window of an engine in this process, in tokens; None: the model's."""
    node: NodeSettings = NodeSettings()
    """The node that runs the sessions."""
    gateway: GatewaySettings = GatewaySettings()
    """Its gateway."""
    grpo: GrpoConfig = GrpoConfig()
    """The update."""
    schedule: Schedule = Schedule()
    """Steps, staleness, checkpoints."""
    metrics: tuple[PluginSpec, ...] = ()
    """Sinks for metrics besides the console and `metrics.jsonl`: `plots`, `tensorboard`, `wandb`,
    `trackio`."""
    out: Path | None = None
    """Folder of the run, relative to where the command is started; None: `--out` names it."""

    def __post_init__(self) -> None:
        """Check what two sections say about each other. Raises `ConfigError`."""
        super().__post_init__()
        if self.engine.model is not None:
            msg = f"engine.model is {str(self.engine.model)!r}: leave it out, `model` names it"
            raise ConfigError(msg, "engine.model")
        if self.server is not None and not self.engine.urls:
            msg = "engine.urls is empty: the nodes of `server` need an engine that they can reach"
            raise ConfigError(msg, "engine.urls")
        if "samples" in self.template:
            msg = "template.samples has no effect: set schedule.samples and heldout.samples"
            raise ConfigError(msg, "template.samples")
        if self.publishes_adapter and (
            not self.engine.urls or self.server or self.schedule.pause is PauseMode.KEEP
        ):
            msg = (
                "lora.publish is 'adapter': it needs engine.urls, no server, and schedule.pause"
                " 'wait' or 'abort', since a kept answer would end under the adapter it began with"
            )
            raise ConfigError(msg, "lora.publish")
        stale = self.grpo.max_staleness
        if stale is not None and stale < self.schedule.staleness:
            msg = (
                f"grpo.max_staleness is {stale}, must be at least schedule.staleness, which is"
                f" {self.schedule.staleness}: tokens would be sampled to be thrown away"
            )
            raise ConfigError(msg, "grpo.max_staleness")

    @property
    def publishes_adapter(self) -> bool:
        """Whether engines get the adapter by itself."""
        return self.lora is not None and self.lora.publish == "adapter"


def read_config(
    path: Path, default_model: Path, *, server: str | None = None, engines: Sequence[str] = ()
) -> TrainConfig:
    """Read the file at `path` with its paths made absolute. Raises `ConfigError`.

    `server` and `engines` replace the addresses of the file.
    """
    config, folder = load(path, TrainConfig), path.absolute().parent
    model = default_model if config.model is None else folder / config.model.expanduser()
    given = decode({"urls": engines}, EngineSettings, source="--engine")
    tokenizer, urls = config.engine.tokenizer, given.urls or config.engine.urls
    if urls:
        tokenizer = model if tokenizer is None else folder / tokenizer.expanduser()
    elif tokenizer is not None:
        msg = f"{path}: engine.tokenizer is for an engine at engine.urls; a model brings its own"
        raise ConfigError(msg, "engine.tokenizer")
    engine = replace(config.engine, urls=urls, tokenizer=tokenizer)
    return replace(config, server=server or config.server, model=model, engine=engine)


# --------------------------------------------------------------------------- on disk
def store_config(folder: Path, config: Config) -> None:
    """Store the configuration. Raises `UsageError` if the folder belongs to another run.

    Only where figures go, how long to train, the devices, and addresses may change.
    """
    path = folder / CONFIG
    if path.exists():
        stored = load(path, type(config))
        changed = [
            name
            for name in config.__struct_fields__
            if name not in {"metrics", "out", "device", "fsdp"}
            and _comparable(name, getattr(stored, name)) != _comparable(name, getattr(config, name))
        ]
        if changed:
            msg = f"{folder} has another {', '.join(changed)} (see {CONFIG}); choose another --out"
            raise UsageError(msg)
    write_file(path, msgspec.json.format(msgspec.json.encode(config, enc_hook=str)))


def name_run(folder: Path) -> str:
    """Return a name that no other run has; made once, so that a resumed run keeps it."""
    return read_or_make(folder / "name", lambda: f"{secrets.token_hex(4)}.")


def _comparable(name: str, section: object) -> object:
    """Return a section without what may differ in a resumed run."""
    if isinstance(section, EngineSettings):
        return replace(section, urls=("http://elsewhere",) if section.urls else ())
    if name == "server":
        return section is None
    return replace(section, steps=1, minutes=None) if isinstance(section, Schedule) else section
