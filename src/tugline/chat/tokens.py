"""Token id sequences with their JSON text, shared by the turns of a session.

A `TokenSequence` is a length and a buffer of JSON digits, which it shares with the sequences that
extend it. Forty turns over the same sixteen thousand ids store them once (I7), and the cost of an
extension is proportional to the added ids.
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
"""Number of ids at a prompt's end that determine how it can be continued."""


def decode_ids(digits: bytes) -> Ids:
    """Decode ids such as ``1,2,3``, the inside of a JSON array. Raises `EngineError`."""
    try:
        return np.array(_DECODER.decode(b"[" + digits + b"]"), np.int32)
    except msgspec.DecodeError as error:
        raise EngineError(f"the engine sent token ids that cannot be decoded: {error}") from error


class _Buffer:
    """Append-only buffer of the digits of ids; large requests extend it in threads."""

    __slots__ = ("added", "last", "length", "lock", "parts")

    def __init__(self, parts: list[bytes], length: int) -> None:
        """`parts` contain a comma before each id."""
        self.parts, self.length = parts, length
        self.added = 0
        """Number of ids added last."""
        self.last = _NO_IDS
        """Array of the buffer's last ids, which include those added last."""
        self.lock = threading.Lock()

    def append(self, ids: Ids) -> None:
        self.parts.append(b"," + msgspec.json.encode(ids.tolist())[1:-1])
        self.length += len(ids)
        self.last = np.concatenate((self.last[-self.added - END :], ids))
        self.added = len(ids)


class TokenSequence:
    """An immutable sequence of ids, stored as the JSON digits sent to engines."""

    __slots__ = ("_buffer", "_length", "_parts")

    def __init__(self, ids: Ids, behind: _Buffer | None = None) -> None:
        """Add `ids` to a buffer, by default a new one."""
        buffer = _Buffer([], 0) if behind is None else behind
        if len(ids):
            buffer.append(ids)
        self._buffer = buffer
        self._length = buffer.length
        self._parts = len(buffer.parts)

    def __len__(self) -> int:
        return self._length

    def extend(self, ids: Ids) -> TokenSequence:
        """Append `ids`: in the same buffer if this sequence ends there, else in a new one."""
        if not len(ids):
            return self
        buffer = self._buffer
        with buffer.lock:
            if buffer.length != self._length or not self._length:
                buffer = _Buffer(self._list_parts(), self._length)
            return TokenSequence(ids, buffer)

    def to_array(self, count: int | None = None) -> Ids:
        """Return the ids, at most the last `count`: shape ``(n,)``, int32."""
        last = self._buffer.last
        parts = self._list_parts()
        count = self._length if count is None else min(count, self._length)
        if self._buffer.length != self._length or len(last) < count:
            available = 0
            at = len(parts)
            while available < count:
                at -= 1
                available += parts[at].count(b",")
            last = decode_ids(b"".join(parts[at:])[1:])
        return last[len(last) - count :]

    def to_json(self, before: bytes = b"", after: bytes = b"") -> list[bytes | memoryview]:
        """Return JSON digits without brackets, between two texts, as parts without a copy."""
        first, *others = self._list_parts() or [b","]
        return [before, memoryview(first)[1:], *others, after]

    def truncate(self, length: int) -> TokenSequence:
        """Return the first `length` ids."""
        parts = list[bytes]()
        left = length
        for part in self._list_parts():
            if left <= 0:
                break
            count = part.count(b",")
            whole = count <= left
            parts.append(part if whole else b",".join(part.split(b",", left + 1)[: left + 1]))
            left -= count
        return TokenSequence(_NO_IDS, _Buffer(parts, length))

    def shared_prefix(self, other: TokenSequence) -> int:
        """Return the number of leading ids shared with `other`."""
        if self._buffer is other._buffer:
            return min(len(self), len(other))
        mine, theirs = self._list_parts(), other._list_parts()
        same = count_shared(mine, theirs)
        left, right = b"".join(mine[same:]), b"".join(theirs[same:])
        size = min(len(left), len(right))
        differ = np.frombuffer(left, np.uint8, size) != np.frombuffer(right, np.uint8, size)
        end = int(differ.argmax()) if differ.any() else size
        complete = left[end : end + 1] in b"," and right[end : end + 1] in b","
        started = sum(part.count(b",") for part in mine[:same]) + left.count(b",", 0, end)
        return started if complete else started - 1

    def _list_parts(self) -> list[bytes]:
        return self._buffer.parts[: self._parts]


# --------------------------------------------------------------------------- requests
def count_shared(
    first: Sequence[Any], second: Sequence[Any], same: Callable[[Any, Any], bool] = operator.eq
) -> int:
    """Return the number of leading items shared by two sequences; `same` compares two items.

    The whole of `first` is compared at once beforehand, which is fast for identical objects.
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
"""An escape in JSON: a surrogate pair, a lone surrogate (captured), or any other."""


def mend_surrogates(body: bytes, start: int) -> bytes:
    """Replace lone surrogates, such as of an emoji cut in half, by U+FFFD from `start` on."""
    if body.find(b"\\ud", start) < 0 and body.find(b"\\uD", start) < 0:
        return body
    mended = body[:start] + _ESCAPE.sub(lambda m: b"\\ufffd" if m[1] else m[0], body[start:])
    return body if mended == body else mended
