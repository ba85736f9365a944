"""A small tokenizer that is made on the spot, and its renderings."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from tugline.chat.templates.base import CONFIGS
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer

_LINES = Path(__file__).with_name("specials.jsonl").read_text().splitlines()
SPECIALS: dict[str, str] = {
    name: row["specials"] for row in map(json.loads, _LINES) for name in row["templates"]
}
"""The special tokens that each template is made of."""

OFFLINE = sorted(set(CONFIGS) - {"gpt-oss"})
"""Templates that render without asking the internet for a vocabulary."""
GPT_OSS = os.environ.get("TUGLINE_GPT_OSS", "")
"""Folder of the vocabulary that ``tools/gpt_oss_vocabulary.py`` makes; empty if there is none."""


def make_tokenizer(specials: Sequence[str] = tuple(SPECIALS["qwen3"].split())) -> Tokenizer:
    """Byte-level, without merges: every byte is an id, so any text round-trips."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(specials))
    return Tokenizer(backend, "byte-level")


def make_merging_tokenizer(specials: Sequence[str], *, across_words: bool = False) -> Tokenizer:
    """Byte-level with merges; `across_words`, also of line breaks with their neighbours."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=not across_words
    )
    backend.decoder = decoders.ByteLevel()
    text = ['user\n\nassistant\n  x = {"a": 1}\n\n\n\n\tx\n1\n', " x\n\n  y\n user\n{\n }\n"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(text * 20, trainer)
    backend.add_special_tokens(list(specials))
    return Tokenizer(backend, "merging")


@functools.cache
def make_rendering(name: str = "qwen3", thinking_retention: str = "all") -> Rendering:
    """A template over the byte-level tokenizer with the special tokens it needs."""
    if name == "gpt-oss":
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = GPT_OSS
        return Rendering(Tokenizer.load(Path(GPT_OSS)), name)
    return Rendering(
        make_tokenizer(SPECIALS[name].split()), name, thinking_retention=thinking_retention
    )
