"""Weights in the names, types and files of the model folder that they came from.

transformers renames and fuses weights when it loads a model: the experts of a layer become one
tensor, and the text part of a model with images loses a prefix. Engines and other tools read the
names of the folder. `write_weights` converts back with transformers' own rules, a layer at a time,
and copies from the folder what was not trained (such as a vision tower) and ``config.json``.
`tugline.trainers.grpo.loading` is its inverse.
"""

import copy
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers.core_model_loading import revert_weight_conversion

from tugline.errors import ConfigError
from tugline.trainers.grpo.distributed import (
    count_writers,
    gather_tensor,
    raise_together,
    rank_and_world,
    run_on_first_rank,
)
from tugline.trainers.tensor_files import (
    WEIGHTS,
    StoredTensor,
    copy_tensor,
    create_files,
    read_places,
    write_index,
    write_tensor,
)

Weights = Iterable[tuple[str, torch.Tensor]]
"""Weights by their names in the model, in the order of its layers."""
_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types of weights that can be trained, by their names in files."""
_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in _TYPES.items()}
_LAYER = re.compile(r"(.*?\.\d+)\.")


def get_base_model(model: torch.nn.Module) -> Any:
    """Return the transformers model in a wrapper of DDP or PEFT."""
    inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def get_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a model without wrapper; tied weights are the same object."""
    named: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    return named


# --------------------------------------------------------------------------- names
def check_names(model: Any, trained: Weights, source: Path) -> None:
    """Raise `ConfigError` unless each trained weight has a place in the files of `source`."""
    try:
        _choose_places(_name_trained(model, trained), _read_source(source), None)
    except ValueError as error:
        raise ConfigError(f"model: {error}", "model") from error


def _read_source(source: Path) -> dict[str, StoredTensor]:
    try:
        return read_places(source)
    except (OSError, KeyError, ValueError) as error:
        msg = f"{source} has no readable *.safetensors, in which weights are published: {error}"
        raise ConfigError(msg, "model") from error


def _name_trained(model: Any, trained: Weights) -> list[tuple[set[str], tuple[int, ...]]]:
    """Return the names, in files, and the shape of each trained weight; tied ones have several."""
    tied = _find_tied(model)
    return [
        (tied.get(name, {name}), tuple(tensor.shape))
        for part in _group_layers((name, _on_meta(tensor)) for name, tensor in trained)
        for name, tensor in revert_weight_conversion(model, part).items()
    ]


def _choose_places(
    trained: Iterable[tuple[set[str], tuple[int, ...]]],
    stored: Mapping[str, StoredTensor],
    dtype: str | None,
) -> dict[str, StoredTensor]:
    """Return `stored` with the types in which the trained weights are written.

    Raises `ValueError` for weights that are not in `stored`, or of another shape or type there.
    """
    places = dict(stored)
    missing: list[str] = []
    for names, shape in trained:
        if not names & stored.keys():
            missing.append(min(names))
        for each in names & stored.keys():
            place = stored[each]
            if place.shape != shape or place.dtype not in _TYPES:
                msg = f"{each} has shape {shape} in the model, and {place.shape} and type"
                msg += f" {place.dtype} in its files: it must be F32, BF16 or F16 of one shape"
                raise ValueError(msg)
            places[each] = place._replace(dtype=_NAMES[dtype] if dtype else place.dtype)
    if missing:
        msg = f"{len(missing)} weights of the model are not in its files, such as {missing[0]};"
        msg += f" the files have {', '.join(sorted(stored)[:2])}"
        raise ValueError(msg)
    return places


