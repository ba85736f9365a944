"""The life of an answer: its states, their transitions, and its requests to replicas."""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from tugline.chat.engines.base import Delta
from tugline.chat.model_call import Piece
from tugline.gateway.context import EngineContext
from tugline.gateway.replicas import Progress


class AnswerState(StrEnum):
    """State of an answer, in the order of how far it has come; `ENDED` has the last ones."""

    QUEUED = "queued"
    """No replica has the request: it was not sent yet, is held by a pause, or was refused."""
    SENT = "sent"
    """The request is on its way to a replica, or waits there for acceptance."""
    ACCEPTED = "accepted"
    """A replica has accepted the request, and computes the prompt."""
    SAMPLING = "sampling"
    """Tokens have come."""
    ABANDONED = "abandoned"
    """Its clients left, or its session ends; what was sampled is being recorded."""
    FAILED = "failed"
    """There is only an error for the client; what was sampled for one that left is recorded."""
    BROKEN_OFF = "broken_off"
    """The part that was sampled for clients that left is recorded; it can be resumed once."""
    RESUMED = "resumed"
    """A later call continues it."""
    COMPLETE = "complete"
    """Recorded, in full or as far as it was sampled before an abort or the loss of the engine."""
    DELIVERED = "delivered"
    """A client has received all of it."""


_END = (AnswerState.ABANDONED, AnswerState.COMPLETE, AnswerState.FAILED)
TRANSITIONS: Mapping[AnswerState, frozenset[AnswerState]] = {
    AnswerState.QUEUED: frozenset({AnswerState.SENT, *_END}),
    AnswerState.SENT: frozenset({AnswerState.QUEUED, AnswerState.ACCEPTED, *_END}),
    AnswerState.ACCEPTED: frozenset({AnswerState.QUEUED, AnswerState.SAMPLING, *_END}),
    AnswerState.SAMPLING: frozenset({AnswerState.QUEUED, *_END}),
    AnswerState.ABANDONED: frozenset({AnswerState.BROKEN_OFF, AnswerState.FAILED}),
    AnswerState.COMPLETE: frozenset({AnswerState.DELIVERED}),
    AnswerState.BROKEN_OFF: frozenset({AnswerState.RESUMED, AnswerState.FAILED}),
    AnswerState.DELIVERED: frozenset(),
    AnswerState.FAILED: frozenset(),
    AnswerState.RESUMED: frozenset({AnswerState.BROKEN_OFF}),
}
"""Following states. An answer that moves to another replica is queued again, with its tokens. One
without a client may fail after it broke off, if the reason was a hanging engine. If the call that
resumes it fails without a token, it can be resumed by another."""
AT_ENGINE = frozenset({AnswerState.SENT, AnswerState.ACCEPTED, AnswerState.SAMPLING})
"""A replica has the request."""
ACCEPTED = frozenset(
    {AnswerState.ACCEPTED, AnswerState.SAMPLING, AnswerState.COMPLETE, AnswerState.DELIVERED}
)
"""A replica has accepted the request, and has not lost it."""
ENDED = frozenset(
    {
        AnswerState.COMPLETE,
        AnswerState.DELIVERED,
        AnswerState.FAILED,
        AnswerState.BROKEN_OFF,
        AnswerState.RESUMED,
    }
)
PROGRESS = {state: position for position, state in enumerate(AnswerState)}
"""Order of the states, by how far an answer has come."""
TERMINAL = frozenset(state for state, following in TRANSITIONS.items() if not following)
"""States that do not change any more."""

_ABORT_AGAIN_S = 0.02
"""First pause before an abort is repeated; it doubles."""


def _do_nothing() -> None:
    """Stand in for a listener."""


