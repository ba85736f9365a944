"""What the turns of a session share: token ids, as the JSON that engines are sent.

A `TokenSequence` is a length in a buffer that it shares with what extends it, so forty turns over
the same sixteen thousand ids hold them once (I7), as JSON digits; adding to them costs what is
added.
"""

from __future__ import annotations

import operator
import re
import threading
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from tugline.errors import EngineError
from tugline.types import Ids

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_DECODER = msgspec.json.Decoder(list[TokenId])
_NO_IDS = np.empty(0, np.int32)
END = 64
"""Ids at a prompt's end that decide how it can be continued."""


def decode_ids(digits: bytes) -> Ids:
    """The ids of ``1,2,3``, the inside of an engine's JSON array. Raises `EngineError`."""
    try:
        return np.array(_DECODER.decode(b"[" + digits + b"]"), np.int32)
    except msgspec.DecodeError as error:
        raise EngineError(f"the engine sent ids that cannot be read: {error}") from error


class _Buffer:
    """Digits of ids, to which is only appended; large requests extend it in threads."""

    __slots__ = ("added", "last", "length", "lock", "parts")

    def __init__(self, parts: list[bytes], length: int) -> None:
        """`parts` have a comma before each id."""
        self.parts, self.length = parts, length
        self.added, self.last = 0, _NO_IDS
        """How many ids were added last, and those with what was added before, as numbers."""
        self.lock = threading.Lock()

    def append(self, ids: Ids) -> None:
        self.parts.append(b"," + msgspec.json.encode(ids.tolist())[1:-1])
        self.length += len(ids)
        self.last = np.concatenate((self.last[-self.added - END :], ids))
        self.added = len(ids)


class TokenSequence:
    """An immutable sequence of ids, kept as the digits that engines are sent."""

    __slots__ = ("_buffer", "_length", "_parts")

    def __init__(self, ids: Ids, behind: _Buffer | None = None) -> None:
        """Add `ids` to a buffer, by default a new one."""
        buffer = _Buffer([], 0) if behind is None else behind
        if len(ids):
            buffer.append(ids)
        self._buffer, self._length, self._parts = buffer, buffer.length, len(buffer.parts)

    def __len__(self) -> int:
        return self._length

    def extend(self, ids: Ids) -> TokenSequence:
        """These ids followed by `ids`: in place, or beside others that follow them already."""
        if not len(ids):
            return self
        buffer = self._buffer
        with buffer.lock:
            if buffer.length != self._length or not self._length:
                buffer = _Buffer(self._list_parts(), self._length)
            return TokenSequence(ids, buffer)

    def to_array(self, count: int | None = None) -> Ids:
        """All ids, or the last `count` if there are more: shape ``(n,)``, int32."""
        last, parts = self._buffer.last, self._list_parts()
        count = self._length if count is None else min(count, self._length)
        if self._buffer.length != self._length or len(last) < count:
            found, at = 0, len(parts)
            while found < count:
                at -= 1
                found += parts[at].count(b",")
            last = decode_ids(b"".join(parts[at:])[1:])
        return last[len(last) - count :]

    def to_json(self, before: bytes = b"", after: bytes = b"") -> list[bytes | memoryview]:
        """All ids as JSON digits without the brackets, between two texts; parts, none a copy."""
        first, *others = self._list_parts() or [b","]
        return [before, memoryview(first)[1:], *others, after]

    def truncate(self, length: int) -> TokenSequence:
        """The first `length` ids."""
        kept, left = list[bytes](), length
        for part in self._list_parts():
            if left <= 0:
                break
            count = part.count(b",")
            whole = count <= left
            kept.append(part if whole else b",".join(part.split(b",", left + 1)[: left + 1]))
            left -= count
        return TokenSequence(_NO_IDS, _Buffer(kept, length))

    def shared_prefix(self, other: TokenSequence) -> int:
        """How many leading ids the two have in common."""
        if self._buffer is other._buffer:
            return min(len(self), len(other))
        mine, theirs = self._list_parts(), other._list_parts()
        same = count_shared(mine, theirs)
        one, two = b"".join(mine[same:]), b"".join(theirs[same:])
        size = min(len(one), len(two))
        differ = np.frombuffer(one, np.uint8, size) != np.frombuffer(two, np.uint8, size)
        end = int(differ.argmax()) if differ.any() else size
        complete = one[end : end + 1] in b"," and two[end : end + 1] in b","
        begun = sum(part.count(b",") for part in mine[:same]) + one.count(b",", 0, end)
        return begun if complete else begun - 1

    def _list_parts(self) -> list[bytes]:
        return self._buffer.parts[: self._parts]


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
