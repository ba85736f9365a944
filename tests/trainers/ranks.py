"""Two processes that train wrapped models, in a module that they can import."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import peft
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.nn.parallel import DistributedDataParallel

from support.models import make_kind
from trainers.routed import make_moe
from trainers.sessions import VERSION, groups, recaptured, session, tiny, trace, weights
from tugline.inference.load import load
from tugline.trainers.config import Lora
from tugline.trainers.grpo import checkpoint
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.distributed import shard
from tugline.trainers.grpo.train import Grpo, StepReport
from tugline.trainers.lora import write_trained
from tugline.trainers.models import Placement, load_model
from tugline.types import Trajectory

STEPS, SAVED = 5, 2
CPU = torch.device("cpu")
CONFIG = GrpoConfig(lr=1e-4, sessions_per_update=3, importance="truncate", warmup_updates=6)
LORA = peft.LoraConfig(
    r=4,
    lora_dropout=0.5,
    target_modules="all-linear",
    task_type="CAUSAL_LM",
    init_lora_weights=False,
)


def batches() -> list[list[Trajectory]]:
    """Sessions of five steps.

    A session of the second step is not finite. The last step has two rows; the engine's
    probabilities of one of them are much too low.
    """
    model = tiny()
    rng = np.random.default_rng(3)
    lone = [session([trace(model, rng)], task="lone", sample=n, reward=float(n)) for n in range(2)]
    made = [groups(model, tasks=2, samples=3) for _ in range(STEPS - 1)]
    made[1][2] = recaptured(made[1][2], lambda each: each.logprobs + math.nan)
    return [*made, [lone[0], recaptured(lone[1], lambda each: each.logprobs - 1)]]


def train(model: torch.nn.Module, config: GrpoConfig, share: slice) -> list[StepReport]:
    """Train five steps with a part of each step's sessions."""
    trainer = Grpo(model, config)
    replays = trainer.policy.routes.has_experts
    return [
        trainer.step(
            [with_experts(each) if replays else each for each in batch][share], version=VERSION
        )
        for batch in batches()
    ]


def with_experts(each: Trajectory) -> Trajectory:
    """The session with the same experts at the same position, of all but the last token."""
    traces = []
    for old in each.traces:
        rng = np.random.default_rng(0)
        rows = rng.permuted(np.tile(np.arange(8, dtype=np.uint8), (len(old.ids) - 1, 2, 1)), axis=2)
        traces.append(replace(old, experts=rows[..., :2]))
    return replace(each, traces=tuple(traces))


def train_rest(trainer: Grpo, share: slice) -> torch.Tensor:
    """Train the steps after `SAVED`; return the weights."""
    for batch in batches()[SAVED:]:
        trainer.step(batch[share], version=VERSION)
    return weights(trainer.model)


def fsdp(seed: int = 0) -> torch.nn.Module:
    """A sharded model."""
    model = tiny(seed)
    shard(model)
    return model


def hybrid() -> torch.nn.Module:
    """A model with gated delta nets."""
    return make_kind("qwen3_5")


def hybrid_fsdp() -> torch.nn.Module:
    """A sharded model with gated delta nets."""
    model = hybrid()
    shard(model)
    return model


def experts() -> torch.nn.Module:
    """A model with experts."""
    return make_moe()


def experts_fsdp() -> torch.nn.Module:
    """A sharded model with experts."""
    model = make_moe()
    shard(model)
    return model


def lora_fsdp(seed: int = 0) -> torch.nn.Module:
    """A sharded model with adapters."""
    model = lora(seed)
    shard(model)
    return model


def lora(seed: int = 0) -> torch.nn.Module:
    """A model with adapters."""
    model = tiny()
    torch.manual_seed(seed)
    return peft.get_peft_model(model, LORA)


CASES: dict[str, tuple[Callable[[], torch.nn.Module], slice, slice, dict[str, object]]] = {
    "bare": (tiny, slice(None, 1), slice(1, None), {}),
    "ddp": (
        lambda: DistributedDataParallel(tiny()),  # as users of torchrun do
        slice(None),
        slice(0),
        {"tree_packing": False, "ratio_level": "trace", "importance": None},
    ),
    "entropy": (tiny, slice(None), slice(0), {"entropy": 0.1, "loss": "gmpo", "logits_chunk": 16}),
    "fsdp": (fsdp, slice(None, 1), slice(1, None), {}),
    "fsdp, entropy": (fsdp, slice(None, 1), slice(1, None), {"entropy": 0.1, "logits_chunk": 16}),
    "fsdp, all on one rank": (fsdp, slice(None), slice(0), {"gradient_checkpointing": True}),
    "fsdp, small passes": (fsdp, slice(None, 4), slice(4, None), {"micro_tokens": 1}),
    "lora": (lora_fsdp, slice(None, 1), slice(1, None), {}),
    "hybrid": (hybrid_fsdp, slice(None, 1), slice(1, None), {"gradient_checkpointing": True}),
    "experts": (
        experts_fsdp,
        slice(None, 1),
        slice(1, None),
        {"gradient_checkpointing": True, "load_balancing": 0.1},
    ),
    "experts, ddp": (
        lambda: DistributedDataParallel(experts()),
        slice(None),
        slice(0),
        {"tree_packing": False, "ratio_level": "trace", "importance": None},
    ),
}
"""The model, the part of a step's sessions of each rank, and changes of the configuration."""


