"""The BPE tokenizer of the demo's policy.

Two choices let a tiny model learn on a laptop. First, a word has the same token in every position
(no leading space, single digits), so that copying a name from a file into a tool call is copying
ids. Second, each fixed line of a harness's system prompt and tool descriptions is one token, so
that a prompt of 6 KB has about 600 ids. Other texts are tokenized as usual.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tugline.types import Tool

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
"""Special tokens of the Qwen3 chat format; their ids are 0 to 8."""

PAD = 0
END_OF_TURN = 2

PIECES = r"[A-Za-z]+|\d|'[^A-Za-z0-9]'|[^A-Za-z0-9']+|'"
"""Words, single digits, a quoted separator, runs of other characters; never merged together."""

PATH = re.compile(r"(?<![\w.<])/\S{4,}")
"""An absolute path in running text."""

SHORTEST_PHRASE = 12


def harness_phrases(system: str, tools: Sequence[Tool]) -> list[str]:
    """Return the fixed lines of a harness's prompt and tools, without the paths in them."""
    texts = [*system.splitlines(), *(tool.description for tool in tools)]
    texts += [text for tool in tools for text in _descriptions(tool.parameters)]
    pieces = [piece for text in texts for piece in PATH.split(text)]
    return sorted({piece.strip() for piece in pieces if len(piece.strip()) >= SHORTEST_PHRASE})


def _descriptions(schema: object) -> Iterable[str]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "description" and isinstance(value, str):
                yield value
            else:
                yield from _descriptions(value)


def common_blocks(first: str, second: str) -> list[str]:
    """Return the longest common pieces of the prompts of two sessions of a harness.

    As single tokens, they make a prompt of 70 KB about 200 ids long. Unlike the lines of a prompt,
    they match only the same harness and version with the same paths.
    """
    words = _WORDS.findall(first)
    matches = difflib.SequenceMatcher(
        None, words, _WORDS.findall(second), autojunk=False
    ).get_matching_blocks()
    shared = ("".join(words[at : at + size]) for at, _, size in matches)
    pieces = (piece.strip() for text in shared for piece in _MARKS.split(text))
    return sorted({piece for piece in pieces if len(piece) >= SHORTEST_BLOCK})


_MARKS = re.compile("|".join(map(re.escape, SPECIAL)))
_WORDS = re.compile(rf"{_MARKS.pattern}|[^\s<]+|\s|<")
SHORTEST_BLOCK = 40


def train_tokenizer(
    texts: Iterable[str],
    phrases: Sequence[str],
    size: int = 1400,
    special: Sequence[str] = SPECIAL,
    pieces: str = PIECES,
) -> Tokenizer:
    """Train a byte-level BPE tokenizer of at most `size` ids; deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(phrases),
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return tokenizer
