"""State of a training run on disk: its configuration, and what is in every checkpoint."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from tugline.atomic import read_or_make, write_file
from tugline.config import Config, load
from tugline.errors import UsageError
from tugline.launch.settings import EngineSettings
from tugline.trainers.config import Schedule
from tugline.trainers.evaluation import Comparison, Evaluation
from tugline.trainers.grpo import checkpoint
from tugline.types import Ledger

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
MODEL = "model"
"""Folder of the trained model, below that of the run."""
S = TypeVar("S", bound=msgspec.Struct)


class VersionScore(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation of one version on the held-out tasks."""

    step: int
    version: int
    evaluation: Evaluation
    mixed: int
    """Sessions with tokens of another version; none, unless a replica was restarted."""
    sampled: int
    """Tokens."""
    seconds: float


class TrainState(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a run and its totals; part of every checkpoint."""

    step: int = 0
    """Steps trained: batches up to this one are done."""
    version: int = 0
    """Of the weights."""
    chosen: dict[int, tuple[int, ...]] = {}
    """Tasks of the next batches, started or not, by step: their numbers in the set."""
    pass_rates: dict[int, float] = {}
    """With `choose: pass_rate`, moving averages over the groups of a task, by its number."""
    ledger: Ledger = Ledger()
    """Of the training sessions."""
    sessions: int = 0
    failed: int = 0
    """Sessions without a reward."""
    updates: int = 0
    tokens_forwarded: int = 0
    training_s: float = 0.0
    elapsed_s: float = 0.0
    """Wall clock up to the checkpoint, over all processes of the run."""
    entropies: tuple[float, ...] = ()
    """Of each step that had any."""
    scores: tuple[VersionScore, ...] = ()
    """Evaluations, in order."""


class TrainSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run."""

    state: TrainState
    change: Comparison | None
    """pass@1 on the held-out tasks, last minus first weights."""


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
        return replace(section, urls=("elsewhere",) if section.urls else ())
    if name == "server":
        return section is None
    return replace(section, steps=1, minutes=None) if isinstance(section, Schedule) else section


def load_newest(
    folder: Path, load_from: Callable[[Path], checkpoint.CheckpointState], first: S
) -> S:
    """Load the newest checkpoint of a run; return its state, or `first` without one.

    Raises `CheckpointError`.
    """
    latest = checkpoint.latest(folder / CHECKPOINTS)
    if latest is None:
        return first
    return msgspec.convert(load_from(latest).extra, type(first), str_keys=True, strict=False)
