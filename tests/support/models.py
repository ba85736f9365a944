"""Small models with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
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


HYBRID_SIZE: dict[str, Any] = SMALL | {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 3,
    "num_experts_per_tok": 2,
}
ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}


def _qwen3_5(**changes: Any) -> transformers.Qwen3_5TextConfig:
    return transformers.Qwen3_5TextConfig(**HYBRID_SIZE | {"rope_parameters": ROPE} | changes)


def _qwen3_5_with_images() -> PreTrainedModel:
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "num_position_embeddings": 16,
    }
    ids = {"image_token_id": 40, "video_token_id": 41}
    marks = {"vision_start_token_id": 42, "vision_end_token_id": 43}
    tied = {"tie_word_embeddings": True}
    config = transformers.Qwen3_5Config(
        text_config=_qwen3_5(**tied).to_dict(), vision_config=vision, **ids, **marks, **tied
    )
    return transformers.Qwen3_5ForConditionalGeneration(config)


KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=True)),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SMALL, **_EXPERTS)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, num_local_experts=3, num_experts_per_tok=2)
    ),
    "qwen3_next": lambda: transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(**HYBRID_SIZE, **_EXPERTS)
    ),
    "qwen3_5": lambda: transformers.Qwen3_5ForCausalLM(_qwen3_5()),
    "qwen3_5_with_images": _qwen3_5_with_images,
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeForCausalLM(
        transformers.Qwen3_5MoeTextConfig(**HYBRID_SIZE, **_EXPERTS, rope_parameters=ROPE)
    ),
}
"""Models of the architectures that are trained, by name."""
HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_with_images", "qwen3_5_moe")
"""Names of the models with gated delta net layers."""


def make_kind(name: str, seed: int = 0) -> PreTrainedModel:
    """Return a new model of `KINDS`."""
    torch.manual_seed(seed)
    return KINDS[name]()


def make_mistral() -> MistralForCausalLM:
    """Every layer sees 64 tokens back."""
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=64))


def log_probabilities(
    model: PreTrainedModel, ids: np.ndarray, temperature: float = 1.0
) -> torch.Tensor:
    """Log probabilities of ``ids[1:]`` in float64, by one plain forward pass without padding."""
    tokens = torch.from_numpy(ids.astype(np.int64))
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].double() / temperature
    return torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
