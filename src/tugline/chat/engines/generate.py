"""Token ids in, token ids out: the route ``/inference/v1/generate``.

The embedded engine and vLLM (with ``--enable-scale-out``) both serve it. A reply carries the ids,
the logprob of each, and the weight versions they were drawn under.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np

from tugline.chat.engines.base import Delta, EngineRequest, Feature, Post
from tugline.chat.request import Constraint, ConstraintKind
from tugline.errors import ContextOverflow, EngineError, TuglineError
from tugline.types import Finish, LogprobMeaning, Mode, VersionSpan

NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0}
"""Said aloud, because a model's own defaults stand in for what a request leaves out."""

_TOO_LONG = re.compile(r"(?:context|model) (?:length|size|window)(?:\D{0,8}(\d+))?")
"""What every engine's refusal of a long prompt says, the window's size behind it."""


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] = []


class _Version(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] = []
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Version] | None = None


class Fault(msgspec.Struct):
    """An error inside a reply whose status was 200: streams begin before prompts are looked at."""

    code: int | str | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice] = []
    error: Fault | None = None


_decoder = msgspec.json.Decoder(_Reply)


class Generate:
    """Exact mode over ``/inference/v1/generate``."""

    mode = Mode.EXACT

    def __init__(
        self,
        name: str,
        *,
        logprob_meaning: LogprobMeaning = LogprobMeaning.PROCESSED,
        features: frozenset[Feature] = frozenset(),
    ) -> None:
        self.name = name
        self.logprob_meaning = logprob_meaning
        self.features = features

    def build_request(self, request: EngineRequest) -> Post:
        """The prompt's ready-made digits, and the sampling settings."""
        if request.prompt is None:
            msg = f"{self.name} takes token ids; the prompt was not rendered"
            raise EngineError(msg)
        rest = msgspec.json.encode(
            {
                "model": request.model,
                "sampling_params": sampling_params(request),
                "stream": request.stream,
                "request_id": request.request_id,
            }
        )
        body = request.prompt.to_json(b'{"token_ids":[', b"]," + rest[1:])
        return Post("/inference/v1/generate", body)

    def make_reader(self, request: EngineRequest) -> GenerateReader:
        """A fresh reader."""
        return GenerateReader()

    def build_abort(self, request_id: str) -> Post | None:
        """Ends the request; its reply then comes with what was sampled."""
        return Post("/abort_requests", msgspec.json.encode({"request_ids": [request_id]}))

    def parse_error(self, status: int, body: bytes, retry_after: str | None) -> TuglineError:
        """The message inside ``{"error": {...}}``, or the start of whatever came."""
        return parse_engine_error(status, body, retry_after)


class GenerateReader:
    """Reads one reply."""

    def __init__(self) -> None:
        self._count = 0

    def read_events(self, payloads: list[bytes]) -> list[Delta]:
        """Tokens of consecutive events under one version are one `Delta`."""
        ids: list[int] = []
        logprobs: list[float] = []
        done: list[Delta] = []
        version: int | None = None
        for payload in payloads:
            for choice in _read(payload).choices:
                spans: list[_Version] = choice.weight_versions or []
                late = bool(spans) and spans[0].start < self._count
                now = parse_version(spans[0].version) if spans and not late else version
                if ids and now != version:
                    done.append(_delta(ids, logprobs, version))
                    ids, logprobs = [], []
                if len(spans) > 1 or late:
                    done += [_delta(ids, logprobs, version)] if ids else []
                    ids, logprobs = [], []
                    done += self._split(choice)
                    continue
                version = now
                ids += choice.token_ids
                self._count += len(choice.token_ids)
                _more(logprobs, choice)
                if choice.finish_reason:
                    done.append(_delta(ids, logprobs, version, finish_of(choice.finish_reason)))
                    ids, logprobs = [], []
        if ids:
            done.append(_delta(ids, logprobs, version))
        return done

    def read_body(self, body: bytes) -> list[Delta]:
        """The first choice."""
        choices = _read(body).choices
        if not choices:
            msg = "the engine answered without a choice"
            raise EngineError(msg)
        return self._split(choices[0])

    def _split(self, choice: _Choice) -> list[Delta]:
        ids = np.asarray(choice.token_ids, np.int32)
        content = choice.logprobs.content if choice.logprobs is not None else []
        _check(len(ids), len(content))
        logprobs = np.asarray([item.logprob for item in content], np.float32)
        before, self._count = self._count, self._count + len(ids)
        finish = finish_of(choice.finish_reason)
        spans = choice.weight_versions or []
        if not spans or spans[0].start < before:
            told = tuple(VersionSpan(parse_version(s.version), s.start, s.end) for s in spans)
            return [Delta(ids=ids, logprobs=logprobs, spans=told, finish=finish)]
        return [
            Delta(
                ids=ids[span.start - before : span.end - before],
                logprobs=logprobs[span.start - before : span.end - before],
                version=parse_version(span.version),
                finish=finish if span is spans[-1] else None,
            )
            for span in spans
        ]


