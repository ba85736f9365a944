"""Adapters of PEFT: added to a model to train, and merged into its weights to serve."""

import warnings
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import torch

from tugline.trainers.config import Lora
from tugline.trainers.grpo.distributed import gather_tensor
from tugline.trainers.grpo.hub import get_base_model, get_weights, write_weights


def add_adapter(model: Any, lora: Lora, seed: int) -> torch.nn.Module:
    """Return a model with a new adapter, which is equal on every rank.

    The adapter's weights are allocated, also if those of the model are on the meta device.
    """
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - an extra
    from peft.tuners.lora import LoraLayer  # noqa: PLC0415

    targets = list(lora.targets) or "all-linear"
    settings = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM"
    )
    # PEFT 0.21 uses a deprecated name of transformers, and does not find its own patterns for
    # fused experts, which it applies
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern", RuntimeWarning)
        adapted: torch.nn.Module = get_peft_model(model, settings)
    torch.manual_seed(seed)
    for layer in adapted.modules():
        if isinstance(layer, LoraLayer):
            for part in (layer.lora_A, layer.lora_B):
                part.to_empty(device="cpu")
            layer.reset_lora_parameters(  # type: ignore[no-untyped-call]
                "default", init_lora_weights=True
            )
    return adapted


def merge_adapter(model: Any) -> dict[str, torch.Tensor]:
    """Return the full weights with an adapter merged, on rank 0; `model` is not changed."""
    merged = ((n, gather_tensor(tensor.detach(), 0)) for n, tensor in _merge(model, merged=True))
    return {name: tensor for name, tensor in merged if tensor is not None}


def find_trained(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights that training changes, by name, as they are without the adapter."""
    adapted = _find_adapted(get_base_model(model))
    return {
        name: tensor
        for name, tensor in _merge(model, merged=False)
        if tensor.requires_grad or name in adapted
    }


def _find_adapted(base: torch.nn.Module) -> dict[str, Any]:
    """Return PEFT's layer of each adapted weight, by the weight's name without the adapter.

    Layers are nested if several weights of a module are adapted, such as those of fused experts.
    """
    return {
        f"{_strip(name)}.{getattr(part, 'parameter_name', 'weight')}": part
        for name, part in base.named_modules()
        if hasattr(part, "base_layer")
    }


def find_base_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a model without its adapter's, by their names without an adapter."""
    return dict(_merge(model, merged=False))


def _strip(name: str) -> str:
    return name.replace(".base_layer", "")


def merge_trained(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of `find_trained` with the adapter merged, each when it is asked for."""
    trained = find_trained(model)
    return ((name, tensor) for name, tensor in _merge(model, merged=True, only=trained))


@torch.no_grad()
def _merge(
    model: Any, *, merged: bool, only: Container[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights by their names without the adapter, whose product is added if `merged`."""
    base = get_base_model(model)
    adapted = _find_adapted(base) if merged else {}
    for name, tensor in get_weights(base).items():
        plain = _strip(name)
        if ".lora_" in name or (only is not None and plain not in only):
            continue
        if plain in adapted:
            yield plain, tensor + adapted[plain].get_delta_weight("default")
        else:
            yield plain, tensor


def write_trained(folder: Path, model: Any, source: Path | None, dtype: str | None = None) -> None:
    """Write the full weights in the names and files of `source`; every rank must call this.

    `dtype` is as for `hub.write_weights`.
    """
    write_weights(
        folder, get_base_model(model), find_trained(model), merge_trained(model), source, dtype
    )
