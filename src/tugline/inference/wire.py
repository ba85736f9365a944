"""What the server accepts, and how it says no: request bodies and vLLM's error shape.

A field that this engine would have to ignore is refused with a 400 that names it: a sampling
parameter that silently does nothing makes wrong training data (I1).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from starlette.responses import Response

from tugline.errors import EngineError, RequestError, TuglineError
from tugline.inference.base import GenerateRequest
from tugline.types import Ids, Logprobs

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Knobs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of all three routes; None is the same as leaving a field out."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 and -1 both keep the whole vocabulary."""
    seed: Seed | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    # Accepted with the one value that asks for nothing; see `_NEUTRAL`.
    n: int | None = None
    stop: str | list[str] | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    # About text, which the engine does not make: any value will do.
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None


_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "stop": ([], ""),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
}


class GenerateKnobs(Knobs, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of ``/inference/v1/generate``."""

    logprobs: int | None = None
    """Any number asks for the sampled tokens' log probabilities, and for no others."""


class StreamOptions(msgspec.Struct):
    """Unknown fields are about chunk layout and may be ignored."""

    include_usage: bool = False


class GenerateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/inference/v1/generate``."""

    token_ids: list[TokenId]
    sampling_params: GenerateKnobs = msgspec.field(default_factory=GenerateKnobs)
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    request_id: str | None = None


class CompletionBody(Knobs, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/completions``: one prompt, as ids or as text."""

    prompt: list[TokenId] | str
    model: str | None = None
    logprobs: int | None = None
    return_token_ids: bool = False
    request_id: str | None = None
    stream: bool = False
    user: str | None = None


class Function(msgspec.Struct):
    """A function the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class FunctionTool(msgspec.Struct):
    """An entry of `tools`."""

    function: Function
    type: str = "function"


class CalledFunction(msgspec.Struct):
    """A call that an earlier answer made; `arguments` is JSON text."""

    name: str
    arguments: str = "{}"


class CalledTool(msgspec.Struct):
    """An entry of a message's `tool_calls`."""

    function: CalledFunction
    id: str = ""
    type: str = "function"


class TextPart(msgspec.Struct):
    """A part of a message; only text parts are served."""

    type: str
    text: str = ""


class ChatMessage(msgspec.Struct):
    """A message; fields that only carry bookkeeping (`refusal`, `annotations`...) are ignored."""

    role: str
    content: str | list[TextPart] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ChatBody(Knobs, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/chat/completions``."""

    messages: list[ChatMessage]
    model: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    return_token_ids: bool = False
    request_id: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Not about sampling.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    reasoning_effort: str | None = None


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


def to_request(
    ids: Ids,
    knobs: Knobs,
    *,
    window: int,
    request_id: str,
    stream: bool,
    stops: tuple[int, ...] = (),
) -> GenerateRequest:
    """The engine's request. Raises `RequestError` for what this engine cannot do."""
    for name, neutral in _NEUTRAL.items():
        value = getattr(knobs, name, None)
        if value is not None and value not in neutral:
            right = " or ".join(map(repr, neutral)) or "leaving it out"
            msg = f"{name}={value!r} is not served by the embedded engine, only {right}"
            raise RequestError(msg, param=name)
    asked = getattr(knobs, "max_completion_tokens", None)
    asked = knobs.max_tokens if asked is None else asked
    return GenerateRequest(
        prompt_ids=ids,
        max_tokens=window if asked is None else asked,
        temperature=1.0 if knobs.temperature is None else knobs.temperature,
        top_p=1.0 if knobs.top_p is None else knobs.top_p,
        top_k=0 if knobs.top_k in (None, -1) else int(knobs.top_k),
        seed=knobs.seed,
        stop_ids=(*(knobs.stop_token_ids or ()), *stops),
        ignore_eos=knobs.ignore_eos,
        id=request_id,
        stream=stream,
    )


def ids_array(ids: list[int]) -> Ids:
    """Token ids off the wire."""
    return np.array(ids, np.int32)


def prompt_logprobs(ids: Ids, scores: Logprobs) -> list[dict[str, dict[str, float]] | None]:
    """A prompt's own log probabilities as vLLM tells them: nothing is known of the first id."""
    pairs = zip(ids[1:].tolist(), scores.tolist(), strict=True)
    return [None, *({str(one): {"logprob": value}} for one, value in pairs)]


_TYPES = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}


def error_response(error: TuglineError) -> Response:
    """`error` in vLLM's shape, with the status that it carries."""
    status = getattr(error, "status", None) or 500
    headers = {}
    if isinstance(error, EngineError) and error.retry_after is not None:
        headers["retry-after"] = f"{error.retry_after:g}"
    body = error_body(error, status)
    return Response(body, status, headers, media_type="application/json")


def error_body(error: TuglineError, status: int) -> bytes:
    """``{"error": {message, type, param, code}}``."""
    return msgspec.json.encode(
        {
            "error": {
                "message": str(error),
                "type": _TYPES.get(status, "InternalServerError"),
                "param": getattr(error, "param", None),
                "code": status,
            }
        }
    )
