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

    def __init__(self, ids: Ids, digits: bytes | bytearray) -> None:
        self.ids, self.length = ids, len(ids)
        self.digits = bytearray(digits)
        self.lock = threading.Lock()

    def append(self, ids: Ids) -> None:
        end = self.length + len(ids)
        if end > len(self.ids):
            grown = np.empty(end + (end >> 3), np.int32)
            grown[: self.length] = self.ids[: self.length]
            self.ids = grown
        self.ids[self.length : end] = ids
        self.digits += b"," + encode_digits(ids) if self.length else encode_digits(ids)
        self.length = end


class TokenSequence:
    """An immutable sequence of ids. Shape ``(len(self),)``, int32."""

    __slots__ = ("_buffer", "_digits", "_length")

    def __init__(self, ids: Ids) -> None:
        self._buffer = _Buffer(ids, encode_digits(ids))
        self._length, self._digits = len(ids), len(self._buffer.digits)

    def __len__(self) -> int:
        return self._length

    def extend(self, ids: Ids) -> TokenSequence:
        """These ids followed by `ids`: in place, or in a copy if others follow them already."""
        if not len(ids):
            return self
        buffer = self._buffer
        with buffer.lock:
            if buffer.length != self._length or not self._length:
                buffer = _Buffer(self.to_array(), buffer.digits[: self._digits])
            buffer.append(ids)
            return self._share(buffer, buffer.length, len(buffer.digits))

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
        with self._buffer.lock, memoryview(self._buffer.digits) as digits:
            return b"".join((before, digits[: self._digits], after))

    def find_rest(self, digits: bytes) -> bytes | None:
        """The part of `digits` behind these ids; None if they do not come first, with more."""
        known = self.to_json(after=b",")
        return digits[len(known) :] if digits.startswith(known) else None

    def truncate(self, length: int) -> TokenSequence:
        """The first `length` ids, in the same buffers."""
        cut = self._buffer.ids[length : self._length]
        removed = len(encode_digits(cut)) + bool(length) if len(cut) else 0
        return self._share(self._buffer, length, self._digits - removed)

    def shared_prefix(self, ids: Ids) -> int:
        """How many leading ids these and `ids` have in common."""
        return shared_prefix(self.to_array(), ids)

    def _share(self, buffer: _Buffer, length: int, digits: int) -> TokenSequence:
        made = object.__new__(TokenSequence)
        made._buffer, made._length, made._digits = buffer, length, digits
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
    """A request's JSON, and where the items of its conversation lie in it."""

    data: bytes
    start: int = 0
    """Where the first item begins."""
    ends: list[int] = field(default_factory=list)
    items: list[msgspec.Raw] = field(default_factory=list)

    def count_shared(self, data: bytes) -> int:
        """How many leading items `data` has in the same places, and others behind them."""
        view, at, low, middle, high = memoryview(self.data), 0, 0, len(self.ends), len(self.ends)
        while low < high:
            end = self.ends[middle - 1]
            if data.startswith(view[at:end], at):
                low, at = middle, end
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low if data[at : at + 1] == b"," else max(low - 1, 0)

    def add(self, items: Sequence[msgspec.Raw], text: bytes, shift: int) -> None:
        """Add items that lie in `text`, which lies `shift` bytes later in the body."""
        for item in items:
            self.ends.append(offset(item, text) + len(memoryview(item)) + shift)
            self.items.append(msgspec.Raw(bytes(item)))


def offset(item: msgspec.Raw, text: bytes) -> int:
    """Where in `text` an item begins that was decoded from it, and so is a view of it."""
    item_at, text_at = (
        np.frombuffer(one, np.uint8).__array_interface__["data"][0] for one in (item, text)
    )
    return int(item_at - text_at)
