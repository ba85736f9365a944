from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from support.control_plane import limited_files
from tugline.errors import Missing, StoreError, UsageError
from tugline.server.blobs import Blobs, LocalBlobs, open_blobs

KEY = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of a real S3 server on loopback, which the environment names."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (KEY | {"AWS_ENDPOINT_URL": url}).items():
            patch.setenv(name, value)
        yield url
    server.stop()


@pytest.fixture(params=["directory", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    """An empty store of each kind."""
    if request.param == "directory":
        return open_blobs(str(tmp_path / "blobs"))
    address, bucket = request.getfixturevalue("s3"), f"bucket-{time.time_ns()}"
    boto3.client("s3", endpoint_url=address).create_bucket(Bucket=bucket)
    return open_blobs(f"s3://{bucket}/some/prefix")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


async def _names(blobs: Blobs, than: float) -> set[str]:
    pages: AsyncIterator[list[str]] = blobs.list_older(than)
    return {name async for names in pages for name in names}


async def test_blobs_are_stored_replaced_and_deleted(blobs: Blobs) -> None:
    """Bytes are stored by name, replaced, deleted; an unknown name is `Missing`."""
    data = os.urandom(100_000)
    await blobs.put("task-0.1.abc", data)
    await blobs.put("task-1.1.def", b"")
    assert await blobs.get("task-0.1.abc") == data
    assert await blobs.get("task-1.1.def") == b""
    await blobs.put("task-1.1.def", b"new")
    assert await blobs.get("task-1.1.def") == b"new"
    await blobs.delete("task-1.1.def")
    await blobs.delete("task-1.1.def")
    with pytest.raises(Missing, match="task-1"):
        await blobs.get("task-1.1.def")


async def test_blobs_are_listed_by_age(blobs: Blobs) -> None:
    """Only blobs from before the given time are listed, each name once.

    Names that begin like those of temporary files are listed, too.
    """
    odd = {".tmp-a-0.1.x", "..-0.1.x", "--0.1.x", "CON-0.1.x"}
    names = odd | {f"task-{n}.1.x" for n in range(20)}
    for name in names:
        await blobs.put(name, b"data")
    assert await _names(blobs, time.time() - 60) == set()
    assert await _names(blobs, time.time() + 60) == names
    assert {await blobs.get(name) for name in odd} == {b"data"}


async def test_a_failed_write_keeps_the_old_blob(tmp_path: Path) -> None:
    """A full disk leaves the old bytes, a clear error and no partial file."""
    blobs = LocalBlobs(tmp_path)
    await blobs.put("task-0.1.a", b"old")
    refused = pytest.raises(StoreError, match=r"cannot write .*task-0\.1\.a: File too large")
    with limited_files(4096), refused:
        await blobs.put("task-0.1.a", os.urandom(100_000))
    assert await blobs.get("task-0.1.a") == b"old"
    assert [path.name for path in _files(tmp_path)] == ["task-0.1.a"]


async def test_temporary_files_of_a_crash_are_removed(tmp_path: Path) -> None:
    """Listing old blobs removes temporary files that are old enough."""
    blobs = LocalBlobs(tmp_path)
    await blobs.put("task-0.1.a", b"x")
    [path] = _files(tmp_path)
    half = path.with_name("~1234")
    half.write_bytes(b"half")
    assert await _names(blobs, time.time() - 60) == set()
    assert half.exists(), "it may be written right now"
    assert await _names(blobs, time.time() + 60) == {"task-0.1.a"}
    assert _files(tmp_path) == [path]


async def test_blob_names_are_not_paths(tmp_path: Path) -> None:
    """No name leads out of the folder."""
    (tmp_path / "secret").write_text("x")
    blobs = LocalBlobs(tmp_path / "blobs")
    for name in ("../../secret", "/etc/passwd", "..", ""):
        with pytest.raises(Missing):
            await blobs.get(name)


@pytest.mark.usefixtures("s3")
async def test_errors_of_an_object_store_are_store_errors() -> None:
    """The message has the object store's reason and the URL, in one line."""
    with pytest.raises(StoreError, match=r"cannot write s3://nowhere/x/task-0\.1\.a: .*[^\n]$"):
        await open_blobs("s3://nowhere/x").put("task-0.1.a", b"x")


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra to install."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UsageError, match=r"pip install 'tugline\[s3\]'"):
        open_blobs("s3://bucket/prefix")


def test_an_unknown_url_scheme_is_refused() -> None:
    """The error names the URL and what would be right."""
    with pytest.raises(UsageError, match=r"'s4://bucket', must be a path or s3://"):
        open_blobs("s4://bucket")
