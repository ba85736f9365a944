"""Small models with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

SMALL: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def qwen3(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """Full attention in every layer."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SMALL | changes))


def mistral() -> MistralForCausalLM:
    """Every layer sees 64 tokens back."""
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=64))
