"""The embedded engine: vLLM's route ``/inference/v1/generate``, with a version on each chunk."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from tugline.errors import EngineError
from tugline.gateway.engines.base import Delta, Draw
from tugline.types import Finish


class _Logprob(msgspec.Struct):
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


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Chunk)


class Embedded:
    """Token ids in, token ids out, logprobs of the distribution really sampled from."""

    name = "embedded"
    generate_path = "/inference/v1/generate"

    def body(self, draw: Draw) -> bytes:
        """The request; `seed` is sent only when there is one."""
        sampling: dict[str, Any] = {
            "max_tokens": draw.sampling.max_tokens,
            "temperature": draw.sampling.temperature,
            "top_p": draw.sampling.top_p,
            "stop_token_ids": draw.stop_ids,
            "logprobs": 0,
        }
        if draw.sampling.seed is not None:
            sampling["seed"] = draw.sampling.seed
        return msgspec.json.encode(
            {
                "model": draw.model,
                "token_ids": draw.prompt.tolist(),
                "sampling_params": {k: v for k, v in sampling.items() if v is not None},
                "stream": True,
                "request_id": draw.request_id,
            }
        )

    def deltas(self, data: bytes) -> list[Delta]:
        """One `Delta` per version span in the chunk."""
        try:
            chunk = _decoder.decode(data)
        except msgspec.DecodeError as error:
            msg = f"the engine sent a chunk that cannot be read: {error}"
            raise EngineError(msg) from error
        if chunk.error is not None:
            msg = f"the engine failed: {chunk.error.get('message', chunk.error)}"
            raise EngineError(msg)
        return [delta for choice in chunk.choices for delta in _split(choice)]

    def error(self, status: int, body: bytes, retry_after: str | None) -> EngineError:
        """The message inside ``{"error": {...}}``, or the start of whatever came."""
        try:
            text = msgspec.json.decode(body)["error"]["message"]
        except (msgspec.DecodeError, KeyError, TypeError):
            text = body[:200].decode("utf-8", "replace")
        wait = float(retry_after) if retry_after and retry_after.isdigit() else None
        return EngineError(f"the engine answered {status}: {text}", status=status, retry_after=wait)


def _split(choice: _Choice) -> list[Delta]:
    ids = np.asarray(choice.token_ids, np.int32)
    content = choice.logprobs.content if choice.logprobs is not None else []
    logprobs = np.asarray([item.logprob for item in content], np.float32)
    finish = Finish(choice.finish_reason) if choice.finish_reason else None
    spans = choice.weight_versions or []
    if len(ids) and not spans:
        msg = "the engine sent tokens without weight_versions; it cannot be trained from"
        raise EngineError(msg)
    if not spans:
        return [Delta(ids, logprobs, 0, finish)]
    deltas: list[Delta] = []
    first = spans[0].start
    for span in spans:
        part = slice(span.start - first, span.end - first)
        last = finish if span is spans[-1] else None
        deltas.append(Delta(ids[part], logprobs[part], int(span.version), last))
    return deltas
