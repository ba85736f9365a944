"""An engine without a model: a function says what each request is answered with.

For tests of everything in front of an engine, and for recording warm-start data from a scripted
expert. Served by `tugline.inference.server.create_app` it behaves on the wire as the real engine
does, faults included; no torch is needed.

    def reply(prompt_ids, request_id):
        return Reply(tokenizer.encode("done") + [eos])

    app = create_app(ScriptedEngine(reply, vocab_size=2000), model_name="scripted")
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec
import numpy as np

from tugline.errors import EngineError
from tugline.inference.base import Chunk, CutError, GenerateRequest, Mode, Stats, check
from tugline.types import Finish, Ids, VersionSpan


class Reply(msgspec.Struct, frozen=True, kw_only=False):
    """What one request is answered with, and what goes wrong on the way."""

    ids: Sequence[int]
    """Sampled ids; end them with a stop id for finish ``stop``, else it is ``length``."""
    logprobs: Sequence[float] | None = None
    """As long as `ids`; None makes all of them 0."""
    delay_s: float = 0.0
    """Seconds before each token."""
    status: int | None = None
    """Refuse with this HTTP status instead of answering."""
    retry_after_s: float | None = None
    """Sent along with `status`."""
    cut_after: int | None = None
    """Drop the connection after this many tokens."""
    tokens_per_chunk: int = 1


class ScriptedEngine:
    """See `tugline.inference.base.GenerationEngine`; `calls` keeps every request it was sent."""

    def __init__(
        self,
        reply: Callable[[Ids, str], Reply],
        *,
        vocab_size: int,
        max_model_len: int = 8192,
        eos_ids: Sequence[int] = (),
        version: int = 0,
    ) -> None:
        """`reply` gets the prompt's ids and the request's id."""
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.version = version
        """May be assigned to at any time, as if new weights had arrived."""
        self.calls: list[GenerateRequest] = []
        self._reply = reply
        self._eos_ids = frozenset(eos_ids)
        self._running: dict[int, tuple[GenerateRequest, asyncio.Event]] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._frozen = False
        self._prompt = self._sampled = 0
        self._finished = dict.fromkeys(Finish, 0)

    down = False

    @property
    def paused(self) -> bool:
        """Whether new requests are held."""
        return not self._open.is_set()

    def stats(self) -> Stats:
        """A snapshot of the counters; nothing is ever reused or busy."""
        return Stats(
            running=len(self._running),
            prompt_tokens=self._prompt,
            sampled_tokens=self._sampled,
            finished=dict(self._finished),
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Answer as the script says."""
        check(request, max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        await self._open.wait()
        reply = self._reply(request.prompt_ids, request.id)
        self.calls.append(request)
        if reply.status is not None:
            msg = f"scripted fault: status {reply.status}"
            raise EngineError(msg, status=reply.status, retry_after=reply.retry_after_s)
        aborted = asyncio.Event()
        self._running[id(request)] = (request, aborted)
        self._prompt += len(request.prompt_ids)
        finish = Finish.ABORT
        try:
            async for chunk in self._play(request, reply, aborted):
                finish = chunk.finish or finish
                yield chunk
        finally:
            del self._running[id(request)]
            self._finished[finish] += 1
