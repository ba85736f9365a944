"""Scripted engines and models, for tests of programs that are built on Tugline.

`ScriptedEngine` is an engine without a model: a function supplies the answer to each request.
Served by `tugline.inference.server.create_app` it behaves on the wire like the real engine, and can
inject faults; no torch is needed.

    def reply(prompt_ids, request_id):
        return Reply(tokenizer.encode("done") + [eos])

    app = create_app(ScriptedEngine(reply, vocab_size=2000), model_name="scripted")

`serve_scripted_model` serves a `ScriptedEngine` whose answers are scripts. An answer depends only
on the prompt: the turn is the number of assistant openings in it. The same prompt always gets the
same answer. A prompt that ends inside an answer, as a gateway sends it after a lost connection,
gets the rest of the answer. A request without tools, or with the marker of no script, counts as a
side call (a title, a summary).

    scripts = {"Fix the bug.": (ScriptedTurn("I look."), ScriptedTurn("Done."))}
    async with serve_scripted_model(scripts) as served:
        gateway = Gateway(served.upstream, served.rendering, folder)
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from tugline.chat.engines.generate import Embedded
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.errors import EngineError, RequestError, UsageError
from tugline.gateway.replicas import Upstream
from tugline.inference.base import CutError, EngineStats, GenerateRequest, SampledChunk, check
from tugline.inference.server import create_app
from tugline.types import Experts, Finish, Ids, Kept, Logprobs, VersionSpan
from tugline.web.serve import serve


class Reply(msgspec.Struct, frozen=True):
    """Answer to a request, and faults to inject."""

    ids: Sequence[int] = ()
    """Sampled ids; end them with a stop id for finish ``stop``, else it is ``length``."""
    logprobs: Sequence[float] | None = None
    """Logprobs of `ids`; None: all are 0."""
    delay_s: float = 0.0
    """Seconds before each token."""
    first_s: float = 0.0
    """Additional seconds before the first token."""
    status: int | None = None
    """Refuse with this HTTP status instead of answering."""
    retry_after_s: float | None = None
    """Seconds of ``Retry-After``, sent with `status`."""
    cut_after: int | None = None
    """Drop the connection after this many tokens."""
    tokens_per_chunk: int = 1
    experts: Experts | None = None
    """Experts of the prompt's and the answer's tokens but the last, ``(n, layers, top_k)``."""
    experts_at_end: bool = False
    """Report all experts in the last chunk only, also after an abort, as vLLM and SGLang do."""
    kept: Sequence[Sequence[int]] | None = None
    """Ids that each of `ids` was chosen from."""


@dataclass(eq=False)
class ScriptedEngine:
    """A `tugline.inference.base.GenerationEngine`; `calls` has every request received."""

    reply: Callable[[Ids, str], Reply]
    """Function of the prompt's ids and the request's id."""
    _: KW_ONLY
    vocab_size: int
    max_model_len: int = 8192
    eos_ids: Collection[int] = ()
    version: int = 0
    """Policy version; may be set at any time, as if new weights had been loaded."""

    def __post_init__(self) -> None:
        self.calls: list[GenerateRequest] = []
        self._running: dict[int, tuple[GenerateRequest, asyncio.Event]] = {}
        self._stats = EngineStats()

    down = False

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters; `reused_tokens` and `busy_s` stay 0."""
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
        msg = "prompt_logprobs=0 is not supported: a scripted engine has no model"
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
        ids, finish = _cut_ids(reply.ids, stops, limit)
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
            before = len(request.prompt_ids) - 1
            if aborted.is_set():
                rows = None
                if reply.experts_at_end and reply.experts is not None and start:
                    rows = reply.experts[: before + start]
                yield SampledChunk(ids[:0], logprobs[:0], (), finish=Finish.ABORT, experts=rows)
                return
            self._stats.sampled_tokens += end - start
            last = end == len(ids)
            whole = reply.experts_at_end or not start
            computed = slice(0 if whole else before + start, before + end)
            rows = None if reply.experts is None else reply.experts[computed]
            yield SampledChunk(
                ids=ids[start:end],
                logprobs=logprobs[start:end],
                versions=(VersionSpan(self.version, start, end),),
                experts=None if reply.experts_at_end and not last else rows,
                experts_start=computed.start,
                kept=None if reply.kept is None else Kept.of(reply.kept[start:end]),
                finish=finish if last else None,
                stop_id=int(ids[-1]) if last and finish == Finish.STOP else None,
            )

    async def _pass_time(self, seconds: float, aborted: asyncio.Event) -> None:
        if seconds:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(aborted.wait(), seconds)


