"""Output of agents as the nodes send it: bounded in size, followed without polling.

A log is stored in pieces, files named by lease and start offset. The first piece and the newest
ones stay; those between are dropped when a log reaches its limit, and a reader of the gap sees how
much is missing. Offsets count the bytes of the whole log, all leases of the session concatenated,
and do not change when a piece is dropped.

Logs may be lost in a power cut: only a length is acknowledged, and a node continues from there.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from tugline import log
from tugline.errors import Missing, StoreError
from tugline.server.store.database import Hub

_PIECES = 8
_SWEEP_S = 600.0
_FOLLOW_S = 10.0
"""A log counts as followed this long after it was read."""
_log = log.get("logs")


class LogPart(NamedTuple):
    """Some of a log."""

    data: bytes
    offset: int
    """Of the byte after `data`, where the next part starts."""
    ended: bool
    """Whether the log is complete."""


class _Piece(NamedTuple):
    source: Path | bytes
    """Literal bytes stand between two leases."""
    lease: int
    start: int
    """Start offset in the log of the session."""
    size: int

    @property
    def end(self) -> int:
        """Start of the next piece, unless it was dropped."""
        return self.start + self.size


class Logs:
    """Logs under `folder`, up to `limit` bytes for each lease of a session.

    A sweep deletes those older than `keep_s`, and the oldest ones while all together have more
    than `total` bytes.
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

    async def run(self) -> None:
        """Sweep, again and again, until it is cancelled."""
        while True:
            try:
                if deleted := await self.sweep():
                    _log.info("old logs deleted", sessions=deleted)
            except OSError as error:
                _log.warning("old logs cannot be deleted", error=str(error))
            await asyncio.sleep(_SWEEP_S)

    async def append(self, session: str, epoch: int, offset: int, chunk: bytes) -> int:
        """Append a chunk that starts at `offset` of this lease's log; returns its length.

        Bytes that are stored already are skipped, and a chunk beyond the end is not stored: a
        caller whose offset is not the length continues from the length.
        """
        async with self._lock:
            with _explain(session):
                length = await asyncio.to_thread(self._append, session, epoch, offset, chunk)
        self._hub.notify([session])
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

        Waits up to `wait_s` for new bytes, unless the session has `ended`.
        """
        until = asyncio.get_running_loop().time() + wait_s
        if not ended:
            self._followed[session] = time.monotonic() + wait_s + _FOLLOW_S
        with self._hub.subscribe(session) as subscription:
            part = await self._look(session, offset, limit, ended=ended)
            if not part.data and not ended and await subscription.wait(until):
                part = await self._look(session, part.offset, limit, ended=False)
        return part

    def notify(self, session: str) -> None:
        """Wake followers of this log: its session has ended."""
        self._hub.notify([session])

    def followed(self) -> tuple[str, ...]:
        """Sessions whose log is being read."""
        now = time.monotonic()
        self._followed = {name: until for name, until in self._followed.items() if until > now}
        return tuple(self._followed)

    async def sweep(self) -> int:
        """Delete what is too old or too much; returns the number of deleted logs."""
        return await asyncio.to_thread(self._sweep, time.time() - self._keep_s)

    async def _look(self, session: str, offset: int, limit: int, *, ended: bool) -> LogPart:
        async with self._lock:
            with _explain(session):
                data, at, more = await asyncio.to_thread(self._read, session, offset, limit)
        return LogPart(data, at, ended and not more)

    # ------------------------------------------------------------------ in a thread
    def _folder_of(self, session: str) -> Path:
        if Path(session).name != session:
            raise Missing(f"no log of session {session!r}")
        return self._folder / sha256(session.encode()).hexdigest()[:2] / session

    def _append(self, session: str, epoch: int, offset: int, chunk: bytes) -> int:
        folder = self._folder_of(session)
        names = [(path, path.stat().st_size) for path in sorted(folder.glob(f"{epoch:08}-*"))]
        length = _start_of(names[-1][0]) + names[-1][1] if names else 0
        if offset > length:
            return length
        rest = memoryview(chunk)[length - offset :]
        piece_size = max(self._limit // _PIECES, 1)
        while rest:
            if not names or names[-1][1] >= piece_size:
                self._folder.mkdir(0o700, parents=True, exist_ok=True)
                folder.mkdir(parents=True, exist_ok=True)
                names.append((folder / f"{epoch:08}-{length:014}", 0))
            path, size = names.pop()
            taken = rest[: piece_size - size]
            with path.open("ab") as file:
                file.write(taken)
            names.append((path, size + len(taken)))
            rest, length = rest[len(taken) :], length + len(taken)
            if len(names) > _PIECES:
                names.pop(1)[0].unlink()
        return length

    def _read(self, session: str, offset: int, limit: int) -> tuple[bytes, int, bool]:
        """The bytes, the next offset, and whether there is more."""
        pieces = _list_pieces(self._folder_of(session))
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
            data = _read_piece(piece.source, at - piece.start, left)
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
        deleted = 0
        for newest, size, folder in sorted(found):
            if newest >= before and total <= self._total:
                break
            shutil.rmtree(folder, ignore_errors=True)
            total -= size
            deleted += 1
        return deleted


def _start_of(path: Path) -> int:
    """Start offset of a piece in the log of its lease."""
    return int(path.name.partition("-")[2])


def _list_pieces(folder: Path) -> list[_Piece]:
    """All pieces in order; a line separates the logs of two leases."""
    pieces: list[_Piece] = []
    base = 0
    for path in sorted(folder.glob("*-*")):
        lease = int(path.name.partition("-")[0])
        if pieces and pieces[-1].lease != lease:
            line = b"\n[lease %d]\n" % lease
            pieces.append(_Piece(line, lease, pieces[-1].end, len(line)))
            base = pieces[-1].end
        pieces.append(_Piece(path, lease, base + _start_of(path), path.stat().st_size))
    return pieces


def _read_piece(source: Path | bytes, offset: int, limit: int) -> bytes:
    if isinstance(source, bytes):
        return source[offset : offset + limit]
    with source.open("rb") as file:
        file.seek(offset)
        return file.read(limit)


@contextlib.contextmanager
def _explain(session: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"log of {session}: {error.strerror}") from error
