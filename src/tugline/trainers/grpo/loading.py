"""Weights of a model folder, read into a model: each rank reads its own part of the files.

transformers renames and fuses weights when it loads a model. The same rules are applied here, one
weight at a time, so no rank ever has a sharded model whole, on the host or on its GPU. Of a weight
that is stored as it is in the model, a rank reads the rows of its shard; of a weight that is made
of several, such as the experts of a layer, it reads all of them and keeps its shard.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from tugline.trainers.grpo.hub import get_weights
from tugline.trainers.tensor_files import StoredTensor, read_places


class WeightFiles:
    """The weights in a folder by their names in `model`, which may be on the meta device.

    Raises `OSError` for a file that cannot be read, and `ValueError` for one that is not a
    safetensors file, or if a weight of the model is missing or has another shape. Tensors that the
    model does not have are left out.
    """

    def __init__(self, folder: Path, model: Any) -> None:
        self._folder = folder
        self._stored = read_places(folder)
        self._conversions = _plan(model, sorted(self._stored, key=dot_natural_key))
        own = get_weights(model)
        shapes = dict(self._read(lambda stored: torch.empty(stored.shape, device="meta")))
        found = {id(own[name]) for name in shapes}
        different = [name for name, tensor in own.items() if id(tensor) not in found]
        different += [name for name, value in shapes.items() if value.shape != own[name].shape]
        if different:
            msg = f"its files and the model differ in {len(different)} weights, such as"
            raise ValueError(f"{msg} {different[0]}")

    def _read(
        self, read: Callable[[StoredTensor], torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each weight of the model, made of the tensors that `read` returns."""
        for conversion in self._conversions:
            yield from conversion.make(lambda name: read(self._stored[name]))

    @torch.no_grad()
    def copy_to(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights, or this rank's shard of each, to tensors with the same names."""
        with contextlib.ExitStack() as stack:
            files = {
                file: stack.enter_context(safetensors.safe_open(self._folder / file, "pt"))
                for file in {place.file for place in self._stored.values()}
            }
            for conversion in self._conversions:
                if conversion.rule is None:
                    name = next(iter(conversion.parts))
                    stored = files[self._stored[name].file].get_slice(name)
                    copy_rows(weights[conversion.target], stored)
                    continue
                made = conversion.make(lambda name: files[self._stored[name].file].get_tensor(name))
                for name, whole in made:
                    copy_rows(weights[name], whole)


@torch.no_grad()
def copy_rows(tensor: torch.Tensor, whole: Any) -> None:
    """Copy `whole`, a tensor or a slice of a file, to a tensor that may be a shard of it."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(whole[...])
        return
    shape, begin = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    part = tuple(slice(at, at + size) for at, size in zip(begin, shape, strict=True))
    if all(shape):  # the last ranks may have none of a small weight
        tensor.to_local().copy_(whole[part])


def load_weights(folder: Path, model: Any) -> None:
    """Copy the weights in a folder to those of `model`; see `WeightFiles` for errors."""
    WeightFiles(folder, model).copy_to(get_weights(model))


# --------------------------------------------------------------------------- conversions
@dataclass
class _Conversion:
    """A weight of the model, or several that are made together, and what they are made of."""

    model: Any
    target: str
    rule: WeightConverter | None
    parts: dict[str, str | None] = field(default_factory=dict)
    """Tensors by their names in the files, each with the pattern of `rule` that it matches."""

    def make(self, read: Callable[[str], torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield names and values; `read` returns a tensor by its name in the files."""
        if self.rule is None:
            return [(self.target, read(next(iter(self.parts))))]
        rule: Any = copy.deepcopy(self.rule)
        for name, pattern in self.parts.items():
            rule.add_tensor(self.target, name, pattern, read(name))
        made = rule.convert(self.target, model=self.model, config=self.model.config)
        return [(name, each[0] if isinstance(each, list) else each) for name, each in made.items()]


def _plan(model: Any, names: Iterable[str]) -> list[_Conversion]:
    """Return how the weights of `model` are made of tensors with these names."""
    own = get_weights(model)
    rules = _find_rules(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    conversions: dict[str, _Conversion] = {}
    for name in names:
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, own
        )
        if target not in own and name in own:
            target = name
            pattern = None
        if target in own:
            rule = None if pattern is None else by_pattern[pattern]
            made = conversions.setdefault(target, _Conversion(model, target, rule))
            made.parts[name] = pattern
    return list(conversions.values())


def _find_rules(model: Any) -> list[Any]:
    """Return the rules with which a model was loaded, or would be."""
    rules = getattr(model, "_weight_conversions", None)
    if rules is not None:
        return list(rules)
    known = get_model_conversion_mapping(model, add_legacy=False)
    return [rule for rule in known if not isinstance(rule, PrefixChange)]
