"""The whole path of one model call: recognise, sample, decode, record, tell.

An `Exchange` is a task of its own. It reads the engine, keeps the pieces of the answer and writes
the `Call` to disk before anybody is told that the answer is over (I3). The client's connection only
follows it: a slow reader slows nobody else, and one that hangs up aborts the engine's work; what
was sampled until then is still recorded, with that outcome (I2).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec

from tugline.capture.recorder import Sampled
from tugline.errors import ClientGone, ContextOverflow, EngineError, TuglineError
from tugline.gateway.conversation import Plan
from tugline.gateway.decoder import Decoder
from tugline.gateway.dialects.base import Answer, Dialect, Piece, Request, Usage
from tugline.gateway.engines.base import Draw
from tugline.gateway.rendering import Rendering
from tugline.gateway.sessions import LiveSession
from tugline.gateway.upstream import ModelCard, Upstream
from tugline.types import Call, Finish, Message, Outcome, Sampling, Timings

SETTLE_S = 10.0


@dataclass(frozen=True, slots=True)
class Backend:
    """What answers are made with: the engine, what it serves, and its template."""

    upstream: Upstream
    card: ModelCard
    rendering: Rendering


class Exchange:
    """One model call in progress: its pieces so far and, in the end, its answer or its error."""

    def __init__(
        self,
        live: LiveSession,
        dialect: Dialect,
        request: Request,
        body: bytes,
        backend: Backend,
    ) -> None:
        """Plan the call. Raises `RequestError` before anything is sampled."""
        self.received = time.time()
        self.body_digest = body_digest(body)
        self.request = request
        self.answer: Answer | None = None
        self.error: TuglineError | None = None
        self._live, self._dialect, self._body = live, dialect, body
        self._backend = backend
        self.plan: Plan = live.conversation.plan(request.messages, request.tools)
        window = backend.card.max_model_len
        room = window - len(self.plan.prompt)
        if room < 1:
            msg = (
                f"the prompt has {len(self.plan.prompt)} tokens and leaves no room to answer: "
                f"this model's maximum context length is {window} tokens"
            )
            raise ContextOverflow(msg, param="messages")
        self.number = live.admit()
        self.id = f"chatcmpl-{live.id}-{self.number}"
        self._sampling = enforce(request.asked, live.contract, room, self.number)
        self._decoder = Decoder(backend.rendering, self.plan.prompt, f"{self.number}")
        self._sampled = Sampled()
        self._sent_at: float | None = None
        self._pieces: list[Piece] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._recorded = False

    def start(self) -> None:
        """Begin sampling."""
        self._live.running.add(self)
        self._task = asyncio.create_task(self._run(), name=self.id)

    def leave(self) -> None:
        """The client is gone: stop sampling, keep what there is."""
        if self._task is not None:
            self._task.cancel()

    async def settled(self) -> None:
        """Wait until the call is recorded, whatever became of it."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=SETTLE_S)

    @property
    def done(self) -> bool:
        """Whether the answer is complete, or failed."""
        return self.answer is not None or self.error is not None

    async def follow(self, every_s: float) -> AsyncGenerator[Piece | None]:
        """Every piece from the first on; None when `every_s` passed without one."""
        index = 0
        while True:
            changed = self._changed
            while index < len(self._pieces):
                yield self._pieces[index]
                index += 1
            if self.done:
                return
            try:
                async with asyncio.timeout(every_s):
                    await changed.wait()
            except TimeoutError:
                yield None

    async def settled_answer(self) -> None:
        """Wait until there is an answer or an error."""
        while not self.done:
            await self._changed.wait()

    async def begun(self, within_s: float) -> None:
        """Wait for the first piece, the end, or `within_s`, whichever is first."""
        if not self._pieces and not self.done:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._changed.wait()

    # ----------------------------------------------------------------------- the task
    async def _run(self) -> None:
        try:
            await self._sample()
            await self._finish(Outcome.COMPLETE)
        except asyncio.CancelledError:
            self.error = ClientGone("the client hung up before the answer was complete")
            if self._sampled.length and not self._recorded:
                await self._record(Outcome.CLIENT_GONE)
        except EngineError as error:
            if self._sampled.length:
                await self._finish(Outcome.ENGINE_LOST)
            else:
                self.error = error
        except TuglineError as error:
            self.error = error
        finally:
            self._live.running.discard(self)
            self._publish([])

    async def _sample(self) -> None:
        backend = self._backend
        stop_ids = backend.rendering.stop_ids
        draw = Draw(backend.card.id, self.plan.prompt, self._sampling, stop_ids, self.id)
        self._sent_at = time.time()
        async with contextlib.aclosing(backend.upstream.sample(draw)) as deltas:
            async for delta in deltas:
                self._sampled.add(delta.ids, delta.logprobs, delta.version)
                self._sampled.finish = delta.finish or self._sampled.finish
                self._publish(self._decoder.feed(delta.ids))

    async def _finish(self, outcome: Outcome) -> None:
        """Record, then let the answer be known."""
        pieces, message = self._decoder.finish()
        await self._record(outcome, message)
        finish = self._sampled.finish if outcome is Outcome.COMPLETE else Finish.LENGTH
        self.answer = Answer(
            id=self.id,
            model=self.request.model or self._backend.card.id,
            created=int(self.received),
            message=message,
            finish=finish or Finish.LENGTH,
            usage=Usage(len(self.plan.prompt), self._sampled.length, self.plan.reused),
        )
        self._publish(pieces)

    async def _record(self, outcome: Outcome, message: Message | None = None) -> None:
        ids, logprobs = self._sampled.joined()
        call = Call(
            session=self._live.id,
            number=self.number,
            parent=self.plan.parent,
            branch=self.plan.branch,
            dialect=self._dialect.name,
            messages=self.plan.added,
            tools=self.request.tools,
            sampling=self._sampling,
            asked=self.request.asked,
            prompt_ids=self.plan.prompt,
            sampled_ids=ids,
            logprobs=logprobs,
            versions=tuple(self._sampled.versions),
            finish=self._sampled.finish or Finish.ABORT,
            outcome=outcome,
            engine=self._backend.upstream.wire.name,
            timings=Timings(
                self.received, self._sent_at, self._sampled.first_at, self._sampled.last_at
            ),
            request=self._body,
        )
        self._recorded = True
        await self._live.append(call)
        if message is not None:
            self._live.conversation.record(self.plan, self.number, ids, message)

    def _publish(self, pieces: list[Piece]) -> None:
        if pieces or self.done:
            self._pieces.extend(pieces)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()


def body_digest(body: bytes) -> bytes:
    """What a repeated request is recognised by."""
    return hashlib.blake2b(body, digest_size=16).digest()


def contract_of(sampling: Sampling, sample: int) -> Sampling:
    """A task's contract for one of its samples: each draws from a seed of its own."""
    if sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=_mixed(sampling.seed, sample))


def enforce(asked: Sampling, contract: Sampling, room: int, number: int) -> Sampling:
    """The sampling that is really used: the contract where it speaks, else the client's wish.

    The answer is capped to the `room` left in the window; a session's seed gives each call one of
    its own, so that a call's tokens do not depend on what else is running.
    """
    limits = [n for n in (asked.max_tokens, contract.max_tokens, room) if n is not None]
    return Sampling(
        temperature=_first(contract.temperature, asked.temperature, 1.0),
        top_p=_first(contract.top_p, asked.top_p, 1.0),
        max_tokens=min(limits),
        seed=asked.seed if contract.seed is None else _mixed(contract.seed, number),
    )


def _mixed(seed: int, place: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=4).digest())


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
