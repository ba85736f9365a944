"""The models of a run: loaded, prepared for training, and written for engines."""

import contextlib
import copy
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from tugline.chat.tokenizer import Tokenizer
from tugline.inference.load import load
from tugline.trainers.config import Lora, TrainConfig
from tugline.trainers.grpo.distributed import join_ranks, rank_and_world, shard
from tugline.trainers.grpo.train import Grpo
from tugline.trainers.lora import add_adapter
from tugline.trainers.ranks import TrainerGroup


@dataclass(frozen=True, slots=True)
class Models:
    """The trainer, served model and tokenizer of a run."""

    trainer: TrainerGroup
    served: PreTrainedModel
    """The loaded model: a copy for an engine in this process, else the trained model itself."""
    tokenizer: Tokenizer
    eos_ids: frozenset[int]


@contextlib.contextmanager
def open_models(config: TrainConfig) -> Iterator[Models]:
    """Load the model on this rank and make its trainer; the other ranks end with rank 0."""
    with join_ranks(config.device) as device:
        model, tokenizer, eos_ids = load(config.model or Path(), dtype=torch.float32)
        model.to(device)  # type: ignore[arg-type]  # its stub is of a wrapper
        embeds = not config.engine.urls and rank_and_world()[0] == 0
        served = copy.deepcopy(model) if embeds else model
        fsdp = config.fsdp
        reference = prepare(copy.deepcopy(model), fsdp=fsdp) if config.grpo.kl else None
        policy = prepare(model, config.lora, config.schedule.seed, fsdp=fsdp)
        trainer = TrainerGroup(Grpo(policy, config.grpo, reference, config.model))
        try:
            yield Models(trainer, served, tokenizer, eos_ids)
        finally:
            trainer.close()


def prepare(
    model: torch.nn.Module, lora: Lora | None = None, seed: int = 0, *, fsdp: bool
) -> torch.nn.Module:
    """Add a new adapter, equal on every rank, and shard the model, each if configured."""
    model = model if lora is None else add_adapter(model, lora, seed)
    if fsdp and dist.is_initialized():
        shard(model)
    return model


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


@contextlib.contextmanager
def model_folder(source: Path, folder: Path) -> Iterator[Path]:
    """Yield a draft of a model folder with all files of `source` but weights; it becomes `folder`.

    A draft that is not completed leaves `folder` as it was.
    """
    draft = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    ignored = shutil.ignore_patterns("*.safetensors", "*.bin", "*.index.json", "optimizer.pt")
    shutil.copytree(source, draft, ignore=ignored)
    yield draft
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
