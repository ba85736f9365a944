"""Configuration of ``tugline train``: tasks, engine, trainer and schedule in one strict file.

A run stores its configuration in its folder and cannot be resumed with a different one.
"""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from tugline.atomic import write_file
from tugline.config import NO_CHANGES, Config, load
from tugline.datasets.files import TaskSelection
from tugline.errors import ConfigError, UsageError
from tugline.launch.prices import Prices
from tugline.launch.settings import EngineSettings, GatewaySettings
from tugline.node.settings import NodeSettings
from tugline.plugins import find, import_beside
from tugline.protocol import PauseMode
from tugline.schema import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, decode
from tugline.trainers.grpo.config import GrpoConfig
from tugline.types import PluginSpec

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
MODEL = "model"
"""Folder of the trained model, below that of the run."""


class TaskSource(Config, frozen=True):
    """A task set and a selection of its tasks."""

    file: Path | None = None
    """A [task-set file](tasksets.md), in place of `taskset` and `select`; the keys of `template`
    replace those of its own template."""
    taskset: PluginSpec | None = None
    """The task set (`name`, `options`), as in a task-set file."""
    select: TaskSelection | None = None
    """Selection of tasks, as in a task-set file; None: all tasks."""

    def __post_init__(self) -> None:
        """Check that there is one source. Raises `ConfigError`."""
        super().__post_init__()
        if (self.file is None) == (self.taskset is None):
            msg = "give either `file`, the path of a task-set file, or `taskset`"
            raise ConfigError(msg, "taskset")
        if self.file is not None and self.select is not None:
            msg = "select has no effect on a task-set file: write it there"
            raise ConfigError(msg, "select")


class HeldOut(TaskSource, frozen=True):
    """Tasks that are never trained on."""

    every: PositiveInt = 10
    """Training steps between evaluations; the first and last weights are always evaluated."""
    samples: PositiveInt = 1
    """Sessions per task; pass@k is estimated for every power of two up to this."""


class Supervised(Config, frozen=True):
    """Conversations that are trained beside the sessions of each step."""

    data: tuple[Path, ...]
    """Data sets in the forms that `tugline sft` reads; they are rendered with `engine.renderer`."""
    rows: PositiveInt = 8
    """Rows in each step. The mean negative log likelihood of their answers' tokens is added to the
    loss with the weight `grpo.cross_entropy`."""


class Schedule(Config, frozen=True):
    """Amounts of sampling and training, and intervals of publishing and saving."""

    steps: PositiveInt = 100
    """Total number of training steps."""
    tasks_per_step: PositiveInt = 8
    """Groups per training step."""
    samples: Annotated[int, Meta(ge=2)] = 8
    """Sessions per group."""
    balance: str | None = None
    """Tag, such as `family`, whose values are as frequent in each step as in all tasks; None: tasks
    are not balanced."""
    choose: Literal["order", "pass_rate"] = "order"
    """Choice of tasks after one pass over all of them: further passes in new orders (`order`), or
    more often the tasks that only some sessions solve (`pass_rate`)."""
    refill: bool = False
    """Sample further groups until `tasks_per_step` groups of a step have a training signal (dynamic
    sampling of DAPO, arXiv 2503.14476)."""
    refill_limit: Annotated[int, Meta(ge=2)] = 4
    """Maximum groups of a step with `refill`, as a multiple of `tasks_per_step`; the step then
    trains on what it has, and raises an alarm."""
    staleness: NonNegativeInt = 0
    """Maximum policy versions between sampling a session and training on it; 0: synchronous."""
    pause: PauseMode = PauseMode.WAIT
    """Handling of running model calls when new weights are loaded."""
    publish_s: PositiveFloat = 300.0
    """Timeout in seconds for a replica to load new weights, and for the gateways to pause."""
    patience: NonNegativeFloat = 3600.0
    """Seconds for which a step whose sessions all failed for a reason outside the policy is run
    again, after pauses that double up to 5 minutes, before the run ends with that reason."""
    checkpoint_minutes: PositiveFloat = 10.0
    """Minutes between checkpoints. A resumed run trains the steps after the last checkpoint again,
    on the same sessions, which are not run again."""
    checkpoint_every: PositiveInt | None = None
    """Steps between checkpoints, instead of minutes."""
    keep: PositiveInt = 3
    """Number of newest checkpoints to keep."""
    seed: NonNegativeInt = 0
    """Seed of the order of tasks, of the sampling and of the updates."""
    minutes: PositiveFloat | None = None
    """Time limit of a run in minutes, which includes the last evaluation; None: no limit."""


class Lora(Config, frozen=True):
    """A low-rank adapter (LoRA, arXiv 2106.09685), trained instead of the model's weights."""

    rank: PositiveInt = 16
    """Rank of the update of each matrix."""
    alpha: PositiveInt = 32
    """Scale of the update, which is multiplied by `alpha / rank`."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers to adapt, such as `q_proj`; empty: all but the output layer."""
    publish: Literal["merged", "adapter"] = "merged"
    """Weights sent to engines: those of the model with the adapter merged, or the adapter alone
    (vLLM only)."""