def sampling_params(request: EngineRequest) -> dict[str, Any]:
    """The settings as vLLM names them."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop_token_ids": request.stop_ids,
        "logprobs": 0,
    }
    params |= NEUTRAL | {"top_k": sampling.top_k or 0}
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    if request.banned:
        params["logit_bias"] = {str(token): -100.0 for token in request.banned}
    if request.constraint is not None:
        params["structured_outputs"] = structured(request.constraint)
    return params


def structured(constraint: Constraint) -> dict[str, Any]:
    """Constrained decoding as vLLM asks for it."""
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return {"json_object": True}
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        return {"json": msgspec.json.decode(constraint.schema)}
    return {str(constraint.kind): constraint.schema}


def parse_engine_error(status: int, body: bytes, retry_after: str | None) -> TuglineError:
    """What an engine's error body says; a prompt beyond the window is `ContextOverflow`."""
    text = _words(body)
    too_long = _TOO_LONG.search(text)
    if status in {400, 413, 422} and too_long:
        counts = [int(count) for count in re.findall(r"\d+", text)]
        window = int(too_long[1]) if too_long[1] else None
        return ContextOverflow(text, prompt=max(counts, default=None), window=window)
    wait = seconds(retry_after)
    return EngineError(f"the engine answered {status}: {text}", status=status, retry_after=wait)


def inner_error(payload: bytes, fault: Fault) -> TuglineError:
    """The same for an error in the middle of a stream."""
    return parse_engine_error(fault.code if isinstance(fault.code, int) else 500, payload, None)


def _words(body: bytes) -> str:
    """The message in ``{"error": {...}}``, in a flat body or a `detail`; else the body's start."""
    try:
        told = msgspec.json.decode(body)
        told = told.get("error") or told
        return str(told.get("message") or told.get("detail") or told)
    except (msgspec.DecodeError, AttributeError):
        return body[:200].decode("utf-8", "replace")


def finish_of(reason: str | None) -> Finish | None:
    """``length`` and ``abort`` are told apart; every other reason is the model's own stop."""
    if not reason:
        return None
    return {"length": Finish.LENGTH, "abort": Finish.ABORT}.get(reason, Finish.STOP)


def seconds(retry_after: str | None) -> float | None:
    """The value of a Retry-After header in its usual form."""
    try:
        return max(0.0, float(retry_after)) if retry_after else None
    except ValueError:
        return None


def parse_version(version: str) -> int:
    """A version as a number: ``7`` and ``v7`` are 7; an engine's first, unnamed weights are 0."""
    digits = "".join(char for char in version if char.isdigit())
    return int(digits) if digits else 0


def _read(payload: bytes) -> _Reply:
    try:
        reply = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        msg = f"the engine sent a reply that cannot be read: {error}"
        raise EngineError(msg) from error
    if reply.error is not None:
        raise inner_error(payload, reply.error)
    return reply


def _more(logprobs: list[float], choice: _Choice) -> None:
    content = choice.logprobs.content if choice.logprobs is not None else []
    _check(len(choice.token_ids), len(content))
    logprobs += [item.logprob for item in content]


def _check(ids: int, logprobs: int) -> None:
    if ids != logprobs:
        msg = (
            f"the engine sent {ids} token ids but {logprobs} logprobs; "
            "ask it for the logprob of every sampled token"
        )
        raise EngineError(msg)


def _delta(
    ids: list[int], logprobs: list[float], version: int | None, finish: Finish | None = None
) -> Delta:
    return Delta(
        ids=np.asarray(ids, np.int32),
        logprobs=np.asarray(logprobs, np.float32),
        version=version,
        finish=finish,
    )