ALONE: dict[str, Callable[[], torch.nn.Module]] = {
    "lora": lora,
    "hybrid": hybrid,
    "experts": experts,
    "experts, ddp": experts,
}
"""The model that one process trains, by case; `tiny` for the others."""
RESUMED: dict[str, Callable[[int], torch.nn.Module]] = {"fsdp": fsdp, "lora": lora_fsdp}
"""Models that are saved after `SAVED` steps and loaded into others."""


def resume(name: str, share: slice, folder: Path) -> torch.Tensor:
    """Train, save, load into a model with other weights, and train the rest."""
    trainer = Grpo(RESUMED[name](0), CONFIG)
    for batch in batches()[:SAVED]:
        trainer.step(batch[share], version=VERSION)
    checkpoint.save(folder, trainer, step=SAVED, version=VERSION)
    dist.barrier()
    other = Grpo(RESUMED[name](7), CONFIG)
    checkpoint.load(folder / f"step-{SAVED:06d}", other)
    return train_rest(other, share)


def publish(folder: Path, model: torch.nn.Module) -> None:
    """Write a model in the names of its source, and a checkpoint."""
    trainer = Grpo(model, CONFIG, source=folder / "qwen3_moe")
    write_trained(folder / "published", model, trainer.source)
    checkpoint.save(folder / "saved", trainer, step=1, version=VERSION)


LOADED: dict[str, tuple[str, Placement, Lora | None]] = {
    "experts": ("qwen3_moe", Placement(CPU, sharded=True), None),
    "tied": ("qwen3", Placement(CPU, sharded=True), None),
    "images": ("qwen3_5_with_images", Placement(CPU, sharded=True), None),
    "adapter": ("qwen3_moe", Placement(CPU, sharded=True, compute=torch.bfloat16), Lora(rank=2)),
}
"""Models that each rank loads a part of: the kind of the source, where it computes, the adapter."""


def load_by_rank(folder: Path) -> dict[str, tuple[torch.Tensor, list[bytes]]]:
    """Return all weights of each model in `LOADED`, and the type of each as text."""
    results = {}
    for name, (kind, placement, adapter) in LOADED.items():
        model = load_model(folder / kind, placement, adapter, seed=3).model
        types = [str(each.dtype).encode() for each in model.parameters()]
        results[f"loaded {name}"] = (weights(model).float(), types)
    return results


def train_in_bfloat16(folder: Path, share: slice) -> tuple[torch.Tensor, list[bytes]]:
    """Train a step of a sharded model that computes in bfloat16."""
    placement = Placement(CPU, sharded=True, compute=torch.bfloat16)
    model = load_model(folder / "qwen3", placement).model
    trainer = Grpo(model, replace(CONFIG, autocast="bfloat16"))
    report = trainer.step(batches()[0][share], version=VERSION)
    return weights(model), [msgspec.json.encode(report)]


def work(rank: int, folder: Path) -> None:
    """One of two ranks: train every case, and write weights and reports to `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    results = {}
    for name, (make, *shares, changes) in CASES.items():
        model = make()
        reports = train(model, replace(CONFIG, **changes), shares[rank])
        results[name] = (weights(model), [msgspec.json.encode(report) for report in reports])
    for name in RESUMED:
        share = slice(1) if rank == 0 else slice(1, None)
        results[f"resumed {name}"] = (resume(name, share, folder / name), [])
    results |= load_by_rank(folder)
    results["bfloat16"] = train_in_bfloat16(folder, slice(1) if rank == 0 else slice(1, None))
    (folder / "published").mkdir(exist_ok=True)
    experts = load(folder / "qwen3_moe", dtype=torch.float32)[0]
    shard(experts)
    publish(folder, experts)
    saving = checkpoint.start(folder / "started", Grpo(fsdp(), CONFIG), step=1, version=VERSION)
    own = sum(each.numel() for part in saving.draft.layers for each in part.values())
    results["copied"] = (torch.tensor(own), [])
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


# --------------------------------------------------------------------------- a killed rank
PARTS = (slice(1), slice(1, 4), slice(4, None), slice(0))
"""Parts of a step's sessions of four ranks; the last has none."""


def train_until_killed(rank: int, folder: Path) -> None:
    """One of four ranks: save after `SAVED` steps; rank 2 dies in the second step after that."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/four", rank=rank, world_size=4)
    model = fsdp()
    trainer = Grpo(model, CONFIG)
    for number, batch in enumerate(batches()):
        if rank == 2 and number == SAVED + 1:
            head = trainer.policy.model.get_output_embeddings()
            head.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        trainer.step(batch[PARTS[rank]], version=VERSION)
        if number + 1 == SAVED:
            checkpoint.save(folder, trainer, step=SAVED, version=VERSION)


def resume_with_two(rank: int, folder: Path) -> None:
    """One of two ranks: train the rest from the newest checkpoint; write the weights."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/two", rank=rank, world_size=2)
    trainer = Grpo(fsdp(7), CONFIG)
    newest = checkpoint.latest(folder)
    assert newest is not None
    checkpoint.load(newest, trainer)
    trained = train_rest(trainer, slice(1) if rank == 0 else slice(1, None))
    torch.save(trained, folder / f"resumed{rank}.pt")
    dist.destroy_process_group()
