"""Small models with random weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SMALL: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def make_qwen3(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """Full attention in every layer."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SMALL | changes))


def make_mistral() -> MistralForCausalLM:
    """Every layer sees 64 tokens back."""
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=64))


def log_probabilities(
    model: PreTrainedModel, ids: np.ndarray, temperature: float = 1.0
) -> torch.Tensor:
    """Those of ``ids[1:]`` in float64, by one plain forward pass over one sequence alone."""
    tokens = torch.from_numpy(ids.astype(np.int64))
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].double() / temperature
    return torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
