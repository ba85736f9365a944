"""Where encoded trajectories lie: a local directory or an object store, by name (I7).

A blob is written before the row that points to it and is on the disk when `put` returns, so a
result that is listed can be read (I3). A crash in between leaves a blob that no row points to:
`sweep` removes those. A blob is whole or not there, also when the disk is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

from tugline.errors import Missing, StoreError
from tugline.server.store import results
from tugline.server.store.database import Database

ORPHAN_S = 3600.0
"""A blob may be that long without a row; it takes seconds."""
_TEMPORARY = ".tmp-"
_CHUNK = 1000


class Blobs(Protocol):
    """Bytes by name. All raise `StoreError` when the place cannot be used."""

    async def put(self, name: str, data: bytes) -> None:
        """Keep it durably. The same name again replaces it."""
        ...

    async def get(self, name: str) -> bytes:
        """The bytes. Raises `Missing`."""
        ...

    async def delete(self, name: str) -> None:
        """Remove it, if it is there."""
        ...

    def older(self, than: float) -> AsyncIterator[list[str]]:
        """Names, some at a time, of what was put before that time."""
        ...


def open_blobs(where: str) -> Blobs:
    """The place that `where` names: a directory, or a URL such as ``s3://bucket/prefix``."""
    if "://" in where and not where.startswith("file://"):
        objects = importlib.import_module("tugline.server.objects")  # needs an extra
        opened: Blobs = objects.ObjectBlobs(where)
        return opened
    return LocalBlobs(Path(where.removeprefix("file://")))


async def sweep(blobs: Blobs, database: Database, *, older_s: float = ORPHAN_S) -> int:
    """Delete the blobs that no result points to; returns how many."""
    gone = 0
    async for names in blobs.older(time.time() - older_s):
        for start in range(0, len(names), _CHUNK):
            some = names[start : start + _CHUNK]
            for name in set(some) - await database.read(partial(results.known, blobs=some)):
                await blobs.delete(name)
                gone += 1
    return gone


class LocalBlobs:
    """Files under `folder`, spread over 256 directories."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def put(self, name: str, data: bytes) -> None:
        """Write beside, flush, rename, flush the directory."""
        path = self._path(name)
        with _explained("write", path):
            await asyncio.to_thread(self._put, path, data)

    async def get(self, name: str) -> bytes:
        """Read the file."""
        path = self._path(name)
        with _explained("read", path):
            try:
                return await asyncio.to_thread(path.read_bytes)
            except FileNotFoundError:
                raise _missing(name) from None

    async def delete(self, name: str) -> None:
        """Remove the file."""
        path = self._path(name)
        with _explained("remove", path):
            await asyncio.to_thread(path.unlink, missing_ok=True)

    async def older(self, than: float) -> AsyncIterator[list[str]]:
        """Names, one directory at a time; what a crash left half-written is removed on the way."""
        with _explained("list", self._folder):
            for shard in await asyncio.to_thread(lambda: sorted(self._folder.glob("??"))):
                yield await asyncio.to_thread(_older, shard, than)

    def _path(self, name: str) -> Path:
        if Path(name).name != name:
            raise _missing(name)
        return self._folder / hashlib.sha256(name.encode()).hexdigest()[:2] / name

    def _put(self, path: Path, data: bytes) -> None:
        temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
        try:
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                _flush(self._folder)
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _flush(path.parent)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def _older(shard: Path, than: float) -> list[str]:
    names = []
    with os.scandir(shard) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # deleted just now
                if entry.stat().st_mtime < than:
                    if entry.name.startswith(_TEMPORARY):
                        Path(entry.path).unlink()
                    else:
                        names.append(entry.name)
    return names


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _missing(name: str) -> Missing:
    return Missing(f"no blob {name!r}")


@contextlib.contextmanager
def _explained(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        msg = f"cannot {verb} {path}: {error.strerror}; nothing acknowledged is lost"
        raise StoreError(msg) from error
