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
from dataclasses import dataclass, field
from typing import Protocol

from tugline.capture.segments import Writer
from tugline.errors import BudgetExhausted, Unauthorized, UsageError
from tugline.gateway.conversation import Conversation
from tugline.types import Call, Limits, Sampling


class InFlight(Protocol):
    """A model call that is being answered."""

    def leave(self) -> None:
        """Stop it."""
        ...

    async def settled(self) -> None:
        """Wait until it is recorded."""
        ...


@dataclass(slots=True)
class LiveSession:
    """What the gateway knows of one session while it runs."""

    id: str
    digest: bytes
    """SHA-256 of the secret."""
    contract: Sampling
    limits: Limits
    conversation: Conversation
    writer: Writer
    turns: int = 0
    sampled: int = 0
    running: set[InFlight] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Calls of parallel agents are written one after the other."""

    def admit(self) -> int:
        """Number of the next call. Raises `BudgetExhausted` when none may be made."""
        limit = self.limits.max_turns
        if limit is not None and self.turns >= limit:
            msg = f"the session has used its {limit} model calls"
            raise BudgetExhausted(msg)
        tokens = self.limits.max_sampled_tokens
        if tokens is not None and self.sampled >= tokens:
            msg = f"the session has used its {tokens} sampled tokens"
            raise BudgetExhausted(msg)
        number, self.turns = self.turns, self.turns + 1
        return number

    async def append(self, call: Call) -> None:
        """Put a call on disk, one at a time, and whole even if the caller is cancelled."""
        self.sampled += len(call.sampled_ids)
        writing = asyncio.ensure_future(self._write(call))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait({writing})
            raise

    async def _write(self, call: Call) -> None:
        async with self.lock:
            await asyncio.to_thread(self.writer.append, call)


class Sessions:
    """Every live session, by id and by the digest of its secret."""

    def __init__(self) -> None:
        self._by_id: dict[str, LiveSession] = {}
        self._by_digest: dict[bytes, LiveSession] = {}

    def open(
        self,
        session_id: str,
        *,
        contract: Sampling,
        limits: Limits,
        conversation: Conversation,
        writer: Writer,
    ) -> tuple[LiveSession, str]:
        """Start a session; returns it with its secret, which is not kept."""
        if session_id in self._by_id:
            msg = f"session {session_id!r} is live already"
            raise UsageError(msg)
        secret = f"tl-{secrets.token_urlsafe(24)}"
        live = LiveSession(session_id, _digest(secret), contract, limits, conversation, writer)
        self._by_id[session_id] = self._by_digest[live.digest] = live
        return live, secret

    async def close(self, live: LiveSession) -> None:
        """End a session: its secret opens nothing more, its open calls are aborted."""
        self._by_id.pop(live.id, None)
        self._by_digest.pop(live.digest, None)
        for exchange in list(live.running):
            exchange.leave()
            await exchange.settled()
        live.writer.close()

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
