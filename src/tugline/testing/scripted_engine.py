"""An engine without a model: a function supplies the answer to each request.

For tests of everything in front of an engine, and for recording scripted sessions. Served by
`tugline.inference.server.create_app` it behaves on the wire like the real engine, and can inject
faults; no torch is needed.

    def reply(prompt_ids, request_id):
        return Reply(tokenizer.encode("done") + [eos])

    app = create_app(ScriptedEngine(reply, vocab_size=2000), model_name="scripted")
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass

import msgspec
import numpy as np

from tugline.errors import EngineError, RequestError, UsageError
from tugline.inference.base import CutError, EngineStats, GenerateRequest, SampledChunk, check
from tugline.types import Finish, Ids, Logprobs, VersionSpan


class Reply(msgspec.Struct, frozen=True):
    """The answer to one request, and the faults on the way."""

    ids: Sequence[int] = ()
    """Sampled ids; end them with a stop id for finish ``stop``, else it is ``length``."""
    logprobs: Sequence[float] | None = None
    """As long as `ids`; None makes all of them 0."""
    delay_s: float = 0.0
    """Seconds before each token."""
    first_s: float = 0.0
    """Seconds before the first, on top of that."""
    status: int | None = None
    """Refuse with this HTTP status instead of answering."""
    retry_after_s: float | None = None
    """Sent along with `status`."""
    cut_after: int | None = None
    """Drop the connection after this many tokens."""
    tokens_per_chunk: int = 1


@dataclass(eq=False)
class ScriptedEngine:
    """See `tugline.inference.base.GenerationEngine`; `calls` has every request received."""

    reply: Callable[[Ids, str], Reply]
    """It gets the prompt's ids and the request's id."""
    _: KW_ONLY
    vocab_size: int
    max_model_len: int = 8192
    eos_ids: Collection[int] = ()
    version: int = 0
    """May be assigned to at any time, as if new weights had arrived."""

    def __post_init__(self) -> None:
        self.calls: list[GenerateRequest] = []
        self._running: dict[int, tuple[GenerateRequest, asyncio.Event]] = {}
        self._stats = EngineStats()

    down = False

    def stats(self) -> EngineStats:
        """A snapshot of the counters; nothing is ever reused or busy."""
        finished = dict(self._stats.finished)
        return msgspec.structs.replace(self._stats, running=len(self._running), finished=finished)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[SampledChunk, None]:
        """Answer according to the script."""
        check(request, max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        reply = self.reply(request.prompt_ids, request.id)
        self.calls.append(request)
        if reply.status is not None:
            msg = f"scripted fault: status {reply.status}"
            raise EngineError(msg, status=reply.status, retry_after=reply.retry_after_s)
        aborted = asyncio.Event()
        self._running[id(request)] = (request, aborted)
        self._stats.prompt_tokens += len(request.prompt_ids)
        finish = Finish.ABORT
        try:
            async with contextlib.aclosing(self._play(request, reply, aborted)) as chunks:
                async for chunk in chunks:
                    finish = chunk.finish or finish
                    yield chunk
        finally:
            del self._running[id(request)]
            self._stats.finished[finish] += 1

    async def score(self, ids: Ids, temperature: float) -> Logprobs:
        """Refuse: there is no model."""
        msg = "prompt_logprobs=0 cannot be served: a scripted engine has no model to ask"
        raise RequestError(msg, param="prompt_logprobs")

    async def abort(self, ids: Sequence[str]) -> int:
        """End running requests by id, all when `ids` is empty."""
        chosen = [
            aborted for request, aborted in self._running.values() if not ids or request.id in ids
        ]
        for aborted in chosen:
            aborted.set()
        return len(chosen)

    async def _play(
        self, request: GenerateRequest, reply: Reply, aborted: asyncio.Event
    ) -> AsyncGenerator[SampledChunk, None]:
        stops = {*request.stop_ids, *(() if request.ignore_eos else self.eos_ids)}
        limit = min(request.max_tokens, self.max_model_len - len(request.prompt_ids))
        ids, finish = _ending(reply.ids, stops, limit)
        logprobs = np.zeros(len(ids), np.float32)
        if reply.logprobs is not None:
            logprobs[:] = reply.logprobs[: len(ids)]
        size = reply.tokens_per_chunk
        await self._pass_time(reply.first_s, aborted)
        for start in range(0, len(ids), size):
            end = min(start + size, len(ids))
            await self._pass_time(reply.delay_s * (end - start), aborted)
            if reply.cut_after is not None and end > reply.cut_after:
                raise CutError(f"scripted fault: cut after {reply.cut_after} tokens")
            if aborted.is_set():
                yield SampledChunk(ids[:0], logprobs[:0], (), Finish.ABORT)
                return
            self._stats.sampled_tokens += end - start
            last = end == len(ids)
            yield SampledChunk(
                ids=ids[start:end],
                logprobs=logprobs[start:end],
                versions=(VersionSpan(self.version, start, end),),
                finish=finish if last else None,
                stop_id=int(ids[-1]) if last and finish == Finish.STOP else None,
            )

    async def _pass_time(self, seconds: float, aborted: asyncio.Event) -> None:
        if seconds:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(aborted.wait(), seconds)


def _ending(ids: Sequence[int], stops: set[int], limit: int) -> tuple[Ids, Finish]:
    """`ids` up to the first stop or the limit. Raises `UsageError` for an empty script."""
    if not ids:
        raise UsageError("Reply.ids is empty: a model always samples at least one token")
    for index, token in enumerate(ids[:limit]):
        if token in stops:
            return np.array(ids[: index + 1], np.int32), Finish.STOP
    return np.array(ids[:limit], np.int32), Finish.LENGTH
