"""vLLM's three routes, from the best to the least.

``/inference/v1/generate`` (server flag ``--enable-scale-out``) takes ids and reports weight
versions; ``/v1/completions`` takes ids, and the versions are those announced to the gateway; the
chat route renders by itself. Log probabilities are the model's own, before temperature, unless the
server was started with ``--logprobs-mode processed_logprobs``.
"""

from typing import Any

import msgspec

from tugline.chat.engines import base
from tugline.chat.engines.chat import OPENAI_FEATURES, ChatFormat
from tugline.chat.engines.generate import Generate, TokenFormat, TokenReader, build_sampling
from tugline.errors import EngineError
from tugline.types import LogprobMeaning

_FEATURES = frozenset({base.Feature.STRUCTURED, base.Feature.BAN})


class VllmGenerate(Generate):
    """Exact mode with weight versions; the server needs ``--enable-scale-out``."""

    name = "vllm"
    features = _FEATURES
    abort_path = "/inference/v1/abort_requests"
    abort_id = "generate-tokens-{}"
    default_meaning = LogprobMeaning.RAW


class VllmChat(ChatFormat):
    """Observed mode; forced tool calls and structured output need the server's parsers.

    Aborts work where the server has its development routes.
    """

    name = "vllm"
    features = OPENAI_FEATURES
    abort_path = "/abort_requests"
    abort_id = "chatcmpl-{}"
    default_meaning = LogprobMeaning.RAW


class VllmCompletions(TokenFormat):
    """Exact mode without ``--enable-scale-out``; replies do not say their weight versions.

    Aborts work where the server has its development routes.
    """

    name = "vllm"
    features = _FEATURES
    path = "/v1/completions"
    prompt_field = b"prompt"
    abort_path = "/abort_requests"
    abort_id = "cmpl-{}-0"
    default_meaning = LogprobMeaning.RAW

    def build_fields(self, request: base.EngineRequest) -> dict[str, Any]:
        """Build the body without its prompt."""
        return {
            **build_sampling(request),
            "model": request.model,
            "stream": request.stream,
            "return_token_ids": True,
            "request_id": request.request_id,
        }

    def make_reader(self, request: base.EngineRequest) -> base.Reader[Any]:
        """Make a reader."""
        return _CompletionsReader()


class _CompletionLogprobs(msgspec.Struct):
    token_logprobs: list[float] = []


class _CompletionChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _CompletionLogprobs | None = None
    finish_reason: str | None = None


class _CompletionReply(base.EngineReply):
    choices: list[_CompletionChoice] = msgspec.field(default_factory=list)


class _CompletionsReader(TokenReader[_CompletionReply]):
    """Reads ids and logprobs; text and the echoed prompt are skipped."""

    decoder = msgspec.json.Decoder(_CompletionReply)

    def add(self, reply: _CompletionReply) -> None:
        """Add the first choice."""
        for choice in reply.choices[:1]:
            ids = choice.token_ids or []
            finish = base.parse_finish(choice.finish_reason)
            if finish is not None and not ids and not self.count:
                msg = "vllm sent no token ids; it must know `return_token_ids` (from 0.10.2 on)"
                raise EngineError(msg)
            logprobs = choice.logprobs.token_logprobs if choice.logprobs is not None else []
            self.add_tokens(ids, logprobs, finish)
