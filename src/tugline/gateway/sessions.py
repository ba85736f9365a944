"""Live sessions and the secrets that authorize their calls (I6).

A secret is returned once, stored only as a digest, authorizes the model calls of one session, and
is invalid once the session closes. A request's secret is looked up by its digest, so the time of a
lookup reveals nothing about secrets.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Iterator, Sequence

from tugline import errors, log
from tugline.gateway.session import LiveSession
from tugline.recording.file import Writer
from tugline.recording.records import RecordedEventKind

_log = log.get("gateway.sessions")


class Sessions:
    """Live sessions by id and by the digest of their secret."""

    def __init__(self) -> None:
        self._live: dict[str, LiveSession] = {}
        self._by_secret: dict[bytes, LiveSession] = {}

    def __iter__(self) -> Iterator[LiveSession]:
        return iter(list(self._live.values()))

    def open(self, live: LiveSession, secret: str = "") -> str:
        """Accept a session's calls; return its secret, a new one unless given."""
        if live.id in self._live:
            raise errors.UsageError(f"session {live.id!r} is already open")
        secret = secret or f"tl-{secrets.token_urlsafe(24)}"
        live.secret_digest = _digest(secret)
        self._live[live.id] = self._by_secret[live.secret_digest] = live
        return secret

    async def close(self, live: LiveSession) -> None:
        """End a session: invalidate its secret and abort its running calls."""
        if self._live.get(live.id) is live:
            del self._live[live.id]
        self._by_secret.pop(live.secret_digest, None)
        await live.close()

    def find(self, secret: str | None, session_id: str | None) -> LiveSession:
        """Return the session that `secret` authorizes. Raises `Unauthorized`."""
        live = self._by_secret.get(_digest(secret or ""))
        if live is None or (session_id is not None and session_id != live.id):
            msg = "the key belongs to no open session; use the key that this session was given"
            raise errors.Unauthorized(msg)
        return live

    def get(self, session_id: str) -> LiveSession | None:
        """Return a live session by its id."""
        return self._live.get(session_id)

    def credit(self, session_id: str, seconds: float) -> None:
        """Credit a session with the seconds for which an engine hung."""
        if live := self._live.get(session_id):
            live.credit(seconds)

    def note(self, kind: RecordedEventKind, detail: str) -> None:
        """Record an event in every live session."""
        for live in self:
            live.transcript.note(kind, detail)

    async def flush(self) -> None:
        """Flush written records to disk, so that they survive a power loss."""
        dirty = [live.transcript.writer for live in self if live.transcript.writer.dirty]
        if dirty:
            await asyncio.to_thread(_flush, dirty)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _flush(writers: Sequence[Writer]) -> None:
    for writer in writers:
        try:
            writer.flush()
        except errors.CaptureError as error:  # the session's next call reports it to its harness
            _log.error("flush failed", path=str(writer.path), error=str(error))
