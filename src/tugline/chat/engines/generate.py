"""Exact mode: token ids in, token ids out.

`TokenFormat` and `TokenReader` serve every engine that takes ids; a subclass names the route, the
fields of its body, and where its reply has the ids, the log probability of each, and the weight
versions. The route ``/inference/v1/generate``, which the embedded engine and vLLM share, is here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tugline.chat.engines.base import (
    NEUTRAL,
    Delta,
    EngineFormat,
    EngineReply,
    EngineRequest,
    Post,
    Reader,
    ReportedSpan,
    decode_reply,
    parse_finish,
    parse_spans,
)
from tugline.chat.request import Constraint, ConstraintKind
from tugline.errors import EngineError
from tugline.types import Finish, Mode, VersionSpan


class TokenFormat(EngineFormat):
    """A route that takes the prompt's ids."""

    mode = Mode.EXACT
    path: str
    prompt_field: bytes

    @abstractmethod
    def build_fields(self, request: EngineRequest) -> dict[str, Any]:
        """Build the body without its prompt."""

    def build_request(self, request: EngineRequest) -> Post:
        """Join the prompt's ready-made digits with the settings."""
        if request.prompt is None:
            msg = f"{self.name} takes token ids; the prompt was not rendered"
            raise EngineError(msg)
        fields = msgspec.json.encode(self.build_fields(request))
        before = b'{"' + self.prompt_field + b'":['
        return Post(self.path, request.prompt.to_json(before, b"]," + fields[1:]))


@dataclass(slots=True)
class GenerateChunk:
    """Tokens of one event, and how its reply goes on."""

    ids: list[int]
    logprobs: list[float]
    finish: Finish | None = None
    version: int | None = None
    spans: tuple[VersionSpan, ...] = ()
    """Override the version of the whole reply so far."""

    def extend(self, more: GenerateChunk) -> bool:
        """Append `more` if it goes on under the same version; whether it did."""
        apart = self.finish or self.spans or more.spans
        if apart or more.version not in (None, self.version):
            return False
        self.ids += more.ids
        self.logprobs += more.logprobs
        self.finish = more.finish
        return True

    def build_delta(self) -> Delta:
        """Build the immutable form."""
        return Delta(
            ids=np.asarray(self.ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            version=self.version,
            spans=self.spans,
            finish=self.finish,
        )


class TokenReader(Reader):
    """Reads token-out replies."""

    advice = "ask it for the logprob of every sampled token"

    def __init__(self) -> None:
        self.count = 0
        """Tokens read so far."""

    @abstractmethod
    def parse(self, payload: bytes) -> Iterator[GenerateChunk]:
        """Parse the tokens of one event that are new."""

    def parse_all(self, payloads: list[bytes]) -> Iterator[GenerateChunk]:
        """Parse the events of one network read."""
        for payload in payloads:
            yield from self.parse(payload)

    def read_events(self, payloads: list[bytes]) -> list[Delta]:
        """Consecutive tokens under one version are one `Delta`."""
        merged: list[GenerateChunk] = []
        for chunk in self.parse_all(payloads):
            if len(chunk.ids) != len(chunk.logprobs):
                msg = (
                    f"the engine sent {len(chunk.ids)} token ids but {len(chunk.logprobs)} "
                    f"logprobs; {self.advice}"
                )
                raise EngineError(msg)
            self.count += len(chunk.ids)
            if not (merged and merged[-1].extend(chunk)):
                merged.append(chunk)
        return [chunk.build_delta() for chunk in merged if chunk.ids or chunk.finish or chunk.spans]

    def read_body(self, body: bytes) -> list[Delta]:
        """Raises `EngineError` if there is no response in it."""
        deltas = self.read_events([body])
        if not deltas:
            msg = "the engine answered without a choice"
            raise EngineError(msg)
        return deltas


# --------------------------------------------------------------------------- /inference/v1/generate
class Generate(TokenFormat):
    """The route ``/inference/v1/generate``; replies say their weight versions."""

    path = "/inference/v1/generate"
    prompt_field = b"token_ids"

    def build_fields(self, request: EngineRequest) -> dict[str, Any]:
        """Build the body without its prompt."""
        return {
            "model": request.model,
            "sampling_params": build_sampling(request),
            "stream": request.stream,
            "request_id": request.request_id,
        }

    def make_reader(self, request: EngineRequest) -> TokenReader:
        """Make a reader."""
        return _GenerateReader()


class Embedded(Generate):
    """The embedded engine; its logprobs are of the distribution really sampled from."""

    name = "embedded"
    abort_path = "/abort_requests"


def build_sampling(request: EngineRequest) -> dict[str, Any]:
    """Build the sampling settings as vLLM names them."""
    sampling = request.sampling
    params: dict[str, Any] = NEUTRAL | {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "stop_token_ids": request.stop_ids,
        "logprobs": 0,
    }
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    if request.banned:
        params["logit_bias"] = build_bans(request.banned)
    if request.constraint is not None:
        params["structured_outputs"] = build_structured(request.constraint)
    return params


def build_bans(banned: tuple[int, ...]) -> dict[str, float]:
    """Build a bias under which the ids are never sampled."""
    return {str(token): -100.0 for token in banned}


def build_structured(constraint: Constraint) -> dict[str, Any]:
    """Build vLLM's field for constrained decoding."""
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return {"json_object": True}
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        return {"json": msgspec.json.decode(constraint.schema)}
    return {str(constraint.kind): constraint.schema}


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] = []


class _Choice(msgspec.Struct):
    token_ids: list[int] = []
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[ReportedSpan] | None = None


class _Reply(EngineReply):
    choices: list[_Choice] = msgspec.field(default_factory=list)


_decoder = msgspec.json.Decoder(_Reply)


class _GenerateReader(TokenReader):
    """Reads versions event by event (embedded), or for the whole reply at its end (vLLM)."""

    def parse(self, payload: bytes) -> Iterator[GenerateChunk]:
        for choice in decode_reply(_decoder, payload).choices[:1]:
            content = choice.logprobs.content if choice.logprobs is not None else []
            logprobs = [item.logprob for item in content]
            finish = parse_finish(choice.finish_reason)
            spans = parse_spans(choice.weight_versions)
            start = self.count
            if spans and spans[0].start < start:
                yield GenerateChunk(choice.token_ids, logprobs, finish, spans=spans)
            elif len(spans) > 1:
                for span in spans:
                    part = slice(span.start - start, span.end - start)
                    last = finish if span is spans[-1] else None
                    yield GenerateChunk(choice.token_ids[part], logprobs[part], last, span.version)
            else:
                version = spans[0].version if spans else None
                yield GenerateChunk(choice.token_ids, logprobs, finish, version)
