"""A mixture of experts made of the demo's model, which can work with real agents at once."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tugline.demo.run import WARM_START

EXPERTS = 8
TOP_K = 2


def make_mixture(seed: int = 0, noise: float = 0.1) -> Qwen3MoeForCausalLM:
    """Return a Qwen3-MoE of the demo's size whose experts are its layers with noise.

    Sparse upcycling (arXiv 2212.05055): the weights of a token's experts add up to 1, so that the
    model does what the dense one does, as far as the noise lets it. The noise is relative.
    """
    dense = AutoModelForCausalLM.from_pretrained(WARM_START, dtype=torch.float32)
    values = dense.config.to_dict() | {
        "moe_intermediate_size": dense.config.intermediate_size,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "architectures": None,
    }
    del values["model_type"], values["dtype"]
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**values))
    model.load_state_dict(dense.state_dict(), strict=False)
    with torch.no_grad():
        for layer, old in zip(model.model.layers, dense.model.layers, strict=True):
            both = torch.cat((old.mlp.gate_proj.weight, old.mlp.up_proj.weight))
            layer.mlp.experts.gate_up_proj.copy_(_vary(both, noise))
            layer.mlp.experts.down_proj.copy_(_vary(old.mlp.down_proj.weight, noise))
            layer.mlp.gate.weight.normal_(std=0.1)
    return model


def _vary(weight: torch.Tensor, noise: float) -> torch.Tensor:
    """Return the weight of each expert."""
    copies = weight.expand(EXPERTS, *weight.shape)
    return copies * (1 + noise * torch.randn_like(copies))


def save_mixture(folder: Path, seed: int = 0, noise: float = 0.1) -> Path:
    """Write the model in the hub's format, with the demo's tokenizer."""
    make_mixture(seed, noise).save_pretrained(folder)
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(WARM_START / name, folder)
    return folder
