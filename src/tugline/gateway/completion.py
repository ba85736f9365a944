"""The answer to a model call while it is sampled, shared by all clients that request it.

A `Completion` samples its choices (one, or `n`) in its own task and keeps their pieces in replay
buffers; each client iterates over them from the beginning. A slow client does not delay others.
After the last client disconnects, sampling is cancelled, unless the same request is sent again
within a grace period.
"""

import asyncio
import contextlib
import copy
import time
from collections.abc import AsyncGenerator, Iterator, Sequence

from tugline.aio import run_together
from tugline.chat.model_call import Piece, Response, Usage
from tugline.errors import ClientGone, TuglineError
from tugline.gateway.answer import ACCEPTED, ENDED, PROGRESS, AnswerState
from tugline.gateway.choice import Choice
from tugline.gateway.policy import CallSettings

_TICK = 1 / 4
"""Interval at which readers check for silence, as a fraction of `keep_alive_s`."""
IndexedPiece = tuple[int, Piece]
"""The index of the choice that a piece belongs to, and the piece."""


class Completion:
    """The choices of one model call, and the clients that read them."""

    def __init__(self, key: bytes, choices: Sequence[Choice], settings: CallSettings) -> None:
        """`key` identifies repetitions of the request."""
        self.key = key
        self.choices = choices
        self.id = choices[0].id
        self.request = choices[0].content.request
        self.received = choices[0].content.received
        self.readers = 0
        """Number of clients that are reading."""
        self._settings = settings
        self._changed = asyncio.Event()
        self._closed: TuglineError | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._ticker: asyncio.TimerHandle | None = None
        """Timer that wakes the readers of a silent stream; one for all pieces."""
        alone = len(choices) == 1
        sampling = choices[0].sample(self._notify) if alone else self._sample_several()
        self.task = asyncio.create_task(sampling, name=self.id)
        self.task.add_done_callback(self._end)
        self._tick()

    @property
    def state(self) -> AnswerState:
        """State of the answer that has come least far."""
        return min((choice.state for choice in self.choices), key=PROGRESS.__getitem__)

    @property
    def error(self) -> TuglineError | None:
        """The error of the first answer that failed; None while answers are sampled."""
        if self.state not in ENDED:
            return None
        error = next((c.error for c in self.choices if c.error is not None), None)
        return self._closed if self._closed and isinstance(error, ClientGone) else error

    def check(self) -> None:
        """Raise the error, if there is one.

        It is a copy: an error refers to the frames that it passes, and so to this object.
        """
        if self.error is not None:
            raise copy.copy(self.error)

    @property
    def responses(self) -> Sequence[Response]:
        """Responses of the complete answers: all of them once ended without an error."""
        return [choice.response for choice in self.choices if choice.response is not None]

    @property
    def usage(self) -> Usage:
        """Token counts so far; the prompt count is 0 until the engine reports it."""
        return self.choices[0].content.usage

    # ----------------------------------------------------------------------- clients
    def deliver(self) -> None:
        """Note that a client has got the whole answer."""
        for choice in self.choices:
            if choice.state is AnswerState.COMPLETE:
                choice.life.enter(AnswerState.DELIVERED)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Keep sampling during the block, and for a grace period after the last such block."""
        self.readers += 1
        if self._grace is not None:
            self._grace.cancel()
        try:
            yield
        finally:
            self.readers -= 1
            if self.readers == 0 and self.state not in ENDED:
                loop = asyncio.get_running_loop()
                self._grace = loop.call_later(self._settings.grace_s, self._abandon)

    async def pieces(self) -> AsyncGenerator[Sequence[IndexedPiece]]:
        """Iterate over all pieces, from the first; yield none after `keep_alive_s` of silence."""
        read = [0] * len(self.choices)
        within_s = self._settings.keep_alive_s
        spoke = time.monotonic()
        while True:
            changed = self._changed
            fresh: list[IndexedPiece] = []
            for index, choice in enumerate(self.choices):
                pieces = choice.content.pieces
                fresh += [(index, piece) for piece in pieces[read[index] :]]
                read[index] = len(pieces)
            silent_s = time.monotonic() - spoke
            if self.state in ENDED and not fresh:
                return
            if fresh or silent_s > within_s * (1 - _TICK):
                spoke += silent_s
                yield fresh
            else:
                await changed.wait()

    async def wait_until_accepted(self) -> None:
        """Wait until the headers of a stream can be sent, because no refusal is to be expected.

        This is at the first token; some time after the acceptance by a replica, for engines that
        accept before they look at the request; or late, for clients that give up without a byte.
        """
        loop = asyncio.get_running_loop()
        settings = self._settings
        latest = due = loop.time() + settings.headers_within_s
        while not (self.state in ENDED or all(map(_has_begun, self.choices))):
            if not all(choice.state in ACCEPTED for choice in self.choices):
                due = latest
            elif due == latest:
                due = min(latest, loop.time() + settings.first_token_within_s)
            if loop.time() >= due:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._changed.wait()

    async def wait_done(self) -> None:
        """Wait until all answers have ended."""
        while self.state not in ENDED:
            await self._changed.wait()

    async def wait_recorded(self) -> None:
        """Wait until the call is recorded, whatever its outcome."""
        await asyncio.wait({self.task}, timeout=self._settings.cancel_timeout_s)

    # ----------------------------------------------------------------------- the task
    async def _sample_several(self) -> None:
        await run_together(*(choice.sample(self._notify) for choice in self.choices))

    def _end(self, _task: asyncio.Task[None]) -> None:
        """End answers that were never begun, because the task was cancelled before it began."""
        for choice in self.choices:
            choice.fail(ClientGone("the call was cancelled before sampling began"))
            choice.close()
        if self._ticker is not None:
            self._ticker.cancel()
        self._notify()

    def _tick(self) -> None:
        self._notify()
        after_s = self._settings.keep_alive_s * _TICK
        self._ticker = asyncio.get_running_loop().call_later(after_s, self._tick)

    def _notify(self) -> None:
        changed = self._changed
        self._changed = asyncio.Event()
        changed.set()

    def cancel(self, error: TuglineError | None = None) -> None:
        """End sampling now and record the partial answer; waiting clients receive `error`."""
        self._closed = self._closed or error
        if self._grace is not None:
            self._grace.cancel()
        for choice in self.choices:
            choice.life.abandon()
        if not self.task.cancelling():  # cancelling again would interrupt the recording
            self.task.cancel()

    def _abandon(self) -> None:
        if not self.readers:
            self.cancel()


def _has_begun(choice: Choice) -> bool:
    """Whether tokens have come, or all of the answer; then it is no refusal."""
    if choice.state is AnswerState.FAILED:
        return False
    return choice.content.count > 0 or choice.state in ENDED
