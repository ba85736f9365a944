"""Blobs in an object store: S3 and compatible ones, Google Cloud Storage, Azure.

obstore comes with the extra ``s3``. It takes credentials, region and endpoint from the environment
(``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ...) as the tools of each provider do. An object is
stored when the upload is answered, whole or not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta

from tugline.errors import Missing, StoreError, UsageError

try:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import from_url
except ImportError as _error:
    _MISSING = "blobs at a URL are kept with obstore, which needs: pip install 'tugline[s3]'"
    raise UsageError(_MISSING) from _error

TIMEOUT = timedelta(seconds=30)
"""For one request; a failed one is retried for `RETRY_TIMEOUT`."""
RETRY_TIMEOUT = timedelta(seconds=60)
_CHUNK = 1000


class ObjectBlobs:
    """Objects under the URL `where`, such as ``s3://bucket/prefix``."""

    def __init__(self, where: str) -> None:
        self._where = where.rstrip("/")
        try:
            self._store = from_url(
                where,
                client_options={
                    "timeout": TIMEOUT,
                    "connect_timeout": timedelta(seconds=10),
                    "allow_http": True,  # for an endpoint that says so; the default is HTTPS
                },
                retry_config={"max_retries": 8, "retry_timeout": RETRY_TIMEOUT},
            )
        except (BaseError, ValueError) as error:
            reason = _first_line(error)
            msg = f"blobs: {where!r} cannot be used, expected s3://BUCKET/PREFIX: {reason}"
            raise UsageError(msg) from error

    async def put(self, name: str, data: bytes) -> None:
        """Upload it."""
        with self._explain("write", name):
            await obstore.put_async(self._store, name, data)

    async def get(self, name: str) -> bytes:
        """Download it."""
        with self._explain("read", name):
            try:
                answer = await obstore.get_async(self._store, name)
            except FileNotFoundError:
                msg = f"no blob {name!r}"
                raise Missing(msg) from None
            return bytes(await answer.bytes_async())

    async def delete(self, name: str) -> None:
        """Delete the object."""
        with self._explain("remove", name), contextlib.suppress(FileNotFoundError):
            await obstore.delete_async(self._store, name)

    async def list_older(self, than: float) -> AsyncIterator[list[str]]:
        """Names, a thousand at a time."""
        with self._explain("list", ""):
            async for objects in obstore.list(self._store, chunk_size=_CHUNK):
                yield [
                    one["path"].rpartition("/")[2]
                    for one in objects
                    if one["last_modified"].timestamp() < than
                ]

    @contextlib.contextmanager
    def _explain(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            msg = f"cannot {verb} {self._where}/{name}: {_first_line(error)}"
            raise StoreError(msg) from error


def _first_line(error: Exception) -> str:
    """The first line; the attempts follow it."""
    return str(error).strip().partition("\n")[0]