class TrainConfig(Config, frozen=True, kw_only=True):
    """A training run. Relative paths, except `out`, are relative to the file."""

    model: Path | None = None
    """Hugging Face folder of the initial model; None: the demo's tiny model."""
    tasks: TaskSource | str
    """Tasks to train on; the path of a task-set file alone is short for `{file: PATH}`."""
    heldout: HeldOut | None = None
    """Evaluation during training; None: no evaluation."""
    template: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies it
    """Fields shared by all tasks (harness, runtime, limits ...), as in a task-set file."""
    engine: EngineSettings = EngineSettings()
    """The engine; `engine.model` must be left out, `engine.tokenizer` defaults to the model's."""
    server: str | None = None
    """URL of a running server whose nodes run the sessions (its token is `TUGLINE_TOKEN`); None: a
    server with one node in this process, configured by `node` and `gateway`."""
    device: str | None = None
    """Device of the trainer and of an engine in this process; None: a GPU if there is one."""
    fsdp: bool = False
    """Under torchrun, shard the model over all processes (FSDP2) instead of copying it to each."""
    lora: Lora | None = None
    """Adapter to train with PEFT; None: all weights are trained."""
    publish_dtype: Literal["bfloat16", "float32"] | None = None
    """Data type of trained weights in the folders that engines load and in `model/`; None: that of
    each weight in the initial model's files. Set it to the type in which the engine serves."""
    publish_folder: Path | None = None
    """Folder for the weights that engines load, which they must be able to read: with engines on
    this machine, a folder in memory such as `/dev/shm`. Weights of earlier versions are removed.
    None: the run's folder."""
    window: PositiveInt | None = None
    """Context window of an engine in this process, in tokens; None: the model's."""
    node: NodeSettings = NodeSettings()
    """The node that runs the sessions."""
    gateway: GatewaySettings = GatewaySettings()
    """The node's gateway."""
    grpo: GrpoConfig = GrpoConfig()
    """Settings of the updates."""
    supervised: Supervised | None = None
    """Conversations whose answers are trained as well; None: only sessions are trained."""
    schedule: Schedule = Schedule()
    """Number of steps, staleness and checkpoints."""
    prices: Prices = Prices()
    """Prices for the figures of cost; they may change when a run is resumed."""
    metrics: tuple[PluginSpec, ...] = ()
    """Sinks for metrics besides the console and `metrics.jsonl`: `plots`, `tensorboard`, `wandb`,
    `trackio`."""
    out: Path | None = None
    """Folder of the run, relative to the current directory; None: given by `--out`."""

    def __post_init__(self) -> None:
        """Check constraints between sections. Raises `ConfigError`."""
        super().__post_init__()
        if self.engine.model is not None:
            msg = f"engine.model is {str(self.engine.model)!r}; leave it out and set `model`"
            raise ConfigError(msg, "engine.model")
        if self.server is not None and not self.engine.urls:
            msg = "engine.urls is empty, but the nodes of `server` need the URL of an engine"
            raise ConfigError(msg, "engine.urls")
        if "samples" in self.template:
            msg = "template.samples has no effect: set schedule.samples and heldout.samples"
            raise ConfigError(msg, "template.samples")
        if self.publishes_adapter and (
            not self.engine.urls or self.server or self.schedule.pause is PauseMode.KEEP
        ):
            msg = (
                "lora.publish is 'adapter', which requires engine.urls, no `server`, and "
                "schedule.pause"
                " 'wait' or 'abort': with 'keep', running calls would continue with the old adapter"
            )
            raise ConfigError(msg, "lora.publish")
        if self.supervised is not None and self.grpo.cross_entropy == 0:
            msg = "grpo.cross_entropy is 0, so the rows of `supervised` would have no weight: set"
            raise ConfigError(f"{msg} it, such as to 0.1", "grpo.cross_entropy")
        if self.supervised is not None and not self.supervised.data:
            raise ConfigError("supervised.data is empty, must name data sets", "supervised.data")
        stale = self.grpo.max_staleness
        if stale is not None and stale < self.schedule.staleness:
            msg = (
                f"grpo.max_staleness is {stale}, must be at least schedule.staleness, which is"
                f" {self.schedule.staleness}: older tokens would be sampled and then discarded"
            )
            raise ConfigError(msg, "grpo.max_staleness")

    @property
    def context(self) -> int | None:
        """Context window of the run in tokens: of the engine in this process, or of the harness."""
        harness = self.template.get("harness")
        options = harness.get("options") if isinstance(harness, dict) else None
        known = options.get("context_window") if isinstance(options, dict) else None
        return self.window or (known if isinstance(known, int) else None)

    def weights_folder(self, run: Path) -> Path:
        """Return the folder of published weights; another run has another one."""
        if self.publish_folder is None:
            return run.absolute() / "weights"
        digest = hashlib.blake2b(bytes(run.absolute()), digest_size=6).hexdigest()
        return self.publish_folder.absolute() / f"tugline-{digest}"

    @property
    def updates(self) -> GrpoConfig:
        """Settings of the updates; forward passes are as long as the context window by default."""
        return replace(self.grpo, micro_tokens=self.grpo.micro_tokens or self.context)

    @property
    def publishes_adapter(self) -> bool:
        """Whether engines receive the adapter alone."""
        return self.lora is not None and self.lora.publish == "adapter"


