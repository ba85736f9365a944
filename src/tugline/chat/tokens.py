"""Token ids that grow by their ends, held once as numbers and once as JSON digits.

A session's turns share their fronts. Each `Tokens` keeps only what it adds to its parent, so forty
turns over the same sixteen thousand ids hold them once (I7), and a request body for the engine is
a join of ready-made digits, without a Python integer per token.
"""

from __future__ import annotations

from typing import Self

import msgspec
import numpy as np

from tugline.types import Ids, shared_prefix


def digits(ids: Ids) -> bytes:
    """``1,2,3``: the inside of a compact JSON array."""
    return msgspec.json.encode(ids.tolist())[1:-1]


class Tokens:
    """An immutable sequence of ids: `parent`'s, then these. Shape ``(len(self),)``, int32."""

    __slots__ = ("_digits", "_length", "ids", "parent")

    def __init__(self, ids: Ids, parent: Self | None = None, text: bytes | None = None) -> None:
        """`text` is the same ids as JSON digits, where the caller has them already."""
        self.ids = ids
        self.parent = parent
        self._digits = text
        self._length = len(ids) + (len(parent) if parent is not None else 0)

    def __len__(self) -> int:
        return self._length

    def extended(self, ids: Ids, text: bytes | None = None) -> Tokens:
        """These ids followed by `ids`."""
        return Tokens(ids, self, text)

    def array(self) -> Ids:
        """All ids, contiguous."""
        parts = [node.ids for node in self._chain()]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def tail(self, count: int) -> Ids:
        """The last `count` ids, or all if there are fewer."""
        node: Tokens | None = self
        parts: list[Ids] = []
        while node is not None and count > 0:
            parts.append(node.ids[-count:])
            count -= len(node.ids)
            node = node.parent
        parts.reverse()
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def json(self, before: bytes = b"", after: bytes = b"") -> bytes:
        """All ids as JSON digits without the brackets, between two texts."""
        parts = [before]
        for node in self._chain():
            if len(node.ids):
                parts += (node.text(), b",")
        if len(parts) > 1:
            parts.pop()
        parts.append(after)
        return b"".join(parts)

    def cut(self, length: int) -> Tokens:
        """The first `length` ids, sharing every whole node before the cut."""
        node: Tokens = self
        while node.parent is not None and len(node.parent) >= length:
            node = node.parent
        if len(node) == length:
            return node
        before = len(node.parent) if node.parent is not None else 0
        return Tokens(node.ids[: length - before], node.parent)

    def shared(self, ids: Ids) -> int:
        """How many leading ids these and `ids` have in common."""
        at = 0
        for node in self._chain():
            same = shared_prefix(node.ids, ids[at:])
            at += same
            if same < len(node.ids):
                break
        return at

    def text(self) -> bytes:
        """The ids of this node alone, as JSON digits."""
        if self._digits is None:
            self._digits = digits(self.ids)
        return self._digits

    def _chain(self) -> list[Tokens]:
        chain: list[Tokens] = []
        node: Tokens | None = self
        while node is not None:
            chain.append(node)
            node = node.parent
        chain.reverse()
        return chain
