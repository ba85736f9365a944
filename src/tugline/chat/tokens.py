"""Token ids that grow at their end, held once as numbers and once as JSON digits.

The turns of a session share their prefixes. A `TokenSequence` stores only what it adds to its
parent, so forty turns over the same sixteen thousand ids hold them once (I7), and an engine's
request body is a join of ready-made digits, without a Python integer per token.
"""

from __future__ import annotations

from typing import Self

import msgspec
import numpy as np

from tugline.types import Ids, shared_prefix


def encode_digits(ids: Ids) -> bytes:
    """``1,2,3``: the inside of a compact JSON array."""
    return msgspec.json.encode(ids.tolist())[1:-1]


class TokenSequence:
    """An immutable sequence of ids: `parent`'s, then these. Shape ``(len(self),)``, int32."""

    __slots__ = ("_digits", "_length", "ids", "parent")

    def __init__(self, ids: Ids, parent: Self | None = None, digits: bytes | None = None) -> None:
        """`digits` are the same ids as JSON text, where the caller has them already."""
        self.ids = ids
        self.parent = parent
        self._digits = digits
        self._length = len(ids) + (len(parent) if parent is not None else 0)

    def __len__(self) -> int:
        return self._length

    def extend(self, ids: Ids, digits: bytes | None = None) -> TokenSequence:
        """These ids followed by `ids`."""
        return TokenSequence(ids, self, digits)

    def to_array(self) -> Ids:
        """All ids, contiguous."""
        parts = [node.ids for node in self._chain()]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def tail(self, count: int) -> Ids:
        """The last `count` ids, or all if there are fewer."""
        node: TokenSequence | None = self
        parts: list[Ids] = []
        while node is not None and count > 0:
            parts.append(node.ids[-count:])
            count -= len(node.ids)
            node = node.parent
        parts.reverse()
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def to_json(self, before: bytes = b"", after: bytes = b"") -> bytes:
        """All ids as JSON digits without the brackets, between two texts."""
        parts = [before]
        for node in self._chain():
            if len(node.ids):
                parts += (node.to_digits(), b",")
        if len(parts) > 1:
            parts.pop()
        parts.append(after)
        return b"".join(parts)

    def truncate(self, length: int) -> TokenSequence:
        """The first `length` ids, sharing every whole node before the cut."""
        node: TokenSequence = self
        while node.parent is not None and len(node.parent) >= length:
            node = node.parent
        if len(node) == length:
            return node
        before = len(node.parent) if node.parent is not None else 0
        return TokenSequence(node.ids[: length - before], node.parent)

    def shared_prefix(self, ids: Ids) -> int:
        """How many leading ids these and `ids` have in common."""
        at = 0
        for node in self._chain():
            same = shared_prefix(node.ids, ids[at:])
            at += same
            if same < len(node.ids):
                break
        return at

    def to_digits(self) -> bytes:
        """The ids of this node alone, as JSON digits."""
        if self._digits is None:
            self._digits = encode_digits(self.ids)
        return self._digits

    def _chain(self) -> list[TokenSequence]:
        chain: list[TokenSequence] = []
        node: TokenSequence | None = self
        while node is not None:
            chain.append(node)
            node = node.parent
        chain.reverse()
        return chain
