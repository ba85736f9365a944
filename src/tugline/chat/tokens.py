"""What the turns of a session share: token ids, and the JSON of conversations.

A `TokenSequence` is a length in buffers that it shares with what extends it, so forty turns over
the same sixteen thousand ids hold them once (I7), as numbers and as JSON digits; adding to them
costs what is added. `BodyItems` tells how much of a request an earlier one has as well.
"""

from __future__ import annotations

import operator
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from tugline.types import Ids, shared_prefix


def encode_digits(ids: Ids) -> bytes:
    """``1,2,3``: the inside of a compact JSON array."""
    return msgspec.json.encode(ids.tolist())[1:-1]


class _Buffer:
    """Ids and their digits, to which is only appended; large requests extend it in threads."""

    __slots__ = ("digits", "ids", "length", "lock")

    def __init__(self, ids: Ids, digits: list[bytes]) -> None:
        """`digits` are those of `ids` in parts, each with the comma before it."""
        self.ids, self.length, self.digits = ids, len(ids), digits
        self.lock = threading.Lock()

    def append(self, ids: Ids) -> None:
        end = self.length + len(ids)
        if end > len(self.ids):
            grown = np.empty(end + (end >> 3), np.int32)
            grown[: self.length] = self.ids[: self.length]
            self.ids = grown
        self.ids[self.length : end] = ids
        self.digits.append(b"," * bool(self.length) + encode_digits(ids))
        self.length = end


class TokenSequence:
    """An immutable sequence of ids. Shape ``(len(self),)``, int32."""

    __slots__ = ("_buffer", "_length", "_parts")

    def __init__(self, ids: Ids) -> None:
        self._buffer = _Buffer(ids, [encode_digits(ids)])
        self._length, self._parts = len(ids), 1

    def __len__(self) -> int:
        return self._length

    def extend(self, ids: Ids) -> TokenSequence:
        """These ids followed by `ids`: in place, or in a copy if others follow them already."""
        if not len(ids):
            return self
        buffer = self._buffer
        with buffer.lock:
            if buffer.length != self._length or not self._length:
                buffer = _Buffer(self.to_array(), buffer.digits[: self._parts])
            buffer.append(ids)
            return _share(buffer, buffer.length)

    def to_array(self) -> Ids:
        """All ids, contiguous and read-only."""
        ids = self._buffer.ids[: self._length]
        ids.flags.writeable = False
        return ids

    def tail(self, count: int) -> Ids:
        """The last `count` ids, or all if there are fewer."""
        return self._buffer.ids[max(0, self._length - count) : self._length].copy()

    def to_json(self, before: bytes = b"", after: bytes = b"") -> bytes:
        """All ids as JSON digits without the brackets, between two texts."""
        return b"".join((before, *self._buffer.digits[: self._parts], after))

    def truncate(self, length: int) -> TokenSequence:
        """The first `length` ids, in the same array."""
        kept, cut = self.to_array()[:length], self.to_array()[length:]
        removed = len(encode_digits(cut)) + bool(length) if len(cut) else 0
        digits = self.to_json()
        return _share(_Buffer(kept, [digits[: len(digits) - removed]]), length)

    def shared_prefix(self, ids: Ids) -> int:
        """How many leading ids these and `ids` have in common."""
        return shared_prefix(self.to_array(), ids)


def _share(buffer: _Buffer, length: int) -> TokenSequence:
    made = object.__new__(TokenSequence)
    made._buffer, made._length, made._parts = buffer, length, len(buffer.digits)
    return made


# --------------------------------------------------------------------------- requests
def count_shared(
    first: Sequence[Any], second: Sequence[Any], same: Callable[[Any, Any], bool] = operator.eq
) -> int:
    """How many leading items two sequences have in common; `same` compares those of two objects.

    All of `first` is tried at once, which compares no content where the objects are the same.
    """
    if first == second[: len(first)]:
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if not same(a, b)), min(len(first), len(second)))


_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
"""One escape in JSON: a surrogate pair, half of one, which is captured, or any other."""


def mend_surrogates(body: bytes, start: int) -> bytes:
    """Replace halves of characters, as of an emoji that was cut, by U+FFFD from `start` on."""
    if body.find(b"\\ud", start) < 0 and body.find(b"\\uD", start) < 0:
        return body
    mended = body[:start] + _ESCAPE.sub(lambda m: b"\\ufffd" if m[1] else m[0], body[start:])
    return body if mended == body else mended


@dataclass(slots=True, eq=False)
class BodyItems:
    """The beginning of a request's JSON, and the items of its conversation that follow."""

    front: bytes = b""
    """All that comes before the first item."""
    texts: list[bytes] = field(default_factory=list)
    """Each item, with what comes between it and the one before."""
    items: list[msgspec.Raw] = field(default_factory=list)
    """Views of `texts`."""

    def count_shared(self, data: bytes) -> int:
        """How many leading items `data` has in the same places, and others behind them."""
        if not data.startswith(self.front):
            return 0
        count, at = 0, len(self.front)
        for text in self.texts:
            if not data.startswith(text, at):
                break
            count, at = count + 1, at + len(text)
        return count if data[at : at + 1] == b"," else max(count - 1, 0)

    def add(self, items: Sequence[msgspec.Raw], data: bytes, text: bytes, shift: int) -> None:
        """Add items that lie in `text`, which lies `shift` bytes later in the body `data`."""
        end = self.end()
        for item in items:
            start, size = offset(item, text) + shift, len(memoryview(item))
            self.texts.append(data[end : start + size])
            self.items.append(msgspec.Raw(memoryview(self.texts[-1])[start - end :]))
            end = start + size

    def end(self, count: int | None = None) -> int:
        """Where the first `count` items end in the request, or all."""
        return len(self.front) + sum(map(len, self.texts[:count]))


def offset(item: msgspec.Raw, text: bytes) -> int:
    """Where in `text` an item begins that was decoded from it, and so is a view of it."""
    item_at, text_at = (
        np.frombuffer(one, np.uint8).__array_interface__["data"][0] for one in (item, text)
    )
    return int(item_at - text_at)