def _find_tied(model: Any) -> dict[str, set[str]]:
    """Return the names of weights that share their memory, as in files, by each of these names.

    A folder may have such a weight once, or by each of its names.
    """
    by_weight: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in get_weights(model).items():
        by_weight.setdefault(id(tensor), {})[name] = _on_meta(tensor)
    shared = [names for names in by_weight.values() if len(names) > 1]
    tied = [{*revert_weight_conversion(model, names)} for names in shared]
    return {name: names for names in tied for name in names}


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _group_layers(weights: Weights) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights of each layer together, because conversions may need several of them."""

    def find_layer(item: tuple[str, torch.Tensor]) -> str:
        layer = _LAYER.match(item[0])
        return layer[1] if layer else item[0]

    for _, part in groupby(weights, find_layer):
        yield dict(part)


def _describe_model(model: Any) -> dict[str, StoredTensor]:
    """Return the tensors of a model without a source as of one file, tied weights once."""
    own = get_weights(model)
    first = {id(tensor): name for name, tensor in reversed(own.items())}
    unique = {name: _on_meta(own[name]) for name in reversed(first.values())}
    return {
        name: StoredTensor(WEIGHTS, "F32", tuple(tensor.shape), 0, 0)
        for name, tensor in revert_weight_conversion(model, unique).items()
    }


# --------------------------------------------------------------------------- writing
@torch.no_grad()
def write_weights(
    folder: Path,
    model: Any,
    trained: Mapping[str, torch.Tensor],
    weights: Weights,
    source: Path | None,
    dtype: str | None,
) -> None:
    """Write a model's files and ``config.json``, with new values of its trained weights.

    `trained` has the names and shapes of `weights`, whose tensors are made and gathered one layer
    at a time. Every rank must call this function; those on the machine of rank 0 write the layers
    in turn. Raises `OSError`.
    """
    writer = WeightWriter(folder, model, trained, source, dtype)
    writer.create()
    problem: Exception | None = None
    for part in gather_layers(weights):
        try:
            if part is not None and problem is None:
                writer.write(part)
        except (OSError, ValueError) as error:
            problem = error  # the other ranks are gathering the next layers
    try:
        if problem is None:
            writer.copy_rest()
    except (OSError, ValueError) as error:
        problem = error
    raise_together(problem)


def gather_layers(weights: Weights) -> Iterator[dict[str, torch.Tensor] | None]:
    """Yield the weights of each layer, gathered, to the rank whose turn it is to write them.

    Every rank must take all of them; it gets None for those of the others.
    """
    rank, _ = rank_and_world()
    writers = count_writers()
    for number, part in enumerate(_group_layers(weights)):
        turn = number % writers
        whole = {name: gather_tensor(tensor, turn) for name, tensor in part.items()}
        yield {n: t for n, t in whole.items() if t is not None} if turn == rank else None


class WeightWriter:
    """Writes the weights of a model in the names, types and files of its source.

    Tensors that are not trained and the configuration are copied from `source`; without it, all
    weights are trained. `dtype` is a name such as ``bfloat16``; None: each tensor has its type in
    `source`. Raises `ConfigError` for a source without readable files.
    """

    def __init__(
        self,
        folder: Path,
        model: Any,
        trained: Mapping[str, torch.Tensor],
        source: Path | None,
        dtype: str | None,
    ) -> None:
        self._folder = folder
        self._model = model
        self._source = source
        self._stored = _read_source(source) if source else _describe_model(model)
        named = _name_trained(model, trained.items())
        self._places = _choose_places(named, self._stored, dtype)
        self._trained = set[str]().union(*(names for names, _ in named))
        self._tied = _find_tied(model)

    def create(self) -> None:
        """Create the files, on rank 0; every rank must call this. Raises `OSError`."""
        run_on_first_rank(self._create)
        self._places = read_places(self._folder)

    def _create(self) -> None:
        write_index(self._folder, create_files(self._folder, self._places))
        _write_config(self._folder, self._model, self._source)

    def write(self, part: Mapping[str, torch.Tensor]) -> None:
        """Write the weights of a layer, which are whole, by their names in the model."""
        for name, tensor in revert_weight_conversion(self._model, dict(part)).items():
            for each in self._tied.get(name, {name}) & self._places.keys():
                place = self._places[each]
                write_tensor(self._folder, place, get_bytes(tensor, place.dtype))

    def copy_rest(self) -> None:
        """Copy this rank's share of the tensors that are not trained."""
        rank, _ = rank_and_world()
        writers = count_writers()
        rest = [name for name in self._places if name not in self._trained]
        for name in rest[rank::writers] if rank < writers else []:
            assert self._source is not None  # noqa: S101 - without a source, all are trained
            copy_tensor(self._source, self._stored[name], self._folder, self._places[name])


def get_bytes(tensor: torch.Tensor, dtype: str) -> memoryview:
    """Return the bytes of a tensor in a type, such as ``F32``."""
    plain = tensor.detach().to("cpu", _TYPES[dtype]).contiguous()
    data: memoryview = plain.reshape(-1).view(torch.uint8).numpy().data
    return data


def _write_config(folder: Path, model: Any, source: Path | None) -> None:
    if source is not None:
        shutil.copyfile(source / "config.json", folder / "config.json")
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(folder)
