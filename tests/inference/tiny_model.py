"""A tiny Qwen3 with random weights, and the plain forward pass that judges what the engine says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3ForCausalLM

from random_models import log_probabilities, qwen3
from tugline.types import Ids, Logprobs

VOCAB = 512
EOS = 2


def tiny(seed: int = 0) -> Qwen3ForCausalLM:
    """Random weights, sharp enough that a wrong context shows in the log probabilities."""
    sharp = {"initializer_range": 0.3, "tie_word_embeddings": False}
    return qwen3(seed, vocab_size=VOCAB, max_position_embeddings=1024, **sharp).eval()


@torch.inference_mode()
def truth(model: PreTrainedModel, prompt: Ids, sampled: Ids, temperature: float = 1.0) -> Logprobs:
    """Log probabilities of `sampled` after `prompt` by one plain forward pass, no cache."""
    whole = log_probabilities(model, np.concatenate([prompt, sampled]), temperature)
    return whole[len(prompt) - 1 :].float().numpy()


def prompt(length: int, seed: int = 0) -> Ids:
    """Random ids that hold no special token."""
    return np.random.default_rng(seed).integers(10, VOCAB, length).astype(np.int32)


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until `condition` holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not reached in time"
        await asyncio.sleep(0.002)
