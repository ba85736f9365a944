"""One append-only file per session: every call, each byte of it written once.

Layout: an 8-byte magic with the format's version, then records of ``<u32 length> <u32 crc32>
<payload>``; a payload is a zstd frame of msgpack. A call's prompt is stored as a reference to the
longest prefix it shares with one of the last few calls, plus the rest (I7); so is its raw request
body, which also shares its end.

When `Writer.append` returns, the record is with the operating system: no death of a process loses
it (I3). A loss of power may cost what came since the last `flush`; with ``sync`` each record is
flushed before `append` returns. A record cut off by a crash is a torn tail: it is dropped when the
file is opened, everything before it is intact. Any other damage is a `CaptureError` that names
file and offset.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from tugline.capture.records import Event, Header, Result
from tugline.errors import CaptureError
from tugline.types import Call, Ids, Tool, decode, encode

MAGIC = b"TUGSEG\x00\x03"
_HEAD = struct.Struct("<II")
_CANDIDATES = 8
_BODIES = 3
_SMALL = 8192
"""New bytes of a body that are few enough to stop looking for a nearer one."""
_LEVEL = 1


class _Record(msgspec.Struct, frozen=True, tag="call"):
    """A call with its prompt, tools and request body reduced to what is new."""

    call: Call
    base: int
    """Number of the call whose ids the prompt starts with; -1 for none."""
    keep: int
    """How many of those ids."""
    same_tools: bool
    body_base: int
    """Number of the call whose request body this one's starts and ends like; -1 for none."""
    front: int
    """How many bytes of it come first."""
    back: int
    """How many bytes of it come last."""


_Any = Header | _Record | Event | Result


