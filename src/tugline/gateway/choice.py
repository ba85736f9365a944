"""Sample one answer: read the engine, fail over, record.

The `Call` is recorded before any client receives the end of the answer (I3). If a replica fails
during an answer, another continues from the exact prompt and the ids sampled so far, and the client
sees one unbroken answer. Sampled tokens are recorded whether the answer completes, fails or loses
its client (I2).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Callable

from tugline.chat.engines.base import Delta
from tugline.chat.model_call import Response, join_pieces
from tugline.errors import ClientGone, EngineError, TuglineError
from tugline.gateway.answer import ENDED, AnswerLife, AnswerState
from tugline.gateway.context import EngineContext, explain
from tugline.gateway.sampled_answer import SampledAnswer
from tugline.gateway.transcript import Transcript
from tugline.recording.records import RecordedEventKind
from tugline.types import CallOutcome, Finish

_EXPERTS_S = 10.0
"""Maximum seconds to wait for the experts of an answer that a stop string ended."""


class Choice:
    """One of the `n` answers of a model call: its content so far, and its response or error."""

    def __init__(
        self, content: SampledAnswer, transcript: Transcript, engine: EngineContext
    ) -> None:
        self.content = content
        self.number = content.number
        self.id = content.id
        self.life = AnswerLife(self.id, engine)
        self.response: Response | None = None
        self.error: TuglineError | None = None
        self._transcript = transcript
        self._engine = engine
        self._earlier: Choice | None = None
        """The call that this call resumes."""

    @property
    def state(self) -> AnswerState:
        """State of the answer."""
        return self.life.state

    def resume(self, earlier: Choice) -> None:
        """Continue the answer `earlier`, whose clients left."""
        self.content.resume(earlier.content)
        self._earlier = earlier
        earlier.life.enter(AnswerState.RESUMED)

    def fail(self, error: TuglineError) -> None:
        """End with an error, unless it has ended; the call that it resumes can be resumed again."""
        if self.state in ENDED:
            return
        self.error = copy.copy(error)  # without the frames that it has passed
        if self._earlier is not None:
            self._earlier.life.enter(AnswerState.BROKEN_OFF)
        self.life.enter(AnswerState.FAILED)

    def close(self) -> None:
        """Drop references to this object, which would keep it until a garbage collection."""
        self.life.forget_listener()
        self.content.close()

    # ----------------------------------------------------------------------- sampling
    async def sample(self, on_change: Callable[[], None]) -> None:
        """Sample to the end; `on_change` is called after each new piece and state.

        Cancelling records what was sampled as `CallOutcome.CLIENT_GONE`.
        """
        self.life.on_change = on_change
        unfinished = self._transcript.turns.unfinished  # a sub-agent may start before the end
        unfinished[self.number] = self.content.prompt.thread, self.content.pieces
        try:
            await self._sample()
        except Exception as error:  # noqa: BLE001 - a bug must not block the clients
            self.fail(explain(error))
        finally:
            del unfinished[self.number]

    async def _sample(self) -> None:
        """Read the answer, and record it as far as it was sampled."""
        several = self.content.request.n > 1
        try:
            async with self._transcript.several if several else contextlib.nullcontext():
                await self._read()
            self._finish(CallOutcome.COMPLETE)
        except asyncio.CancelledError:
            self._break_off()
            await self._check_engine()
        except EngineError:
            if self.state is AnswerState.ABANDONED:
                self._break_off()
            elif self.content.count:
                self._finish(CallOutcome.ENGINE_LOST)
            else:
                raise

    async def _read(self) -> None:
        """Read the engine to the answer's end, failing over a bounded number of times."""
        content = self.content
        settings = self._engine.settings
        avoid: list[str] = []
        for fault in range(settings.failovers + 1):
            if content.remaining_tokens() < 1:
                content.end(Finish.LENGTH)
                return
            deltas = self._engine.upstream.sample(
                content.begin_reply(), self._transcript.session_id, self.life, avoid
            )
            try:
                async with self.life.read_reply(), contextlib.aclosing(deltas):
                    async for delta in deltas:
                        self.life.note_data(delta, content.take(delta))
                        if content.matched_stop is not None:
                            break
                    if not content.has_experts:
                        await self._read_experts(deltas)
            except TimeoutError:  # by `AnswerLife.stop_early`
                content.end(Finish.ABORT)
                return
            except EngineError:
                self._note_fault()
                if not content.can_be_continued or fault == settings.failovers:
                    raise
                self.life.note_refused()
                avoid = self.life.replicas[-1:]
                await asyncio.sleep(settings.backoff_s * fault)
            else:
                return

    async def _read_experts(self, deltas: AsyncIterator[Delta]) -> None:
        """Read on behind a stop string: engines report experts at the end of a reply only."""
        with contextlib.suppress(TimeoutError, EngineError):
            async with asyncio.timeout(_EXPERTS_S):
                await self.life.abort_request()
                async for delta in deltas:
                    self.content.take(delta)

    def _note_fault(self) -> None:
        if self.life.replicas and self.content.count:
            detail = f"{self.life.replicas[-1]} after {self.content.count} tokens"
            self._transcript.note(RecordedEventKind.ENGINE_FAULT, detail, call=self.number)

    # ----------------------------------------------------------------------- finishing
    def _finish(self, outcome: CallOutcome) -> None:
        """Record the call, then publish the answer and its last pieces."""
        content = self.content
        pieces, message = content.parse_rest()
        content.record(outcome, message, self.life)
        self.response = content.make_response(outcome, message)
        content.call.dialect.keep(content.request, self.response, self._transcript.parse_cache)
        content.pieces += pieces
        self._earlier = None
        self.life.enter(AnswerState.COMPLETE)

    def _break_off(self) -> None:
        """Record the partial answer of a call whose clients left."""
        self.life.abandon()
        message = join_pieces(self.content.pieces)
        self.content.record(CallOutcome.CLIENT_GONE, message, self.life)
        self.error = ClientGone("the client disconnected before the answer was complete")
        resumable = self.content.can_be_resumed
        self.life.enter(AnswerState.BROKEN_OFF if resumable else AnswerState.FAILED)

    async def _check_engine(self) -> None:
        """Fail with `EngineError` if the client left because the replica hangs."""
        if self.life.silent_s < min(1.0, self._engine.settings.silent_s):
            return
        if not await self.life.engine_answers():
            self.error = EngineError("the client disconnected while the engine did not respond")
            if self.state is AnswerState.BROKEN_OFF:
                self.life.enter(AnswerState.FAILED)
