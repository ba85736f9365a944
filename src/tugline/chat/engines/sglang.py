"""SGLang: ids over its native ``/generate``, or its chat route with the ids that it used.

Streams repeat everything from the start unless the server runs with
``--incremental-streaming-output``; a reader takes what is new of either. Its logprobs are those
after temperature, unless the server runs with ``SGLANG_RETURN_ORIGINAL_LOGPROB=1``. The chat route
tells its ids once, at the end; until then tokens are counted, and a call that breaks off before has
counts only (I2).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from tugline.chat.engines.base import Delta, EngineRequest, Feature, Post, Reader
from tugline.chat.engines.chat import chat_body, response_format
from tugline.chat.engines.chat_reading import (
    Gathered,
    Reading,
    Reply,
    logprobs_of,
    raw,
    told_by,
)
from tugline.chat.engines.generate import (
    NEUTRAL,
    Fault,
    finish_of,
    inner_error,
    parse_engine_error,
    parse_version,
)
from tugline.chat.request import ConstraintKind
from tugline.errors import EngineError, TuglineError, Unsupported
from tugline.types import Finish, LogprobMeaning, Mode, VersionSpan


class _Sglang:
    """What both routes share."""

    name = "sglang"

    def __init__(self, logprob_meaning: LogprobMeaning = LogprobMeaning.PROCESSED) -> None:
        self.logprob_meaning = logprob_meaning

    def build_abort(self, request_id: str) -> Post | None:
        """Ends the request; its reply then comes with what was sampled."""
        return Post("/abort_request", msgspec.json.encode({"rid": request_id}))

    def parse_error(self, status: int, body: bytes, retry_after: str | None) -> TuglineError:
        """The message, which is not wrapped in ``error`` everywhere."""
        return parse_engine_error(status, body, retry_after)


# --------------------------------------------------------------------------- ids in, ids out
class SglangGenerate(_Sglang):
    """Exact mode; each reply says its weight versions."""

    mode = Mode.EXACT
    features = frozenset({Feature.STRUCTURED, Feature.BAN})

    def build_request(self, request: EngineRequest) -> Post:
        """The prompt's ready-made digits, and the sampling settings."""
        if request.prompt is None:
            msg = "sglang takes token ids; the prompt was not rendered"
            raise EngineError(msg)
        rest = msgspec.json.encode(
            {
                "sampling_params": _sampling_params(request),
                "return_logprob": True,
                "rid": request.request_id,
                "stream": request.stream,
            }
        )
        return Post("/generate", request.prompt.to_json(b'{"input_ids":[', b"]," + rest[1:]))

    def make_reader(self, request: EngineRequest) -> Reader:
        """A fresh reader."""
        return _GenerateReader()


def _sampling_params(request: EngineRequest) -> dict[str, Any]:
    sampling = request.sampling
    params: dict[str, Any] = NEUTRAL | {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(request.stop_ids),
        "sampling_seed": sampling.seed,
        "skip_special_tokens": False,
    }
    if request.banned:
        params["logit_bias"] = {str(token): -100.0 for token in request.banned}
    constraint = request.constraint
    if constraint is not None and constraint.kind is ConstraintKind.JSON_OBJECT:
        params["json_schema"] = '{"type":"object"}'
    elif constraint is not None and constraint.kind is ConstraintKind.JSON_SCHEMA:
        params["json_schema"] = constraint.schema
    elif constraint is not None and constraint.kind is ConstraintKind.REGEX:
        params["regex"] = constraint.schema
    elif constraint is not None:
        msg = "sglang cannot hold an answer to a Lark grammar; a JSON schema or a regex it can"
        raise Unsupported(msg)
    return {name: value for name, value in params.items() if value is not None}


class _Pair(msgspec.Struct, array_like=True, gc=False):
    logprob: float
    id: int


class _Finish(msgspec.Struct):
    type: str


