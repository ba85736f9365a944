"""Bytes of single ids exist only for tokenizers that decode ids independently."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tugline.chat.tokenizer import Tokenizer

TEXTS = ["a b", " a  b\n", "é界🙂 <tool>", "\t\n<0x41>"]


def byte_level() -> Tokenizer:
    """A tokenizer like those of Qwen, Llama 3, GLM and DeepSeek, with special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: i for i, char in enumerate([*alphabet, "Ġa", "Ã©"])}
    backend = Backend(models.BPE(vocabulary, [("Ġ", "a"), ("Ã", "©")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<tool>", "<｜User｜>"])  # noqa: RUF001
    return Tokenizer(backend, "byte-level")


def pieces(*, stripping: bool) -> Tokenizer:
    """A tokenizer like Gemma's, with byte fallback; like Llama 2's, it strips the first space."""
    words = ["▁", "a", "b", "c", "é", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a"]
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = Backend(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if stripping else parts)
    return Tokenizer(backend, "pieces")


@pytest.mark.parametrize("made", [byte_level(), pieces(stripping=False)])
@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_join_to_the_decoded_text(made: Tokenizer, text: str) -> None:
    """The bytes of the ids, joined, are the text."""
    ids = made.encode(text)
    assert b"".join(made.token_bytes[one] for one in ids).decode() == made.decode(ids)


def test_a_tokenizer_whose_ids_depend_on_each_other_has_no_bytes() -> None:
    """A first word that loses its space cannot be decoded id by id, so there are no bytes."""
    assert pieces(stripping=True).token_bytes is None
