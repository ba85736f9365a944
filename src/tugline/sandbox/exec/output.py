"""What programs write, from a pipe into a log that has a bound.

A program must neither fill the disk nor be held up by us: what comes after the bound is read and
forgotten, at a pace that leaves the processor to others. All reading and writing is done in
threads; the event loop only hears that there is something.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import threading
from pathlib import Path

from tugline.errors import DiskFull

MOST_MB = 64
"""Size of a log, unless a runtime's option says otherwise."""

_CHUNK = 1 << 16
_CHUNKS = 16
_WIDE = 1 << 20
_PAUSE_S = 0.005


class Output:
    """Appends what can be read from a descriptor to `log`, up to `most` bytes."""

    def __init__(self, log: Path, most: int) -> None:
        self._log = log
        self._most = most
        self._left = most
        self._error: OSError | None = None
        self._source = self._file = -1
        self._lock = threading.Lock()
        self._task: asyncio.Task[None] | None = None

    def open(self, source: int) -> None:
        """Make the log of what comes from `source`, which does not block and is closed by this."""
        self._source = source
        self._file = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def follow(self) -> None:
        """Begin to copy, in a task of its own."""
        self._task = asyncio.create_task(self._follow())

    async def finish(self) -> None:
        """Copy what is left of a program that has ended. Raises `DiskFull` if that failed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await asyncio.to_thread(self._close)
        if self._error is not None and self._error.errno in {errno.ENOSPC, errno.EDQUOT}:
            msg = f"cannot write {self._log}: {self._error.strerror}"
            raise DiskFull(msg)

    async def _follow(self) -> None:
        while True:
            await readable(self._source)
            if not await asyncio.to_thread(self._copy):
                return
            if self._left < 0:
                await asyncio.sleep(_PAUSE_S)

    def _copy(self) -> bool:
        """Some of it; whether more may come."""
        with self._lock, contextlib.suppress(BlockingIOError):
            for _ in range(_CHUNKS):
                data = os.read(self._source, _CHUNK)
                if not data:
                    return False
                self._write(data)
        return True

    def _write(self, data: bytes) -> None:
        if self._left < 0:
            return
        kept, self._left = data[: self._left], self._left - len(data)
        if self._left < 0:
            kept += f"\n[what was written after {self._most} bytes is left out]\n".encode()
            with contextlib.suppress(OSError):  # what one pause lets through; a user has few such
                fcntl.fcntl(self._source, fcntl.F_SETPIPE_SZ, _WIDE)
        try:
            os.write(self._file, kept)
        except OSError as error:
            self._error, self._left = error, -1

    def _close(self) -> None:
        """All writers are dead, so what is left is at most what the pipe holds."""
        if self._source >= 0:
            self._copy()
        with self._lock:
            for descriptor in (self._source, self._file):
                if descriptor >= 0:
                    os.close(descriptor)


async def readable(descriptor: int) -> None:
    """Wait until something can be read, or the other end is closed."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
