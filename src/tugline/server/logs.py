"""Logs of sessions: agent output sent by nodes, bounded in size, followed without polling.

Each lease of a session has a file of limited size; a sandbox limits the output of an agent before
that. The log of a session is the files of its leases, separated by a line with the epoch. Offsets
count its bytes.

Logs may lose data in a power cut: the server acknowledges a length, from which the node continues.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from tugline import log
from tugline.errors import StoreError
from tugline.server.blobs import spread
from tugline.server.store.database import Hub

_SWEEP_S = 600.0
_FOLLOW_S = 10.0
"""Seconds after a read during which a log counts as followed."""
_log = log.get("logs")
T = TypeVar("T")


class LogPart(NamedTuple):
    """Part of a log."""

    data: bytes
    offset: int
    """Offset of the next part, after `data`."""
    ended: bool
    """Whether the log is complete after this part."""


@dataclass(eq=False)
class Logs:
    """Logs in `folder`, up to `limit` bytes per lease, read in parts of up to `part` bytes.

    A sweep deletes logs older than `keep_s`, and the oldest logs while their total size exceeds
    `total` bytes.
    """

    folder: Path
    limit: int = 64 << 20
    keep_s: float = 14 * 86400.0
    total: int = 4 << 30
    part: int = 1 << 16
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    hub: Hub = field(default_factory=Hub)
    """Hub with sessions as topics, notified of new output."""
    _followed: dict[str, float] = field(default_factory=dict)

    async def run(self) -> None:
        """Sweep periodically until cancelled."""
        while True:
            try:
                if deleted := await self.sweep():
                    _log.info("old logs deleted", sessions=deleted)
            except OSError as error:
                _log.warning("old logs cannot be deleted", error=str(error))
            await asyncio.sleep(_SWEEP_S)

    async def append(self, session: str, epoch: int, offset: int, chunk: bytes) -> int:
        """Append a chunk at `offset` of a lease's log; return the log's length.

        Bytes that are already stored are skipped. A chunk beyond the end is not stored: the caller
        continues from the returned length.
        """
        length = await self._run(self._append, session, epoch, offset, chunk)
        self.hub.notify([session])
        return length

    async def read(
        self, session: str, *, offset: int = 0, wait_s: float = 0.0, ended: bool = False
    ) -> LogPart:
        """Read up to `part` bytes from `offset`; a negative offset counts from the end.

        Waits up to `wait_s` for new bytes, unless the session has `ended`.
        """
        until = asyncio.get_running_loop().time() + wait_s
        if not ended:
            self._followed[session] = time.monotonic() + wait_s + _FOLLOW_S
        with self.hub.subscribe(session) as subscription:
            part = await self._run(self._read, session, offset, ended)
            if not part.data and not ended and await subscription.wait(until):
                part = await self._run(self._read, session, part.offset, False)
        return part

    def followed(self) -> tuple[str, ...]:
        """Return the sessions whose log is being read."""
        now = time.monotonic()
        self._followed = {name: until for name, until in self._followed.items() if until > now}
        return tuple(self._followed)

    async def sweep(self) -> int:
        """Delete logs beyond the limits of age and total size; return their number."""
        return await asyncio.to_thread(self._sweep, time.time() - self.keep_s)

    async def _run(self, work: Callable[..., T], session: str, *args: int | bytes) -> T:
        """Run `work` in a thread, exclusively. Raises `StoreError`."""
        async with self._lock:
            try:
                return await asyncio.to_thread(work, session, *args)
            except OSError as error:
                raise StoreError(f"log of {session}: {error.strerror}") from error

    # ------------------------------------------------------------------ in a thread
    def _append(self, session: str, epoch: int, offset: int, chunk: bytes) -> int:
        path = spread(self.folder, session) / f"{epoch:08}.log"
        length = path.stat().st_size if path.exists() else 0
        new = chunk[length - offset :][: self.limit - length] if offset <= length else b""
        if new:
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(new)
        return length + len(new)

    def _read(self, session: str, offset: int, ended: bool) -> LogPart:  # noqa: FBT001 - by position, through a thread
        parts: list[tuple[bytes | Path, int]] = []
        for path in sorted(spread(self.folder, session).glob("*.log")):
            if parts:
                line = b"\n[lease %d]\n" % int(path.stem)
                parts.append((line, len(line)))
            parts.append((path, path.stat().st_size))
        length = sum(size for _, size in parts)
        start = max(length + offset, 0) if offset < 0 else min(offset, length)
        data = b""
        at = 0
        for source, size in parts:
            skip = start + len(data) - at
            left = self.part - len(data)
            if skip < size and left > 0:
                data += _read_part(source, skip, left)
            at += size
        return LogPart(data, start + len(data), ended and start + len(data) == length)

    def _sweep(self, before: float) -> int:
        logs = []
        for folder in self.folder.glob("??/*"):
            with contextlib.suppress(FileNotFoundError):
                stats = [path.stat() for path in folder.iterdir()]
                created = folder.stat().st_mtime
                newest = max((stat.st_mtime for stat in stats), default=created)
                logs.append((newest, sum(stat.st_size for stat in stats), folder))
        total = sum(size for _, size, _ in logs)
        deleted = 0
        for newest, size, folder in sorted(logs):
            if newest >= before and total <= self.total:
                break
            shutil.rmtree(folder, ignore_errors=True)
            total -= size
            deleted += 1
        return deleted


def _read_part(source: bytes | Path, offset: int, limit: int) -> bytes:
    if isinstance(source, bytes):
        return source[offset : offset + limit]
    with source.open("rb") as file:
        file.seek(offset)
        return file.read(limit)
