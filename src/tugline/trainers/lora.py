"""Adapters of PEFT: added to a model to train, and merged into its weights to serve."""

import warnings
from typing import Any

import torch

from tugline.trainers.config import Lora
from tugline.trainers.grpo.distributed import gather_tensors


def add_adapter(model: Any, lora: Lora, seed: int) -> torch.nn.Module:
    """Return a model with a new adapter, which is equal on every rank."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - an extra

    targets = list(lora.targets) or "all-linear"
    settings = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM"
    )
    torch.manual_seed(seed)
    # PEFT 0.21 uses a deprecated name of transformers
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return get_peft_model(model, settings)


@torch.no_grad()
def merge_adapter(model: Any) -> dict[str, torch.Tensor]:
    """Return the full weights with an adapter merged; `model` is not changed."""
    if not hasattr(model, "peft_config"):
        return dict(gather_tensors(model.state_dict()))
    base = model.get_base_model()
    adapted = {name: part for name, part in base.named_modules() if hasattr(part, "base_layer")}
    merged = {}
    for name, tensor in base.state_dict().items():
        layer, inner, weight = name.partition(".base_layer.")
        if inner and weight == "weight":
            merged[f"{layer}.weight"] = tensor + adapted[layer].get_delta_weight("default")
        elif ".lora_" not in name:
            merged[f"{layer}.{weight}" if inner else name] = tensor
    return dict(gather_tensors(merged))
