"""Trajectories on disk: what a builder made of recordings, for a trainer to load.

A file holds one `Trajectory`: msgpack in one zstd frame, the same bytes for equal trajectories.
``index.json`` beside them names each file with its digest, so that a damaged or missing one is an
error and not a smaller batch (I2).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zstandard

from tugline.errors import CaptureError, UsageError
from tugline.types import Ledger, PluginSpec, Trajectory, decode, encode

INDEX = "index.json"
_LEVEL = 3


class IndexEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One recording and the file that was made of it."""

    session: str
    recording: str
    """Path below the folder that was read."""
    file: str = ""
    """Path below the index; empty where none was made."""
    sha256: str = ""
    """Of the file, in hex."""
    traces: int = 0
    tokens: int = 0
    """In all its traces, context included."""
    ledger: Ledger = Ledger()
    note: str = ""
    """What is unusual: a recording that was cut short, a session without a result."""
    error: str = ""
    """Why no file was made."""


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a folder of trajectories, in the order of the recordings."""

    builder: PluginSpec | None
    """None where each session's own was used."""
    entries: tuple[IndexEntry, ...]


def pack(trajectory: Trajectory) -> bytes:
    """A trajectory as the bytes of its file."""
    return zstandard.ZstdCompressor(level=_LEVEL).compress(encode(trajectory))


def unpack(data: bytes) -> Trajectory:
    """The trajectory in the bytes of a file. Raises `ZstdError` or `msgspec.DecodeError`."""
    return decode(zstandard.ZstdDecompressor().decompress(data), Trajectory)


def read(path: Path, sha256: str = "") -> Trajectory:
    """The trajectory in a file, which must have this digest if one is given.

    Raises `CaptureError` naming the file.
    """
    try:
        data = path.read_bytes()
        if sha256 and hashlib.sha256(data).hexdigest() != sha256:
            msg = f"{path} is not the file that {INDEX} names: its SHA-256 differs"
            raise CaptureError(msg)
        return unpack(data)
    except OSError as error:
        msg = f"cannot read trajectory {path}: {error.strerror}"
        raise CaptureError(msg) from error
    except (zstandard.ZstdError, msgspec.DecodeError) as error:
        msg = f"{path} holds no trajectory: {error}"
        raise CaptureError(msg) from error


def read_index(folder: Path) -> Index:
    """The index of a folder of trajectories. Raises `UsageError` if it has none."""
    try:
        return msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)
    except (OSError, msgspec.DecodeError) as error:
        msg = f"{folder} has no {INDEX} of trajectories: {error}"
        raise UsageError(msg) from error


def read_folder(folder: Path) -> Iterator[Trajectory]:
    """Every trajectory that the folder's index names, one at a time and checked.

    Raises `UsageError` for a folder without index, `CaptureError` for a file that is not as named.
    """
    for entry in read_index(folder).entries:
        if entry.file:
            yield read(folder / entry.file, entry.sha256)
