"""Token ids as text that is safe to show.

A character may be spread over several tokens: the last of them has it, the others are empty.
Control characters, escape sequences and marks of writing direction in model output are shown by
their code, never sent to a terminal.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from tugline.chat.tokenizer import Tokenizer

NEWLINE = "↵"
_VISIBLE = {"\n": NEWLINE, "\t": "⇥", " ": " "}


class TokenText:
    """The text of token ids; without a tokenizer, an id is shown as its number."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[int, bytes] = {}

    def spell(self, token: int) -> bytes:
        """Return the bytes of a token."""
        known = self._cache.get(token)
        if known is None:
            known = self._cache[token] = self._spell(token)
        return known

    def _spell(self, token: int) -> bytes:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return f"{token} ".encode()
        if tokenizer.token_bytes is not None:
            return tokenizer.token_bytes[token]
        # such a tokenizer drops the space before the first token, so decode the second of two
        return tokenizer.decode([token, token])[len(tokenizer.decode([token])) :].encode()

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return the text that each token adds; joined they are the whole text."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = [decoder.decode(self.spell(token)) for token in ids]
        if pieces:
            pieces[-1] += decoder.decode(b"", final=True)
        return pieces


def visible(text: str) -> str:
    """Return `text` on one line, with control characters replaced by their codes."""
    if text.isprintable():
        return text
    return "".join(
        _VISIBLE.get(char) or (char if char.isprintable() else repr(char)[1:-1]) for char in text
    )


def fold_range(size: int, head: int, tail: int) -> tuple[int, int]:
    """Return the range ``[start, end)`` of `size` items to fold; empty if it would save little."""
    return (size, size) if size <= head + tail + 8 else (head, size - tail)
