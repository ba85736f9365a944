"""Two processes that train wrapped models; a module of its own, which they can import."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import peft
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trainers.sessions import VERSION, groups, session, tiny, trace
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.train import Grpo, StepReport
from tugline.types import Trajectory

STEPS = 5
CONFIG = GrpoConfig(lr=1e-4, sessions_per_update=3, importance="truncate")
LORA = peft.LoraConfig(
    r=4,
    lora_dropout=0.5,
    target_modules="all-linear",
    task_type="CAUSAL_LM",
    init_lora_weights=False,
)


def batches() -> list[list[Trajectory]]:
    """Sessions of five steps; the last has a single row of most of the tokens."""
    model = tiny()
    rng = np.random.default_rng(3)
    lone = [session([trace(model, rng)], task="lone", sample=n, reward=float(n)) for n in range(2)]
    return [*(groups(model, tasks=2, samples=3) for _ in range(STEPS - 1)), lone]


def train(model: torch.nn.Module, config: GrpoConfig, share: slice) -> list[StepReport]:
    """Five steps on a part of each step's sessions."""
    trainer = Grpo(model, config)
    return [trainer.step(batch[share], version=VERSION) for batch in batches()]


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All weights in one vector."""
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return torch.cat([p.detach().flatten() for p in whole])


def bare() -> torch.nn.Module:
    """A copy on each rank."""
    return tiny()


def ddp() -> torch.nn.Module:
    """Wrapped as ``torchrun`` users do."""
    return DistributedDataParallel(tiny())


def fsdp() -> torch.nn.Module:
    """Sharded by layer, and the rest at the root."""
    model = tiny()
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def lora_fsdp() -> torch.nn.Module:
    """Adapters, sharded."""
    model = peft.get_peft_model(tiny(), LORA)
    return fully_shard(model)


def lora() -> torch.nn.Module:
    """Adapters of one process."""
    torch.manual_seed(0)
    return peft.get_peft_model(tiny(), LORA)


CASES: dict[str, tuple[Callable[[], torch.nn.Module], slice, slice, dict[str, object]]] = {
    "bare": (bare, slice(None, 1), slice(1, None), {}),
    "ddp": (ddp, slice(None), slice(0), {"tree_packing": False, "ratio_level": "trace"}),
    "fsdp": (fsdp, slice(None, 1), slice(1, None), {}),
    "fsdp, one rank has all": (fsdp, slice(None), slice(0), {"gradient_checkpointing": True}),
    "fsdp, small passes": (fsdp, slice(None, 4), slice(4, None), {"micro_tokens": 1}),
    "lora": (lora_fsdp, slice(None, 1), slice(1, None), {}),
}
"""The model, what each of two ranks brings of a step's sessions, and changes of the config."""


def work(rank: int, folder: Path) -> None:
    """One of two ranks: train every case, and leave weights and reports in `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    results = {}
    for name, (make, *shares, changes) in CASES.items():
        model = make()
        reports = train(model, msgspec.structs.replace(CONFIG, **changes), shares[rank])
        results[name] = (weights(model), [msgspec.json.encode(one) for one in reports])
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()