def _cut_ids(ids: Sequence[int], stops: set[int], limit: int) -> tuple[Ids, Finish]:
    """Cut `ids` after the first stop id or at the limit. Raises `UsageError` if empty."""
    if not ids:
        raise UsageError("Reply.ids is empty, must have at least one token")
    for index, token in enumerate(ids[:limit]):
        if token in stops:
            return np.array(ids[: index + 1], np.int32), Finish.STOP
    return np.array(ids[:limit], np.int32), Finish.LENGTH


# --------------------------------------------------------------------------- a scripted model
_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>",
    "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip
_OPENING = "<|im_start|>assistant\n"
_TOOLS = "<tools>"
END_ID = 2
"""Token id that ends an answer."""
CONTEXT_WINDOW = 131_072
"""Context window in tokens."""


class ScriptedTurn(msgspec.Struct, frozen=True):
    """A scripted answer; `calls` are names of tools with their arguments."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()

    def render(self) -> str:
        """Return the answer in the format of Qwen3 models."""
        thought = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else ""
        calls = [
            f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
            for name, arguments in self.calls
        ]
        return thought + "\n".join([*([self.text] if self.text else []), *calls]) + "<|im_end|>"


Script = Sequence[ScriptedTurn | Callable[[str], ScriptedTurn]]
"""Turns in order; a function gets the text of the prompt."""

_SIDE_ANSWER = ScriptedTurn("A short title")
_AFTER_END = ScriptedTurn("There is nothing left to do.")


@dataclass(eq=False)
class ScriptedModel:
    """Answers from `scripts`, each selected by a marker in the prompt.

    `faults` apply to the first script, by number of the turn. They are replies without ids, and
    only their `delay_s` applies to repeated requests as well.
    """

    tokenizer: Tokenizer
    scripts: Mapping[str, Script]
    faults: Mapping[int, Reply] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._failed: set[int] = set()
        self._opening = self.tokenizer.encode(_OPENING)
        self.answers: dict[tuple[str, int], int] = {}
        """Number of tokens of each requested answer, by script and turn."""
        self.side_calls = 0

    @property
    def expected_tokens(self) -> int:
        """Tokens that the engine samples if it samples every answer exactly once."""
        return sum(self.answers.values())

    def reply(self, prompt: Ids, _request: str) -> Reply:
        """Return the engine's reply to a prompt."""
        text = self.tokenizer.decode(prompt.tolist())
        marker = next((marker for marker in self.scripts if marker in text), "")
        marker = marker if _TOOLS in text else ""
        turn = text.count(_OPENING) - 1
        ids = self.tokenizer.encode(self._turn(marker, turn, text).render())
        starts = (prompt == self._opening[0]).nonzero()[0]
        done = len(prompt) - int(starts[-1]) - len(self._opening) if len(starts) else 0
        """Number of tokens of the answer that are already in the prompt."""
        if marker:
            self.answers[marker, turn] = len(ids)
        first = bool(marker) and marker == next(iter(self.scripts))
        fault = self.faults.get(turn, Reply()) if first else Reply()
        if done or turn in self._failed:
            fault = Reply(delay_s=fault.delay_s)
        self._failed.add(turn)
        return msgspec.structs.replace(fault, ids=ids[done:])

    def _turn(self, marker: str, turn: int, text: str) -> ScriptedTurn:
        if not marker:
            self.side_calls += 1
            return _SIDE_ANSWER
        script = self.scripts[marker]
        if turn >= len(script):
            return _AFTER_END
        answer = script[turn]
        return answer if isinstance(answer, ScriptedTurn) else answer(text)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Inputs of a gateway for a model, and engine and model if they are scripted."""

    upstream: Upstream
    rendering: Rendering | None
    engine: ScriptedEngine | None = None
    model: ScriptedModel | None = None


@contextlib.asynccontextmanager
async def serve_scripted_model(
    scripts: Mapping[str, Script], faults: Mapping[int, Reply] | None = None
) -> AsyncIterator[ServedModel]:
    """Serve a scripted model that accepts token ids, as exact mode requires."""
    tokenizer = make_tokenizer()
    model = ScriptedModel(tokenizer, scripts, faults or {})
    engine = ScriptedEngine(
        model.reply, vocab_size=tokenizer.size, max_model_len=CONTEXT_WINDOW, eos_ids=[END_ID]
    )
    rendering = Rendering(tokenizer, "qwen3", thinking_retention="all")
    async with serve(create_app(engine, model_name="scripted")) as url:
        yield ServedModel(Upstream(url, Embedded()), rendering, engine, model)


@cache
def make_tokenizer() -> Tokenizer:
    """Train a byte-level BPE tokenizer on the text of this package, which takes 0.1 s."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    package = Path(__file__).parents[1]
    texts = (path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py")))
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, "scripted")