class _Version(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    completion_tokens: int = 0
    output_token_logprobs: list[_Pair] = []
    weight_version: str = ""
    weight_versions: list[_Version] | None = None


class _Event(msgspec.Struct):
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: Fault | None = None


_decoder = msgspec.json.Decoder(_Event)


class _GenerateReader:
    """Reads cumulative and incremental replies alike, by the engine's own count of tokens."""

    def __init__(self) -> None:
        self._count = 0

    def read_events(self, payloads: list[bytes]) -> list[Delta]:
        """What is new; of cumulative events only the last is looked at."""
        last = _read(payloads[-1])
        if len(last.output_token_logprobs) == last.completion_tokens:
            return self._new(last)
        return [delta for one in payloads for delta in self._new(_read(one))]

    def read_body(self, body: bytes) -> list[Delta]:
        """All of it."""
        return self._new(_read(body))

    def _new(self, meta: _Meta) -> list[Delta]:
        fresh = meta.completion_tokens - self._count
        finish = finish_of(meta.finish_reason.type) if meta.finish_reason is not None else None
        if fresh <= 0 and finish is None:
            return []
        told = meta.output_token_logprobs
        if fresh > len(told):
            msg = (
                f"sglang sampled {fresh} tokens but told {len(told)}; "
                "it must know `return_logprob` (any version of the last two years does)"
            )
            raise EngineError(msg)
        new = told[len(told) - fresh :] if fresh > 0 else []
        self._count = max(self._count, meta.completion_tokens)
        spans = meta.weight_versions or ()
        return [
            Delta(
                ids=np.asarray([pair.id for pair in new], np.int32),
                logprobs=np.asarray([pair.logprob for pair in new], np.float32),
                version=parse_version(meta.weight_version) if meta.weight_version else None,
                spans=tuple(VersionSpan(parse_version(s.version), s.start, s.end) for s in spans),
                finish=finish,
            )
        ]


def _read(payload: bytes) -> _Meta:
    try:
        event = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        msg = f"the engine sent a reply that cannot be read: {error}"
        raise EngineError(msg) from error
    if event.error is not None:
        raise inner_error(payload, event.error)
    return event.meta_info


# --------------------------------------------------------------------------- messages in
class SglangChat(_Sglang):
    """Observed mode."""

    mode = Mode.OBSERVED
    features = frozenset({Feature.STRUCTURED, Feature.IMAGES, Feature.TOOL_CHOICE})

    def build_request(self, request: EngineRequest) -> Post:
        """The conversation, and what to tell of the tokens. Raises `Unsupported` by name."""
        if request.tools and not request.parallel:
            msg = "sglang's chat route cannot hold an answer to one tool call; exact mode can"
            raise Unsupported(msg, param="parallel_tool_calls")
        body = chat_body(request, reasoning="reasoning_content")
        body |= NEUTRAL | {
            "logprobs": True,
            "return_input_ids_in_sglext": True,
            "return_output_ids_in_sglext": True,
            "rid": request.request_id,
            "skip_special_tokens": False,  # else thoughts whose marks are special never end
            "top_k": request.sampling.top_k or -1,
        }
        if request.constraint is not None:
            body["response_format"] = response_format(request.constraint)
        return Post("/v1/chat/completions", msgspec.json.encode(body))

    def make_reader(self, request: EngineRequest) -> Reader:
        """A fresh reader."""
        return _ChatReader()


class _ChatReader(Reading):
    """Text as it comes; ids, logprobs and the end when the ids are told."""

    def __init__(self) -> None:
        self._logprobs: list[float] = []
        self._finish: Finish | None = None
        self._told = False

    def take(self, reply: Reply, to: Gathered) -> None:
        """Tokens are counted until their ids come; then the count is taken back."""
        for choice in reply.choices[:1]:
            fresh = logprobs_of(choice)
            self._logprobs += fresh
            to.unreported_tokens += len(fresh)
            told_by(choice, to)
            self._finish, to.finish = to.finish or self._finish, None
        if reply.metadata is not None and reply.metadata.weight_versions:
            to.spans = tuple(
                VersionSpan(parse_version(s.version), s.start, s.end)
                for s in reply.metadata.weight_versions
            )
        if reply.sglext is not None and reply.sglext.output_ids:
            self._told = True
            to.prompt = raw(reply.sglext.input_ids)
            ids = reply.sglext.output_ids[0]
            if len(ids) == len(self._logprobs):
                to.ids, to.logprobs = ids, self._logprobs
                to.unreported_tokens -= len(ids)
            else:
                to.unreported_tokens += len(ids) - len(self._logprobs)
            to.finish = self._finish or Finish.STOP
        elif reply.usage is not None and not self._told:
            self._without_ids(to)

    def _without_ids(self, to: Gathered) -> None:
        """The reply is over. An aborted one has no ids, by SGLang's own design."""
        if self._finish is not Finish.ABORT:
            msg = "sglang sent no ids beside its text; it must know `return_output_ids_in_sglext`"
            raise EngineError(msg)
        to.finish = Finish.ABORT
