"""vLLM: three ways to ask it, from the best to the least.

`/inference/v1/generate` (server flag ``--enable-scale-out``) takes ids and tells weight versions;
`/v1/completions` takes ids, and the versions are those announced to the gateway; the chat route
renders by itself. Its logprobs are the model's own, before temperature, unless it was started with
``--logprobs-mode processed_logprobs``.
"""

from __future__ import annotations

import msgspec
import numpy as np

from tugline.chat.engines.base import Delta, EngineRequest, Feature, Post, Reader
from tugline.chat.engines.chat import Chat
from tugline.chat.engines.generate import (
    Fault,
    Generate,
    finish_of,
    inner_error,
    parse_engine_error,
    sampling_params,
)
from tugline.errors import EngineError, TuglineError
from tugline.types import LogprobMeaning, Mode

_EXACT = frozenset({Feature.STRUCTURED, Feature.BAN})
_CHAT = frozenset({Feature.STRUCTURED, Feature.IMAGES, Feature.TOOL_CHOICE})


def _abort(path: str, name: str) -> Post:
    """Each route puts something of its own around the id that a request came with."""
    return Post(path, msgspec.json.encode({"request_ids": [name]}))


class VllmGenerate(Generate):
    """Exact mode with weight versions; the server needs ``--enable-scale-out``."""

    def __init__(self, logprob_meaning: LogprobMeaning = LogprobMeaning.RAW) -> None:
        super().__init__("vllm", logprob_meaning=logprob_meaning, features=_EXACT)

    def build_abort(self, request_id: str) -> Post | None:
        """Ends the request; its reply then comes with what was sampled."""
        return _abort("/inference/v1/abort_requests", f"generate-tokens-{request_id}")


class VllmChat(Chat):
    """Observed mode; forced tool calls and structured output need the server's parsers."""

    def __init__(self, logprob_meaning: LogprobMeaning = LogprobMeaning.RAW) -> None:
        super().__init__("vllm", logprob_meaning=logprob_meaning, features=_CHAT)

    def build_abort(self, request_id: str) -> Post | None:
        """Ends the request where the server has its development routes."""
        return _abort("/abort_requests", f"chatcmpl-{request_id}")


class VllmCompletions:
    """Exact mode on a server without ``--enable-scale-out``; it does not tell weight versions."""

    name = "vllm"
    mode = Mode.EXACT
    features = _EXACT

    def __init__(self, logprob_meaning: LogprobMeaning = LogprobMeaning.RAW) -> None:
        self.logprob_meaning = logprob_meaning

    def build_request(self, request: EngineRequest) -> Post:
        """The prompt's ready-made digits, and the sampling settings."""
        if request.prompt is None:
            msg = "vllm takes token ids; the prompt was not rendered"
            raise EngineError(msg)
        rest = msgspec.json.encode(
            {
                **sampling_params(request),
                "model": request.model,
                "stream": request.stream,
                "return_token_ids": True,
                "request_id": request.request_id,
            }
        )
        return Post("/v1/completions", request.prompt.to_json(b'{"prompt":[', b"]," + rest[1:]))

    def make_reader(self, request: EngineRequest) -> Reader:
        """A fresh reader."""
        return _CompletionsReader()

    def build_abort(self, request_id: str) -> Post | None:
        """Ends the request where the server has its development routes."""
        return _abort("/abort_requests", f"cmpl-{request_id}-0")

    def parse_error(self, status: int, body: bytes, retry_after: str | None) -> TuglineError:
        """The message inside ``{"error": {...}}``, or the start of whatever came."""
        return parse_engine_error(status, body, retry_after)


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float] = []


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice] = []
    error: Fault | None = None


_decoder = msgspec.json.Decoder(_Reply)


class _CompletionsReader:
    """Reads ids and logprobs; text and the echoed prompt are passed over."""

    def __init__(self) -> None:
        self._count = 0

    def read_events(self, payloads: list[bytes]) -> list[Delta]:
        """One `Delta` for all tokens of a read."""
        ids: list[int] = []
        logprobs: list[float] = []
        finish = None
        for payload in payloads:
            for choice in _read(payload).choices[:1]:
                ids += choice.token_ids or []
                logprobs += choice.logprobs.token_logprobs if choice.logprobs is not None else []
                finish = finish_of(choice.finish_reason) or finish
        self._count += len(ids)
        if finish is not None and not self._count:
            msg = "vllm sent no token ids; it must know `return_token_ids` (from 0.10.2 on)"
            raise EngineError(msg)
        if not ids and finish is None:
            return []
        return [
            Delta(
                ids=np.asarray(ids, np.int32),
                logprobs=np.asarray(logprobs, np.float32),
                finish=finish,
            )
        ]

    def read_body(self, body: bytes) -> list[Delta]:
        """The first choice."""
        return self.read_events([body])


def _read(payload: bytes) -> _Reply:
    try:
        reply = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        msg = f"the engine sent a reply that cannot be read: {error}"
        raise EngineError(msg) from error
    if reply.error is not None:
        raise inner_error(payload, reply.error)
    return reply