class AnswerLife(Progress):
    """State of an answer, and the requests for it, each known before it is sent."""

    def __init__(self, answer_id: str, engine: EngineContext) -> None:
        self.state = AnswerState.QUEUED
        self.on_change: Callable[[], None] = _do_nothing
        """Called after each change of the state, and when clients can get more of the answer."""
        self.replicas: list[str] = []
        """Addresses of the replicas that answered, in order."""
        self.sent_at: float | None = None
        """Unix time of the first request."""
        self._id = f"{secrets.token_hex(4)}-{answer_id}"
        self._engine = engine
        self._url = self._request_id = ""
        """Replica and id of the last request; the replica is empty for a recording."""
        self._requests = 0
        self._last_at = engine.upstream.gate.now()
        """Time of the last request or data, by the gate's clock."""
        self._reading = asyncio.timeout(None)

    def enter(self, state: AnswerState) -> None:
        """Change the state."""
        if state not in TRANSITIONS[self.state]:
            msg = f"an answer that is {self.state} cannot become {state}"
            raise RuntimeError(msg)
        self.state = state
        self.on_change()

    def forget_listener(self) -> None:
        """Call `on_change` no more."""
        self.on_change = _do_nothing

    def abandon(self) -> None:
        """Mark the answer as one without clients, unless it has ended."""
        if AnswerState.ABANDONED in TRANSITIONS[self.state]:
            self.enter(AnswerState.ABANDONED)

    # ----------------------------------------------------------------------- requests
    async def wait_until_sendable(self) -> None:
        """See `Progress.wait_until_sendable`."""
        await self._engine.wait_until_resumed()

    def note_sent(self, url: str) -> str:
        """See `Progress.note_sent`.

        Each request has an id of its own: SGLang aborts a lost request by its id two seconds late.
        """
        self.sent_at = self.sent_at or time.time()
        self._last_at = self._engine.upstream.gate.now()
        suffix = f"-r{self._requests}" if self._requests else ""
        self._requests += 1
        self._url = url
        self._request_id = f"{self._id}{suffix}"
        self.enter(AnswerState.SENT)
        return self._request_id

    def note_accepted(self) -> None:
        """See `Progress.note_accepted`."""
        self.enter(AnswerState.ACCEPTED)

    def note_refused(self) -> None:
        """See `Progress.note_refused`."""
        if self.state is not AnswerState.QUEUED:
            self.enter(AnswerState.QUEUED)

    def note_data(self, delta: Delta, pieces: Sequence[Piece]) -> None:
        """Note that a part of the answer has come; clients can get the pieces that it completes."""
        self._last_at = self._engine.upstream.gate.now()
        if self.state is AnswerState.ACCEPTED and delta.answers:
            self.replicas += [self._url] if self._url else []
            self.enter(AnswerState.SAMPLING)
        if pieces:
            self.on_change()

    # ----------------------------------------------------------------------- early ends
    def read_reply(self) -> asyncio.Timeout:
        """Return the context in which a reply is read; `stop_early` may end it."""
        self._reading = asyncio.timeout(None)
        return self._reading

    async def stop_early(self) -> None:
        """Abort sampling; clients receive the answer so far as truncated.

        The abort is repeated, because it may overtake the request. If the replica cannot abort, the
        connection is closed.
        """
        pause_s = _ABORT_AGAIN_S
        while self.state in AT_ENGINE:
            aborted = await self._engine.upstream.abort(self._request_id, self._url)
            if not aborted and self.state in AT_ENGINE and not self._reading.expired():
                self._reading.reschedule(asyncio.get_running_loop().time())
            await asyncio.sleep(pause_s)
            pause_s *= 2

    async def abort_request(self) -> None:
        """Abort the last request, whose reply has begun; the rest of the reply comes at once."""
        await self._engine.upstream.abort(self._request_id, self._url)

    @property
    def silent_s(self) -> float:
        """Seconds since the last request or data, without pauses; 0 before the first request."""
        return self._engine.upstream.gate.now() - self._last_at if self._requests else 0.0

    async def engine_answers(self) -> bool:
        """Whether the last replica answers a probe, or is paused; else its retry gets another."""
        return await self._engine.upstream.answers(self._url)
