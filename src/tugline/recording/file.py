"""One append-only file per session: every call, each byte of it written once.

Layout (`docs/format.md` has every byte of it): sections, of which each begins with an 8-byte magic
that holds the format's version, and goes on with records of ``<u32 packed> <u32 plain> <u32 crc32
of both> <u32 crc32 of these three>``, then the bytes. `codec` says what is in them. Whoever opens
a file to write on begins a section, which refers to nothing before it.

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
import zstandard

from tugline.errors import CaptureError
from tugline.recording.codec import Packed, Packer, Unpacker
from tugline.recording.records import Event, Header, Result
from tugline.types import Call

VERSION = 3
_NAME = b"TUGREC\x00"
MAGIC = _NAME + bytes([VERSION])
_HEAD = struct.Struct("<IIII")
_LIMIT = 1 << 30
"""Bytes of a record: no request is nearly as large."""
_SECTOR = 512
_LOOKS = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"PK", "a zip archive"),
    (b"PAR1", "Parquet"),
    (b"SQLite", "an SQLite database"),
    (b"{", "JSON"),
    (b"[", "JSON"),
)


@dataclass(slots=True)
class Recording:
    """What a file holds, in order."""

    header: Header | None = None
    calls: tuple[Call, ...] = ()
    """Their arrays are read-only; ids of calls that go on from each other share memory."""
    events: tuple[Event, ...] = ()
    result: Result | None = None
    """The last one, if there are several."""
    pictures: dict[str, str] = field(default_factory=dict)
    """URL of every image in the calls, by its `Image.digest`."""
    torn_bytes: int = 0
    """Length of a torn tail that was ignored."""
    damage: str = ""
    """Where and why a salvaging read stopped; empty if it came to the end."""


def read(path: Path, *, salvage: bool = False, bodies: bool = True) -> Recording:
    """Everything in a recording. Raises `CaptureError` on anything but a torn tail.

    With `salvage` the good records before a damaged place are enough. Without `bodies` the calls'
    raw requests are left out: as each repeats the one before, all of them are O(turns x tokens).
    """
    data = _load(path)
    recording, unpacker = Recording(), Unpacker(bodies=bodies)
    events: list[Event] = []
    good = 0
    try:
        for frame in frames(path, data):
            found = _unpacked(path, frame, unpacker)
            if isinstance(found, Event):
                events.append(found)
            elif isinstance(found, Header):
                recording.header = recording.header or found
            elif found is not None:
                recording.result = found
            good = frame.end
        recording.torn_bytes = len(data) - good
    except CaptureError as error:
        if not salvage or not good:
            raise
        recording.damage = str(error)
    recording.calls, recording.events = unpacker.calls(), tuple(events)
    recording.pictures = unpacker.pictures
    return recording


class Frame(NamedTuple):
    """A record as it lies in the file, or the start of a section, which has no bytes."""

    start: int
    end: int
    packed: bytes = b""
    plain: bytes = b""


def _load(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        msg = f"cannot read recording {path}: {error.strerror}"
        raise CaptureError(msg) from error


def _unpacked(path: Path, frame: Frame, unpacker: Unpacker) -> Header | Event | Result | None:
    if not frame.packed:
        unpacker.section()
        return None
    try:
        return unpacker.take(frame.packed, frame.plain)
    except (msgspec.DecodeError, zstandard.ZstdError, KeyError, ValueError) as error:
        msg = f"{path} holds a record at offset {frame.start} that cannot be read: {error!r}"
        raise CaptureError(msg) from error


def frames(path: Path, data: bytes) -> Iterator[Frame]:
    """Sections and records up to the end or a torn tail. Raises `CaptureError` on damage."""
    if len(data) < len(MAGIC) and MAGIC.startswith(data):
        return
    if not data.startswith(_NAME):
        raise _foreign(path, data)
    at = 0
    while at + len(MAGIC) <= len(data):
        section = data.startswith(_NAME, at)
        frame = _section(path, data, at) if section else _record(path, data, at)
        if frame is None:
            return
        yield frame
        at = frame.end


def _section(path: Path, data: bytes, at: int) -> Frame:
    if data.startswith(MAGIC, at):
        return Frame(at, at + len(MAGIC))
    msg = (
        f"{path} has version {data[at + len(_NAME)]} of the recording format (offset {at}); "
        f"this release reads version {VERSION} alone"
    )
    raise CaptureError(msg)


def _record(path: Path, data: bytes, at: int) -> Frame | None:
    """The record at `at`; None if that is a torn tail."""
    if at + _HEAD.size > len(data):
        return None
    packed, plain, crc, own = _HEAD.unpack_from(data, at)
    body = at + _HEAD.size
    end = body + packed + plain
    if zlib.crc32(data[at : body - 4]) != own:
        if _unfilled(data, at):
            return None
        raise _damaged(path, at, "the length of a record is not what was written")
    if packed + plain > _LIMIT:
        raise _damaged(path, at, f"a record of {packed + plain} bytes; none has over {_LIMIT}")
    if end > len(data):
        return None
    if zlib.crc32(data[body:end]) != crc:
        if end == len(data) and _unfilled(data, at):
            return None
        raise _damaged(path, at, "the checksum of a record does not match")
    return Frame(at, end, data[body : body + packed], data[body + packed : end])


def _unfilled(data: bytes, at: int) -> bool:
    """Whether the file ends in zeros, from `at` or a sector's start on: a power cut left them."""
    filled = len(data.rstrip(b"\0"))
    return filled <= at or -(-filled // _SECTOR) * _SECTOR < len(data)


def _damaged(path: Path, at: int, what: str) -> CaptureError:
    return CaptureError(f"{path} is damaged at offset {at}: {what}; --salvage reads what is before")


def _foreign(path: Path, data: bytes) -> CaptureError:
    known = next((what for start, what in _LOOKS if data.startswith(start)), None)
    what = known or ("text" if data[:64].isascii() and b"\0" not in data[:64] else "something else")
    return CaptureError(f"{path} is no recording: it looks like {what} (offset 0: {data[:8]!r})")


class Writer:
    """Appends to one file; opening an existing one cuts its torn tail and goes on."""

    def __init__(self, path: Path, header: Header | None = None, *, sync: bool = True) -> None:
        """`header` is written if the file is new; with None an existing one is gone on with."""
        self.path = path
        self.sync = sync
        self.dirty = False
        """Whether something was written since the last flush."""
        self._end = 0
        for frame in frames(path, _load(path) if path.exists() else b""):
            self._end = frame.end
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            msg = f"cannot open recording {path}: {error.strerror}"
            raise CaptureError(msg) from error
        fresh = self._end <= len(MAGIC)
        os.ftruncate(self._fd, self._end)
        self._packer = Packer()
        self._write(MAGIC)
        if fresh and header is not None:
            self._records(self._packer.pack(header))

    @property
    def closed(self) -> bool:
        """Whether nothing more can be written."""
        return self._fd < 0

    def append(self, call: Call) -> int:
        """Write one call; returns the bytes it took."""
        return self._records(self._packer.call(call))

    def note(self, what: Event | Result) -> int:
        """Write an event, or what became of the session; returns the bytes it took."""
        return self._records(self._packer.pack(what))

    def _records(self, packed: Iterable[Packed]) -> int:
        if self.closed:
            msg = f"recording {self.path} is closed"
            raise CaptureError(msg)
        records = b"".join(_framed(*one) for one in packed)
        self._write(records)
        return len(records)

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
        if not self.dirty or self.closed:
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
        if not self.closed:
            os.close(self._fd)
            self._fd = -1

    def _failed(self, error: OSError) -> CaptureError:
        self._release()  # what was written of the last record is a torn tail
        why = error.strerror
        msg = f"cannot write recording {self.path}: {why}; free some space and resume"
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


def _framed(packed: bytes, plain: bytes) -> bytes:
    head = _HEAD.pack(len(packed), len(plain), zlib.crc32(plain, zlib.crc32(packed)), 0)[:-4]
    return b"".join((head, zlib.crc32(head).to_bytes(4, "little"), packed, plain))


def conclude(path: Path, result: Result) -> None:
    """Append what became of a session to its recording, safe from a loss of power."""
    with Writer(path) as writer:
        writer.note(result)
