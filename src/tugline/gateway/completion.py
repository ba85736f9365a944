"""One answer being sampled: read the engine, decode, go on elsewhere after a fault, record.

A `Completion` is a task of its own. It writes the `Call` to disk before anybody is told that the
answer is over (I3). When a replica dies in the middle, the next one is asked to continues
from the exact prompt and the ids sampled so far, and the client sees one unbroken answer. Sampled
tokens are recorded whether the answer completes, breaks off or loses its client (I2).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from tugline.chat.engines.base import NO_IDS, Delta, EngineRequest
from tugline.chat.request import ChoiceMode, Request
from tugline.chat.response import Piece, ReasoningDelta, Response, TextDelta, Usage
from tugline.chat.stream_parser import StreamParser
from tugline.chat.tokens import TokenSequence
from tugline.errors import ClientGone, EngineError, TuglineError
from tugline.gateway.assembler import Assembler, told
from tugline.gateway.backend import EngineContext
from tugline.gateway.policy import kind_of
from tugline.gateway.sessions import LiveSession
from tugline.gateway.turns import PromptPlan
from tugline.recording.recorder import Sampled, replayed
from tugline.recording.records import EventKind
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

_CONTINUATIONS = 4
"""How often one answer goes on after a fault in its middle."""
_BACKOFF_S = 0.25
_GATE_S = 900.0
"""Longest wait for weights to be swapped."""
_PARTIAL_S = 0.8
"""How long an engine may take to hand over what it has of an aborted answer."""


class Completion:
    """One of the answers of a call: its record in the making, and its answer or error."""

    def __init__(
        self,
        number: int,
        live: LiveSession,
        backend: EngineContext,
        request: Request,
        plan: PromptPlan,
        sampling: Sampling,
    ) -> None:
        self.number, self.plan = number, plan
        self.id = f"{live.id}-{number}"
        self._nonce = secrets.token_hex(4)
        self.answer: Response | None = None
        self.error: TuglineError | None = None
        self.sampled = Sampled()
        self._live, self._backend, self._request = live, backend, request
        self._sampling = sampling
        self._prefix = self._forced()
        self._resumed = NO_IDS
        self._decoder: StreamParser | None = None
        self._assembler: Assembler | None = None
        if backend.rendering is not None:
            end = plan.prompt.tail(64)
            self._decoder = StreamParser(
                backend.rendering,
                end,
                f"{number}",
                stops=sampling.stop,
                forced=self._prefix,
                tools=request.tools,
            )
        else:
            self._assembler = Assembler(f"{number}")
        self._told: list[tuple[int, Piece]] = []
        self._used: list[str] = []
        self._replayed: Call | None = None
        self._received = time.time()
        self._sent_at: float | None = None
        self._recorded = self._unheard = False
        self._publish: Callable[[list[Piece]], None] = lambda _pieces: None
        self._record_of: tuple[str, bytes] = ("", b"")

    @property
    def _constrained(self) -> bool:
        choice = self._request.tool_choice.mode
        silent = choice is ChoiceMode.NONE and bool(self._request.tools)
        return silent or self._request.constraint is not None

    @property
    def done(self) -> bool:
        """Whether the answer is complete, or failed."""
        return self.answer is not None or self.error is not None

    @property
    def sending(self) -> bool:
        """Whether the engine has been asked and has not finished."""
        return self._sent_at is not None and not self.done

    @property
    def broke_off(self) -> bool:
        """Whether nobody listened to the end, and the rest can still be sampled."""
        return isinstance(self.error, ClientGone) and self._decoder is not None

    @property
    def usage(self) -> Usage:
        """Counts so far, as the client sees them."""
        count = len(self._resumed) + self.sampled.length + self.sampled.unreported_tokens
        reasoning = self._decoder.reasoning_tokens if self._decoder is not None else 0
        return Usage(len(self.plan.prompt), count, self.plan.reused, reasoning)

    def take_up(self, earlier: Completion) -> list[Piece]:
        """Go on with an answer that broke off: its ids become context, its pieces are retold."""
        if self._decoder is None:
            return []
        self._resumed = np.concatenate((earlier._resumed, earlier.sampled.joined()[0]))
        pieces = self._decoder.feed(self._resumed)
        self.plan = replace(self.plan, parent=earlier.number, branch=None, added=())
        return pieces

    # ----------------------------------------------------------------------- the task
    async def run(self, publish: Callable[[list[Piece]], None], dialect: str, body: bytes) -> None:
        """Sample to the end; `publish` is called with pieces as they come, and once when over."""
        self._publish, self._record_of = publish, (dialect, body)
        self._backend.running.add(self)
        try:
            await self._open_gate()
            await self._sample()
            if self._unheard:
                await self._break_off()
            else:
                await self._finish(CallOutcome.COMPLETE)
        except asyncio.CancelledError:
            await self._break_off()
        except EngineError as error:
            if self.sampled.length or self.sampled.unreported_tokens:
                await self._finish(CallOutcome.ENGINE_LOST)
            else:
                self.error = error
        except TuglineError as error:
            self.error = error
        finally:
            self._backend.running.discard(self)
            publish([])
            self._publish = lambda _pieces: None  # it leads back here: no work for the collector
            self._record_of = ("", b"")

    async def abort(self) -> None:
        """Ask the engine to end this answer where it is; it is then told as truncated."""
        last = len(self._used) - 1
        if last >= 0:
            await self._backend.upstream.abort(self._request_id(last), self._used[last])

    async def salvage(self) -> None:
        """Let the engine hand over the part of an unstreamed answer that nobody waits for."""
        if self._request.stream or self.done:
            return
        self._unheard = True
        replica = self._backend.upstream.choose(self._live.id)
        await self._backend.upstream.abort(self._request_id(len(self._used)), replica.url)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PARTIAL_S):
                while not self.done:  # noqa: ASYNC110 - bounded just above
                    await asyncio.sleep(0.02)

    async def _open_gate(self) -> None:
        if self._backend.gate.is_set():
            return
        try:
            async with asyncio.timeout(_GATE_S):
                await self._backend.gate.wait()
        except TimeoutError as error:
            msg = f"the engine was paused for more than {_GATE_S:.0f} s"
            raise EngineError(msg, status=503, retry_after=5.0) from error

    async def _sample(self) -> None:
        avoid: list[str] = []
        for fault in range(_CONTINUATIONS + 1):
            self._sent_at = self._sent_at or time.time()
            self.sampled.reply_start = self.sampled.length
            try:
                await self._read(avoid)
            except EngineError:
                if self._used and (count := self.sampled.length + self.sampled.unreported_tokens):
                    detail = f"{self._used[-1]} after {count} tokens"
                    self._live.note(EventKind.ENGINE_FAULT, detail, call=self.number)
                again = self._decoder is not None and self.sampled.length
                if not again or fault == _CONTINUATIONS:
                    raise
                avoid = self._used[-1:]
                await asyncio.sleep(_BACKOFF_S * fault)
            else:
                return
            if self._left() < 1:
                self.sampled.finish = Finish.LENGTH
                return

    async def _read(self, avoid: Sequence[str]) -> None:
        ask = self._ask()
        deltas = self._backend.upstream.sample(ask, self._live.id, self._used, avoid)
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                self._publish(self._take(delta))
                if self._decoder is not None and self._decoder.matched_stop is not None:
                    self._stop(self._decoder)
                    return

    def _ask(self) -> EngineRequest:
        request, backend, rendering = self._request, self._backend, self._backend.rendering
        if rendering is None:
            return EngineRequest(
                model=backend.card.id,
                request_id=self._request_id(len(self._used)),
                stream=request.stream,
                sampling=self._sampling,
                constraint=request.constraint,
                messages=request.messages,
                tools=request.tools,
                tool_choice=request.tool_choice,
                parallel=request.parallel,
                request=request,
            )
        marks, stops = rendering.markers, rendering.stop_ids
        silent = request.tool_choice.mode is ChoiceMode.NONE and bool(request.tools)
        prompt = self._context()
        return EngineRequest(
            model=backend.card.id,
            request_id=self._request_id(len(self._used)),
            stream=request.stream,
            sampling=msgspec.structs.replace(self._sampling, max_tokens=self._left()),
            constraint=request.constraint,
            prompt=prompt.extend(self.sampled.joined()[0]) if self.sampled.length else prompt,
            stop_ids=stops if request.parallel or marks.call_end < 0 else (*stops, marks.call_end),
            banned=(marks.call,) if silent and marks.call >= 0 else (),
            request=request,
        )

    def _take(self, delta: Delta) -> list[Piece]:
        if delta.prompt is not None and not len(self.plan.prompt):
            self.plan = self._live.conversation.observed(self.plan, delta.prompt)
        version = self._backend.version if delta.version is None else delta.version
        sampled = self.sampled
        sampled.add(delta.ids, delta.logprobs, version)
        if delta.spans:
            sampled.reversion(delta.spans)
        sampled.finish = delta.finish or sampled.finish
        sampled.stop = delta.stop or sampled.stop
        sampled.unreported_tokens += delta.unreported_tokens
        self._replayed = delta.replayed or self._replayed
        if self._decoder is not None:
            pieces = self._decoder.feed(delta.ids)
        elif self._assembler is not None:
            pieces = self._assembler.feed(delta)
        else:
            pieces = []
        self._told += [(sampled.length, piece) for piece in pieces]
        return pieces

    def _stop(self, decoder: StreamParser) -> None:
        """A stop string is complete: what was sampled behind it is not of the answer."""
        self.sampled.cut(max(0, decoder.length - len(self._resumed)))
        self.sampled.finish, self.sampled.stop = Finish.STOP, decoder.matched_stop

    async def _finish(self, outcome: CallOutcome) -> None:
        """Record, then let the answer be known."""
        part = self._decoder or self._assembler
        pieces, message = part.finish() if part is not None else ([], Message(Role.ASSISTANT))
        if self._decoder is not None and self._decoder.matched_stop is not None:
            self._stop(self._decoder)
        await self._record(outcome, message)
        finish = self.sampled.finish if outcome is CallOutcome.COMPLETE else Finish.LENGTH
        self.answer = Response(
            id=self.id,
            model=self._request.model or self._backend.card.id,
            created=int(self._received),
            message=message,
            finish=finish or Finish.LENGTH,
            usage=self.usage,
            stop=self.sampled.stop,
        )
        self._publish(pieces)

    async def _break_off(self) -> None:
        """Keep what there is of an answer that nobody waits for."""
        if not self._recorded:
            await self._record(CallOutcome.CLIENT_GONE)
            self._remember_parts()
        if self.answer is None:
            self.error = ClientGone("the client hung up before the answer was complete")

    async def _record(self, outcome: CallOutcome, message: Message | None = None) -> None:
        dialect, body = self._record_of
        backend, thread, sampled = self._backend, self._request.thread, self.sampled
        ids, logprobs = sampled.joined()
        kind = kind_of(self._request, toolless_is_aside=self._live.saw_tools)
        call = Call(
            session=self._live.id,
            number=self.number,
            parent=self.plan.parent,
            branch=self.plan.branch,
            echo_changes=self.plan.echo_changes,
            kind=kind,
            thread=thread.id,
            parent_thread=thread.parent,
            dialect=dialect,
            mode=backend.mode if sampled.length or not sampled.unreported_tokens else Mode.TEXT,
            logprob_meaning=backend.upstream.wire.logprob_meaning,
            thinking_retention=backend.rendering.thinking_retention if backend.rendering else "",
            messages=self.plan.added,
            answer=message or told([piece for _, piece in self._told]),
            tools=self._request.tools,
            sampling=self._sampling,
            requested=self._request.sampling,
            constrained=self._constrained,
            prompt_ids=self._context().to_array(),
            sampled_ids=ids,
            logprobs=logprobs,
            unreported_tokens=sampled.unreported_tokens,
            versions=tuple(sampled.versions),
            finish=sampled.finish or Finish.ABORT,
            stop=sampled.stop,
            outcome=outcome,
            engine=backend.upstream.wire.name,
            replicas=tuple(self._used),
            timings=Timings(self._received, self._sent_at, sampled.first_at, sampled.last_at),
            request=body,
        )
        self._recorded = True
        call = call if self._replayed is None else replayed(call, self._replayed)
        await self._live.append(call)
        backend.traffic.add(call)
        if message is not None and kind is not TraceKind.SIDE:
            self._live.conversation.record(self.plan, self.number, self._whole(ids), message)

    def _remember_parts(self) -> None:
        """An answer that broke off may come back as far as it was told, and be continued."""
        ids, _ = self.sampled.joined()
        for index, (length, piece) in enumerate(self._told, start=1):
            following = self._told[index][1] if index < len(self._told) else None
            if isinstance(piece, TextDelta | ReasoningDelta) and type(following) is type(piece):
                continue
            message = told([piece for _, piece in self._told[:index]])
            if message is not None:
                self._live.conversation.record(
                    self.plan, self.number, self._whole(ids[:length]), message, complete=False
                )

    # ----------------------------------------------------------------------- the context
    def _forced(self) -> Ids | None:
        """Ids that make the answer begin with a tool call; they are context, not sampled."""
        choice = self._request.tool_choice
        if self._backend.rendering is None or choice.mode in {ChoiceMode.AUTO, ChoiceMode.NONE}:
            return None
        return self._backend.rendering.force_tool_call(choice)

    @property
    def _given(self) -> list[Ids]:
        """What the answer has before what is sampled now: forced ids, and an earlier beginning."""
        return [ids for ids in (self._prefix, self._resumed) if ids is not None and len(ids)]

    def _context(self) -> TokenSequence:
        given = self._given
        return self.plan.prompt.extend(np.concatenate(given)) if given else self.plan.prompt

    def _whole(self, sampled: Ids) -> Ids:
        """The answer from where the template ends."""
        return np.concatenate((*self._given, sampled))

    def _left(self) -> int:
        limit = self._sampling.max_tokens
        return (1 << 30 if limit is None else limit) - self.sampled.length

    def _request_id(self, attempt: int) -> str:
        """Never given twice: SGLang ends a lost request by its id, but two seconds later."""
        again = f"-r{attempt}" if attempt else ""
        return f"{self._nonce}-{self.id}{again}"
