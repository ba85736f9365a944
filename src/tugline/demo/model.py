"""The demo's policy: the Qwen3 architecture at a size that two cores train in minutes.

It is an ordinary `transformers` model, saved as an ordinary model folder, so any engine that
serves Qwen3 serves it. Input and output embeddings are untied: engines that reload weights while
running are exact only then.
"""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tugline.demo.tokenizer import END_OF_TURN, PAD

WINDOW = 4096
"""Longest sequence, in tokens."""


def tiny_model(vocabulary: int, seed: int) -> Qwen3ForCausalLM:
    """A model with fresh random weights of about 0.9 million parameters."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=WINDOW,
            initializer_range=0.05,  # 0.02, the default, suits wide models
            tie_word_embeddings=False,
            pad_token_id=PAD,
            eos_token_id=END_OF_TURN,
            bos_token_id=None,
        )
    )
