"""Sample one answer: read the engine, decode, fail over, record.

The `Call` is recorded before any client receives the end of the answer (I3). If a replica fails
during an answer, another continues from the exact prompt and the ids sampled so far, and the client
sees one unbroken answer. Sampled tokens are recorded whether the answer completes, fails or loses
its client (I2).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from tugline.chat.engines.base import Delta, EngineRequest
from tugline.chat.engines.chat import ToolCallAssembler
from tugline.chat.model_call import ChoiceMode, Piece, Request, Response, Usage, join_pieces
from tugline.chat.stream_parser import StreamParser
from tugline.chat.tokenizer import Detokenizer
from tugline.chat.tokens import END, TokenSequence
from tugline.errors import ClientGone, EngineError, TuglineError
from tugline.gateway.answer import ENDED, AnswerLife, AnswerState
from tugline.gateway.engine import EngineContext, Transcript, explain
from tugline.gateway.policy import classify_call
from tugline.gateway.prefix import Prompt
from tugline.recording.records import RecordedEventKind, SampledTokens, mark_replayed
from tugline.types import (
    Call,
    CallOutcome,
    Finish,
    Ids,
    Message,
    Mode,
    Role,
    Sampling,
    Timings,
    TraceKind,
)

_NO_LIMIT = 1 << 30
_NO_IDS: Ids = np.empty(0, np.int32)


class Choice:
    """An answer of a model call, which has `n`: its pieces so far, and its response or error."""

    def __init__(
        self,
        number: int,
        request: Request,
        prompt: Prompt,
        sampling: Sampling,
        transcript: Transcript,
        engine: EngineContext,
    ) -> None:
        """`number` is the call's number in its session."""
        self.number, self.prompt = number, prompt
        self.id = f"{transcript.session_id}-{number}"
        self.life = AnswerLife(self.id, engine)
        self.pieces: list[Piece] = []
        """Replay buffer: all pieces that are sent to clients, from the first."""
        self.answer: Response | None = None
        self.error: TuglineError | None = None
        self.sampled = SampledTokens()
        self._request, self._sampling = request, sampling
        self._transcript, self._engine = transcript, engine
        rendering, tool_choice = engine.rendering, request.tool_choice
        self._forced = None if rendering is None else rendering.force_tool_call(tool_choice)
        """Ids that make the answer begin with a tool call; they are context, not sampled."""
        self._resumed = _NO_IDS
        """Ids sampled by the earlier call that this call resumes."""
        self._earlier: Choice | None = None
        """The call that this call resumes."""
        self._decoder = self._make_decoder()
        self._assembler = ToolCallAssembler(f"call_{number}_")
        self._replayed: Call | None = None
        self.received = time.time()

    @property
    def max_tokens(self) -> int | None:
        """Maximum number of sampled tokens; None if unlimited."""
        return self._sampling.max_tokens

    @property
    def begun(self) -> bool:
        """Whether tokens have come, or all of it; then it is an answer, and not a refusal."""
        if self.life.state is AnswerState.FAILED:
            return False
        return bool(self._counted) or self.life.state in ENDED

    @property
    def resumable(self) -> bool:
        """Whether a later call can continue it."""
        exact = self._decoder is not None and not self._request.logprobs
        return exact and self.life.state is AnswerState.BROKEN_OFF

    @property
    def usage(self) -> Usage:
        """Token counts so far, as reported to clients; the prompt count is 0 until it is known.

        They are those of the recording: forced ids are prompt, resumed and cut ones are sampled.
        """
        sampled = self.sampled
        prompt = len(self.prompt.tokens) + (0 if self._forced is None else len(self._forced))
        count = len(self._resumed) + self._counted + sampled.cut_tokens
        reasoning = self._decoder.reasoning_tokens if self._decoder is not None else 0
        return Usage(prompt or sampled.prompt_count, count, self.prompt.reused, reasoning)

    def resume(self, earlier: Choice) -> None:
        """Continue the interrupted answer `earlier`: replay its pieces, use its ids as context."""
        if self._decoder is not None:
            self._resumed = np.concatenate((earlier._resumed, earlier.sampled.join()[0]))
            self.pieces = list(self._decoder.feed(self._resumed.tolist()))
            self.prompt = msgspec.structs.replace(
                self.prompt, parent=earlier.number, branch=None, added=()
            )
            self._earlier = earlier
            earlier.life.enter(AnswerState.RESUMED)

    def fail(self, error: TuglineError) -> None:
        """End with an error, unless it has ended; the call that it resumes can be resumed again."""
        if self.life.state in ENDED:
            return
        self.error = error
        if self._earlier is not None:
            self._earlier.life.enter(AnswerState.BROKEN_OFF)
        self.life.enter(AnswerState.FAILED)

    # ----------------------------------------------------------------------- sampling
    async def sample(self, on_change: Callable[[], None]) -> None:
        """Sample to the end; `on_change` is called after each new piece and state.

        Cancelling records what was sampled as `CallOutcome.CLIENT_GONE`.
        """
        self.life.on_change = on_change
        with self._listed_as_unfinished():
            try:
                await self._sample_to_end()
            except Exception as error:  # noqa: BLE001 - a bug must not block the clients
                self.fail(explain(error))

    @contextlib.contextmanager
    def _listed_as_unfinished(self) -> Iterator[None]:
        """List the answer, so that a sub-agent may start before its call has ended."""
        unfinished = self._transcript.turns.unfinished
        unfinished[self.number] = self.prompt.thread, self.pieces
        try:
            yield
        finally:
            del unfinished[self.number]

    async def _sample_to_end(self) -> None:
        try:
            async with (
                self._transcript.several if self._request.n > 1 else contextlib.nullcontext()
            ):
                await self._sample()
            self._finish(CallOutcome.COMPLETE)
        except asyncio.CancelledError:
            self._break_off()
            await self._check_engine()
        except EngineError:
            if self.life.state is AnswerState.ABANDONED:
                self._break_off()
            elif self._counted:
                self._finish(CallOutcome.ENGINE_LOST)
            else:
                raise

    async def _sample(self) -> None:
        """Read the engine, failing over to another replica a bounded number of times."""
        settings, avoid = self._engine.settings, list[str]()
        for fault in range(settings.failovers + 1):
            if self._remaining_tokens() < 1:
                self.sampled.finish = Finish.LENGTH
                return
            try:
                await self._read(avoid)
            except EngineError:
                self._note_fault()
                resumable = self._decoder is not None and self.sampled.length
                if not resumable or fault == settings.failovers:
                    raise
                self.life.note_refused()
                avoid = self.life.replicas[-1:]
                await asyncio.sleep(settings.backoff_s * fault)
            else:
                return

    async def _read(self, avoid: Sequence[str]) -> None:
        """Read one reply of the engine, up to its end or a stop string."""
        self.sampled.reply_start = self.sampled.length
        session = self._transcript.session_id
        deltas = self._engine.upstream.sample(self._engine_request(), session, self.life, avoid)
        try:
            async with self.life.read_reply(), contextlib.aclosing(deltas):
                async for delta in deltas:
                    self._take(delta)
                    if self._decoder is not None and self._decoder.matched_stop is not None:
                        self._cut_at_stop(self._decoder)
                        return
        except TimeoutError:  # by `AnswerLife.stop_early`
            self.sampled.finish = Finish.ABORT

    def _engine_request(self) -> EngineRequest:
        request, rendering = self._request, self._engine.rendering
        ask = EngineRequest(
            request=request,
            model=self._engine.card.id,
            sampling=self._sampling,
            request_id="",
            stream_interval=None if request.stream else self._engine.settings.stream_interval,
        )
        if rendering is None:
            return ask
        markers, stops = rendering.markers, rendering.stop_ids
        one_call = not request.parallel and markers.call_end >= 0
        prompt = self._context()
        return msgspec.structs.replace(
            ask,
            sampling=msgspec.structs.replace(self._sampling, max_tokens=self._remaining_tokens()),
            prompt=prompt.extend(self.sampled.join()[0]) if self.sampled.length else prompt,
            stop_ids=(*stops, markers.call_end) if one_call else stops,
            banned=self._engine.find_banned(request),
        )

    def _take(self, delta: Delta) -> None:
        """Add a delta from the engine, and the pieces that it completes."""
        if delta.prompt is not None and not len(self.prompt.tokens):
            self.prompt = self._transcript.turns.set_observed(self.prompt, delta.prompt)
        sampled = self.sampled
        version = self._engine.version if delta.version is None else delta.version
        sampled.add(delta.ids, delta.logprobs, version)
        if delta.spans:
            sampled.set_versions(delta.spans)
        sampled.finish = delta.finish or sampled.finish
        sampled.stop = delta.stop or sampled.stop
        sampled.unreported_tokens += delta.unreported_tokens
        sampled.prompt_count = delta.prompt_count or sampled.prompt_count
        self._replayed = delta.replayed or self._replayed
        if self._decoder is not None:
            pieces = self._decoder.feed(delta.ids)
        else:
            pieces = self._assembler.feed(delta)
        self.pieces += pieces
        self.life.note_data(delta)
        if pieces:
            self.life.on_change()

    def _cut_at_stop(self, decoder: StreamParser) -> None:
        """Drop tokens sampled after a complete stop string."""
        self.sampled.truncate(max(0, decoder.length - len(self._resumed)))
        self.sampled.finish, self.sampled.stop = Finish.STOP, decoder.matched_stop

    # ----------------------------------------------------------------------- finishing
    def _finish(self, outcome: CallOutcome) -> None:
        """Record the call, then publish the answer and its last pieces."""
        if self._decoder is not None:
            pieces, message = self._decoder.finish()
            if self._decoder.matched_stop is not None:
                self._cut_at_stop(self._decoder)
        else:
            pieces = self._assembler.finish()
            message = join_pieces(self.pieces + pieces) or Message(Role.ASSISTANT)
        tokens = self._record(outcome, message)
        if self._kind() is not TraceKind.SIDE:
            self._transcript.turns.add(self.prompt, self.number, tokens, message)
        if (first := self._request.kept_from) is not None:
            conversation = (*self._request.messages[first:], message)
            self._transcript.parse_cache.conversations[self.id] = conversation, self._request.tools
        finish = self.sampled.finish if outcome is CallOutcome.COMPLETE else Finish.LENGTH
        self.answer = Response(
            id=self.id,
            model=self._request.model or self._engine.card.id,
            created=int(self.received),
            message=message,
            finish=finish or Finish.LENGTH,
            usage=self.usage,
            stop=self.sampled.stop,
            tokens=self._list_tokens() if self._request.logprobs else (),
        )
        self.pieces += pieces
        self._earlier = None
        self.life.enter(AnswerState.COMPLETE)

    def _list_tokens(self) -> tuple[tuple[str, float], ...]:
        """List the text that each sampled token completes, with the token's log probability."""
        rendering, (ids, logprobs) = self._engine.rendering, self.sampled.join()
        text = Detokenizer((rendering and rendering.tokenizer.token_bytes) or {})
        text.verbatim = True
        pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
        return tuple((text.feed([token]), value) for token, value in pairs)

    def _break_off(self) -> None:
        """Record the partial answer of a call whose clients left."""
        self.life.abandon()
        self._record(CallOutcome.CLIENT_GONE, join_pieces(self.pieces))
        self.error = ClientGone("the client hung up before the answer was complete")
        self.life.enter(AnswerState.BROKEN_OFF)

    async def _check_engine(self) -> None:
        """Fail with `EngineError` if the client left because the replica hangs."""
        if self.life.silent_s < min(1.0, self._engine.settings.silent_s):
            return
        if not await self.life.engine_answers():
            self.error = EngineError("the engine did not answer when its client gave up")
            self.life.enter(AnswerState.FAILED)

    def _record(self, outcome: CallOutcome, message: Message | None) -> TokenSequence:
        """Append the call to the recording; return the ids of its prompt and answer."""
        engine, request, sampled = self._engine, self._request, self.sampled
        wire = engine.upstream.wire
        ids, logprobs = sampled.join()
        call = Call(
            session=self._transcript.session_id,
            number=self.number,
            parent=self.prompt.parent,
            branch=self.prompt.branch,
            echo_changes=self.prompt.echo_changes,
            kind=self._kind(),
            thread=request.thread.id,
            parent_thread=request.thread.parent,
            dialect=request.dialect,
            mode=wire.mode if sampled.length or not sampled.unreported_tokens else Mode.TEXT,
            logprob_meaning=wire.logprob_meaning,
            thinking_retention=engine.rendering.thinking_retention if engine.rendering else "",
            raw_prompt=request.prompt is not None,
            messages=self.prompt.added,
            answer=message,
            tools=request.tools,
            sampling=self._sampling,
            requested=request.sampling,
            constrained=engine.is_constrained(request),
            forbidden_calls=0 if self._decoder is None else self._decoder.forbidden_calls,
            prompt_ids=_NO_IDS,
            forced=0 if self._forced is None else len(self._forced),
            resumed=len(self._resumed),
            sampled_ids=ids,
            logprobs=logprobs,
            unreported_tokens=sampled.unreported_tokens + sampled.cut_tokens,
            unreported_prompt_tokens=sampled.prompt_count,
            versions=tuple(sampled.versions),
            finish=sampled.finish or Finish.ABORT,
            stop=sampled.stop,
            outcome=outcome,
            malformed=None if self._decoder is None else self._decoder.malformed,
            engine=wire.name,
            replicas=tuple(self.life.replicas),
            timings=Timings(self.received, self.life.sent_at, sampled.first_at, sampled.last_at),
        )
        call = call if self._replayed is None else mark_replayed(call, self._replayed)
        tokens = self._context().extend(ids)
        self._transcript.append(call, tokens)
        return tokens

    def _kind(self) -> TraceKind:
        return classify_call(self._request, declares_tools=self._transcript.declares_tools)

    def _note_fault(self) -> None:
        if self.life.replicas and self._counted:
            detail = f"{self.life.replicas[-1]} after {self._counted} tokens"
            self._transcript.note(RecordedEventKind.ENGINE_FAULT, detail, call=self.number)

    # ----------------------------------------------------------------------- context
    @property
    def _counted(self) -> int:
        """Number of tokens sampled so far, with or without ids."""
        return self.sampled.length + self.sampled.unreported_tokens

    @property
    def _unsampled_ids(self) -> list[Ids]:
        """Leading ids of the answer that this call does not sample: forced and resumed ones."""
        return [ids for ids in (self._forced, self._resumed) if ids is not None and len(ids)]

    def _make_decoder(self) -> StreamParser | None:
        """Create the decoder of exact mode; None in other modes, where the engine sends text."""
        if self._engine.rendering is None:
            return None
        return StreamParser(
            self._engine.rendering,
            None if self._request.prompt is not None else self.prompt.tokens.to_array(END),
            f"{self.number}",
            stops=self._sampling.stop,
            forced=self._forced,
            tools=self._request.tools,
            malformed=self._request.malformed,
            forbidden=self._request.tool_choice.mode is ChoiceMode.NONE,
        )

    def _context(self) -> TokenSequence:
        unsampled, tokens = self._unsampled_ids, self.prompt.tokens
        return tokens.extend(np.concatenate(unsampled)) if unsampled else tokens

    def _remaining_tokens(self) -> int:
        limit = self._sampling.max_tokens
        return (_NO_LIMIT if limit is None else limit) - len(self._resumed) - self.sampled.length
