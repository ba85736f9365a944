"""Encoded trajectories by name, in a local directory or an object store (I7).

A blob is written before the row that refers to it and is on disk when `put` returns, so a listed
result can be read (I3). A crash in between leaves a blob without a row: `sweep` removes those. A
blob is whole or absent, even when the disk is full.
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
from pathlib import Path
from typing import Protocol

from tugline.errors import Missing, StoreError
from tugline.server.store import results
from tugline.server.store.database import Database

ORPHAN_S = 3600.0
"""Age at which a blob without a row is removed; writing the row takes seconds."""
_TEMPORARY = ".tmp-"
_CHUNK = 1000


class Blobs(Protocol):
    """Bytes by name. All raise `StoreError` if the storage cannot be used."""

    async def put(self, name: str, data: bytes) -> None:
        """Store it durably, in place of a blob of the same name."""
        ...

    async def get(self, name: str) -> bytes:
        """The bytes. Raises `Missing`."""
        ...

    async def delete(self, name: str) -> None:
        """Remove it, if it exists."""
        ...

    def list_older(self, than: float) -> AsyncIterator[list[str]]:
        """Names of blobs from before that time, some at a time."""
        ...


def open_blobs(where: str) -> Blobs:
    """Open a directory, or a URL such as ``s3://bucket/prefix``."""
    if "://" in where and not where.startswith("file://"):
        objects = importlib.import_module("tugline.server.objects")  # needs an extra
        opened: Blobs = objects.ObjectBlobs(where)
        return opened
    return LocalBlobs(Path(where.removeprefix("file://")))


async def sweep(blobs: Blobs, database: Database, *, older_s: float = ORPHAN_S) -> int:
    """Delete the blobs that no result refers to; returns how many."""
    deleted = 0
    async for names in blobs.list_older(time.time() - older_s):
        for start in range(0, len(names), _CHUNK):
            some = names[start : start + _CHUNK]
            for name in set(some) - await database.read(results.list_blobs, some):
                await blobs.delete(name)
                deleted += 1
    return deleted


class LocalBlobs:
    """Files under `folder`, spread over 256 directories."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def put(self, name: str, data: bytes) -> None:
        """Write a temporary file, flush, rename, flush the directory."""
        path = self._path(name)
        with _explain("write", path):
            await asyncio.to_thread(self._put, path, data)

    async def get(self, name: str) -> bytes:
        """Read the file."""
        path = self._path(name)
        with _explain("read", path):
            try:
                return await asyncio.to_thread(path.read_bytes)
            except FileNotFoundError:
                raise _missing(name) from None

    async def delete(self, name: str) -> None:
        """Remove the file."""
        path = self._path(name)
        with _explain("remove", path):
            await asyncio.to_thread(path.unlink, missing_ok=True)

    async def list_older(self, than: float) -> AsyncIterator[list[str]]:
        """Names, one directory at a time; removes temporary files that a crash left."""
        with _explain("list", self._folder):
            for shard in await asyncio.to_thread(lambda: sorted(self._folder.glob("??"))):
                yield await asyncio.to_thread(_list_older, shard, than)

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


def _list_older(shard: Path, than: float) -> list[str]:
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
def _explain(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        msg = f"cannot {verb} {path}: {error.strerror}; nothing acknowledged is lost"
        raise StoreError(msg) from error
