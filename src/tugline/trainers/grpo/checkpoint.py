"""Atomic checkpoints, from which training continues bit for bit.

A checkpoint is a directory such as ``step-000012``. It has the model in the Hugging Face format
(the files of the folder that it was loaded from, with float32 weights, and ``config.json``), or an
adapter in the PEFT format (``adapter_model.safetensors``, ``adapter_config.json``); the optimizer
and the state of the trainer's random generator (``optimizer.pt``); and ``state.json`` with the step
and the digest of every other file. It is written under a hidden name, flushed to disk and then
renamed, so a crash at any time leaves earlier checkpoints unchanged (I3).

Under torchrun every rank must call `save` and `load`. Rank 0 writes unsharded tensors, so a run can
be resumed with another number of ranks, and other tools can read the files. For that it needs main
memory for the whole optimizer and one layer; the other ranks hold one whole tensor at a time.
"""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import safetensors
import safetensors.torch
import torch

from tugline.atomic import flush_path, write_file
from tugline.errors import CheckpointError
from tugline.trainers.grpo.distributed import gather_tensors, rank_and_world, shard_like
from tugline.trainers.grpo.hub import get_base_model, get_weights, write_weights
from tugline.trainers.grpo.loading import load_weights
from tugline.trainers.grpo.update import Updater

STATE = "state.json"
ADAPTER = "adapter_model.safetensors"
OPTIMIZER = "optimizer.pt"
S = TypeVar("S", bound=msgspec.Struct)


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of ``state.json``."""

    step: int
    version: int
    """Policy version of these weights."""
    updates: int
    files: dict[str, str]
    """SHA-256 by file name."""
    extra: dict[str, Any] = {}
    """Data of the caller, such as its position in the data set."""


def path_of(directory: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return directory / f"step-{step:06d}"


def save(
    directory: Path,
    trainer: Updater,
    *,
    step: int,
    version: int,
    extra: dict[str, Any] | None = None,
    keep: int = 3,
) -> Path:
    """Write ``step-NNNNNN`` to `directory`, and remove all but the newest `keep` checkpoints.

    Raises `CheckpointError` if the step exists already or cannot be written; no part of the new
    checkpoint is left then.
    """
    path = path_of(directory, step)
    optimizer = gather_tensors(trainer.optimizer.state_dict())
    draft = directory / f".{path.name}.part"
    try:
        if rank_and_world()[0] == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        _write_model(draft, trainer)
        if rank_and_world()[0] > 0:
            return path
        if path.exists():
            shutil.rmtree(draft)
            msg = f"checkpoint {path} exists; remove it or save to another directory"
            raise CheckpointError(msg)
        torch.save({"optimizer": optimizer, "order": trainer.order.get_state()}, draft / OPTIMIZER)
        state = CheckpointState(
            step=step,
            version=version,
            updates=trainer.updates,
            files={file.name: _digest(file) for file in sorted(draft.iterdir())},
            extra=extra or {},
        )
        for file in draft.iterdir():
            flush_path(file)
        _replace_state(draft, state)
        draft.rename(path)
        flush_path(directory)
        for old in _steps(directory)[: -max(1, keep)]:
            shutil.rmtree(old)
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        msg = f"checkpoint {path} cannot be written ({error}); check that the disk is not full"
        raise CheckpointError(msg) from error
    return path


def unique_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights by name, tied weights once; for a PEFT model, those of the adapter."""
    if hasattr(model, "peft_config"):
        from peft import get_peft_model_state_dict  # noqa: PLC0415 - an extra

        return dict(get_peft_model_state_dict(model, save_embedding_layers=False))
    named = get_weights(get_base_model(model))
    first = {id(tensor): name for name, tensor in reversed(named.items())}
    return {name: named[name].detach() for name in reversed(first.values())}


def _write_model(folder: Path, trainer: Updater) -> None:
    """Write the adapter of a PEFT model, or all weights in float32."""
    if hasattr(trainer.model, "peft_config"):
        write_adapter(folder, trainer.model)
        return
    base = get_base_model(trainer.model)
    weights = get_weights(base)
    write_weights(folder, base, weights, weights.items(), trainer.source, "float32")


def write_adapter(folder: Path, model: Any) -> None:
    """Write the adapter of a PEFT model as PEFT does; every rank must call this."""
    weights = gather_tensors(unique_weights(model))
    if rank_and_world()[0] == 0:
        whole = {name: tensor.contiguous() for name, tensor in weights.items()}
        safetensors.torch.save_file(whole, folder / ADAPTER, metadata={"format": "pt"})
        model.peft_config["default"].save_pretrained(folder)


def _replace_state(path: Path, state: CheckpointState) -> None:
    write_file(path / STATE, msgspec.json.format(msgspec.json.encode(state)))
    flush_path(path)


def update(path: Path, *, version: int, extra: dict[str, Any]) -> None:
    """Replace version and extra data of the checkpoint at `path`. Raises `CheckpointError`."""
    try:
        _replace_state(path, msgspec.structs.replace(read(path), version=version, extra=extra))
    except OSError as error:
        msg = f"checkpoint {path} cannot be written ({error}); check that the disk is not full"
        raise CheckpointError(msg) from error


def load(path: Path, trainer: Updater) -> CheckpointState:
    """Restore weights, optimizer and random state of `trainer` from a checkpoint, in place.

    Files are verified before anything is changed. Raises `CheckpointError` for a missing or damaged
    file, or a model of another shape.
    """
    state = read(path)
    for name, digest in state.files.items():
        file = path / name
        if not file.is_file() or _digest(file) != digest:
            problem = "damaged" if file.is_file() else "missing"
            raise CheckpointError(f"checkpoint {path}: {name} is {problem}; use an earlier one")
    try:
        # mapped, so that ranks of one machine share the memory
        rest = torch.load(path / OPTIMIZER, map_location="cpu", weights_only=True, mmap=True)
        _load_weights(path, trainer.model)
        _load_optimizer(rest["optimizer"], trainer.optimizer)
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} does not fit this model: {error}") from error
    trainer.order.set_state(rest["order"])
    trainer.updates = state.updates
    return state


@torch.no_grad()
def _load_weights(path: Path, model: torch.nn.Module) -> None:
    if not hasattr(model, "peft_config"):
        load_weights(path, get_base_model(model))
        return
    own = unique_weights(model)
    with safetensors.safe_open(path / ADAPTER, "pt") as stored:
        different = sorted(own.keys() ^ set(stored.keys()))
        if different:
            msg = f"{ADAPTER} and the model differ in {len(different)} weights, such as"
            raise ValueError(f"{msg} {different[0]}")
        for name, tensor in own.items():
            tensor.copy_(shard_like(stored.get_tensor(name), tensor))


def _load_optimizer(stored: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, moments in stored["state"].items():
        for name, tensor in moments.items():
            moments[name] = shard_like(tensor, parameters[number]).clone()  # off the mapped file
    optimizer.load_state_dict(stored)


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


def load_newest(directory: Path, load_from: Callable[[Path], CheckpointState], first: S) -> S:
    """Load the newest checkpoint, and return the state in its extra data; `first` without any.

    Raises `CheckpointError`.
    """
    newest = latest(directory)
    if newest is None:
        return first
    return msgspec.convert(load_from(newest).extra, type(first), str_keys=True, strict=False)


def _steps(directory: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first; others have a hidden name or no state."""
    return sorted(path for path in directory.glob("step-*") if (path / STATE).is_file())


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