def read_config(
    path: Path,
    default_model: Path,
    *,
    server: str | None = None,
    engines: Sequence[str] = (),
    changes: Mapping[str, Any] = NO_CHANGES,
) -> TrainConfig:
    """Read the file at `path` with its paths made absolute. Raises `ConfigError`.

    `changes` override values of the file by dotted key, `server` and `engines` its addresses.
    """
    import_beside(path)
    config = load(path, TrainConfig, changes)
    folder = path.absolute().parent
    model = default_model if config.model is None else folder / config.model.expanduser()
    given = decode({"urls": engines}, EngineSettings, source="--engine")
    tokenizer = config.engine.tokenizer
    urls = given.urls or config.engine.urls
    if urls:
        tokenizer = model if tokenizer is None else folder / tokenizer.expanduser()
    elif tokenizer is not None:
        msg = (
            f"{path}: engine.tokenizer requires engine.urls; without them, the model's "
            "tokenizer is used"
        )
        raise ConfigError(msg, "engine.tokenizer")
    engine = replace(config.engine, urls=urls, tokenizer=tokenizer)
    supervised = config.supervised
    if supervised is not None:
        data = tuple(folder / part.expanduser() for part in supervised.data)
        supervised = replace(supervised, data=data)
    given_folder = config.publish_folder
    publish_folder = None if given_folder is None else folder / given_folder.expanduser()
    return replace(
        config,
        server=server or config.server,
        model=model,
        engine=engine,
        supervised=supervised,
        publish_folder=publish_folder,
    )


# --------------------------------------------------------------------------- on disk
def store_config(folder: Path, config: Config) -> None:
    """Store the configuration. Raises `UsageError` if the folder belongs to another run.

    Only sinks, prices, the length of the training, devices and addresses may change. The
    digests of functions of the user are stored, too.
    """
    path = folder / CONFIG
    if isinstance(config, TrainConfig):
        config = replace(config, grpo=add_digests(config.grpo))
    if path.exists():
        stored = load(path, type(config))
        if isinstance(stored, TrainConfig) and isinstance(config, TrainConfig):
            _check_digests(stored.grpo, config.grpo, folder)
        changed = [
            name
            for name in config.__struct_fields__
            if name not in {"metrics", "out", "device", "fsdp", "publish_folder", "prices"}
            and _comparable(name, getattr(stored, name)) != _comparable(name, getattr(config, name))
        ]
        if changed:
            msg = (
                f"{folder} was started with other values of {', '.join(changed)} (see "
                f"{CONFIG}); choose another --out"
            )
            raise UsageError(msg)
    write_file(path, msgspec.json.format(msgspec.json.encode(config, enc_hook=str)))


def add_digests(config: GrpoConfig) -> GrpoConfig:
    """Return the settings with the digests of the files of functions of the user.

    Raises `UnknownPlugin`, and `ConfigError` if the settings have other digests.
    """
    digests = {}
    for option in ("loss", "advantage", "credit"):
        name = getattr(config, option)
        if ":" in name:
            function = find(f"grpo.{option}", name)
            try:
                source = Path(inspect.getsourcefile(function) or "").read_bytes()
            except (TypeError, OSError) as error:
                msg = f"grpo.{option} {name!r} has no source file to take the digest of"
                raise ConfigError(msg, f"grpo.{option}") from error
            digests[option] = hashlib.sha256(source).hexdigest()
    if config.digests not in ({}, digests):
        msg = f"digests are {config.digests}, but the files of the functions have {digests}"
        raise ConfigError(f"grpo.{msg}", "grpo.digests")
    return replace(config, digests=digests)


def _check_digests(stored: GrpoConfig, config: GrpoConfig, folder: Path) -> None:
    """Raise `UsageError` if a function of the user has another file than the stored one."""
    for option, digest in config.digests.items():
        name = getattr(config, option)
        if getattr(stored, option) == name and stored.digests.get(option) != digest:
            msg = f"grpo.{option} {name!r}: its file has changed since {folder} was started"
            raise UsageError(f"{msg}; restore it, or choose another --out")


def _comparable(name: str, section: object) -> object:
    """Return a section without the fields that may change in a resumed run."""
    if isinstance(section, EngineSettings):
        return replace(section, urls=("http://elsewhere",) if section.urls else ())
    if name == "server":
        return section is None
    return (
        replace(section, steps=1, minutes=None, patience=0.0)
        if isinstance(section, Schedule)
        else section
    )
