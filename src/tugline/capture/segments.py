"""One append-only file per session: every call, each byte of it written once.

Layout: an 8-byte magic with the format's version, then records of ``<u32 length> <u32 crc32>
<payload>``; a payload is a zstd frame of msgpack. A call's prompt is stored as a reference to the
longest prefix it shares with one of the last few calls, plus the rest (I7); its raw request body
is compressed against the one before it.

`Writer.append` returns when the record is on disk (I3). A record cut off by a crash is a torn
tail: it is dropped when the file is opened, everything before it is intact. Any other damage is a
`CaptureError` that names file and offset.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
import zstandard

from tugline.errors import CaptureError
from tugline.types import Call, Ids, decode, encode

MAGIC = b"TUGSEG\x00\x01"
_HEAD = struct.Struct("<II")
_CANDIDATES = 8
_LEVEL = 3


class _Record(msgspec.Struct, frozen=True):
    """A call with its prompt, tools and request body reduced to what is new."""

    call: Call
    base: int
    """Number of the call whose ids the prompt starts with; -1 for none."""
    keep: int
    """How many of those ids."""
    same_tools: bool


def shared_prefix(a: Ids, b: Ids) -> int:
    """How many leading ids `a` and `b` have in common."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


class _Codec:
    """The state both directions share: the last calls' ids, tools and body."""

    def __init__(self) -> None:
        self.recent: deque[tuple[int, Ids]] = deque(maxlen=_CANDIDATES)
        self.last: Call | None = None

    def pack(self, call: Call) -> bytes:
        base, keep = -1, 0
        for number, ids in reversed(self.recent):
            shared = shared_prefix(ids, call.prompt_ids)
            if shared > keep:
                base, keep = number, shared
        same_tools = self.last is not None and self.last.tools == call.tools
        slim = msgspec.structs.replace(
            call,
            prompt_ids=np.ascontiguousarray(call.prompt_ids[keep:]),
            tools=() if same_tools else call.tools,
            request=self._compress_body(call.request),
        )
        self._remember(call)
        payload = encode(_Record(slim, base, keep, same_tools))
        return zstandard.ZstdCompressor(level=_LEVEL).compress(payload)

    def unpack(self, payload: bytes) -> Call:
        record = decode(zstandard.ZstdDecompressor().decompress(payload), _Record)
        prompt = record.call.prompt_ids
        if record.keep:
            prompt = np.concatenate((dict(self.recent)[record.base][: record.keep], prompt))
        call = msgspec.structs.replace(
            record.call,
            prompt_ids=prompt,
            tools=self.last.tools if record.same_tools and self.last else record.call.tools,
            request=self._expand_body(record.call.request),
        )
        self._remember(call)
        return call

    def _remember(self, call: Call) -> None:
        self.recent.append((call.number, np.concatenate((call.prompt_ids, call.sampled_ids))))
        self.last = call

    def _dictionary(self) -> zstandard.ZstdCompressionDict | None:
        if self.last is None or len(self.last.request) < 8:
            return None
        return zstandard.ZstdCompressionDict(
            self.last.request, dict_type=zstandard.DICT_TYPE_RAWCONTENT
        )

    def _compress_body(self, body: bytes) -> bytes:
        return zstandard.ZstdCompressor(level=_LEVEL, dict_data=self._dictionary()).compress(body)

    def _expand_body(self, body: bytes) -> bytes:
        return zstandard.ZstdDecompressor(dict_data=self._dictionary()).decompress(body)


@dataclass(frozen=True, slots=True)
class Segment:
    """What a file held: its calls in order, and the bytes of a torn tail that were ignored."""

    calls: tuple[Call, ...]
    torn_bytes: int


def read(path: Path) -> Segment:
    """All calls of a segment. Raises `CaptureError` on anything but a torn tail."""
    try:
        data = path.read_bytes()
    except OSError as error:
        msg = f"cannot read segment {path}: {error.strerror}"
        raise CaptureError(msg) from error
    calls, good, _ = _parse(path, data)
    return Segment(tuple(calls), len(data) - good)


def _parse(path: Path, data: bytes) -> tuple[list[Call], int, _Codec]:
    codec = _Codec()
    if len(data) < len(MAGIC) and MAGIC.startswith(data):
        return [], 0, codec
    if not data.startswith(MAGIC):
        msg = f"{path} is not a segment of this version (offset 0: {data[:8]!r})"
        raise CaptureError(msg)
    calls: list[Call] = []
    at = len(MAGIC)
    while at + _HEAD.size <= len(data):
        length, crc = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + length
        if end > len(data) or not any(data[at:]):
            break  # cut off, or blocks the file system never filled
        payload = data[at + _HEAD.size : end]
        if zlib.crc32(payload) != crc:
            if end == len(data):
                break
            msg = f"{path} is damaged at offset {at}: checksum mismatch in a record"
            raise CaptureError(msg)
        try:
            calls.append(codec.unpack(payload))
        except (msgspec.DecodeError, zstandard.ZstdError, KeyError) as error:
            msg = f"{path} holds a record at offset {at} that cannot be read: {error}"
            raise CaptureError(msg) from error
        at = end
    return calls, at, codec


class Writer:
    """Appends calls to one file; opening an existing one cuts its torn tail and goes on."""

    def __init__(self, path: Path, *, sync: bool = True) -> None:
        self.path = path
        self._sync = sync
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            msg = f"cannot open segment {path}: {error.strerror}"
            raise CaptureError(msg) from error
        calls, good, self._codec = _parse(path, path.read_bytes())
        self.calls = len(calls)
        self._end = good
        os.ftruncate(self._fd, good)
        if not good:
            self._write(MAGIC)

    def append(self, call: Call) -> int:
        """Write one call durably; returns the bytes it took."""
        if self._fd < 0:
            msg = f"segment {self.path} is closed"
            raise CaptureError(msg)
        payload = self._codec.pack(call)
        record = _HEAD.pack(len(payload), zlib.crc32(payload)) + payload
        self._write(record)
        self.calls += 1
        return len(record)

    def _write(self, data: bytes) -> None:
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], self._end + done)
            if self._sync:
                os.fdatasync(self._fd)
            self._end += len(data)
        except OSError as error:
            self.close()  # what was written of this record is a torn tail
            msg = f"cannot write segment {self.path}: {error.strerror}; free some space and resume"
            raise CaptureError(msg) from error

    def close(self) -> None:
        """Release the file; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
