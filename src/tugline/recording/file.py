"""Recording files: append-only, one per session, with every byte of a call written once.

Layout (`docs/format.md` specifies it): sections, each of which begins with an 8-byte magic that
holds the format's version, followed by records of ``<u32 length> <u32 crc32 of the bytes> <u32
crc32 of these two>`` and the bytes. `codec` defines their content. Opening a file to append starts
a new section, which refers to no earlier one.

When `Writer.append` returns, the operating system has the record, so a crash of the process does
not lose it (I3). A power failure may lose records written since the last `flush` or `close`. A
record truncated by a crash is a torn tail: it is dropped when the file is opened, and everything
before it is intact. Any other damage is a `CaptureError` that names file and offset.
"""

import os
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import zstandard

from tugline.chat.tokens import TokenSequence
from tugline.errors import CaptureError, RecordingVersionError
from tugline.recording.codec import Packer, Unpacker
from tugline.recording.records import Header, RecordedEvent, RecordedResult
from tugline.types import Call

VERSION = 4
_NAME = b"TUGREC\x00"
MAGIC = _NAME + bytes([VERSION])
_HEAD = struct.Struct("<III")
_LIMIT = 1 << 30
"""Largest record in bytes, far above any request."""
_SECTOR = 512
_UNREADABLE = (
    *(msgspec.DecodeError, zstandard.ZstdError, LookupError, ValueError),
    *(TypeError, ArithmeticError, RecursionError),
)
"""Errors of a record that is complete, but not as `Packer` writes it."""


@dataclass(slots=True)
class Recording:
    """The content of a file, in order."""

    header: Header | None = None
    calls: tuple[Call, ...] = ()
    """Calls with read-only arrays; ids of calls that extend each other share memory."""
    events: tuple[RecordedEvent, ...] = ()
    results: tuple[RecordedResult, ...] = ()
    """Results in the order in which they were written: verdicts that were in force, and the last.
    """
    images: dict[str, str] = field(default_factory=dict)
    """URL of every image in the calls, by its `Image.digest`."""
    torn_bytes: int = 0
    """Length of a torn tail that was ignored."""
    damage: str = ""
    """Offset and reason at which a salvaging read stopped; empty if it reached the end."""

    @property
    def result(self) -> RecordedResult | None:
        """The result in force: the last one, or None without any."""
        return self.results[-1] if self.results else None

    @property
    def own_result(self) -> RecordedResult | None:
        """The result with the verdict of the session's own evaluation."""
        return next((each for each in reversed(self.results) if each.verdict is None), None)

    def describe_gaps(self) -> Iterator[str]:
        """Yield a line for each missing part."""
        if self.torn_bytes:
            yield f"an incomplete record of {self.torn_bytes} bytes at the end was not read"
        if self.damage:
            yield f"only the records before the damage were read: {self.damage}"
        if self.result is None:
            yield "no result is recorded"


def read(path: Path, *, salvage: bool = False) -> Recording:
    """Read a recording. Raises `CaptureError` on any damage except a torn tail.

    With `salvage` the records before the damage are returned instead.
    """
    data = _read_bytes(path)
    recording = Recording()
    unpacker = Unpacker()
    events: list[RecordedEvent] = []
    results: list[RecordedResult] = []
    good_end = 0
    try:
        for frame in read_frames(path, data):
            record = _unpack_frame(path, frame, unpacker)
            if isinstance(record, RecordedEvent):
                events.append(record)
            elif isinstance(record, Header):
                recording.header = recording.header or record
            elif record is not None:
                results.append(record)
            good_end = frame.end
        recording.torn_bytes = len(data) - good_end
    except CaptureError as error:
        if not salvage or not good_end:
            raise
        recording.damage = str(error)
    recording.calls = unpacker.calls()
    recording.events = tuple(events)
    recording.results = tuple(results)
    recording.images = unpacker.images
    return recording


class Frame(NamedTuple):
    """Position and bytes of a record; a section start has no bytes."""

    start: int
    end: int
    data: bytes = b""


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CaptureError(f"cannot read recording {path}: {error.strerror}") from error


def _unpack_frame(
    path: Path, frame: Frame, unpacker: Unpacker
) -> Header | RecordedEvent | RecordedResult | None:
    if not frame.data:
        unpacker.begin_section()
        return None
    try:
        return unpacker.unpack(frame.data)
    except _UNREADABLE as error:
        msg = f"{path} has a record at offset {frame.start} that cannot be decoded: {error!r}"
        raise CaptureError(msg) from error


def read_frames(path: Path, data: bytes) -> Iterator[Frame]:
    """Yield sections and records up to the end or a torn tail. Raises `CaptureError` on damage."""
    if len(data) < len(MAGIC) and MAGIC.startswith(data):
        return
    if not data.startswith(_NAME):
        raise CaptureError(f"{path} is not a recording: it begins with {data[:8]!r} (offset 0)")
    at = 0
    while at + len(MAGIC) <= len(data):
        section = data.startswith(_NAME, at)
        frame = _parse_section(path, data, at) if section else _parse_record(path, data, at)
        if frame is None:
            return
        yield frame
        at = frame.end


