"""The content of one answer: its context, the sampled tokens, and what they are parsed to.

Nothing here waits: `choice` asks the engine and decides what becomes of the answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np

from tugline.chat.engines.base import Delta, EngineRequest
from tugline.chat.engines.chat import ToolCallAssembler
from tugline.chat.model_call import ChoiceMode, Piece, Response, Usage, join_pieces
from tugline.chat.stream_parser import StreamParser
from tugline.chat.tokenizer import Detokenizer
from tugline.chat.tokens import END, TokenSequence
from tugline.gateway.answer import AnswerLife
from tugline.gateway.context import EngineContext
from tugline.gateway.model_call import ModelCall
from tugline.gateway.policy import classify_call
from tugline.gateway.transcript import Transcript
from tugline.recording.records import RecordedEventKind, SampledTokens, mark_replayed
from tugline.types import Call, CallOutcome, Finish, Ids, Message, Mode, Role, Sampling, Timings

_NO_LIMIT = 1 << 30
_NO_IDS: Ids = np.empty(0, np.int32)


class SampledAnswer:
    """Tokens, pieces and message of one answer."""

    def __init__(
        self,
        number: int,
        call: ModelCall,
        sampling: Sampling,
        transcript: Transcript,
        engine: EngineContext,
    ) -> None:
        """`number` is the call's number in its session."""
        self.number = number
        self.id = f"{transcript.session_id}-{number}"
        self.call = call
        self.request = call.request
        self.prompt = call.prompt
        """Prompt of the call; its ids are completed by an engine that renders it."""
        self.sampling = sampling
        self.received = time.time()
        self.pieces: list[Piece] = []
        """Replay buffer: all pieces that are sent to clients, from the first."""
        self._transcript = transcript
        self._engine = engine
        self._sampled = SampledTokens()
        self._forced = engine.force_tool_call(call.request)
        """Ids that make the answer begin with a tool call; they are context, not sampled."""
        self._resumed = _NO_IDS
        """Ids sampled by the earlier call that this call resumes."""
        self._replayed: Call | None = None
        self._decoder = self._make_decoder()
        """Parser of sampled ids; None in modes in which the engine sends text."""
        self._assembler = ToolCallAssembler(f"call_{number}_")

    def _make_decoder(self) -> StreamParser | None:
        if self._engine.rendering is None:
            return None
        return StreamParser(
            self._engine.rendering,
            None if self.request.prompt is not None else self.prompt.tokens.to_array(END),
            f"{self.number}",
            stops=self.sampling.stop,
            forced=self._forced if len(self._forced) else None,
            tools=self.request.tools,
            malformed=self.call.malformed,
            forbidden=self.request.tool_choice.mode is ChoiceMode.NONE,
        )

    def close(self) -> None:
        """Parse no more ids."""
        if self._decoder is not None:
            self._decoder.close()

    @property
    def count(self) -> int:
        """Number of tokens sampled so far, with or without ids."""
        return self._sampled.length + self._sampled.unreported_tokens

    @property
    def _asks_kept(self) -> bool:
        """Whether the engine reports the ids from which truncated sampling chooses."""
        sampling = self.sampling
        truncated = (sampling.top_p or 1) < 1 or sampling.top_k or sampling.min_p
        greedy = sampling.temperature == 0
        return self._engine.upstream.wire.kept and bool(truncated) and not greedy

    @property
    def can_be_continued(self) -> bool:
        """Whether another replica can sample on from the ids so far."""
        return self._decoder is not None and self._sampled.length > 0

    @property
    def can_be_resumed(self) -> bool:
        """Whether a later call can sample on from the ids so far."""
        request = self.request
        return self._decoder is not None and request.n == 1 and not request.logprobs

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, where ids are parsed here."""
        return self._decoder.matched_stop if self._decoder is not None else None

    @property
    def has_experts(self) -> bool:
        """Whether the experts of all tokens so far are reported, or none are expected."""
        return self._sampled.experts.covers(self._sampled.length)

    @property
    def usage(self) -> Usage:
        """Token counts so far, as reported to clients; the prompt count is 0 until it is known.

        They are those of the recording: forced ids are prompt, resumed and cut ones are sampled.
        """
        sampled = self._sampled
        prompt = len(self.prompt.tokens) + len(self._forced)
        count = len(self._resumed) + self.count + sampled.cut_tokens
        reasoning = self._decoder.reasoning_tokens if self._decoder is not None else 0
        return Usage(prompt or sampled.prompt_count, count, self.prompt.reused, reasoning)

    # ----------------------------------------------------------------------- context
    def resume(self, earlier: SampledAnswer) -> None:
        """Continue the answer `earlier`: replay its pieces, use its ids as context."""
        self._resumed = np.concatenate((earlier._resumed, earlier._sampled.join()[0]))
        if self._decoder is not None:
            self.pieces = list(self._decoder.feed(self._resumed.tolist()))
        self.prompt = msgspec.structs.replace(
            self.prompt, parent=earlier.number, branch=None, added=()
        )

    def remaining_tokens(self) -> int:
        """Return the number of tokens that may still be sampled."""
        limit = self.sampling.max_tokens
        return (_NO_LIMIT if limit is None else limit) - len(self._resumed) - self._sampled.length

    def begin_reply(self) -> EngineRequest:
        """Make the request for the rest of the answer, whose reply is taken next."""
        sampled = self._sampled
        sampled.reply_start = sampled.length
        request = self.request
        rendering = self._engine.rendering
        ask = EngineRequest(
            request=request,
            model=self._engine.card.id,
            sampling=self.sampling,
            request_id="",
            experts=self._engine.upstream.wire.experts is not None,
            kept=self._asks_kept,
            stream_interval=None if request.stream else self._engine.settings.stream_interval,
        )
        if rendering is None:
            return ask
        call_end = rendering.markers.call_end
        one_call = not request.parallel and call_end >= 0
        prompt = self._context()
        if sampled.length:
            prompt = prompt.extend(sampled.join()[0])
        sampled.experts.begin_reply(len(prompt), sampled.length, expected=ask.experts)
        return msgspec.structs.replace(
            ask,
            sampling=msgspec.structs.replace(self.sampling, max_tokens=self.remaining_tokens()),
            prompt=prompt,
            stop_ids=(*rendering.stop_ids, call_end) if one_call else rendering.stop_ids,
            banned=self._engine.find_banned(request),
        )

    def _context(self) -> TokenSequence:
        """Return the prompt and the leading ids of the answer that this call does not sample."""
        unsampled = [ids for ids in (self._forced, self._resumed) if len(ids)]
        tokens = self.prompt.tokens
        return tokens.extend(np.concatenate(unsampled)) if unsampled else tokens

    # ----------------------------------------------------------------------- tokens
    def take(self, delta: Delta) -> Sequence[Piece]:
        """Add a part of the engine's reply; return the pieces that it completes."""
        if delta.prompt is not None and not len(self.prompt.tokens):
            self.prompt = self._transcript.turns.set_observed(self.prompt, delta.prompt)
        sampled = self._sampled
        version = self._engine.version if delta.version is None else delta.version
        sampled.add(delta.ids, delta.logprobs, version)
        if delta.experts is not None:
            shape = self._engine.upstream.wire.experts
            sampled.experts.add(delta.experts, shape, sampled.length)
        if delta.kept and self._asks_kept:
            sampled.add_kept(delta.kept)
        if delta.spans:
            sampled.set_versions(delta.spans)
        sampled.finish = delta.finish or sampled.finish
        sampled.stop = delta.stop or sampled.stop
        sampled.unreported_tokens += delta.unreported_tokens
        sampled.prompt_count = delta.prompt_count or sampled.prompt_count
        self._replayed = delta.replayed or self._replayed
        if self._decoder is None:
            pieces = self._assembler.feed(delta)
        else:
            pieces = self._decoder.feed(delta.ids)
            self._cut_at_stop()
        self.pieces += pieces
        return pieces

    def end(self, finish: Finish) -> None:
        """End the answer early, for the reason `finish`."""
        self._sampled.finish = finish

    def parse_rest(self) -> tuple[Sequence[Piece], Message]:
        """Return the last pieces, which are not yet among `pieces`, and the whole message."""
        if self._decoder is None:
            rest = self._assembler.finish()
            return rest, join_pieces(self.pieces + rest) or Message(Role.ASSISTANT)
        pieces, message = self._decoder.finish()
        self._cut_at_stop()
        return pieces, message

    def _cut_at_stop(self) -> None:
        """Drop tokens sampled after a complete stop string."""
        if self._decoder is not None and self._decoder.matched_stop is not None:
            self._sampled.truncate(max(0, self._decoder.length - len(self._resumed)))
            self._sampled.finish = Finish.STOP
            self._sampled.stop = self._decoder.matched_stop

    # ----------------------------------------------------------------------- results
    def record(self, outcome: CallOutcome, message: Message | None, life: AnswerLife) -> None:
        """Append the call to the recording."""
        engine = self._engine
        request = self.request
        sampled = self._sampled
        wire = engine.upstream.wire
        ids, logprobs = sampled.join()
        experts, masked = sampled.experts.finish(sampled.length)
        call = Call(
            session=self._transcript.session_id,
            number=self.number,
            parent=self.prompt.parent,
            branch=self.prompt.branch,
            echo_changes=self.prompt.echo_changes,
            kind=classify_call(request, declares_tools=self._transcript.declares_tools),
            thread=request.thread.id,
            parent_thread=request.thread.parent,
            dialect=self.call.dialect.name,
            mode=wire.mode if sampled.length or not sampled.unreported_tokens else Mode.TEXT,
            logprob_meaning=wire.logprob_meaning,
            thinking_retention=engine.rendering.thinking_retention if engine.rendering else "",
            raw_prompt=request.prompt is not None,
            messages=self.prompt.added,
            answer=message,
            tools=request.tools,
            sampling=self.sampling,
            requested=request.sampling,
            constrained=engine.is_constrained(request),
            forbidden_calls=0 if self._decoder is None else self._decoder.forbidden_calls,
            prompt_ids=_NO_IDS,
            forced=len(self._forced),
            resumed=len(self._resumed),
            sampled_ids=ids,
            logprobs=logprobs,
            experts=experts,
            kept=sampled.join_kept(),
            masked=masked,
            unreported_tokens=sampled.unreported_tokens + sampled.cut_tokens,
            unreported_prompt_tokens=sampled.prompt_count,
            versions=tuple(sampled.versions),
            finish=sampled.finish or Finish.ABORT,
            stop=sampled.stop,
            outcome=outcome,
            malformed=None if self._decoder is None else self._decoder.malformed,
            engine=wire.name,
            replicas=tuple(life.replicas),
            timings=Timings(self.received, life.sent_at, sampled.first_at, sampled.last_at),
        )
        call = call if self._replayed is None else mark_replayed(call, self._replayed)
        self._transcript.append(call, self._context().extend(ids), self.prompt)
        for fault in filter(None, (sampled.experts.fault, sampled.kept_fault)):
            detail = f"{', '.join(life.replicas)}: {fault}"
            self._transcript.note(RecordedEventKind.ENGINE_FAULT, detail, call=self.number)

    def make_response(self, outcome: CallOutcome, message: Message) -> Response:
        """Make the response for the client."""
        finish = self._sampled.finish if outcome is CallOutcome.COMPLETE else Finish.LENGTH
        return Response(
            id=self.id,
            model=self.request.model or self._engine.card.id,
            created=int(self.received),
            message=message,
            finish=finish or Finish.LENGTH,
            usage=self.usage,
            stop=self._sampled.stop,
            tokens=self._list_tokens() if self.request.logprobs else (),
        )

    def _list_tokens(self) -> tuple[tuple[str, float], ...]:
        """List the text that each sampled token completes, with the token's log probability."""
        rendering = self._engine.rendering
        ids, logprobs = self._sampled.join()
        text = Detokenizer((rendering and rendering.tokenizer.token_bytes) or {})
        text.verbatim = True
        pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
        return tuple((text.feed([token]), value) for token, value in pairs)
