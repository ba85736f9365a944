"""Google's ``generateContent`` family, as Gemini CLI, pi, opencode and the SDKs speak it.

Gemini CLI takes nothing but bare ``data:`` lines in a stream: no comments, no event names, no end
marker (I4), so there is no keep-alive here. Calls may come back without their ids or with new ones;
a result finds its call by id, else by name and order. Dropped thoughts do not matter: they are not
part of what a turn is recognised by.

Field names are read in camel case and, as the original does, in snake case too, so that nothing a
client asks for is overlooked. What cannot be done here is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

import msgspec
from msgspec import Raw

from tugline.chat.dialects.base import Action, HttpRequest, ParseCache
from tugline.chat.dialects.google_config import (
    asked,
    config,
    constraint,
    shows_thoughts,
    tool_choice,
    tools,
)
from tugline.chat.dialects.google_parts import answer_parts, call_part, step
from tugline.chat.dialects.reading import bearer, decode
from tugline.chat.request import Request, ThreadInfo
from tugline.chat.response import Piece, Response, TextDelta, Usage
from tugline.errors import ContextOverflow, EngineError, RequestError, TuglineError
from tugline.types import Finish, Role, ToolCall, TraceKind

_NULL = Raw(b"null")
_ROUTE = re.compile(r"/models/(.+):(generateContent|streamGenerateContent|countTokens)")
_SSE = b"sse"
_QUIET = b"quiet"
_STATUS = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}
_FIELDS = {
    "messages": "contents",
    "tool_choice": "toolConfig.functionCallingConfig",
    "response_format": "generationConfig.responseMimeType",
    "temperature": "generationConfig.temperature",
    "top_p": "generationConfig.topP",
    "top_k": "generationConfig.topK",
}
"""What the neutral fields are called here."""
_UNAVAILABLE = 503
_INTERNAL = 500


class _Body(msgspec.Struct, rename="camel"):
    """The envelope; what it does not name is accepted and changes nothing."""

    contents: list[Raw] = []
    system_instruction: Raw = _NULL
    tools: Raw = _NULL
    generation_config: Raw = _NULL
    tool_config: Raw = _NULL
    cached_content: str | None = None
    generate_content_request: Raw = _NULL
    """What a count is asked for, in the longer of its two forms."""
    system_snake: Raw = msgspec.field(default=_NULL, name="system_instruction")
    generation_snake: Raw = msgspec.field(default=_NULL, name="generation_config")
    choice_snake: Raw = msgspec.field(default=_NULL, name="tool_config")
    cached_snake: str | None = msgspec.field(default=None, name="cached_content")


_BODY = msgspec.json.Decoder(_Body)
_ACTIONS = {
    "generateContent": Action.ANSWER,
    "streamGenerateContent": Action.ANSWER,
    "countTokens": Action.COUNT,
}


class Google:
    """``POST /v1beta/models/{model}:generateContent`` and its siblings."""

    name = "google"

    def match(self, incoming: HttpRequest) -> Action | None:
        """See `Dialect.match`; the model routes are shared, so version or key decides."""
        if incoming.method == "POST":
            route = _ROUTE.fullmatch(incoming.path)
            return _ACTIONS[route[2]] if route else None
        ours = incoming.version.startswith(("v1alpha", "v1beta")) or self._own_key(
            incoming.headers, incoming.query
        )
        if incoming.method != "GET" or not ours:
            return None
        if incoming.path == "/models":
            return Action.MODELS
        return Action.MODEL if incoming.path.startswith("/models/") else None

    def find_secret(self, headers: Mapping[str, str], query: str) -> str | None:
        """``x-goog-api-key``, ``?key=``, or a bearer token."""
        return self._own_key(headers, query) or bearer(headers)

    def _own_key(self, headers: Mapping[str, str], query: str) -> str | None:
        return headers.get("x-goog-api-key") or parse_qs(query).get("key", [None])[0]

    def parse(self, incoming: HttpRequest, cache: ParseCache) -> Request:
        """The neutral request; see `Dialect.parse`. The model stands in the path."""
        route = _ROUTE.fullmatch(incoming.path)
        model, method = (route[1], route[2]) if route else ("", "")
        counting = method == "countTokens"
        body = decode(incoming.body, _BODY, "the request body")
        if counting and body.generate_content_request != _NULL:
            body = decode(body.generate_content_request, _BODY, "generateContentRequest")
        if not body.contents:
            msg = "contents=[] must hold at least one content"
            raise RequestError(msg, param="contents")
        if body.cached_content or body.cached_snake:
            msg = "cachedContent cannot be honoured: nothing is cached here; send the whole prompt"
            raise RequestError(msg, param="cachedContent")
        system = _given(body.system_instruction, body.system_snake)
        messages = cache.fold([system, *body.contents], step)
        if messages[-1].role is Role.ASSISTANT and not counting:
            place = f"contents[{len(body.contents) - 1}]"
            msg = f"{place} begins the answer (role 'model'); the last content must be a user's"
            raise RequestError(msg, param=place)
        declared = cache.parse_tools(bytes(body.tools), tools)
        wanted = config(_given(body.generation_config, body.generation_snake))
        sse = _SSE if "sse" in parse_qs(incoming.query).get("alt", ()) else b""
        return Request(
            model=model,
            messages=messages,
            tools=declared,
            sampling=asked(wanted),
            stream=method == "streamGenerateContent",
            usage_in_stream=True,
            n=wanted.candidate_count or 1,
            tool_choice=tool_choice(_given(body.tool_config, body.choice_snake)),
            constraint=constraint(wanted),
            thread=_native(incoming.headers),
            echo=sse + (b"" if shows_thoughts(wanted) else _QUIET),
        )

    def encode(self, request: Request, answers: Sequence[Response]) -> bytes:
        """A ``GenerateContentResponse``."""
        thoughts = _QUIET not in request.echo
        candidates = [
            _candidate(i, answer_parts(answer.message, thoughts=thoughts), _finish(answer))
            for i, answer in enumerate(answers)
        ]
        head = {"modelVersion": answers[0].model, "responseId": answers[0].id}
        return msgspec.json.encode(
            {"candidates": candidates, "usageMetadata": _usage(answers), **head}
        )

    def stream(self, request: Request, response_id: str, created: int) -> ContentStream:
        """``data:`` lines with ``alt=sse``, else one JSON list that grows."""
        head = {"modelVersion": request.model, "responseId": response_id}
        return ContentStream(head, sse=_SSE in request.echo, thoughts=_QUIET not in request.echo)

    def encode_count(self, tokens: int) -> bytes:
        """The reply of ``countTokens``."""
        return msgspec.json.encode({"totalTokens": tokens})

    def encode_models(self, names: Sequence[str], window: int, created: int) -> bytes:
        """One page that holds them all."""
        return msgspec.json.encode({"models": [_model(name, window) for name in names]})

    def encode_model(self, name: str, window: int, created: int) -> bytes:
        """One ``Model`` object."""
        return msgspec.json.encode(_model(name, window))

    def encode_error(self, error: TuglineError) -> tuple[int, dict[str, str], bytes]:
        """The ``error`` object with its ``google.rpc`` status."""
        status, headers = _status(error)
        return status, headers, msgspec.json.encode(_failure(error))


class ContentStream:
    """One streamed answer; every chunk is a whole response with the parts that are new."""

    def __init__(self, head: dict[str, Any], *, sse: bool, thoughts: bool) -> None:
        self.content_type = "text/event-stream" if sse else "application/json"
        self._head, self._sse, self._thoughts = head, sse, thoughts
        self._chunks = 0
        self._called: set[int] = set()

    def start(self, usage: Usage) -> bytes:
        """Nothing: the first chunk is the first piece."""
        return b""

    def add(self, piece: Piece, index: int = 0) -> bytes:
        """A chunk with one part; nothing for thoughts that the client does not want."""
        if isinstance(piece, ToolCall):
            part = call_part(piece, first=index not in self._called)
            self._called.add(index)
        elif isinstance(piece, TextDelta):
            part = {"text": piece.text}
        elif self._thoughts:
            part = {"text": piece.text, "thought": True}
        else:
            return b""
        return self._chunk({"candidates": [_candidate(index, [part])], **self._head})

    def finish(self, answers: Sequence[Response]) -> bytes:
        """The chunk with finish reasons and usage; its empty text is what the original sends."""
        ends = [_candidate(i, [{"text": ""}], _finish(each)) for i, each in enumerate(answers)]
        last = {"candidates": ends, "usageMetadata": _usage(answers), **self._head}
        return self._chunk(last) + (b"" if self._sse else b"]")

    def fail(self, error: TuglineError) -> bytes:
        """One chunk with the error object."""
        return self._chunk(_failure(error)) + (b"" if self._sse else b"]")

    def keep_alive(self) -> bytes:
        """Nothing: Gemini CLI fails on anything that is no chunk."""
        return b""

    def _chunk(self, data: dict[str, Any]) -> bytes:
        body = msgspec.json.encode(data)
        self._chunks += 1
        if self._sse:
            return b"data: " + body + b"\n\n"
        return (b"[" if self._chunks == 1 else b",\n") + body


# --------------------------------------------------------------------------- telling
def _candidate(
    index: int, parts: list[dict[str, Any]], finish: str | None = None
) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": index}
    if finish is not None:
        candidate["finishReason"] = finish
    return candidate


def _finish(answer: Response) -> str:
    return "STOP" if answer.finish is Finish.STOP else "MAX_TOKENS"


def _usage(answers: Sequence[Response]) -> dict[str, int]:
    prompt = answers[0].usage.prompt
    sampled = sum(answer.usage.sampled for answer in answers)
    thoughts = sum(answer.usage.reasoning for answer in answers)
    told = {
        "promptTokenCount": prompt,
        "candidatesTokenCount": sampled - thoughts,
        "totalTokenCount": prompt + sampled,
    }
    if thoughts:
        told["thoughtsTokenCount"] = thoughts
    if answers[0].usage.reused:
        told["cachedContentTokenCount"] = answers[0].usage.reused
    return told


def _model(name: str, window: int) -> dict[str, Any]:
    return {
        "name": f"models/{name}",
        "baseModelId": name,
        "version": "1",
        "displayName": name,
        "inputTokenLimit": window,
        "outputTokenLimit": window,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }


def _status(error: TuglineError) -> tuple[int, dict[str, str]]:
    if isinstance(error, RequestError):
        return error.status, {}
    if not isinstance(error, EngineError) or 400 <= (error.status or 0) < 429:
        return _INTERNAL, {}
    if error.retry_after is None:
        return _UNAVAILABLE, {}
    return _UNAVAILABLE, {"retry-after": f"{error.retry_after:.0f}"}


def _failure(error: TuglineError) -> dict[str, Any]:
    status, _ = _status(error)
    text, details = str(error), []
    if isinstance(error, ContextOverflow) and error.prompt is not None:
        text = (
            f"The input token count ({error.prompt}) exceeds the maximum number of tokens "
            f"allowed ({error.window})."
        )
    if isinstance(error, RequestError) and error.param:
        violation = {"field": _FIELDS.get(error.param, error.param), "description": text}
        kind = "type.googleapis.com/google.rpc.BadRequest"
        details.append({"@type": kind, "fieldViolations": [violation]})
    if isinstance(error, EngineError) and error.retry_after is not None:
        kind = "type.googleapis.com/google.rpc.RetryInfo"
        details.append({"@type": kind, "retryDelay": f"{error.retry_after:.3f}s"})
    named = _STATUS.get(status, "INVALID_ARGUMENT")
    told: dict[str, Any] = {"code": status, "message": text, "status": named}
    return {"error": {**told, "details": details} if details else told}


# --------------------------------------------------------------------------- reading
def _given(camel: Raw, snake: Raw) -> Raw:
    return snake if camel == _NULL else camel


def _native(headers: Mapping[str, str]) -> ThreadInfo:
    """What opencode says of itself; no other client of this dialect says anything."""
    parent = headers.get("x-parent-session-id")
    return ThreadInfo(headers.get("x-session-id"), parent, TraceKind.SUBAGENT if parent else None)