def _parse_section(path: Path, data: bytes, at: int) -> Frame:
    if data.startswith(MAGIC, at):
        return Frame(at, at + len(MAGIC))
    msg = (
        f"{path} has version {data[at + len(_NAME)]} (offset {at}); this release reads version "
        f"{VERSION}"
    )
    raise RecordingVersionError(msg)


def _parse_record(path: Path, data: bytes, at: int) -> Frame | None:
    """Parse the record at `at`; None if it is a torn tail."""
    if at + _HEAD.size > len(data):
        return None
    length, crc, own = _HEAD.unpack_from(data, at)
    body = at + _HEAD.size
    end = body + length
    if zlib.crc32(data[at : body - 4]) != own:
        if _ends_in_zeros(data, at):
            return None
        raise _make_damage_error(path, at, "the checksum of a record's length does not match")
    if length > _LIMIT:
        raise _make_damage_error(path, at, f"a record claims {length} bytes; the limit is {_LIMIT}")
    if end > len(data):
        return None
    if zlib.crc32(data[body:end]) != crc:
        if end == len(data) and _ends_in_zeros(data, at):
            return None
        raise _make_damage_error(path, at, "the checksum of a record does not match")
    return Frame(at, end, data[body:end])


def _ends_in_zeros(data: bytes, at: int) -> bool:
    """Whether a power failure left zeros from `at`, or from the start of a later sector."""
    filled = len(data.rstrip(b"\0"))
    return filled <= at or -(-filled // _SECTOR) * _SECTOR < len(data)


def _make_damage_error(path: Path, at: int, what: str) -> CaptureError:
    return CaptureError(
        f"{path} is damaged at offset {at}: {what}; --salvage reads the records before it"
    )


class Writer:
    """Writer that appends to a file; opening an existing file truncates its torn tail."""

    def __init__(self, path: Path, header: Header | None = None) -> None:
        """Open `path`; `header` is written if the file is new."""
        self.path = path
        self.dirty = False
        """Whether anything was written since the last flush."""
        self.size = 0
        """Size of the file in bytes."""
        self._lock = threading.RLock()
        """Held while the descriptor is used or closed, so that no other file gets its number."""
        self._flushing = threading.Lock()
        """Held during a flush, which may take long; a second one waits for it."""
        for frame in read_frames(path, _read_bytes(path) if path.exists() else b""):
            self.size = frame.end
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise CaptureError(f"cannot open recording {path}: {error.strerror}") from error
        is_new = self.size <= len(MAGIC)
        os.ftruncate(self._fd, self.size)
        self._packer = Packer()
        self._write(MAGIC)
        if is_new and header is not None:
            self._write_records(self._packer.pack(header))

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._fd < 0

    def append(self, call: Call, tokens: TokenSequence | None = None) -> int:
        """Write a call; return the number of bytes written. See `Packer.pack_call`."""
        return self._write_records(self._packer.pack_call(call, tokens))

    def append_record(self, record: RecordedEvent | RecordedResult) -> int:
        """Write an event or the session's result; return the number of bytes written."""
        return self._write_records(self._packer.pack(record))

    def _write_records(self, packed: Iterable[bytes]) -> int:
        if self.closed:  # packing changes what later records refer to
            raise CaptureError(f"recording {self.path} is closed")
        records = b"".join(map(_frame, packed))
        self._write(records)
        return len(records)

    def _write(self, data: bytes) -> None:
        with self._lock:
            if self.closed:
                raise CaptureError(f"recording {self.path} is closed")
            try:
                done = 0
                while done < len(data):
                    done += os.pwrite(self._fd, data[done:], self.size + done)
                self.size += len(data)
                self.dirty = True
            except OSError as error:
                raise self._close_failed(error) from error

    def flush(self) -> None:
        """Write everything to the disk, so that it survives a power failure."""
        with self._flushing:
            with self._lock:
                if not self.dirty or self.closed:
                    return
                try:
                    own = os.dup(self._fd)  # so that no writer waits for the disk
                except OSError:  # too many open files: the next flush tries again
                    return
                self.dirty = False
            try:
                os.fdatasync(own)
            except OSError as error:
                raise self._close_failed(error) from error
            finally:
                os.close(own)

    def close(self) -> None:
        """Flush and close the file; may be called twice."""
        self.flush()
        self._release()

    def _release(self) -> None:
        with self._lock:
            if not self.closed:
                os.close(self._fd)
                self._fd = -1

    def _close_failed(self, error: OSError) -> CaptureError:
        self._release()  # a partly written record is a torn tail
        return CaptureError(
            f"cannot write recording {self.path}: {error.strerror}; free some space and resume"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _frame(data: bytes) -> bytes:
    head = _HEAD.pack(len(data), zlib.crc32(data), 0)[:-4]
    return b"".join((head, zlib.crc32(head).to_bytes(4, "little"), data))


def write_result(path: Path, result: RecordedResult) -> None:
    """Append the session's result to its recording and flush to the disk."""
    with Writer(path) as writer:
        writer.append_record(result)
