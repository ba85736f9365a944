"""Google's ``generateContent`` API, as used by Gemini CLI, pi, opencode and the SDKs.

Gemini CLI accepts only bare ``data:`` lines in a stream: no comments, event names or end marker
(I4), so there is no keep-alive.

Field names are read in camel case and in snake case, as in the original API, so that no field is
ignored. Fields that cannot be honoured are refused by name.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar
from urllib.parse import parse_qs

import msgspec
from msgspec import Meta, Raw

from tugline.chat.dialects import base, decoding, google_messages
from tugline.chat.model_call import (
    Constraint,
    ConstraintKind,
    Piece,
    ReasoningDelta,
    Request,
    Response,
    Usage,
    sum_usage,
)
from tugline.errors import ContextOverflow, EngineError, RequestError, TuglineError
from tugline.types import Finish, Sampling, ToolCall
from tugline.types.task import INT32, MaxTokens, Temperature, TopP
from tugline.web.sse import encode_event

_ROUTE = re.compile(r"/models/(.+):(generateContent|streamGenerateContent|countTokens)")
_STATUS = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}
_REFUSED = (
    "presencePenalty", "frequencyPenalty", "responseLogprobs", "logprobs", "speechConfig",
    "imageConfig",
)  # fmt: skip
"""Fields of the generation config that change the response."""
_CONFIG = "generationConfig"


class _GenerateContentBody(msgspec.Struct, rename="camel"):
    """Request body; other fields are accepted and ignored."""

    contents: list[Raw] = []
    system_instruction: Raw = decoding.ABSENT
    tools: Raw = decoding.ABSENT
    generation_config: Raw = decoding.ABSENT
    tool_config: Raw = decoding.ABSENT
    cached_content: str | None = None
    generate_content_request: Raw = decoding.ABSENT
    """The whole request, in the long form of ``countTokens``."""
    system_snake: Raw = msgspec.field(default=decoding.ABSENT, name="system_instruction")
    generation_snake: Raw = msgspec.field(default=decoding.ABSENT, name="generation_config")
    choice_snake: Raw = msgspec.field(default=decoding.ABSENT, name="tool_config")
    cached_snake: str | None = msgspec.field(default=None, name="cached_content")


class _Config(msgspec.Struct, rename="camel"):
    """``generationConfig``; other fields are accepted and ignored."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[float, Meta(ge=0, le=INT32)] | None = None
    max_output_tokens: MaxTokens | None = None
    stop_sequences: decoding.Stops | None = None
    candidate_count: Annotated[int, Meta(ge=1, le=8)] | None = None
    seed: decoding.Seed | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: Any = None
    response_modalities: list[str] | None = None
    thinking_config: dict[str, Any] | None = None


_body = msgspec.json.Decoder(_GenerateContentBody)
_config = msgspec.json.Decoder(_Config)


class ContentRequest(Request, frozen=True, kw_only=True, gc=False):
    """A request for content."""

    sse: bool = False
    """Whether a streamed response is sent as events, else as one JSON list."""


class ContentStream(base.Stream):
    """Encoder of a streamed response; each chunk is a whole response object with the new parts."""

    request: ContentRequest

    def __post_init__(self) -> None:
        self._head = {"modelVersion": self.request.model, "responseId": self.response_id}
        self._chunks = 0
        self._called: set[int] = set()
        """Indices of responses with a call."""

    @property
    def content_type(self) -> str:
        """Content type: events with ``alt=sse``, else one streamed JSON list."""
        return super().content_type if self.request.sse else "application/json"

    def start(self, usage: Usage) -> bytes:
        """Return nothing: the first chunk is the first piece."""
        return b""

    def add(self, piece: Piece, index: int = 0) -> bytes:
        """Encode a chunk with one part; nothing for thoughts that the client excludes."""
        if isinstance(piece, ReasoningDelta) and not self.request.reasoning:
            return b""
        part = google_messages.build_part(piece, signed=index not in self._called)
        self._called |= {index} if isinstance(piece, ToolCall) else set()
        return self._chunk({"candidates": [_build_candidate(index, [part])], **self._head})

    def finish(self, responses: Sequence[Response]) -> bytes:
        """Encode the chunk with finish reasons, usage and an empty text, as in the original."""
        ends = [_build_candidate(i, [{"text": ""}], last) for i, last in enumerate(responses)]
        usage = _build_usage(responses)
        return self._last_chunk({"candidates": ends, "usageMetadata": usage, **self._head})

    def fail(self, error: TuglineError) -> bytes:
        """Encode the bare error object: Gemini CLI treats one in a ``data:`` line as the end."""
        body = self.dialect.build_error(error)
        return base.encode(body) + b"\n\n" if self.request.sse else self._last_chunk(body)

    def keep_alive(self) -> bytes:
        """Return nothing: Gemini CLI fails on anything but chunks."""
        return b""

    def _chunk(self, data: dict[str, Any]) -> bytes:
        body = base.encode(data)
        self._chunks += 1
        if self.request.sse:
            return encode_event(body)
        return (b"[" if self._chunks == 1 else b",\n") + body

    def _last_chunk(self, data: dict[str, Any]) -> bytes:
        return self._chunk(data) + (b"" if self.request.sse else b"]")


