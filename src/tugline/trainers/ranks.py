"""The trainer on the ranks of torchrun.

Rank 0 runs the training loop. The other ranks only train: they repeat each call that rank 0 makes
on its `TrainerGroup`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from tugline.trainers.grpo import checkpoint
from tugline.trainers.grpo.distributed import rank_and_world
from tugline.trainers.grpo.train import Grpo, StepReport
from tugline.trainers.lora import merge_adapter, write_trained
from tugline.types import Ids, Logprobs, Trajectory

_BETWEEN_CALLS = timedelta(days=365)
"""Timeout of other ranks' waits: sampling may take any time; torchrun ends them if rank 0 dies."""
_Call = tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]
"""A function that can be pickled by its name, and its arguments after the trainer."""
P = ParamSpec("P")
R = TypeVar("R")


class TrainerGroup:
    """The trainer on all ranks: rank 0 announces each call, and all ranks make it."""

    def __init__(self, trainer: Grpo) -> None:
        self._trainer = trainer
        self._busy = threading.Lock()
        self._rank, world = rank_and_world()
        self._calls = None if world == 1 else dist.new_group(backend="gloo", timeout=_BETWEEN_CALLS)

    @property
    def packing(self) -> str:
        """See `PolicyModel.packing`."""
        return self._trainer.policy.packing

    def step(self, trajectories: Sequence[Trajectory], version: int) -> StepReport:
        """Run `Grpo.step` with the trajectories of rank 0."""
        with self._announced(Grpo.step, (), version=version):
            return self._trainer.step(trajectories, version=version)

    def score(self, ids: Ids) -> Logprobs:
        """See `Grpo.score`."""
        return self._call(Grpo.score, ids)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the full weights to serve, by their names in the model without an adapter."""
        return self._call(_merge_adapter)

    def write_weights(self, folder: Path, dtype: str | None) -> None:
        """See `lora.write_trained`."""
        self._call(_write_weights, folder, dtype)

    def write_adapter(self, folder: Path) -> None:
        """Write the adapter as PEFT does."""
        self._call(_write_adapter, folder)

    def save(self, folder: Path, step: int, version: int, extra: dict[str, Any], keep: int) -> None:
        """See `checkpoint.save`."""
        self._call(_save, folder, step=step, version=version, extra=extra, keep=keep)

    def load(self, path: Path) -> checkpoint.CheckpointState:
        """See `checkpoint.load`; all ranks must be able to read `path`."""
        return self._call(_load, path)

    def _call(
        self, function: Callable[Concatenate[Grpo, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a function of this package with the trainer, on all ranks."""
        with self._announced(function, *args, **kwargs):
            return function(self._trainer, *args, **kwargs)

    @contextlib.contextmanager
    def _announced(
        self, function: Callable[..., object], *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        """Announce a call, which the caller makes itself; other calls wait until it has ended."""
        with self._busy:
            self._send((function, args, kwargs))
            yield

    def _send(self, call: _Call | None) -> None:
        if self._calls is not None and self._rank == 0:
            dist.broadcast_object_list([call], src=0, group=self._calls)

    def follow(self) -> None:
        """Make the calls that rank 0 announces until it closes the group; for the other ranks."""
        while True:
            announced: list[_Call | None] = [None]
            dist.broadcast_object_list(announced, src=0, group=self._calls)
            if announced[0] is None:
                return
            function, args, kwargs = announced[0]
            function(self._trainer, *args, **kwargs)

    def close(self) -> None:
        """End the other ranks that are still running, once no call is being made."""
        with contextlib.suppress(RuntimeError), self._busy:
            self._send(None)


# --------------------------------------------------------------------------- calls
def _merge_adapter(trainer: Grpo) -> dict[str, torch.Tensor]:
    return merge_adapter(trainer.model)


def _write_weights(trainer: Grpo, folder: Path, dtype: str | None) -> None:
    write_trained(folder, trainer.model, trainer.source, dtype)


def _write_adapter(trainer: Grpo, folder: Path) -> None:
    checkpoint.write_adapter(folder, trainer.model)


def _save(trainer: Grpo, /, folder: Path, **settings: Any) -> None:
    checkpoint.save(folder, trainer, **settings)


def _load(trainer: Grpo, path: Path) -> checkpoint.CheckpointState:
    return checkpoint.load(path, trainer)
