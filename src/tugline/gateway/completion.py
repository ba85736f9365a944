"""The answer to a model call while it is sampled, shared by all clients that request it.

A `Completion` samples its choices (one, or `n`) in its own task and keeps their pieces in replay
buffers; each client iterates over them from the beginning. A slow client does not delay others.
After the last client disconnects, sampling is cancelled, unless the same request is sent again
within a grace period.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence

from tugline.chat.model_call import Piece, Response, Usage
from tugline.errors import ClientGone, TuglineError
from tugline.gateway.choice import Choice
from tugline.gateway.engine import explain
from tugline.gateway.policy import CallSettings

_TICK = 1 / 4
"""Interval at which readers check for silence, as a fraction of `keep_alive_s`."""
IndexedPiece = tuple[int, Piece]
"""The index of the choice that a piece belongs to, and the piece."""


class Completion:
    """The choices of one model call, and the clients that read them."""

    def __init__(
        self, key: bytes, choices: Sequence[Choice], settings: CallSettings, *, stream: bool
    ) -> None:
        """`key` identifies repetitions of the request, `stream` is whether it was streamed."""
        self.key, self.choices, self.stream = key, choices, stream
        self.id = choices[0].id
        self.received = choices[0].received
        self.error: TuglineError | None = None
        self.delivered = False
        """Whether a client got the whole answer."""
        self.abandoned = False
        """Whether sampling was cancelled and is being recorded; no client may attach any more."""
        self.resumed = False
        """Whether a later call resumed it, which happens at most once."""
        self._settings = settings
        self._changed, self._over = asyncio.Event(), asyncio.Event()
        self._started = any(choice.pieces for choice in choices)
        self._closed: TuglineError | None = None
        self._readers = 0
        self._grace: asyncio.TimerHandle | None = None
        self._draining: asyncio.Task[None] | None = None
        self._ticker: asyncio.TimerHandle | None = None
        """Timer that wakes the readers of a silent stream; one for all pieces."""
        self.task = asyncio.create_task(self._run(), name=self.id)

    @property
    def done(self) -> bool:
        """Whether all answers are complete, or one failed."""
        return self.error is not None or all(choice.answer for choice in self.choices)

    @property
    def broke_off(self) -> bool:
        """Whether the answer ended early because its clients left, and can be resumed."""
        return len(self.choices) == 1 and self.choices[0].broke_off

    @property
    def undelivered(self) -> bool:
        """Whether every client disconnected before the end."""
        return not self.delivered and self._readers == 0

    @property
    def answers(self) -> Sequence[Response]:
        """Complete answers: those of all choices once done without an error."""
        return [choice.answer for choice in self.choices if choice.answer is not None]

    @property
    def usage(self) -> Usage:
        """Token counts so far; the prompt count is 0 until the engine reports it."""
        return self.choices[0].usage

    # ----------------------------------------------------------------------- clients
    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Keep sampling during the block, and for a grace period after the last such block."""
        self._readers += 1
        if self._grace is not None:
            self._grace.cancel()
        try:
            yield
        finally:
            self._readers -= 1
            if self._readers == 0 and not self.done:
                loop = asyncio.get_running_loop()
                self._grace = loop.call_later(self._settings.grace_s, self._abandon)

    async def pieces(self) -> AsyncGenerator[Sequence[IndexedPiece]]:
        """Iterate over all pieces, from the first; yield none after `keep_alive_s` of silence."""
        read = [0] * len(self.choices)
        within_s, spoke = self._settings.keep_alive_s, time.monotonic()
        while True:
            changed = self._changed
            fresh: list[IndexedPiece] = []
            for index, choice in enumerate(self.choices):
                fresh += [(index, piece) for piece in choice.pieces[read[index] :]]
                read[index] = len(choice.pieces)
            silent_s = time.monotonic() - spoke
            if self.done and not fresh:
                return
            if fresh or silent_s > within_s * (1 - _TICK):
                spoke += silent_s
                yield fresh
            else:
                await changed.wait()

    async def wait_started(self, within_s: float) -> None:
        """Wait for the first token or the end, at most `within_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not (self._started or self.done):
                    await self._changed.wait()

    async def wait_done(self) -> None:
        """Wait until all answers are complete, or one failed."""
        await self._over.wait()

    async def wait_recorded(self) -> None:
        """Wait until the call is recorded, whatever its outcome."""
        await asyncio.wait({self.task}, timeout=self._settings.cancel_timeout_s)

    # ----------------------------------------------------------------------- the task
    async def _run(self) -> None:
        self._tick()
        failed: TuglineError | None = None
        try:
            if len(self.choices) == 1:
                await self.choices[0].sample(self._notify_started)
            else:
                async with asyncio.TaskGroup() as group:
                    for choice in self.choices:
                        group.create_task(choice.sample(self._notify_started))
        except Exception as error:  # noqa: BLE001 - a bug of the gateway must not block clients
            failed = explain(error)
        finally:
            self._end(failed)

    def _end(self, failed: TuglineError | None) -> None:
        error = next((c.error for c in self.choices if c.error is not None), failed)
        closed = isinstance(error, ClientGone) and self._closed is not None
        self.error = self._closed if closed else error
        if self._ticker is not None:
            self._ticker.cancel()
        self._over.set()
        self._notify()

    def _tick(self) -> None:
        self._notify()
        after_s = self._settings.keep_alive_s * _TICK
        self._ticker = asyncio.get_running_loop().call_later(after_s, self._tick)

    def _notify_started(self, pieces: Sequence[Piece]) -> None:
        if pieces or not self._started:
            self._started = True
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def cancel(self, error: TuglineError | None = None) -> None:
        """End sampling now and record the partial answer; waiting clients receive `error`."""
        self._closed = self._closed or error
        if self._grace is not None:
            self._grace.cancel()
        if self._ticker is None:  # the task has not started, and will not
            self._end(ClientGone("nothing was sampled"))
        if not self.task.cancelling():  # cancelling again would interrupt the recording
            self.task.cancel()

    def _abandon(self) -> None:
        if self._readers or self.done:
            return
        self.abandoned = True
        if self.stream or len(self.choices) > 1:
            self.cancel()
        else:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        """Give the engine `partial_answer_s` to return its part of an unstreamed answer."""
        await self.choices[0].drain()
        await asyncio.wait({self.task}, timeout=self._settings.partial_answer_s)
        self.cancel()
