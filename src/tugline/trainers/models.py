"""The models of a run: loaded, prepared for training, and written for engines."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from tugline.chat.tokenizer import Tokenizer
from tugline.errors import UsageError
from tugline.inference.load import load, load_empty
from tugline.trainers.config import Lora, TrainConfig
from tugline.trainers.grpo.config import UpdateConfig
from tugline.trainers.grpo.distributed import join_ranks, rank_and_world, shard
from tugline.trainers.grpo.forward import get_compute_type
from tugline.trainers.grpo.loading import WeightFiles
from tugline.trainers.grpo.train import Grpo
from tugline.trainers.lora import add_adapter, find_base_weights
from tugline.trainers.ranks import TrainerGroup


@dataclass(frozen=True, slots=True)
class Models:
    """The trainer, served model and tokenizer of a run."""

    trainer: TrainerGroup
    served: PreTrainedModel | None
    """A copy of the loaded model for an engine in this process; None: engines have their own."""
    tokenizer: Tokenizer
    eos_ids: frozenset[int]


@contextlib.contextmanager
def open_models(config: TrainConfig) -> Iterator[Models]:
    """Load the model on this rank and make its trainer; the other ranks end with rank 0."""
    folder = config.model or Path()
    with join_ranks(config.device) as device:
        placement = Placement.of(device, config.grpo, fsdp=config.fsdp)
        policy = load_model(folder, placement, config.lora, config.schedule.seed)
        reference = None
        if config.grpo.needs_reference and config.lora is None:
            reference = load_model(folder, placement, frozen=True).model
        served = None
        if not config.engine.urls and rank_and_world()[0] == 0:
            served = load(folder, dtype=torch.float32)[0]
            served.to(device)  # type: ignore[arg-type]  # its stub is of a wrapper
        trainer = TrainerGroup(Grpo(policy.model, config.updates, reference, config.model))
        try:
            yield Models(trainer, served, policy.tokenizer, policy.eos_ids)
        finally:
            trainer.close()


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and in which type a model computes."""

    device: torch.device
    sharded: bool = False
    """Whether each rank has a shard (FSDP2), instead of the whole model."""
    compute: torch.dtype | None = None
    """Type of forward passes; None: that of the weights."""

    @classmethod
    def of(cls, device: torch.device, config: UpdateConfig, *, fsdp: bool) -> Self:
        """Return the placement of a run, whose `fsdp` counts under torchrun only."""
        return cls(device, fsdp and dist.is_initialized(), get_compute_type(config))


class LoadedModel(NamedTuple):
    """A model to train or to compare with, its tokenizer and its end-of-answer ids."""

    model: torch.nn.Module
    tokenizer: Tokenizer
    eos_ids: frozenset[int]


def load_model(
    folder: Path,
    placement: Placement,
    lora: Lora | None = None,
    seed: int = 0,
    *,
    frozen: bool = False,
) -> LoadedModel:
    """Load a model, with a new adapter if `lora` is given, which is equal on every rank.

    Of a sharded model, each rank reads and keeps only its part. Weights to train are float32. The
    others, which are all if `frozen`, and all but the adapter's if there is one, have the type in
    which the model computes. Raises `UsageError` for a folder that cannot be loaded.
    """
    trains_all = lora is None and not frozen
    dtype = torch.float32 if trains_all else placement.compute or torch.float32
    base, tokenizer, eos_ids = (load_empty if placement.sharded else load)(folder, dtype=dtype)
    files = _open_weights(folder, base) if placement.sharded else None
    model: torch.nn.Module = base if lora is None else add_adapter(base, lora, seed)
    if frozen:
        model.requires_grad_(requires_grad=False)
    if files is None:
        model.to(placement.device)
    else:
        shard(model, placement.compute)
        # unlike `to_empty`, this keeps the values of buffers and of the adapter
        allocate = partial(_allocate, device=placement.device)
        model._apply(allocate)  # type: ignore[no-untyped-call]  # noqa: SLF001 - no public name
        files.copy_to(find_base_weights(model))
    return LoadedModel(model, tokenizer, eos_ids)


def _open_weights(folder: Path, model: torch.nn.Module) -> WeightFiles:
    try:
        return WeightFiles(folder, model)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot load the model in {folder}: {error}") from error


def _allocate(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)


# --------------------------------------------------------------------------- folders
def write_model(config: TrainConfig, models: Models, folder: Path) -> None:
    """Write the weights to serve and their configuration in the Hugging Face format."""
    folder.mkdir(parents=True, exist_ok=True)
    if config.publishes_adapter:
        models.trainer.write_adapter(folder)
        return
    write_weights(config, models, folder)


def write_weights(config: TrainConfig, models: Models, folder: Path) -> None:
    """Write the full weights, with any adapter merged, and their configuration."""
    models.trainer.write_weights(folder, config.publish_dtype)


def name_draft(folder: Path) -> Path:
    """Return the folder in which a model folder is written before it is complete."""
    return folder.with_name(f".{folder.name}.part")


@contextlib.contextmanager
def model_folder(source: Path, folder: Path) -> Iterator[Path]:
    """Yield a draft of a model folder with all files of `source` but weights; it becomes `folder`.

    A draft that is not completed leaves `folder` as it was.
    """
    draft = name_draft(folder)
    shutil.rmtree(draft, ignore_errors=True)
    ignored = shutil.ignore_patterns("*.safetensors", "*.bin", "*.index.json", "optimizer.pt")
    shutil.copytree(source, draft, ignore=ignored)
    yield draft
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
