"""Tiny models with random weights in folders as on the hub, which real engines serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from demo_tokenizer import END_OF_TURN, PAD
from transformers import PreTrainedModel

from engines.tool_model import WINDOW, make_tokenizer, save
from tugline.chat.tokenizer import Tokenizer

IMAGES = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
"""Tokens of a model with images, by their names in its configuration."""
_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 16,
    "num_position_embeddings": 256,
}
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
}


def make(kind: str, folder: Path) -> Path:
    """Write a model of a kind of `_KINDS` in bfloat16; embeddings are untied, see `tool_model`."""
    tokenizer = make_tokenizer([*IMAGES.values()])
    torch.manual_seed(0)
    model = _KINDS[kind](tokenizer)
    save(model.to(torch.bfloat16), tokenizer, folder)
    if kind == "hybrid":
        (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    return folder


def _share(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what all kinds have; a head of 32 is the smallest that every engine can compute."""
    return {
        "vocab_size": tokenizer.size + -tokenizer.size % 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": WINDOW,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "pad_token_id": PAD,
        "eos_token_id": END_OF_TURN,
        "bos_token_id": None,
    }


def _make_dense(tokenizer: Tokenizer) -> PreTrainedModel:
    config = transformers.Qwen3Config(num_hidden_layers=2, **_share(tokenizer))
    return transformers.Qwen3ForCausalLM(config)


def _make_moe(tokenizer: Tokenizer) -> PreTrainedModel:
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=4,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        **_share(tokenizer),
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _make_hybrid(tokenizer: Tokenizer) -> PreTrainedModel:
    """Return a Qwen3.5 with images; vLLM on CPU computes linear heads of 128 only."""
    text = transformers.Qwen3_5TextConfig(
        num_hidden_layers=4,
        layer_types=[*["linear_attention"] * 3, "full_attention"],
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        **_share(tokenizer),
    )
    ids = {name: tokenizer.encode(token)[0] for name, token in IMAGES.items()}
    config = transformers.Qwen3_5Config(
        text_config=text.to_dict(), vision_config=_VISION, tie_word_embeddings=False, **ids
    )
    return transformers.Qwen3_5ForConditionalGeneration(config)


_KINDS = {"dense": _make_dense, "moe": _make_moe, "hybrid": _make_hybrid}
