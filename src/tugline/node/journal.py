"""Results that are not committed yet, one file each, safe from the death of this process (I3).

A result is written here before the server is told, and removed when the server has it. What a
killed node left is offered again by the next one in the same folder. Names carry session and
epoch, so that a result whose lease was lost meanwhile is fenced as ever.
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


class Entry(NamedTuple):
    """A result on its way."""

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

    def left(self) -> list[tuple[str, int]]:
        """Sessions and epochs of the results that an earlier process left."""
        names = [_NAME.fullmatch(path.name) for path in sorted(self._folder.glob("*.result"))]
        return [(name["session"], int(name["epoch"])) for name in names if name]

    def holds(self, name: str) -> bool:
        """Whether the result of ``<session>.<epoch>`` is here."""
        return (self._folder / f"{name}.result").exists()

    async def keep(self, session: str, epoch: int, data: bytes) -> Entry:
        """Write a result down. When the disk refuses it is in memory alone, which is logged."""
        entry = Entry(session, epoch, data)
        try:
            await asyncio.to_thread(_write, self._path(entry), data)
        except OSError as error:
            _log.error("result not journaled", session=session, error=str(error))
        return entry

    async def read(self, session: str, epoch: int) -> Entry:
        """A result that was kept. Raises `OSError`."""
        path = self._path(Entry(session, epoch, b""))
        return Entry(session, epoch, await asyncio.to_thread(path.read_bytes))

    def done(self, entry: Entry) -> None:
        """The server has it, or somebody else has the session. Blocks."""
        self._path(entry).unlink(missing_ok=True)

    def refused(self, entry: Entry) -> None:
        """Set aside what the server will never take, for somebody to look at. Blocks."""
        path = self._path(entry)
        with contextlib.suppress(OSError):
            path.replace(path.with_suffix(".refused"))

    def _path(self, entry: Entry) -> Path:
        return self._folder / f"{entry.name}.result"


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fdatasync(file.fileno())
    part.replace(path)
