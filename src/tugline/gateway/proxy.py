"""One model call, from request to reply: plan, draw, follow.

An `ModelCall` owns the draws of one call (one, or `n`). The client's connection only follows it: a
slow reader slows nobody else, and one that hangs up ends the engine's work a moment later, unless
the same request comes again within that moment. A request that comes again after its answer broke
off is not sampled anew: the new exchange goes on from the ids that there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator, Sequence

import msgspec

from tugline.chat.dialects.base import Dialect
from tugline.chat.engines.base import Feature
from tugline.chat.request import ChoiceMode, Request
from tugline.chat.response import Piece, Response, Usage
from tugline.errors import ContextOverflow, TuglineError, Unsupported
from tugline.gateway import policy
from tugline.gateway.backend import EngineContext
from tugline.gateway.completion import Completion
from tugline.gateway.sessions import LiveSession
from tugline.gateway.turns import PromptPlan
from tugline.recording.records import EventKind

SETTLE_S = 10.0
GRACE_S = 0.6
"""How long an answer goes on without a client: a retry may be on its way."""

Told = tuple[int, Piece]
"""Which answer a piece belongs to, and the piece."""


class ModelCall:
    """One model call in progress: its pieces so far and, in the end, its answers or its error."""

    def __init__(
        self,
        live: LiveSession,
        dialect: Dialect,
        request: Request,
        body: bytes,
        backend: EngineContext,
    ) -> None:
        """Plan the call. Raises `RequestError` before anything is sampled."""
        self.received = time.time()
        self.request = request
        self.error: TuglineError | None = None
        self._live, self._dialect, self._body, self._backend = live, dialect, body, backend
        policy.check(request, backend.mode, backend.upstream.wire.features)
        _check_choice(request, backend)
        live.saw_tools = live.saw_tools or bool(request.tools)
        self.plan: PromptPlan = live.conversation.plan(
            request.messages, request.tools, request.thread.id
        )
        self.key = _key(self.plan, request)
        self.delivered = False
        self.id = ""
        self.draws: list[Completion] = []
        self._pieces: list[Told] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._leaving: asyncio.TimerHandle | None = None
        self._followers = 0
        self.ending = False
        """Whether it was given up, and is only recorded any more; nobody may follow it."""

    def start(self, earlier: ModelCall | None = None) -> None:
        """Begin sampling, going on from where `earlier` broke off. Raises `RequestError`."""
        room = self._room()
        live, terms = self._live, self._live.terms
        for index, number in enumerate(live.admit(self.request.n)):
            sampling = policy.settle(
                self.request.sampling,
                terms.contract,
                terms.policy,
                (room, live.tokens_left),
                number,
            )
            draw = Completion(number, live, self._backend, self.request, self.plan, sampling)
            if earlier is not None and index == 0:
                self._pieces += [(0, piece) for piece in draw.take_up(earlier.draws[0])]
            self.draws.append(draw)
        self.id = self.draws[0].id
        live.running.add(self)
        self._task = asyncio.create_task(self._run(), name=self.id)

    # ----------------------------------------------------------------------- what clients do
    def join(self) -> None:
        """A client follows."""
        self._followers += 1
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None

    def leave(self, told: bytes = b"") -> None:
        """A client that was `told` this is gone; without any, sampling ends after a moment."""
        if told:
            self._live.note(EventKind.RESPONSE, call=self.draws[0].number, data=told)
        self._followers -= 1
        if self._followers <= 0 and not self.done and self._leaving is None:
            loop = asyncio.get_running_loop()
            self._leaving = loop.call_later(GRACE_S, self._abandon)

    def stop(self) -> None:
        """End sampling at once, keep what there is."""
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        if self._task is not None:
            self._task.cancel()

    async def settled(self) -> None:
        """Wait until the call is recorded, whatever became of it."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=SETTLE_S)

    # ----------------------------------------------------------------------- what clients see
    @property
    def done(self) -> bool:
        """Whether all answers are complete, or one failed."""
        return self.error is not None or (bool(self.draws) and all(d.answer for d in self.draws))

    @property
    def begun(self) -> bool:
        """Whether there is something to tell."""
        return self.done or bool(self._pieces) or any(d.sampled.length for d in self.draws)

    @property
    def broke_off(self) -> bool:
        """Whether the answer ended for want of a listener and can be taken up again."""
        return len(self.draws) == 1 and self.draws[0].broke_off

    @property
    def abandoned(self) -> bool:
        """Whether its client hung up before the end."""
        return not self.delivered and self._followers <= 0

    @property
    def answers(self) -> Sequence[Response]:
        """All of them, once done without an error."""
        return [draw.answer for draw in self.draws if draw.answer is not None]

    @property
    def usage(self) -> Usage:
        """What is known by now; the prompt's count is 0 until the engine tells."""
        return self.draws[0].usage

    def continued(self) -> bool:
        """Whether the harness went on from this call's answer."""
        return any(self._live.conversation.continued(draw.number) for draw in self.draws)

    async def follow(self, every_s: float) -> AsyncGenerator[Sequence[Told]]:
        """Every piece from the first on, as they come; nothing when `every_s` passed without."""
        index = 0
        while True:
            changed = self._changed
            if index < len(self._pieces):
                fresh = self._pieces[index:]
                index += len(fresh)
                yield fresh
                continue
            if self.done:
                return
            try:
                async with asyncio.timeout(every_s):
                    await changed.wait()
            except TimeoutError:
                yield ()

    async def settled_answer(self) -> None:
        """Wait until there are answers or an error."""
        while not self.done:
            await self._changed.wait()

    async def wait_begun(self, within_s: float) -> None:
        """Wait for the first token, the end, or `within_s`, whichever is first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self.begun:
                    await self._changed.wait()

    # ----------------------------------------------------------------------- the task
    async def _run(self) -> None:
        try:
            if len(self.draws) == 1:
                await self._draw(0)
            else:
                async with asyncio.TaskGroup() as group:
                    for index in range(len(self.draws)):
                        group.create_task(self._draw(index))
        finally:
            self.error = next((d.error for d in self.draws if d.error is not None), None)
            self._live.running.discard(self)
            self._body = b""
            self._told([])

    async def _draw(self, index: int) -> None:
        def publish(pieces: Sequence[Piece]) -> None:
            self._told([(index, piece) for piece in pieces])

        body = self._body if index == 0 else b""
        await self.draws[index].run(publish, self._dialect.name, body)

    def _told(self, pieces: Sequence[Told]) -> None:
        self._pieces.extend(pieces)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _abandon(self) -> None:
        self._leaving = None
        if self._followers > 0 or self.done or self._task is None:
            return
        self.ending = True
        if self.request.stream or len(self.draws) > 1:
            self._task.cancel()
        else:
            task = asyncio.create_task(self._salvage(self._task))
            task.add_done_callback(lambda _done: None)

    async def _salvage(self, running: asyncio.Task[None]) -> None:
        await self.draws[0].salvage()
        running.cancel()

    def _room(self) -> int | None:
        """Tokens that the window leaves for an answer; None where only the engine knows."""
        window, length = self._backend.card.max_model_len, len(self.plan.prompt)
        if not window or self._backend.rendering is None:
            return None
        if window - length < 1:
            msg = (
                f"the prompt has {length} tokens and leaves no room to answer: "
                f"this model's maximum context length is {window} tokens"
            )
            raise ContextOverflow(msg, param="messages", prompt=length, window=window)
        return window - length


def repeats(old: ModelCall, new: ModelCall, *, retry: bool) -> bool:
    """Whether `new` asks again for what `old` was asked, rather than for another sample.

    The same request is a retry if its client says so, if nobody received the first answer, or if
    a streaming client asks for the same without a stream. Two clients that wait at the same time
    want two samples, and so does one that got its answer and asks again.
    """
    if old.key != new.key or (old.error is not None and not old.broke_off) or old.continued():
        return False
    unstreamed = old.request.stream and not new.request.stream
    return retry or old.abandoned or unstreamed


def _check_choice(request: Request, backend: EngineContext) -> None:
    """Raises `Unsupported` if this template or engine cannot be held to the tool choice."""
    rendering, choice = backend.rendering, request.tool_choice
    if rendering is None or choice.mode is ChoiceMode.AUTO or not request.tools:
        return
    if choice.mode is ChoiceMode.NONE:
        if Feature.BAN in backend.upstream.wire.features and rendering.markers.call >= 0:
            return
        msg = "tool_choice 'none' cannot be honoured here; send the request without tools"
        raise Unsupported(msg, param="tool_choice")
    if rendering.force_tool_call(choice) is None:
        msg = f"tool_choice {choice.mode.value!r} cannot be honoured with this model's template"
        raise Unsupported(msg, param="tool_choice")


def _key(plan: PromptPlan, request: Request) -> bytes:
    """What a repeated request is recognised by: its meaning and settings, not its bytes."""
    settings = (
        request.sampling,
        request.n,
        request.tool_choice,
        request.constraint,
        request.thread,
    )
    return hashlib.blake2b(
        msgspec.msgpack.encode(settings), key=plan.digest, digest_size=16
    ).digest()
