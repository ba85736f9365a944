"""Request bodies and error bodies of the embedded engine, in vLLM's shapes.

A field that this engine would have to ignore is refused with a 400 that names it: a sampling
parameter that silently does nothing makes wrong training data (I1).
"""

import re
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from starlette.responses import Response

from tugline.errors import EngineError, RequestError, TuglineError
from tugline.inference.base import GenerateRequest
from tugline.types import Logprobs

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of a request; None is the same as leaving a field out."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 and -1 both keep the whole vocabulary."""
    seed: Seed | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    """Any number asks for the sampled tokens' log probabilities, and for no others."""
    prompt_logprobs: int | None = None
    """0 asks for the prompt's own log probabilities, for which the prompt is scored separately."""
    # Accepted only with the value that has no effect; see `_NO_EFFECT`.
    n: int | None = None
    stop: str | list[str] | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_logprobs: int | None = None
    # About text, which the engine does not produce: any value is accepted.
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None


_NO_EFFECT: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "stop": ([], ""),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
}


class StreamOptions(msgspec.Struct):
    """Accepted and ignored: it concerns the layout of chunks only."""


class GenerateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/inference/v1/generate``."""

    token_ids: list[TokenId]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    request_id: str | None = None


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``/abort_requests``; no ids means all of them."""

    request_ids: list[str] = []


T = TypeVar("T", bound=msgspec.Struct)
_FIELD = re.compile(r"field `(\w+)`")
_PATH = re.compile(r"`\$\.?([^`]*)`$")


def parse(raw: bytes, kind: type[T]) -> T:
    """Decode a body. Raises `RequestError` naming the field that is wrong."""
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except msgspec.DecodeError as error:
        text = str(error)
        path, field = _PATH.search(text), _FIELD.search(text)
        names = [path[1]] if path and path[1] else []
        names += [field[1]] if field else []
        msg = f"1 validation error: {text}"
        raise RequestError(msg, param=".".join(names) or None) from error


def to_request(body: GenerateBody, *, window: int, request_id: str) -> GenerateRequest:
    """Build the engine's request. Raises `RequestError` for what this engine cannot do."""
    params = body.sampling_params
    for name, neutral in _NO_EFFECT.items():
        value = getattr(params, name)
        if value is not None and value not in neutral:
            right = " or ".join(map(repr, neutral))
            msg = f"{name}={value!r} is not served by the embedded engine, only {right}"
            raise RequestError(msg, param=name)
    return GenerateRequest(
        prompt_ids=np.array(body.token_ids, np.int32),
        max_tokens=window if params.max_tokens is None else params.max_tokens,
        temperature=1.0 if params.temperature is None else params.temperature,
        top_p=1.0 if params.top_p is None else params.top_p,
        top_k=0 if params.top_k in (None, -1) else int(params.top_k),
        seed=params.seed,
        stop_ids=tuple(params.stop_token_ids or ()),
        ignore_eos=params.ignore_eos,
        id=request_id,
        stream=body.stream,
    )


def prompt_logprobs(ids: list[int], logprobs: Logprobs) -> list[dict[str, dict[str, float]] | None]:
    """Log probabilities of a prompt in vLLM's shape; the first id has none."""
    pairs = zip(ids[1:], logprobs.tolist(), strict=True)
    return [None, *({str(token): {"logprob": value}} for token, value in pairs)]


_TYPES = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}


def error_response(error: EngineError | RequestError) -> Response:
    """Build the response for `error` in vLLM's shape, with the error's own status."""
    status = error.status or 500
    headers = {}
    if isinstance(error, EngineError) and error.retry_after is not None:
        headers["retry-after"] = f"{error.retry_after:g}"
    body = error_body(error, status)
    return Response(body, status, headers, media_type="application/json")


def error_body(error: TuglineError, status: int) -> bytes:
    """``{"error": {message, type, param, code}}``."""
    param = error.param if isinstance(error, RequestError) else None
    return msgspec.json.encode(
        {
            "error": {
                "message": str(error),
                "type": _TYPES.get(status, "InternalServerError"),
                "param": param,
                "code": status,
            }
        }
    )
