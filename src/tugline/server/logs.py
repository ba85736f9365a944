"""What agents print, as it comes from the nodes: bounded, followed without polling, forgotten.

A log lies in pieces, files named by lease and by the offset at which they begin. The first piece
and the newest ones stay; those between are dropped when a log has grown to its limit, and whoever
reads over the gap is told how much is missing. Offsets count the bytes of the whole log, all
leases of the session one below the other, and stay what they are when a piece is dropped.

Logs may be lost in a power cut: nothing is acknowledged but a length, and a node goes on from the
length that it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, Self

from tugline import log
from tugline.errors import Missing, StoreError
from tugline.server.hub import Hub

PIECES = 8
SWEEP_S = 600.0
FOLLOW_S = 10.0
"""Who has read a log counts as following it for so long after."""
_log = log.get("logs")


class LogPart(NamedTuple):
    """Some of a log."""

    data: bytes
    offset: int
    """Of the byte after `data`: where to go on."""
    ended: bool
    """Nothing will ever follow."""


class _Piece(NamedTuple):
    source: Path | bytes
    """Bytes of ours stand between two leases."""
    lease: int
    start: int
    """Where it begins in the log of the session."""
    size: int

    @property
    def end(self) -> int:
        """Where the next one begins, unless it was dropped."""
        return self.start + self.size


class Logs:
    """Logs under `folder`, up to `limit` bytes for each lease of a session.

    An async context manager: while it is open, logs older than `keep_s` are forgotten, and the
    oldest of them while all together have more than `total` bytes.
    """

    def __init__(
        self,
        folder: Path,
        limit: int = 1 << 20,
        *,
        keep_s: float = 14 * 86400.0,
        total: int = 4 << 30,
    ) -> None:
        self._folder, self._limit = folder, limit
        self._keep_s, self._total = keep_s, total
        self._lock = asyncio.Lock()
        self._hub = Hub()
        self._followed: dict[str, float] = {}
        self._sweeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._sweeper = asyncio.create_task(self._sweep_often())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])

    async def append(self, session: str, epoch: int, offset: int, chunk: bytes) -> int:
        """Add what comes at `offset` of this lease's log; returns how long that is by now.

        What is there already is not added again, and nothing is added beyond the end: a caller
        whose offset is another than the length goes on from the length.
        """
        async with self._lock:
            with _explained(session):
                length = await asyncio.to_thread(self._append, session, epoch, offset, chunk)
        self._hub.wake([session])
        return length

    async def read(
        self,
        session: str,
        *,
        offset: int = 0,
        limit: int = 65536,
        wait_s: float = 0.0,
        ended: bool = False,
    ) -> LogPart:
        """Up to `limit` bytes from `offset`, which counts from the end if it is negative.

        Waits up to `wait_s` for something to come, unless the session has `ended`.
        """
        until = asyncio.get_running_loop().time() + wait_s
        if not ended:
            self._followed[session] = time.monotonic() + wait_s + FOLLOW_S
        with self._hub.listen(session) as bell:
            part = await self._look(session, offset, limit, ended=ended)
            if not part.data and not ended and await bell.heard(until):
                part = await self._look(session, part.offset, limit, ended=False)
        return part

    def wake(self, session: str) -> None:
        """Let those who follow this log look again: its session has ended."""
        self._hub.wake([session])

    def followed(self) -> tuple[str, ...]:
        """Sessions whose log somebody reads right now."""
        now = time.monotonic()
        self._followed = {name: until for name, until in self._followed.items() if until > now}
        return tuple(self._followed)

    async def sweep(self) -> int:
        """Forget what is too old or too much; returns how many sessions' logs that were."""
        return await asyncio.to_thread(self._sweep, time.time() - self._keep_s)

    async def _look(self, session: str, offset: int, limit: int, *, ended: bool) -> LogPart:
        async with self._lock:
            with _explained(session):
                data, at, more = await asyncio.to_thread(self._read, session, offset, limit)
        return LogPart(data, at, ended and not more)

    # ------------------------------------------------------------------ in a thread
    def _of(self, session: str) -> Path:
        if Path(session).name != session:
            msg = f"no log of session {session!r}"
            raise Missing(msg)
        return self._folder / sha256(session.encode()).hexdigest()[:2] / session

    def _append(self, session: str, epoch: int, offset: int, chunk: bytes) -> int:
        folder = self._of(session)
        names = [(path, path.stat().st_size) for path in _files(folder, f"{epoch:08}-*")]
        length = _own(names[-1][0]) + names[-1][1] if names else 0
        if offset > length:
            return length
        rest = memoryview(chunk)[length - offset :]
        room = max(self._limit // PIECES, 1)
        while rest:
            if not names or names[-1][1] >= room:
                folder.mkdir(parents=True, exist_ok=True)
                names.append((folder / f"{epoch:08}-{length:014}", 0))
            path, size = names.pop()
            taken = rest[: room - size]
            with path.open("ab") as file:
                file.write(taken)
            names.append((path, size + len(taken)))
            rest, length = rest[len(taken) :], length + len(taken)
            if len(names) > PIECES:
                names.pop(1)[0].unlink()
        return length

    def _read(self, session: str, offset: int, limit: int) -> tuple[bytes, int, bool]:
        """The bytes, where to go on, and whether there is more by now."""
        pieces = _pieces(self._of(session))
        length = pieces[-1].end if pieces else 0
        at = max(length + offset, 0) if offset < 0 else min(offset, length)
        parts: list[bytes] = []
        left = limit
        for piece in pieces:
            if piece.end <= at or left <= 0:
                continue
            if at < piece.start:
                parts.append(b"\n[%d bytes left out]\n" % (piece.start - at))
                at = piece.start
            data = _bytes(piece.source, at - piece.start, left)
            parts.append(data)
            at, left = at + len(data), left - len(data)
        return b"".join(parts), at, at < length

    def _sweep(self, before: float) -> int:
        found = []
        for folder in self._folder.glob("??/*"):
            with contextlib.suppress(FileNotFoundError):
                stats = [path.stat() for path in folder.iterdir()]
                made = folder.stat().st_mtime
                newest = max((stat.st_mtime for stat in stats), default=made)
                found.append((newest, sum(stat.st_size for stat in stats), folder))
        total = sum(size for _, size, _ in found)
        gone = 0
        for newest, size, folder in sorted(found):
            if newest >= before and total <= self._total:
                break
            shutil.rmtree(folder, ignore_errors=True)
            total -= size
            gone += 1
        return gone

    async def _sweep_often(self) -> None:
        while True:
            try:
                if gone := await self.sweep():
                    _log.info("old logs forgotten", sessions=gone)
            except OSError as error:
                _log.warning("old logs cannot be forgotten", error=str(error))
            await asyncio.sleep(SWEEP_S)


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))


def _own(path: Path) -> int:
    """Where a piece begins in the log of its lease."""
    return int(path.name.partition("-")[2])


def _pieces(folder: Path) -> list[_Piece]:
    """In order. The log of a lease begins under a line where that of the one before has ended."""
    pieces: list[_Piece] = []
    base = 0
    for path in _files(folder, "*-*"):
        lease = int(path.name.partition("-")[0])
        if pieces and pieces[-1].lease != lease:
            line = b"\n[lease %d]\n" % lease
            pieces.append(_Piece(line, lease, pieces[-1].end, len(line)))
            base = pieces[-1].end
        pieces.append(_Piece(path, lease, base + _own(path), path.stat().st_size))
    return pieces


def _bytes(source: Path | bytes, offset: int, limit: int) -> bytes:
    if isinstance(source, bytes):
        return source[offset : offset + limit]
    with source.open("rb") as file:
        file.seek(offset)
        return file.read(limit)


@contextlib.contextmanager
def _explained(session: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        msg = f"log of {session}: {error.strerror}"
        raise StoreError(msg) from error
