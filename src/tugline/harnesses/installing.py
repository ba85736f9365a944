"""Put a program into a folder of its own, once, however many processes ask for it.

Everything lies in the toolbox, ``<cache>/toolbox``, which sandboxes mount read-only at the same
path. A program is made beside its place, renamed into it, finished there and sealed: a folder with
a seal is complete, one without is made anew, and an installation that failed leaves nothing behind
(one that was killed is cleared away by the next).
The seal holds a digest of every file, so that ``tugline harness list`` can tell a damaged one; only
what Node compiled is left out of it, which programs in no sandbox add to.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from tugline.errors import ConfigError, DiskFull, HarnessError
from tugline.harnesses.base import one_at_a_time
from tugline.sandbox.cache import cache_folder

_LIMIT_S = 900.0
_SEAL = "tugline.json"
COMPILED = "compile-cache"
"""Folder of a program where Node keeps what it compiled."""

Step = Callable[[Path], Awaitable[None]]


class InstallManifest(msgspec.Struct, frozen=True):
    """What a folder held when it was complete."""

    files: int
    bytes: int
    digest: str
    """SHA-256, in hex, over every path with its mode and content."""


def toolbox() -> Path:
    """Where everything is that sandboxes mount."""
    return cache_folder() / "toolbox"


def folder_of(harness: str, version: str) -> Path:
    """Where this version is installed. Raises `ConfigError` unless the version is exact."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        msg = f"harness {harness!r}: version is {version!r}, must be exact, such as '1.2.3'"
        raise ConfigError(msg)
    return toolbox() / f"{harness}-{version}"


def sealed(folder: Path) -> InstallManifest | None:
    """What `folder` held when it was complete; None if it is not installed."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((folder / _SEAL).read_bytes(), type=InstallManifest)
    return None


async def once(folder: Path, fill: Step, finish: Step | None = None) -> None:
    """Have `fill` make `folder` unless it is there; it gets an empty folder to work in.

    `finish` is for what must be done at the final place; the folder is sealed after it. Raises
    `DiskFull` where there is no room.
    """
    if sealed(folder):
        return
    async with one_at_a_time(folder):
        if sealed(folder):
            return
        for left in (folder, *folder.parent.glob(f"{folder.name}.*/")):
            await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)
        with (
            _full_disk_named(folder),
            tempfile.TemporaryDirectory(
                dir=folder.parent, prefix=f"{folder.name}.", ignore_cleanup_errors=True
            ) as parent,
        ):
            fresh = Path(parent) / "new"
            fresh.mkdir()
            await fill(fresh)
            fresh.rename(folder)
        try:
            if finish is not None:
                await finish(folder)
            seal = await asyncio.to_thread(measure, folder)
            with _full_disk_named(folder):
                (folder / _SEAL).write_bytes(msgspec.json.encode(seal))
        finally:
            if not sealed(folder):
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _full_disk_named(folder: Path) -> Iterator[None]:
    """What a copy or an installer says of a full disk, as `DiskFull`, which names the toolbox."""
    try:
        yield
    except (OSError, HarnessError) as error:
        if not re.search("no space left|disk quota exceeded", str(error), re.IGNORECASE):
            raise
        msg = (
            f"cannot install {folder.name}: no room is left in {folder.parent}; "
            "make some, or set TUGLINE_CACHE elsewhere"
        )
        raise DiskFull(msg) from error


def measure(folder: Path) -> InstallManifest:
    """What `folder` holds now. Blocks for as long as it takes to read all of it."""
    digest, files, sizes = hashlib.sha256(), 0, {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        left_out = path == folder / _SEAL or path.is_relative_to(folder / COMPILED)
        if left_out or stat.S_ISDIR(info.st_mode):
            continue
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name}\0{info.st_mode:o}\0".encode(errors="surrogateescape"))
        if stat.S_ISLNK(info.st_mode):
            digest.update(os.fsencode(path.readlink()))
        else:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        files += 1
        sizes[info.st_ino] = info.st_size  # hard links are one file
    return InstallManifest(files, sum(sizes.values()), digest.hexdigest())


async def succeed(what: str, *argv: str, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """Output of an installer. Raises `HarnessError` with its last words and `what` it was for."""
    code, text = await output(*argv, cwd=cwd, env=env)
    if code != 0:
        last = " | ".join(text.strip().splitlines()[-6:])
        msg = f"{what} (exit {code}): {last}"
        raise HarnessError(msg)
    return text


async def output(*argv: str, cwd: Path, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Exit code and output of a program that is ended with the task that waits for it."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(_LIMIT_S):
            text, _ = await process.communicate()
    except TimeoutError as error:
        msg = f"{argv[0]} was not done after {_LIMIT_S:.0f} s; is the package registry reachable?"
        raise HarnessError(msg) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, text.decode(errors="replace")
