"""Atomic checkpoints, from which training continues bit for bit.

A checkpoint is a directory such as ``step-000012``. It has the model in the Hugging Face format
(the files of the folder that it was loaded from, with float32 weights, and ``config.json``), or an
adapter in the PEFT format (``adapter_model.safetensors``, ``adapter_config.json``); the moments of
the optimizer (``optimizer.moments``) and its other state with that of the trainer's random
generator (``trainer.pt``); and ``state.json`` with the step and the digest of every other file. It
is written under a hidden name, flushed to disk and then renamed, so a crash at any time leaves
earlier checkpoints unchanged (I3).

Under torchrun every rank must call `start` and `load`. `start` copies weights and moments to the
memory of the host, one tensor at a time, each to one of the ranks on the machine of rank 0, which
together hold each once; training may go on when it returns. `Saving.write`, which may run in a
thread, writes the copies. The files have whole tensors, so a run can be resumed with another number
of ranks, and other tools can read them.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import safetensors
import torch
import xxhash

from tugline.atomic import flush_path, write_file
from tugline.errors import CheckpointError
from tugline.trainers.grpo.distributed import rank_and_world, run_on_first_rank
from tugline.trainers.grpo.draft import ADAPTER, MOMENTS, TRAINER, Draft, copy_adapter, get_adapter
from tugline.trainers.grpo.hub import get_base_model
from tugline.trainers.grpo.loading import copy_rows, load_weights
from tugline.trainers.grpo.update import Updater

STATE = "state.json"
_BLOCK = 16 << 20
S = TypeVar("S", bound=msgspec.Struct)


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of ``state.json``."""

    step: int
    version: int
    """Policy version of these weights."""
    updates: int
    files: dict[str, str]
    """XXH3 digest (128 bits) by file name."""
    extra: dict[str, Any] = {}
    """Data of the caller, such as its position in the data set."""


def path_of(directory: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return directory / f"step-{step:06d}"


# --------------------------------------------------------------------------- writing
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
    saving = start(directory, trainer, step=step, version=version, extra=extra, keep=keep)
    saving.write()
    return saving.path


def start(
    directory: Path,
    trainer: Updater,
    *,
    step: int,
    version: int,
    extra: dict[str, Any] | None = None,
    keep: int = 3,
) -> "Saving":
    """Copy a checkpoint to the memory of the host; errors and arguments are those of `save`."""
    path = path_of(directory, step)
    draft = Draft(directory / f".{path.name}.part")
    with _describe_errors(path, draft.folder):
        run_on_first_rank(partial(_make_folder, path, draft.folder))
        if hasattr(trainer.model, "peft_config"):
            draft.adapter = copy_adapter(trainer.model)
        else:
            draft.copy_model(trainer)
        draft.copy_optimizer(trainer)
    state = CheckpointState(
        step=step, version=version, updates=trainer.updates, files={}, extra=extra or {}
    )
    return Saving(path, draft, state, keep)


def _make_folder(path: Path, folder: Path) -> None:
    if path.exists():
        msg = f"checkpoint {path} exists; remove it or save to another directory"
        raise CheckpointError(msg)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


@dataclass(frozen=True)
class Saving:
    """A checkpoint whose files are to be written."""

    path: Path
    draft: Draft
    state: CheckpointState
    keep: int

    def write(self) -> None:
        """Write this rank's part; on rank 0, also wait for the others and complete the checkpoint.

        Raises `CheckpointError`; no part of the new checkpoint is left then.
        """
        folder = self.draft.folder
        with _describe_errors(self.path, folder):
            self.draft.write()
            if rank_and_world()[0] > 0:
                return
            files = sorted(folder.iterdir())
            for file in files:
                flush_path(file)
            digests = {file.name: _digest(file) for file in files}
            _replace_state(folder, msgspec.structs.replace(self.state, files=digests))
            folder.rename(self.path)
            flush_path(self.path.parent)
            for old in _steps(self.path.parent)[: -max(1, self.keep)]:
                shutil.rmtree(old)


@contextlib.contextmanager
def _describe_errors(path: Path, draft: Path) -> Iterator[None]:
    """Remove the draft and raise `CheckpointError` if it cannot be written."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError, ValueError, safetensors.SafetensorError) as error:
        if rank_and_world()[0] == 0:
            shutil.rmtree(draft, ignore_errors=True)
        msg = f"checkpoint {path} cannot be written ({error}); check that the disk is not full"
        raise CheckpointError(msg) from error


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
        rest = torch.load(path / TRAINER, map_location="cpu", weights_only=True)
        _load_weights(path, trainer.model)
        _load_optimizer(path, rest, trainer)
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
    own = get_adapter(model)
    with safetensors.safe_open(path / ADAPTER, "pt") as stored:
        different = sorted(own.keys() ^ set(stored.keys()))
        if different:
            msg = f"{ADAPTER} and the model differ in {len(different)} weights, such as"
            raise ValueError(f"{msg} {different[0]}")
        for name, tensor in own.items():
            copy_rows(tensor, stored.get_slice(name))


def _load_optimizer(path: Path, rest: dict[str, Any], trainer: Updater) -> None:
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    parameters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    if rest["steps"]:  # before the first update there are no moments
        with safetensors.safe_open(path / MOMENTS, "pt") as file:
            kinds = sorted({name.rpartition(".")[2] for name in file.keys()})  # noqa: SIM118 - no mapping
            for number, step in rest["steps"].items():
                parameter = parameters[number]
                state[number] = {"step": step}
                for kind in kinds:
                    moment = torch.zeros_like(parameter)
                    copy_rows(moment, file.get_slice(f"{names[id(parameter)]}.{kind}"))
                    state[number][kind] = moment
    trainer.optimizer.load_state_dict({"state": state, "param_groups": rest["param_groups"]})


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
    digest = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
