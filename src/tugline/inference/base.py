"""Interface between a token generator and its HTTP server.

`tugline.inference.engine.Engine` (a model) and `tugline.testing.ScriptedEngine` (a
function) implement it, so `tugline.inference.server.create_app` serves both.

Invariant I1: prompts and answers are token ids; each sampled id has its log probability and the
policy version that it was sampled under. This module does not import torch.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec
import numpy as np

from tugline.errors import ContextOverflow, EngineError, RequestError
from tugline.types import Experts, Finish, Ids, Kept, Logprobs, VersionSpan
from tugline.types.task import MIN_TEMPERATURE


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and its sampling options."""

    prompt_ids: Ids
    max_tokens: int
    """Maximum tokens to sample; the window may end the answer earlier, with finish ``length``."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    """Least probability relative to the likeliest token's, at `temperature`; 0 keeps all."""
    seed: int | None = None
    """Equal seed, prompt and weights give equal tokens in any batch; None: a random seed."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the answer, besides the model's own."""
    ignore_eos: bool = False
    id: str = ""
    """Identifies the request to `GenerationEngine.abort`."""
    stream: bool = True
    """False: no chunk before the end, with less work for the event loop."""
    stream_interval: int = 1
    """Minimum tokens of a chunk; the first chunk has one, and the last the rest."""


class SampledChunk(msgspec.Struct, frozen=True):
    """Tokens sampled since the previous chunk; the last chunk has a finish reason."""

    ids: Ids
    logprobs: Logprobs
    """Log probabilities in the distribution that the tokens were sampled from."""
    versions: tuple[VersionSpan, ...]
    """Policy versions of these tokens; positions count from the answer's first token."""
    experts: Experts | None = None
    """Experts of the tokens computed since the previous chunk; None if there are none.

    The first chunk has those of the whole prompt; each has none for its last token, which is
    computed with the next one. After new weights, a chunk has those of the whole context again."""
    experts_start: int = 0
    """Position of the first of these tokens, from the prompt's first."""
    kept: Kept | None = None
    """Ids that each token was chosen from; None if sampling was not truncated."""
    finish: Finish | None = None
    stop_id: int | None = None
    """The id that ended the answer when `finish` is ``stop``; it is the last of `ids`."""


class EngineStats(msgspec.Struct, kw_only=True):
    """Counters since the start, and current numbers of requests."""

    running: int = 0
    waiting: int = 0
    parked: int = 0
    """Finished sequences whose KV is kept for a later turn."""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Prompt tokens that were not computed, because their KV was cached."""
    sampled_tokens: int = 0
    busy_s: float = 0.0
    """Seconds spent in forward passes and sampling."""
    steps: int = 0
    """Forward passes."""
    finished: dict[Finish, int] = msgspec.field(default_factory=lambda: dict.fromkeys(Finish, 0))
    """Answers by finish reason."""


class GenerationEngine(Protocol):
    """The interface that `create_app` serves."""

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of prompt and answer together."""

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""

    @property
    def down(self) -> bool:
        """Whether the engine has failed or was stopped."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[SampledChunk, None]:
        """Sample an answer; closing the iterator aborts it.

        Raises `RequestError` before the first chunk.
        """

    async def score(self, ids: Ids, temperature: float) -> Logprobs:
        """Return the log probability of each id but the first, shape ``(n - 1,)``.

        Raises `RequestError` if the engine has no model.
        """

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters."""

    async def abort(self, ids: Sequence[str]) -> int:
        """Abort requests by id, or all if `ids` is empty, and return their number."""


def join(chunks: Sequence[SampledChunk]) -> SampledChunk:
    """Concatenate the chunks of an answer.

    Its experts are those under the latest weights, which computed its whole context.
    """
    spans: list[VersionSpan] = []
    for span in (span for chunk in chunks for span in chunk.versions):
        if spans and spans[-1].version == span.version:
            spans[-1] = VersionSpan(span.version, spans[-1].start, span.end)
        else:
            spans.append(span)
    rows: list[Experts] = []
    for chunk in chunks:
        if chunk.experts is not None:
            rows = [chunk.experts] if chunk.experts_start == 0 else [*rows, chunk.experts]
    kept = [ids for chunk in chunks for ids in chunk.kept or ()]
    return msgspec.structs.replace(
        chunks[-1],
        experts=np.concatenate(rows) if rows else None,
        experts_start=0,
        kept=Kept.of(kept) if chunks[0].kept is not None else None,
        ids=np.concatenate([chunk.ids for chunk in chunks]),
        logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
        versions=tuple(spans),
    )


def check(request: GenerateRequest, *, max_model_len: int, vocab_size: int) -> None:
    """Raise a `RequestError` that names the first invalid field of `request`."""
    _check_prompt(request.prompt_ids, max_model_len, vocab_size)
    if not 1 <= request.max_tokens <= max_model_len:
        rule = f"must be between 1 and max_model_len={max_model_len}"
        _reject("max_tokens", request.max_tokens, rule)
    temperature = request.temperature
    if not (temperature == 0 or MIN_TEMPERATURE <= temperature < np.inf):
        _reject("temperature", temperature, f"must be 0 or at least {MIN_TEMPERATURE}")
    if not 0 < request.top_p <= 1:
        _reject("top_p", request.top_p, "must be above 0 and at most 1")
    if not 0 <= request.min_p <= 1:
        _reject("min_p", request.min_p, "must be between 0 and 1")
    if request.top_k < 0:
        _reject("top_k", request.top_k, "must be 0 (all tokens) or positive")
    for stop in request.stop_ids:
        if not 0 <= stop < vocab_size:
            _reject("stop_token_ids", stop, f"must contain ids from 0 to {vocab_size - 1}")


def _check_prompt(ids: Ids, max_model_len: int, vocab_size: int) -> None:
    if len(ids) == 0:
        _reject("token_ids", "[]", "must contain at least one token")
    if len(ids) + 1 > max_model_len:
        msg = (
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
            f"contains {len(ids)} input tokens, which leaves no room for an answer. Please reduce "
            f"the length of the input prompt. (parameter=input_tokens, value={len(ids)})"
        )
        raise ContextOverflow(msg, param="input_tokens")
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        rule = f"is out of vocabulary: ids go from 0 to {vocab_size - 1}"
        _reject("token_ids", int(wrong[0]), rule)


def _reject(field: str, value: object, rule: str) -> None:
    raise RequestError(f"{field}={value} {rule}", param=field)


class CutError(EngineError):
    """Scripted fault: drop the connection in the middle of the answer."""
