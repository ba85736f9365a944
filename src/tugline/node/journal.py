"""Results that are not committed yet, one file each, safe from the death of this process (I3).

A result is written before it is offered to the server, and removed when the server has it. What a
killed node left is offered by the next one in the same folder. Names contain session and epoch, so
a result whose lease was lost meanwhile is fenced as usual.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from tugline import log

_NAME = re.compile(r"(?P<session>.+)\.(?P<epoch>\d+)\.result")
_log = log.get("node.journal")


class PendingResult(NamedTuple):
    """A result on its way to the server."""

    session: str
    epoch: int
    data: bytes

    @property
    def name(self) -> str:
        """``<session>.<epoch>``."""
        return f"{self.session}.{self.epoch}"


class Journal:
    """A folder of results."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def list_pending(self) -> list[tuple[str, int]]:
        """Sessions and epochs of the results in the folder."""
        names = [_NAME.fullmatch(path.name) for path in sorted(self._folder.glob("*.result"))]
        return [(name["session"], int(name["epoch"])) for name in names if name]

    def contains(self, name: str) -> bool:
        """Whether the result of ``<session>.<epoch>`` is in the folder."""
        return (self._folder / f"{name}.result").exists()

    async def write(self, session: str, epoch: int, data: bytes) -> PendingResult:
        """Write a result. If the disk refuses, it is in memory only, which is logged."""
        result = PendingResult(session, epoch, data)
        try:
            await asyncio.to_thread(_write, self._path(result), data)
        except OSError as error:
            _log.error("result not journaled", session=session, error=str(error))
        return result

    async def read(self, session: str, epoch: int) -> PendingResult:
        """A result that was written. Raises `OSError`."""
        path = self._path(PendingResult(session, epoch, b""))
        return PendingResult(session, epoch, await asyncio.to_thread(path.read_bytes))

    def remove(self, result: PendingResult) -> None:
        """Remove a result that is committed or fenced. Blocks."""
        self._path(result).unlink(missing_ok=True)

    def set_aside(self, result: PendingResult) -> None:
        """Rename a result that the server refused, for inspection. Blocks."""
        path = self._path(result)
        with contextlib.suppress(OSError):
            path.replace(path.with_suffix(".refused"))

    def _path(self, result: PendingResult) -> Path:
        return self._folder / f"{result.name}.result"


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fdatasync(file.fileno())
    part.replace(path)