def shared_prefix(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """How many leading items `a` and `b` have in common."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


class _Codec:
    """The state both directions share: the last calls' ids, tools and bodies."""

    def __init__(self) -> None:
        self.ids: deque[tuple[int, Ids]] = deque(maxlen=_CANDIDATES)
        self.bodies: deque[tuple[int, bytes]] = deque(maxlen=_BODIES)
        self.tools: tuple[Tool, ...] | None = None
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self._decompressor = zstandard.ZstdDecompressor()

    def pack(self, call: Call) -> bytes:
        base, keep = self._nearest(call)
        body_base, front, back = self._nearest_body(call.request)
        same_tools = self.tools is not None and self.tools == call.tools
        slim = msgspec.structs.replace(
            call,
            prompt_ids=np.ascontiguousarray(call.prompt_ids[keep:]),
            tools=() if same_tools else call.tools,
            request=call.request[front : len(call.request) - back],
        )
        record = _Record(slim, base, keep, same_tools, body_base, front, back)
        self._remember(call, record)
        return self.squeeze(record)

    def squeeze(self, record: _Any) -> bytes:
        return self._compressor.compress(encode(record))

    def unpack(self, payload: bytes) -> Header | Call | Event | Result:
        record: _Any = decode(self._decompressor.decompress(payload), _Any)  # type: ignore[arg-type]
        return self._whole(record) if isinstance(record, _Record) else record

    def _whole(self, record: _Record) -> Call:
        prompt, body = record.call.prompt_ids, record.call.request
        if record.keep:
            prompt = np.concatenate((dict(self.ids)[record.base][: record.keep], prompt))
        if record.front or record.back:
            like = dict(self.bodies)[record.body_base]
            body = like[: record.front] + body + like[len(like) - record.back :]
        call = msgspec.structs.replace(
            record.call,
            prompt_ids=prompt,
            tools=self.tools if record.same_tools and self.tools else record.call.tools,
            request=body,
        )
        self._remember(call, record)
        return call

    def _nearest(self, call: Call) -> tuple[int, int]:
        """The call whose ids begin this prompt, and how many of them; its parent if it can be."""
        base, keep = -1, 0
        latest_first = reversed(self.ids)
        for number, ids in sorted(latest_first, key=lambda pair: pair[0] != call.parent):
            shared = shared_prefix(ids, call.prompt_ids)
            if shared > keep:
                base, keep = number, shared
            if shared == len(ids):
                break
        return base, keep

    def _nearest_body(self, body: bytes) -> tuple[int, int, int]:
        """The body that this one starts and ends like, and how many bytes of each."""
        base, best, best_back = -1, 0, 0
        mine = np.frombuffer(body, np.uint8)
        for number, other in reversed(self.bodies):
            theirs = np.frombuffer(other, np.uint8)
            front = shared_prefix(theirs, mine)
            back = shared_prefix(theirs[front:][::-1], mine[front:][::-1])
            if front + back > best + best_back:
                base, best, best_back = number, front, back
            if len(body) - front - back < _SMALL:
                break
        return base, best, best_back

    def _remember(self, call: Call, record: _Record) -> None:
        """What this call holds in full need not be kept beside it: one conversation, one entry."""
        _drop_held(self.ids, record.base, record.keep)
        self.ids.append((call.number, np.concatenate((call.prompt_ids, call.sampled_ids))))
        if call.request:
            _drop_held(self.bodies, record.body_base, record.front + record.back)
            self.bodies.append((call.number, call.request))
        self.tools = call.tools


def _drop_held(known: deque[tuple[int, Any]], number: int, held: int) -> None:
    for entry in known:
        if entry[0] == number and len(entry[1]) == held:
            known.remove(entry)
            return


@dataclass(slots=True)
class Segment:
    """What a file holds, in order."""

    header: Header | None = None
    calls: tuple[Call, ...] = ()
    events: tuple[Event, ...] = ()
    result: Result | None = None
    """The last one, if there are several."""
    torn_bytes: int = 0
    """Length of a torn tail that was ignored."""

    def _take(self, found: Header | Call | Event | Result) -> None:
        if isinstance(found, Call):
            self.calls = (*self.calls, found)
        elif isinstance(found, Event):
            self.events = (*self.events, found)
        elif isinstance(found, Header):
            self.header = found
        else:
            self.result = found


def read(path: Path) -> Segment:
    """Everything in a segment. Raises `CaptureError` on anything but a torn tail."""
    try:
        data = path.read_bytes()
    except OSError as error:
        msg = f"cannot read segment {path}: {error.strerror}"
        raise CaptureError(msg) from error
    segment, good, _ = _parse(path, data)
    segment.torn_bytes = len(data) - good
    return segment


def _parse(path: Path, data: bytes) -> tuple[Segment, int, _Codec]:
    codec, segment = _Codec(), Segment()
    if len(data) < len(MAGIC) and MAGIC.startswith(data):
        return segment, 0, codec
    if not data.startswith(MAGIC):
        msg = f"{path} is not a segment of this version (offset 0: {data[:8]!r})"
        raise CaptureError(msg)
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
            segment._take(codec.unpack(payload))  # noqa: SLF001 - its only maker
        except (msgspec.DecodeError, zstandard.ZstdError, KeyError) as error:
            msg = f"{path} holds a record at offset {at} that cannot be read: {error}"
            raise CaptureError(msg) from error
        at = end
    return segment, at, codec


class Writer:
    """Appends to one file; opening an existing one cuts its torn tail and goes on."""

    def __init__(self, path: Path, header: Header | None = None, *, sync: bool = True) -> None:
        """`header` is written if the file is new; with None an existing one is gone on with."""
        self.path = path
        self.sync = sync
        self.dirty = False
        """Whether something was written since the last flush."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            msg = f"cannot open segment {path}: {error.strerror}"
            raise CaptureError(msg) from error
        segment, good, self._codec = _parse(path, path.read_bytes())
        self.calls = len(segment.calls)
        self._end = good
        os.ftruncate(self._fd, good)
        if not good:
            self._write(MAGIC)
        if segment.header is None and header is not None:
            self._record(self._codec.squeeze(header))

    def append(self, call: Call) -> int:
        """Write one call; returns the bytes it took."""
        size = self._record(self._codec.pack(call))
        self.calls += 1
        return size

    def note(self, what: Event | Result) -> int:
        """Write an event, or what became of the session; returns the bytes it took."""
        return self._record(self._codec.squeeze(what))

    def _record(self, payload: bytes) -> int:
        if self._fd < 0:
            msg = f"segment {self.path} is closed"
            raise CaptureError(msg)
        record = _HEAD.pack(len(payload), zlib.crc32(payload)) + payload
        self._write(record)
        return len(record)

    def _write(self, data: bytes) -> None:
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], self._end + done)
            self._end += len(data)
            self.dirty = True
        except OSError as error:
            raise self._failed(error) from error
        if self.sync:
            self.flush()

    def flush(self) -> None:
        """Wait until everything written is safe from a loss of power, too."""
        if not self.dirty or self._fd < 0:
            return
        self.dirty = False
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Flush and release the file; may be called twice."""
        self.flush()
        self._release()

    def _release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _failed(self, error: OSError) -> CaptureError:
        self._release()  # what was written of the last record is a torn tail
        why = error.strerror
        msg = f"cannot write segment {self.path}: {why}; free some space and resume"
        return CaptureError(msg)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def conclude(path: Path, result: Result) -> None:
    """Append what became of a session to its segment, safe from a loss of power."""
    with Writer(path) as writer:
        writer.note(result)
