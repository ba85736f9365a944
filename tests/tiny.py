"""A tokenizer small enough to make on the spot, and the rendering built on it."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tugline.gateway.rendering import Rendering
from tugline.tokenizer import Tokenizer

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]


def tokenizer() -> Tokenizer:
    """Byte-level, without merges: every byte is an id, so any text round-trips."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend, "byte-level")


def rendering() -> Rendering:
    """Qwen3's template over the byte-level tokenizer."""
    return Rendering(tokenizer(), "qwen3", thinking_retention="all")
