"""Put a program into a folder of its own, once, however many processes ask for it.

A program is installed beside its place and renamed into it when it is whole, under a lock: a
folder that exists is complete, and an installation that failed leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from tugline.errors import ConfigError, HarnessError
from tugline.harnesses.base import cache_folder, one_at_a_time

_LIMIT_S = 900.0


def folder_of(harness: str, version: str) -> Path:
    """Where this version is installed. Raises `ConfigError` unless the version is exact."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        msg = f"harness {harness!r}: version is {version!r}, must be exact, such as '1.2.3'"
        raise ConfigError(msg)
    return cache_folder() / "harnesses" / f"{harness}-{version}"


async def once(folder: Path, fill: Callable[[Path], Awaitable[None]]) -> None:
    """Have `fill` make `folder` unless it is there; `fill` gets an empty folder to work in."""
    if _there(folder):
        return
    async with one_at_a_time(folder):
        if _there(folder):
            return
        with tempfile.TemporaryDirectory(
            dir=folder.parent, prefix=f"{folder.name}.", ignore_cleanup_errors=True
        ) as parent:
            fresh = Path(parent) / "new"
            fresh.mkdir()
            await fill(fresh)
            fresh.rename(folder)


def _there(folder: Path) -> bool:
    return folder.is_dir()


async def succeed(what: str, *argv: str, cwd: Path, env: Mapping[str, str] | None = None) -> None:
    """Run an installer. Raises `HarnessError` with its last words; `what` says what it was for."""
    code, text = await output(*argv, cwd=cwd, env=env)
    if code != 0:
        last = " | ".join(text.strip().splitlines()[-6:])
        msg = f"{what} (exit {code}): {last}"
        raise HarnessError(msg)


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
