"""The trainer on the ranks of torchrun.

Rank 0 runs the training loop. The other ranks only train: they repeat each call that rank 0 makes
on its `TrainerGroup`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from tugline.trainers.grpo import checkpoint
from tugline.trainers.grpo.distributed import rank_and_world
from tugline.trainers.grpo.draft import write_adapter
from tugline.trainers.grpo.train import Grpo, StepReport
from tugline.trainers.lora import merge_adapter, write_trained
from tugline.types import Ids, Logprobs, Sample, Trajectory

_BETWEEN_CALLS = timedelta(days=365)
"""Timeout of other ranks' waits: sampling may take any time; torchrun ends them if rank 0 dies."""
_Call = tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]
"""A function that can be pickled by its name, and its arguments after the group."""
P = ParamSpec("P")
R = TypeVar("R")


class TrainerGroup:
    """The trainer on all ranks: rank 0 announces each call, and all ranks make it."""

    def __init__(self, trainer: Grpo) -> None:
        self.trainer = trainer
        self._busy = threading.Lock()
        self._rank, world = rank_and_world()
        self._calls = None if world == 1 else dist.new_group(backend="gloo", timeout=_BETWEEN_CALLS)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    @property
    def packing(self) -> str:
        """See `PolicyModel.packing`."""
        return self.trainer.policy.packing

    def step(
        self, trajectories: Sequence[Trajectory], version: int, supervised: Sequence[Sample] = ()
    ) -> StepReport:
        """Run `Grpo.step` with the trajectories and the supervised rows of rank 0."""
        with self._announced(_step, (), version):
            return _step(self, trajectories, version, supervised)

    def score(self, ids: Ids) -> Logprobs:
        """See `Grpo.score`."""
        return self._call(_score, ids)

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
        """Copy a checkpoint to the memory of the host, and begin to write it.

        Raises `CheckpointError`, also for the checkpoint before; see `finish_saving`.
        """
        self.finish_saving()
        self._call(_save, folder, step=step, version=version, extra=extra, keep=keep)

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is written. Raises `CheckpointError` if it cannot be."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def write(self, saving: checkpoint.Saving) -> None:
        """Begin to write this rank's part of a checkpoint, after that of the one before."""
        self._writing = self._writer.submit(saving.write)

    def load(self, path: Path) -> checkpoint.CheckpointState:
        """See `checkpoint.load`; all ranks must be able to read `path`."""
        return self._call(_load, path)

    def _call(
        self,
        function: "Callable[Concatenate[TrainerGroup, P], R]",
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call a function of this module on all ranks."""
        with self._announced(function, *args, **kwargs):
            return function(self, *args, **kwargs)

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
            function(self, *args, **kwargs)

    def close(self) -> None:
        """Complete the last checkpoint, and end the other ranks once no call is being made."""
        self._writer.shutdown()
        with contextlib.suppress(RuntimeError), self._busy:
            self._send(None)


# --------------------------------------------------------------------------- calls
def _step(
    group: TrainerGroup,
    trajectories: Sequence[Trajectory],
    version: int,
    supervised: Sequence[Sample] = (),
) -> StepReport:
    return group.trainer.step(trajectories, version=version, supervised=supervised)


def _score(group: TrainerGroup, ids: Ids) -> Logprobs:
    return group.trainer.score(ids)


def _merge_adapter(group: TrainerGroup) -> dict[str, torch.Tensor]:
    return merge_adapter(group.trainer.model)


def _write_weights(group: TrainerGroup, folder: Path, dtype: str | None) -> None:
    write_trained(folder, group.trainer.model, group.trainer.source, dtype)


def _write_adapter(group: TrainerGroup, folder: Path) -> None:
    write_adapter(folder, group.trainer.model)


def _save(group: TrainerGroup, /, folder: Path, **settings: Any) -> None:
    group.write(checkpoint.start(folder, group.trainer, **settings))


def _load(group: TrainerGroup, path: Path) -> checkpoint.CheckpointState:
    return checkpoint.load(path, group.trainer)