class Google(base.Dialect):
    """``POST /v1beta/models/{model}:generateContent`` and related routes."""

    name = "google"
    stream_type = ContentStream
    fields: ClassVar = {
        "messages": "contents",
        "tool_choice": "toolConfig.functionCallingConfig",
        "response_format": "generationConfig.responseMimeType",
        "temperature": "generationConfig.temperature",
        "top_p": "generationConfig.topP",
        "top_k": "generationConfig.topK",
    }

    def match(self, request: base.HttpRequest) -> base.Action | None:
        """See `Dialect.match`; the model is part of the route."""
        if request.method != "POST":
            return super().match(request)
        route = _ROUTE.fullmatch(request.path)
        if route is None:
            return None
        return base.Action.COUNT if route[2] == "countTokens" else base.Action.ANSWER

    def owns_models(self, request: base.HttpRequest) -> bool:
        """Whether the API version or the position of the key is Google's."""
        own = request.version.startswith(("v1alpha", "v1beta"))
        return own or self._find_key(request.headers, request.query) is not None

    def find_secret(self, headers: Mapping[str, str], query: str) -> str | None:
        """Return ``x-goog-api-key``, ``?key=``, or a bearer token."""
        return self._find_key(headers, query) or base.bearer(headers)

    def _find_key(self, headers: Mapping[str, str], query: str) -> str | None:
        return headers.get("x-goog-api-key") or parse_qs(query).get("key", [None])[0]

    def parse(self, request: base.HttpRequest, cache: decoding.ParseCache) -> Request:
        """See `Dialect.parse`."""
        model, _, method = request.path.removeprefix("/models/").rpartition(":")
        body, items = cache.decode_body(request.body, _body, "contents")
        counted: list[bytes] = []
        if method == "countTokens" and body.generate_content_request != decoding.ABSENT:
            body = decoding.decode(body.generate_content_request, _body, "generateContentRequest")
            items = decoding.Items()
            counted = [bytes(content) for content in body.contents]
        if not (items or counted):
            raise RequestError("contents=[] must contain at least one item", param="contents")
        cached = body.cached_content or body.cached_snake
        if cached:
            advice = ": prompts are not cached by name; send the whole prompt"
            raise decoding.unsupported(cached, "cachedContent", advice)
        system = _either(body.system_instruction, body.system_snake)
        messages = items.fold(google_messages.fold_content, [bytes(system)], counted)
        if method != "countTokens":  # the API's models continue a model's turn, or refuse it
            decoding.refuse_prefill(messages)
        config = _parse_config(_either(body.generation_config, body.generation_snake))
        tool_config = _either(body.tool_config, body.choice_snake)
        choice = decoding.decode(tool_config, decoding.ANY, "toolConfig")
        thinking = google_messages.to_camel(config.thinking_config or {})
        return ContentRequest(
            model=model,
            messages=messages,
            tools=cache.parse_tools(body.tools, google_messages.parse_tools),
            sampling=Sampling(
                temperature=config.temperature,
                top_p=config.top_p,
                top_k=_parse_top_k(config.top_k),
                max_tokens=config.max_output_tokens,
                seed=decoding.fold_seed(config.seed),
                stop=decoding.build_stops(config.stop_sequences),
            ),
            stream=method == "streamGenerateContent",
            n=config.candidate_count or 1,
            tool_choice=google_messages.parse_tool_choice(choice),
            constraint=_parse_constraint(config),
            thread=base.session_thread(request.headers),
            reasoning=thinking.get("includeThoughts") is not False,
            sse="sse" in parse_qs(request.query).get("alt", ()),
        )

    def encode(self, request: Request, responses: Sequence[Response]) -> bytes:
        """Encode a ``GenerateContentResponse``."""
        candidates = [
            _build_candidate(index, google_messages.build_parts(request, reply.message), reply)
            for index, reply in enumerate(responses)
        ]
        head = {"modelVersion": responses[0].model, "responseId": responses[0].id}
        usage = _build_usage(responses)
        return base.encode({"candidates": candidates, "usageMetadata": usage, **head})

    def encode_count(self, tokens: int) -> bytes:
        """Encode the reply of ``countTokens``."""
        return base.encode({"totalTokens": tokens})

    def encode_models(self, names: Sequence[str], window: int, created: int) -> bytes:
        """Encode all models as one page."""
        return base.encode({"models": [self.build_model(name, window, created) for name in names]})

    def build_model(self, name: str, window: int, created: int) -> dict[str, Any]:
        """Build a ``Model`` object."""
        return {
            "name": f"models/{name}",
            "baseModelId": name,
            "version": "1",
            "displayName": name,
            "inputTokenLimit": window,
            "outputTokenLimit": window,
            "supportedGenerationMethods": ["generateContent", "countTokens"],
        }

    def build_error(self, error: TuglineError) -> dict[str, Any]:
        """Build the ``error`` object with its ``google.rpc`` status."""
        status = self.find_status(error)
        field = self.name_field(error)
        text = str(error)
        details = []
        if isinstance(error, ContextOverflow) and error.prompt is not None:
            text = (
                f"The input token count ({error.prompt}) exceeds the maximum number of tokens "
                f"allowed ({error.window})."
            )
        if field is not None:
            kind = "type.googleapis.com/google.rpc.BadRequest"
            violations = [{"field": field, "description": text}]
            details.append({"@type": kind, "fieldViolations": violations})
        if isinstance(error, EngineError) and error.retry_after is not None:
            kind = "type.googleapis.com/google.rpc.RetryInfo"
            details.append({"@type": kind, "retryDelay": f"{error.retry_after:.3f}s"})
        name = _STATUS.get(status, "INVALID_ARGUMENT")
        fields = {"code": status, "message": text, "status": name}
        return {"error": {**fields, "details": details} if details else fields}


