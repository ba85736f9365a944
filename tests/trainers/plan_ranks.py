"""Processes that measure the memory of an update, in a module that they can import."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from fake_memory import Tracker
from msgspec.structs import replace

from tugline.trainers.config import Lora
from tugline.trainers.grpo.batch import Row, plain_sample
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.distributed import shard
from tugline.trainers.grpo.train import Grpo
from tugline.trainers.lora import add_adapter
from tugline.trainers.plan.memory import Memory, Pass, choose_precision, estimate_memory
from tugline.trainers.plan.shape import measure_shape

TOKENS, CHUNK = 1024, 256
SETTINGS = GrpoConfig(
    micro_tokens=TOKENS, logits_chunk=CHUNK, gradient_checkpointing=True, sessions_per_update=1000
)
CASES: dict[str, dict[str, Any]] = {
    "checkpointed": {},
    "stored": {"gradient_checkpointing": False},
    "bfloat16": {"autocast": "bfloat16"},
    "two passes": {"passes": 2},
    "adapter": {"lora": True},
}


def make_config() -> transformers.Qwen3Config:
    """Activations and weights of similar size."""
    return transformers.Qwen3Config(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        tie_word_embeddings=False,
    )


def make_case(changes: dict[str, Any]) -> tuple[GrpoConfig, Lora | None, int]:
    """Return settings, adapter and number of passes."""
    options = {"lora": False, "passes": 1} | changes
    lora = Lora(rank=4) if options.pop("lora") else None
    passes = options.pop("passes")
    return replace(SETTINGS, **options), lora, passes


def plan(changes: dict[str, Any], world: int) -> Memory:
    """Return the planned memory of a case."""
    settings, lora, passes = make_case(changes)
    forward = Pass(
        tokens=TOKENS,
        chunk=CHUNK,
        checkpointing=bool(settings.gradient_checkpointing),
        offload=False,
        alone=passes == 1,
        foreach=False,
    )
    precision = choose_precision(
        compute=settings.autocast, sharded=world > 1, lora=lora is not None
    )
    return estimate_memory(measure_shape(make_config(), "tiny", lora), precision, world, forward)


def measure(changes: dict[str, Any], world: int) -> int:
    """Return the bytes at the peak of an update of real tensors, by torch's tracker."""
    settings, lora, passes = make_case(changes)
    model: Any = transformers.Qwen3ForCausalLM(make_config())
    if lora is not None:
        model = add_adapter(model, lora, 0)
    if world > 1:
        shard(model, None if settings.autocast is None else torch.bfloat16)
    trainer = Grpo(model, settings)
    rng = np.random.default_rng(0)
    rows = []
    for number in range(world * passes):
        ids = rng.integers(0, 2048, TOKENS).astype(np.int32)
        sample = plain_sample(ids, np.arange(TOKENS) > 0, session=str(number))
        advantages = np.ones(TOKENS, np.float32)
        rows.append(Row(replace(sample, advantages=advantages), weight=1e-3))
    trainer.apply(rows)
    gc.collect()
    tracker = Tracker()
    tracker.track_external(model, trainer.optimizer)
    with tracker:
        trainer.apply(rows)
    [peak] = tracker.get_tracker_snapshot("peak").values()
    total: int = peak["Total"]
    return total


def work(rank: int, world: int, folder: Path) -> None:
    """Measure each case on a rank; rank 0 writes the bytes."""
    torch.set_num_threads(1)
    url = f"file://{folder}/ranks"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world)
    found = {name: measure(changes, world) for name, changes in CASES.items()}
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()
