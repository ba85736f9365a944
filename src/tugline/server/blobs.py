"""Encoded trajectories by name, in a local directory or an object store (I7).

A blob is written before the row that refers to it and is on disk when `put` returns, so a listed
result can be read (I3). A crash in between leaves a blob without a row, which retention removes.
Writes are atomic, even when the disk is full.
"""

import asyncio
import contextlib
import hashlib
import uuid
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

from tugline.atomic import flush_path, write_file
from tugline.errors import Missing, StoreError, UsageError, first_line
from tugline.plugins import import_extra
from tugline.server.validation import compute_digest

_TEMPORARY = "~"
"""Prefix of the names of incomplete files; ids of sessions cannot contain it."""
_CHUNK = 1000


class LocalBlobs:
    """Files in 256 subdirectories of `folder`, which only this user can access."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def put(self, name: str, data: bytes) -> None:
        """Store a blob durably; replace a blob of the same name."""
        path = spread(self._folder, name)
        with _explain("write", path):
            await asyncio.to_thread(self._put, path, data)

    async def get(self, name: str) -> bytes:
        """Read a blob. Raises `Missing`."""
        path = spread(self._folder, name)
        with _explain("read", path):
            try:
                return await asyncio.to_thread(path.read_bytes)
            except FileNotFoundError:
                if not path.parent.exists():  # the disk is not mounted
                    raise
                raise _missing(name) from None

    async def delete(self, name: str) -> None:
        """Remove a blob if it exists."""
        path = spread(self._folder, name)
        with _explain("remove", path):
            await asyncio.to_thread(path.unlink, missing_ok=True)

    async def list_older(self, than: float) -> AsyncIterator[list[str]]:
        """Yield the names of blobs older than a Unix time, one directory at a time.

        Removes temporary files older than that.
        """
        with _explain("list", self._folder):
            for shard in await asyncio.to_thread(lambda: sorted(self._folder.glob("??"))):
                yield await asyncio.to_thread(_list_older, shard, than)

    def _put(self, path: Path, data: bytes) -> None:
        if not path.parent.is_dir():
            self._folder.mkdir(0o700, parents=True, exist_ok=True)
            path.parent.mkdir(exist_ok=True)
            flush_path(self._folder)
        write_file(path, data, draft=path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}"))
        flush_path(path.parent)


def spread(folder: Path, name: str) -> Path:
    """Return the path of `name` in one of 256 directories. Raises `Missing` for no valid name."""
    if Path(name).name != name or not name.strip("."):
        raise Missing(f"{name!r} is not a file name")
    return folder / hashlib.sha256(name.encode()).hexdigest()[:2] / name


def _list_older(shard: Path, than: float) -> list[str]:
    names = []
    for path in shard.iterdir():
        with contextlib.suppress(FileNotFoundError):  # deleted just now
            if path.stat().st_mtime < than:
                if path.name.startswith(_TEMPORARY):
                    path.unlink()
                else:
                    names.append(path.name)
    return names


def _missing(name: str) -> Missing:
    return Missing(f"unknown blob {name!r}")


@contextlib.contextmanager
def _explain(
    verb: str, where: object, errors: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[None]:
    try:
        yield
    except errors as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        msg = f"cannot {verb} {where}: {reason}; no acknowledged data is lost"
        raise StoreError(msg) from error


# --------------------------------------------------------------------------- object stores
class ObjectBlobs:
    """Objects under a URL such as ``s3://bucket/prefix``, also in Google Cloud or Azure.

    obstore takes credentials, region and endpoint from the environment (``AWS_ACCESS_KEY_ID``,
    ``AWS_ENDPOINT_URL``, ...) like the tools of each provider. Uploads are atomic and durable when
    `put` returns.
    """

    def __init__(self, where: str) -> None:
        self._obstore, stores, errors = (
            import_extra(module, "s3", "a store of blobs at a URL")
            for module in ("obstore", "obstore.store", "obstore.exceptions")
        )
        self._error = errors.BaseError
        self._where = where.rstrip("/")
        try:
            self._store = stores.from_url(
                where,
                client_options={
                    "timeout": timedelta(seconds=30),  # of one request
                    "connect_timeout": timedelta(seconds=10),
                    "allow_http": True,  # for http:// endpoints; the default is HTTPS
                },
                retry_config={"max_retries": 8, "retry_timeout": timedelta(seconds=60)},
            )
        except (self._error, ValueError) as error:
            reason = first_line(error)
            msg = f"server.blobs is {where!r}, must be a path or s3://BUCKET/PREFIX: {reason}"
            raise UsageError(msg) from error

    async def put(self, name: str, data: bytes) -> None:
        """Store a blob durably; replace a blob of the same name."""
        with self._explain("write", name):
            await self._obstore.put_async(self._store, name, data)

    async def get(self, name: str) -> bytes:
        """Read a blob. Raises `Missing`."""
        with self._explain("read", name):
            try:
                answer = await self._obstore.get_async(self._store, name)
            except FileNotFoundError:
                raise _missing(name) from None
            return bytes(await answer.bytes_async())

    async def delete(self, name: str) -> None:
        """Remove a blob if it exists."""
        with self._explain("remove", name), contextlib.suppress(FileNotFoundError):
            await self._obstore.delete_async(self._store, name)

    async def list_older(self, than: float) -> AsyncIterator[list[str]]:
        """Yield the names of blobs older than a Unix time, a thousand at a time."""
        with self._explain("list", ""):
            async for objects in self._obstore.list(self._store, chunk_size=_CHUNK):
                yield [
                    item["path"].rpartition("/")[2]
                    for item in objects
                    if item["last_modified"].timestamp() < than
                ]

    def _explain(self, verb: str, name: str) -> contextlib.AbstractContextManager[None]:
        return _explain(verb, f"{self._where}/{name}", (self._error, OSError))


Blobs = LocalBlobs | ObjectBlobs
"""Blob store. All methods raise `StoreError` if the storage is unavailable."""


def open_blobs(where: str) -> Blobs:
    """Open the blob store at a directory, or at a URL such as ``s3://bucket/prefix``."""
    if "://" in where and not where.startswith("file://"):
        return ObjectBlobs(where)
    return LocalBlobs(Path(where.removeprefix("file://")))


async def read_blob(blobs: Blobs, name: str, digest: str) -> bytes:
    """Read the trajectory of a result. Raises `Missing`, also if its digest is wrong."""
    data = await blobs.get(name)
    if await asyncio.to_thread(compute_digest, data) != digest:
        raise Missing(f"the result is damaged: blob {name!r} does not have the SHA-256 {digest}")
    return data
