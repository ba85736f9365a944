"""A tiny Qwen3 with random weights, and the plain forward pass that the engine is compared with."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3ForCausalLM

from support.models import log_probabilities, make_qwen3
from tugline.types import Ids, Logprobs

VOCAB = 512
EOS = 2


def tiny(seed: int = 0) -> Qwen3ForCausalLM:
    """Random weights, large enough that a wrong context changes the log probabilities."""
    sharp = {"initializer_range": 0.3, "tie_word_embeddings": False}
    return make_qwen3(seed, vocab_size=VOCAB, max_position_embeddings=1024, **sharp).eval()


@torch.inference_mode()
def truth(model: PreTrainedModel, prompt: Ids, sampled: Ids, temperature: float = 1.0) -> Logprobs:
    """Log probabilities of `sampled` after `prompt` by one plain forward pass, no cache."""
    whole = log_probabilities(model, np.concatenate([prompt, sampled]), temperature)
    return whole[len(prompt) - 1 :].float().numpy()


def prompt(length: int, seed: int = 0) -> Ids:
    """Random ids without special tokens."""
    return np.random.default_rng(seed).integers(10, VOCAB, length).astype(np.int32)
