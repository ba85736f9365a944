"""Token ids as text that can be shown: each token's own piece, and nothing that acts on a terminal.

A character may be spread over several tokens: the last of them has it, the others show nothing.
What a model wrote may hold control characters, escape sequences or marks that turn the writing
direction around; they are shown by their code, never sent.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from tugline.chat.tokenizer import Tokenizer

NEWLINE = "↵"
_SEEN = {"\n": NEWLINE, "\t": "⇥", " ": " "}


class Texts:
    """The bytes and the pieces of ids; without a tokenizer, an id is its number."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._spelled: dict[int, bytes] = {}

    def spell(self, token: int) -> bytes:
        """The bytes that `token` stands for."""
        known = self._spelled.get(token)
        if known is None:
            known = self._spelled[token] = self._spell(token)
        return known

    def _spell(self, token: int) -> bytes:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return f"{token} ".encode()
        if tokenizer.token_bytes is not None:
            return tokenizer.token_bytes[token]
        # such a tokenizer drops the space before a first token: the second of two has it
        return tokenizer.decode([token, token])[len(tokenizer.decode([token])) :].encode()

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The text that each token adds; joined they are the text of all."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        found = [decoder.decode(self.spell(token)) for token in ids]
        if found:
            found[-1] += decoder.decode(b"", final=True)
        return found


def visible(text: str) -> str:
    """`text` on one line, with everything in it to be seen and nothing to be obeyed."""
    if text.isprintable():
        return text
    return "".join(
        _SEEN.get(char) or (char if char.isprintable() else repr(char)[1:-1]) for char in text
    )


def folded(size: int, head: int, tail: int) -> tuple[int, int]:
    """Which of `size` items to leave out, as ``[start, end)``; none where little would be saved."""
    return (size, size) if size <= head + tail + 8 else (head, size - tail)