# --------------------------------------------------------------------------- responses
def _build_candidate(
    index: int, parts: list[dict[str, Any]], ended: Response | None = None
) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": index}
    if ended is not None:
        candidate["finishReason"] = "STOP" if ended.finish is Finish.STOP else "MAX_TOKENS"
    return candidate


def _build_usage(responses: Sequence[Response]) -> dict[str, int]:
    total = sum_usage(responses)
    usage = {
        "promptTokenCount": total.prompt,
        "candidatesTokenCount": total.sampled - total.reasoning,
        "totalTokenCount": total.prompt + total.sampled,
    }
    optional = {"thoughtsTokenCount": total.reasoning, "cachedContentTokenCount": total.reused}
    return usage | {name: count for name, count in optional.items() if count}


# --------------------------------------------------------------------------- requests
def _either(camel: Raw, snake: Raw) -> Raw:
    return snake if camel == decoding.ABSENT else camel


def _parse_config(raw: Raw) -> _Config:
    """Parse the generation config. Raises `Unsupported` for fields that cannot be honoured."""
    given = decoding.decode(raw, decoding.ANY, _CONFIG)
    if given is None:
        return _Config()
    fields = google_messages.to_camel(decoding.require_object(given, _CONFIG))
    config = decoding.decode(base.encode(fields), _config, _CONFIG, f"{_CONFIG}.")
    modalities = [name for name in config.response_modalities or () if name != "TEXT"]
    refused = {name: fields.get(name) for name in _REFUSED} | {"responseModalities": modalities}
    for name, value in refused.items():
        if value:
            raise decoding.unsupported(value, f"{_CONFIG}.{name}", "; leave it out")
    return config


def _parse_top_k(value: float | None) -> int | None:
    """Parse a whole number, which clients may write as ``40.0``."""
    if value is not None and not value.is_integer():
        raise decoding.invalid(value, f"{_CONFIG}.topK", "must be a whole number")
    return None if value is None else int(value)


def _parse_constraint(config: _Config) -> Constraint | None:
    """Parse the structured output: any JSON, or JSON of a schema."""
    media = config.response_mime_type or "text/plain"
    schema = config.response_json_schema
    if schema is None and config.response_schema is not None:
        schema = google_messages.to_json_schema(config.response_schema)
    if media == "application/json":
        if schema is None:
            return Constraint(ConstraintKind.JSON_OBJECT)
        return Constraint(ConstraintKind.JSON_SCHEMA, base.encode(schema).decode())
    if media != "text/plain" or schema is not None:
        problem = (
            "must be 'text/plain' or 'application/json'; a response schema requires the latter"
        )
        raise decoding.invalid(media, f"{_CONFIG}.responseMimeType", problem)
    return None
