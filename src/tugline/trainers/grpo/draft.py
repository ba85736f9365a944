"""The files of a checkpoint, copied to the memory of the host and written later.

Every rank on the machine of rank 0 copies and writes some of the tensors. Copying gathers sharded
tensors, one at a time, so all ranks must take part; writing needs no other rank.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tugline.trainers.grpo.distributed import (
    count_writers,
    gather_tensor,
    rank_and_world,
    run_on_first_rank,
)
from tugline.trainers.grpo.hub import (
    WeightWriter,
    gather_layers,
    get_base_model,
    get_bytes,
    get_weights,
)
from tugline.trainers.grpo.update import Updater
from tugline.trainers.tensor_files import StoredTensor, create_files, read_header, write_tensor

ADAPTER = "adapter_model.safetensors"
MOMENTS = "optimizer.moments"
"""In the format of safetensors; engines take every file with that suffix for weights."""
TRAINER = "trainer.pt"
_WRITE_S = 3600.0
"""Timeout of other ranks' parts, in seconds."""


@dataclass(eq=False)
class Draft:
    """The part of a checkpoint's files that this rank writes to `folder`."""

    folder: Path
    writer: WeightWriter | None = None
    layers: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Weights by their names in the model; written by `writer`."""
    adapter: "AdapterCopy | None" = None
    """In place of the layers of a PEFT model."""
    moments: dict[str, torch.Tensor] = field(default_factory=dict)
    places: dict[str, StoredTensor] = field(default_factory=dict)
    """Places of the moments."""
    rest: dict[str, Any] = field(default_factory=dict)
    """Other state of optimizer and random generator."""

    def copy_model(self, trainer: Updater) -> None:
        """Create the files of the model, and copy the layers that this rank writes."""
        base = get_base_model(trainer.model)
        weights = get_weights(base)
        self.writer = WeightWriter(self.folder, base, weights, trainer.source, "float32")
        self.writer.create()
        self.layers = [
            {name: _copy(tensor) for name, tensor in part.items()}
            for part in gather_layers(weights.items())
            if part is not None
        ]

    def copy_optimizer(self, trainer: Updater) -> None:
        """Create the file of the moments, and copy those that this rank writes."""
        writers = count_writers()
        moments = dict(_name_moments(trainer))
        described = {
            name: StoredTensor(MOMENTS, "F32", tuple(tensor.shape), 0, 0)
            for name, tensor in moments.items()
        }
        run_on_first_rank(partial(create_files, self.folder, described))
        self.places = read_header(self.folder / MOMENTS) if moments else {}
        for number, (name, tensor) in enumerate(moments.items()):
            whole = gather_tensor(tensor, number % writers)
            if whole is not None:
                self.moments[name] = _copy(whole)
        state = trainer.optimizer.state_dict()
        steps = {number: moment["step"].clone() for number, moment in state["state"].items()}
        self.rest = {
            "param_groups": state["param_groups"],
            "steps": steps,
            "order": trainer.order.get_state(),
        }

    def write(self) -> None:
        """Write this rank's part; on rank 0, also wait for those of the others.

        Raises `OSError`, `RuntimeError` or `ValueError`.
        """
        rank, _ = rank_and_world()
        failed = self.folder / f".rank{rank}.failed"
        try:
            self._write_part()
        except (OSError, RuntimeError, ValueError) as error:
            if rank > 0:
                failed.write_text(str(error), encoding="utf-8")
            raise
        if rank > 0:
            (self.folder / f".rank{rank}.done").touch()
            return
        for other in range(1, count_writers()):
            self._await_part(other)

    def _write_part(self) -> None:
        if self.writer is not None:
            for part in self.layers:
                self.writer.write(part)
            self.writer.copy_rest()
        if self.adapter is not None:
            self.adapter.write(self.folder)
        for name, tensor in self.moments.items():
            place = self.places[name]
            write_tensor(self.folder, place, get_bytes(tensor, place.dtype))
        if rank_and_world()[0] == 0:
            torch.save(self.rest, self.folder / TRAINER)

    def _await_part(self, rank: int) -> None:
        deadline = time.monotonic() + _WRITE_S
        done = self.folder / f".rank{rank}.done"
        failed = self.folder / f".rank{rank}.failed"
        while not done.exists():
            if failed.exists():
                raise OSError(f"rank {rank}: {failed.read_text(encoding='utf-8')}")
            if time.monotonic() > deadline:
                raise OSError(f"rank {rank} has not written its part within {_WRITE_S:.0f} s")
            time.sleep(0.02)
        done.unlink()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in the memory of the host that training does not change."""
    return tensor.detach().to("cpu", copy=True)


def _name_moments(trainer: Updater) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the optimizer's tensors, such as ``layers.0.mlp.up_proj.weight.exp_avg``."""
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            for kind, tensor in trainer.optimizer.state.get(parameter, {}).items():
                if kind != "step":
                    yield f"{names[id(parameter)]}.{kind}", tensor


# --------------------------------------------------------------------------- adapters
@dataclass(frozen=True)
class AdapterCopy:
    """An adapter of PEFT: its weights, in the memory of the host on rank 0, and its settings."""

    weights: Mapping[str, torch.Tensor]
    settings: Any

    def write(self, folder: Path) -> None:
        """Write the adapter as PEFT does, on rank 0."""
        if rank_and_world()[0] == 0:
            safetensors.torch.save_file(
                dict(self.weights), folder / ADAPTER, metadata={"format": "pt"}
            )
            self.settings.save_pretrained(folder)


def copy_adapter(model: Any) -> AdapterCopy:
    """Copy the adapter of a PEFT model; every rank must call this."""
    whole = ((n, gather_tensor(tensor, 0)) for n, tensor in get_adapter(model).items())
    weights = {name: _copy(tensor).contiguous() for name, tensor in whole if tensor is not None}
    return AdapterCopy(weights, model.peft_config["default"])


def write_adapter(folder: Path, model: Any) -> None:
    """Write the adapter of a PEFT model as PEFT does; every rank must call this."""
    copy_adapter(model).write(folder)


def get_adapter(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a PEFT model's adapter, by their names in its files."""
    from peft import get_peft_model_state_dict  # noqa: PLC0415 - an extra

    return dict(get_peft_model_state_dict(model, save_embedding_layers=False))
