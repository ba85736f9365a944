"""Atomic checkpoints; training continues from one bit for bit.

A checkpoint is the directory ``step-000012``: the model as Hugging Face reads it
(``model.safetensors``, ``config.json``), the optimizer and the state of the trainer's random
numbers (``optimizer.pt``), and ``state.json``, which names the step and the digest of every other
file. It is written under a hidden name, flushed to disk and then renamed, so a crash at any
moment leaves the checkpoints before it as they were (I3).
"""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import safetensors.torch
import torch

from tugline.errors import CheckpointError
from tugline.trainers.grpo.train import Grpo

STATE = "state.json"
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.pt"


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of ``state.json``."""

    step: int
    version: int
    """Policy version of these weights."""
    config: str
    """Digest of the trainer's config, to detect changes."""
    updates: int
    files: dict[str, str]
    """File name to SHA-256."""
    extra: dict[str, Any] = {}
    """Data of the caller, such as its position in the data set."""


def path_of(directory: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return directory / f"step-{step:06d}"


def save(
    directory: Path,
    trainer: Grpo,
    *,
    step: int,
    version: int,
    extra: dict[str, Any] | None = None,
    keep: int = 3,
) -> Path:
    """Write ``step-NNNNNN`` into `directory` and remove all but the last `keep`.

    Raises `CheckpointError` when that step is there already or the disk refuses; then nothing
    of the new checkpoint stays behind.
    """
    path = path_of(directory, step)
    if path.exists():
        msg = f"checkpoint {path} exists; remove it or save to another directory"
        raise CheckpointError(msg)
    draft = directory / f".{path.name}.part"
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        _write(draft, trainer, step=step, version=version, extra=extra or {})
        draft.rename(path)
        _fsync(directory)
        for old in _steps(directory)[: -max(1, keep)]:
            shutil.rmtree(old)
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        msg = f"checkpoint {path} cannot be written ({error}); is the disk full?"
        raise CheckpointError(msg) from error
    return path


def _write(draft: Path, trainer: Grpo, *, step: int, version: int, extra: dict[str, Any]) -> None:
    safetensors.torch.save_model(trainer.model, str(draft / WEIGHTS), metadata={"format": "pt"})
    config: Any = trainer.model.config  # Hugging Face's own
    config.save_pretrained(draft)
    rest = {"optimizer": trainer.optimizer.state_dict(), "order": trainer.order.get_state()}
    torch.save(rest, draft / OPTIMIZER)
    state = CheckpointState(
        step=step,
        version=version,
        config=trainer.config.digest(),
        updates=trainer.updates,
        files={file.name: _digest(file) for file in sorted(draft.iterdir())},
        extra=extra,
    )
    (draft / STATE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))
    for file in [*draft.iterdir(), draft]:
        _fsync(file)


def load(path: Path, trainer: Grpo) -> CheckpointState:
    """Restore weights, optimizer and random state of `trainer` from a checkpoint, in place.

    Files are verified before anything is changed. Raises `CheckpointError` for a missing or damaged
    file, or a model of another shape.
    """
    state = read(path)
    for name, digest in state.files.items():
        file = path / name
        if not file.is_file() or _digest(file) != digest:
            what = "damaged" if file.is_file() else "missing"
            msg = f"checkpoint {path}: {name} is {what}; use an earlier one"
            raise CheckpointError(msg)
    try:
        safetensors.torch.load_model(trainer.model, str(path / WEIGHTS))
        rest = torch.load(path / OPTIMIZER, map_location="cpu", weights_only=True)
        trainer.optimizer.load_state_dict(rest["optimizer"])
    except (RuntimeError, ValueError) as error:
        msg = f"checkpoint {path} does not fit this model: {error}"
        raise CheckpointError(msg) from error
    trainer.order.set_state(rest["order"])
    trainer.updates = state.updates
    return state


def read(path: Path) -> CheckpointState:
    """Read the state of the checkpoint at `path`. Raises `CheckpointError`."""
    try:
        return msgspec.json.decode((path / STATE).read_bytes(), type=CheckpointState)
    except (OSError, msgspec.DecodeError) as error:
        msg = f"checkpoint {path} is not complete: {STATE} cannot be read ({error})"
        raise CheckpointError(msg) from error


def latest(directory: Path) -> Path | None:
    """Return the newest complete checkpoint in `directory`, or None."""
    return max(_steps(directory), default=None)


def _steps(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first; half-written ones have a hidden name or no state."""
    return sorted(path for path in directory.glob("step-*") if (path / STATE).is_file())


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    """Flush a file or a directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
