"""Training of one model by several processes of torchrun: DDP, FSDP2, or plain copies.

Each rank may have any part of a step's sessions, or none. They are gathered first, so every rank
prepares the same samples, makes the same updates and has the same ledger; only the forward and
backward passes of an update are divided. Gradients are summed, not averaged, because the weight of
each token is already a share of the whole update (I2). The result equals that of a single process,
up to rounding.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tugline.errors import CheckpointError

T = TypeVar("T")


@contextlib.contextmanager
def join_ranks(name: str | None) -> Iterator[torch.device]:
    """Join the process group of torchrun, if it started this process, and leave it at the end.

    Yields the device called `name`, by default a GPU if there is one. Each rank uses the GPU with
    its local rank.
    """
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not dist.is_torchelastic_launched():
        yield device
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def rank_and_world() -> tuple[int, int]:
    """Return the rank and the number of ranks; ``(0, 1)`` without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def gather(items: Sequence[T]) -> list[T]:
    """Return the items of all ranks, in the order of ranks."""
    _, world = rank_and_world()
    if world == 1:
        return list(items)
    parts: list[Sequence[T]] = [()] * world
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def add_up(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the sum of each value over all ranks."""
    if rank_and_world()[1] == 1:
        return list(values)
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return [float(value) for value in sums]


def clip_gradient(model: torch.nn.Module, max_norm: float) -> float:
    """Sum gradients over all ranks, clip them, and return their norm before clipping."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _, world = rank_and_world()
    for parameter in trained:
        if isinstance(parameter.grad, DTensor):
            parameter.grad.mul_(world)  # FSDP2 has averaged it
        elif world > 1:
            if parameter.grad is None:  # such as an expert without tokens on this rank
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
    norm = torch.nn.utils.clip_grad_norm_(trained, max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


# --------------------------------------------------------------------------- sharded models
def shard(model: torch.nn.Module, compute: torch.dtype | None = None) -> None:
    """Shard a Hugging Face or PEFT model over all ranks: each layer, then the rest.

    Weights are gathered and used in the type `compute`, by default their own. Their shards keep
    their types, and gradients are summed over the ranks in float32.
    """
    policy = MixedPrecisionPolicy()
    if compute is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    wrapped: Any = model
    base = wrapped.get_base_model() if hasattr(model, "get_base_model") else model
    kinds = getattr(base, "_no_split_modules", None) or ()
    for layer in [each for each in base.modules() if type(each).__name__ in kinds]:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def count_writers() -> int:
    """Return the number of ranks that write files: those on the machine of rank 0."""
    _, world = rank_and_world()
    return min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))


def gather_tensor(tensor: torch.Tensor, writer: int) -> torch.Tensor | None:
    """Return the whole of a tensor, on the CPU if it was sharded, for the rank `writer`.

    Every rank must call this function; it returns None for the others.
    """
    mine = rank_and_world()[0] == writer
    if not isinstance(tensor, DTensor):
        return tensor if mine else None
    whole = tensor.full_tensor()
    return whole.cpu() if mine else None


def run_on_first_rank(function: Callable[[], object]) -> None:
    """Call a function on rank 0. Every rank must call this, and gets its `OSError`."""
    problem: Exception | None = None
    if rank_and_world()[0] == 0:
        try:
            function()
        except (OSError, CheckpointError) as error:
            problem = error
    raise_together(problem)


def raise_together(error: Exception | None) -> None:
    """Raise `error` on its rank, and an `OSError` with its text on the others.

    Every rank must call this function, with None if it has no error.
    """
    texts = gather([f"{type(error).__name__}: {error}" if error else ""])
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text:
            raise OSError(f"rank {rank}: {text}")
