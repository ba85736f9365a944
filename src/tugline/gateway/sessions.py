"""Live sessions and the secrets that open them (I6).

A secret is handed out once, kept only as a digest, compared in constant time, opens the model
calls of one session and nothing else, and is dead when the session closes. Budgets are checked
before a call is planned, so a refused call costs nothing and samples nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from tugline import log
from tugline.chat.dialects.base import ParseCache
from tugline.errors import (
    BudgetExhausted,
    CaptureError,
    EngineError,
    RequestError,
    TuglineError,
    Unauthorized,
    UsageError,
)
from tugline.gateway.conversation import Conversation
from tugline.recording.file import Writer
from tugline.recording.records import Event, EventKind
from tugline.types import Call, Limits, Policy, Sampling

_log = log.get("gateway.sessions")


class InFlight(Protocol):
    """A model call that is being answered."""

    def stop(self) -> None:
        """Stop it at once."""
        ...

    async def settled(self) -> None:
        """Wait until it is recorded."""
        ...


@dataclass(frozen=True, slots=True)
class SessionPolicy:
    """Under what a session's calls are answered."""

    contract: Sampling
    policy: Policy
    limits: Limits
    spent_status: int = 400
    """HTTP status of a spent budget: the one on which this harness stops cleanly."""


@dataclass(slots=True)
class LiveSession:
    """What the gateway knows of one session while it runs."""

    id: str
    digest: bytes
    """SHA-256 of the secret."""
    terms: SessionPolicy
    conversation: Conversation
    writer: Writer
    memory: ParseCache = field(default_factory=ParseCache)
    opened: float = field(default_factory=time.monotonic)
    turns: int = 0
    sampled: int = 0
    saw_tools: bool = False
    """Whether any request declared tools, or is known to."""
    running: set[InFlight] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Calls of parallel agents are written one after the other."""
    about: dict[str, Any] = field(default_factory=log.bound)
    """Ids that its log events carry: those of whoever opened it."""
    noted: list[Event] = field(default_factory=list)
    """Events that the next call takes along."""

    def admit(self, count: int = 1) -> range:
        """Numbers of the next calls. Raises `BudgetExhausted` when they may not be made."""
        limits, spent = self.terms.limits, ""
        if not self.turns:  # a warm session may have waited for its turn until now
            self.opened = time.monotonic()
        if limits.max_turns is not None and self.turns + count > limits.max_turns:
            spent = f"{limits.max_turns} model calls"
        elif self.tokens_left is not None and self.tokens_left < 1:
            spent = f"{limits.max_sampled_tokens} sampled tokens"
        elif limits.calls_s is not None and time.monotonic() - self.opened > limits.calls_s:
            spent = f"{limits.calls_s:g} seconds"
        if spent:
            msg = f"the session has used its {spent}; this is the end of its budget"
            raise BudgetExhausted(msg, status=self.terms.spent_status)
        first, self.turns = self.turns, self.turns + count
        return range(first, self.turns)

    @property
    def tokens_left(self) -> int | None:
        """What may still be sampled; None without a limit."""
        limit = self.terms.limits.max_sampled_tokens
        return None if limit is None else limit - self.sampled

    async def append(self, call: Call) -> None:
        """Write a call down; flushed before this returns if the writer says so, even if cancelled.

        Without that it is a copy into the page cache, which is quicker than asking a thread.
        """
        self.sampled += len(call.sampled_ids) + call.unreported_tokens
        if not self.writer.sync:
            self.writer.append(call)
            return
        writing = asyncio.ensure_future(self._write(call))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait({writing})
            raise

    async def _write(self, call: Call) -> None:
        async with self.lock:
            await asyncio.to_thread(self._write_now, call)

    def _write_now(self, call: Call) -> None:
        self.write_noted()
        self.writer.append(call)

    def note(
        self, kind: EventKind, detail: str = "", *, call: int | None = None, data: bytes = b""
    ) -> None:
        """Write down what happened beside the calls; it never fails and waits for no disk.

        Where every record is flushed, it is written before the next call or at the end.
        """
        self.noted.append(Event(kind, time.time(), call, detail, data))
        if not self.writer.sync:
            self.write_noted()

    def refused(self, error: TuglineError, status: int) -> None:
        """Write down that a request was answered by an error; nothing of what was asked."""
        if isinstance(error, RequestError | EngineError):
            about = error.param if isinstance(error, RequestError) else None
            detail = f"{status} {type(error).__name__} {about or ''}"
            self.note(EventKind.REFUSED, detail.rstrip())

    def write_noted(self) -> None:
        """Write what was noted, if the session is not over; may wait for a flush."""
        noted, self.noted = self.noted, []
        try:
            for event in () if self.writer.closed else noted:
                self.writer.note(event)
        except CaptureError as error:  # the session's next call says so to its harness
            _log.error("event not written", path=str(self.writer.path), error=str(error))


class Sessions:
    """Every live session, by id and by the digest of its secret."""

    def __init__(self) -> None:
        self._by_id: dict[str, LiveSession] = {}
        self._by_digest: dict[bytes, LiveSession] = {}

    def open(
        self,
        session_id: str,
        *,
        terms: SessionPolicy,
        conversation: Conversation,
        writer: Writer,
    ) -> tuple[LiveSession, str]:
        """Start a session; returns it with its secret, which is not kept."""
        if session_id in self._by_id:
            msg = f"session {session_id!r} is live already"
            raise UsageError(msg)
        secret = f"tl-{secrets.token_urlsafe(24)}"
        live = LiveSession(session_id, _digest(secret), terms, conversation, writer)
        self._by_id[session_id] = self._by_digest[live.digest] = live
        return live, secret

    async def close(self, live: LiveSession) -> None:
        """End a session: its secret opens nothing more, its open calls are aborted."""
        self._by_id.pop(live.id, None)
        self._by_digest.pop(live.digest, None)
        for exchange in list(live.running):
            exchange.stop()
            await exchange.settled()
        await asyncio.to_thread(live.write_noted)
        await asyncio.to_thread(live.writer.close)

    def note(self, kind: EventKind, detail: str) -> None:
        """Something that happened to every live session."""
        for live in self._by_id.values():
            live.note(kind, detail)

    async def flush(self) -> None:
        """Make what was written safe from a loss of power."""
        dirty = [live.writer for live in self._by_id.values() if live.writer.dirty]
        if dirty:
            await asyncio.to_thread(_flush, dirty)

    def find(self, secret: str | None, session_id: str | None) -> LiveSession:
        """The session that `secret` opens. Raises `Unauthorized`."""
        digest = _digest(secret or "")
        live = self._by_digest.get(digest)
        wrong = live is None or not hmac.compare_digest(live.digest, digest)
        if live is None or wrong or (session_id is not None and session_id != live.id):
            msg = "the key opens no live session; use the key that was given to this session"
            raise Unauthorized(msg)
        return live


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _flush(writers: list[Writer]) -> None:
    for writer in writers:
        try:
            writer.flush()
        except CaptureError as error:  # the session's next call says so to its harness
            _log.error("flush failed", path=str(writer.path), error=str(error))
