"""Anthropic Messages, as Claude Code, pi, opencode, litellm and the SDKs speak it.

What keeps a conversation one token sequence (I1) although its history is sent anew each time:
``cache_control`` marks and text given as a string or as one block mean the same; Claude Code's
billing block, which changes from request to request, is left out of the system prompt; a tool's
input is written compactly, because clients echo it as an object. Order is kept: a ``system``
message stays where it stands, and results and text of one user message follow each other as sent.

Whatever would change the answer and cannot be done here is refused by name (I4): tools that run on
the API's own servers, documents, edits of the context, answers begun by the client.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from tugline.chat.dialects.anthropic_blocks import answer_blocks, step
from tugline.chat.dialects.anthropic_stream import MessageStream, stop_reason, usage_of
from tugline.chat.dialects.base import Action, HttpRequest, ParseCache
from tugline.chat.dialects.reading import bearer, decode, need
from tugline.chat.request import (
    ChoiceMode,
    Constraint,
    ConstraintKind,
    Request,
    ThreadInfo,
    ToolChoice,
)
from tugline.chat.response import Response
from tugline.errors import ContextOverflow, EngineError, RequestError, TuglineError
from tugline.types import Role, Sampling, Tool, TraceKind

_NULL = Raw(b"null")
_QUIET = b"quiet"
"""The client wants no thinking blocks."""
_CHOICES = {
    "auto": ChoiceMode.AUTO,
    "any": ChoiceMode.REQUIRED,
    "tool": ChoiceMode.NAMED,
    "none": ChoiceMode.NONE,
}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    529: "overloaded_error",
}
_OVERLOADED = 529
_FAILED = 500


class _Choice(msgspec.Struct):
    type: str
    name: str = ""
    disable_parallel_tool_use: bool = False


class _Format(msgspec.Struct):
    type: str
    schema: Raw = _NULL


class _Thinking(msgspec.Struct):
    type: str


class _Output(msgspec.Struct):
    format: _Format | None = None


class _Context(msgspec.Struct):
    edits: list[dict[str, Any]] = []


class _Body(msgspec.Struct):
    """The envelope; what it does not name is accepted and changes nothing."""

    model: str
    messages: Annotated[list[Raw], Meta(min_length=1)]
    system: Raw = _NULL
    tools: Raw = _NULL
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    stop_sequences: list[str] | None = None
    tool_choice: _Choice | None = None
    thinking: _Thinking | None = None
    output_config: _Output | None = None
    output_format: _Format | None = None
    context_management: _Context | None = None
    mcp_servers: list[Any] | None = None


_BODY = msgspec.json.Decoder(_Body)


class Anthropic:
    """``POST /v1/messages``, its token count, and the list of models."""

    name = "anthropic"

    def match(self, incoming: HttpRequest) -> Action | None:
        """See `Dialect.match`; the model routes are shared, so their header decides."""
        if incoming.method == "POST":
            return {"/messages": Action.ANSWER, "/messages/count_tokens": Action.COUNT}.get(
                incoming.path
            )
        if incoming.method != "GET" or "anthropic-version" not in incoming.headers:
            return None
        if incoming.path == "/models":
            return Action.MODELS
        return Action.MODEL if incoming.path.startswith("/models/") else None

    def find_secret(self, headers: Mapping[str, str], query: str) -> str | None:
        """``x-api-key``, or a bearer token."""
        return headers.get("x-api-key") or bearer(headers)

    def parse(self, incoming: HttpRequest, cache: ParseCache) -> Request:
        """The neutral request; see `Dialect.parse`."""
        counting = self.match(incoming) is Action.COUNT
        body = decode(incoming.body, _BODY, "the request body")
        _refuse(body)
        if body.max_tokens is None and not counting:
            msg = "max_tokens is required: how many tokens the answer may have at most"
            raise RequestError(msg, param="max_tokens")
        messages = cache.fold([body.system, *body.messages], step)
        if messages[-1].role is Role.ASSISTANT and not counting:
            place = f"messages[{len(body.messages) - 1}]"
            msg = f"{place} begins the answer (role 'assistant'); the last message must be a user's"
            raise RequestError(msg, param=place)
        tools = cache.parse_tools(bytes(body.tools), _tools)
        choice = body.tool_choice or _Choice("auto")
        return Request(
            model=body.model,
            messages=messages,
            tools=tools,
            sampling=Sampling(
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=body.top_k,
                max_tokens=body.max_tokens,
                stop=tuple(body.stop_sequences or ()),
            ),
            stream=bool(body.stream),
            usage_in_stream=True,
            tool_choice=_choice(choice),
            parallel=not choice.disable_parallel_tool_use,
            constraint=_constraint(body),
            thread=_native(incoming.headers),
            echo=_QUIET if body.thinking and body.thinking.type == "disabled" else b"",
        )

    def encode(self, request: Request, answers: Sequence[Response]) -> bytes:
        """A ``message`` object."""
        answer = answers[0]
        return msgspec.json.encode(
            {
                "id": f"msg_{answer.id}",
                "type": "message",
                "role": "assistant",
                "model": answer.model,
                "content": answer_blocks(answer.message, thinking=request.echo != _QUIET),
                "stop_reason": stop_reason(answer),
                "stop_sequence": answer.stop,
                "usage": usage_of(answer.usage),
            }
        )

    def stream(self, request: Request, response_id: str, created: int) -> MessageStream:
        """Server-sent events from ``message_start`` to ``message_stop``."""
        return MessageStream(
            request.model,
            response_id,
            lambda error: self.encode_error(error)[2],
            thinking=request.echo != _QUIET,
        )

    def encode_count(self, tokens: int) -> bytes:
        """The reply of ``count_tokens``."""
        return msgspec.json.encode({"input_tokens": tokens})

    def encode_models(self, names: Sequence[str], window: int, created: int) -> bytes:
        """One page that holds them all."""
        data = [_model(name, window, created) for name in names]
        first, last = (names[0], names[-1]) if names else (None, None)
        return msgspec.json.encode(
            {"data": data, "has_more": False, "first_id": first, "last_id": last}
        )

    def encode_model(self, name: str, window: int, created: int) -> bytes:
        """One ``model`` object."""
        return msgspec.json.encode(_model(name, window, created))

    def encode_error(self, error: TuglineError) -> tuple[int, dict[str, str], bytes]:
        """The ``error`` object. Claude Code starts compaction on the words "prompt is too long"."""
        request_id, text = f"req_{uuid.uuid4().hex}", str(error)
        headers = {"request-id": request_id}
        status = _FAILED
        if isinstance(error, RequestError):
            status = error.status
            headers["x-should-retry"] = "false"
        elif isinstance(error, EngineError) and 400 <= (error.status or 0) < 429:
            headers["x-should-retry"] = "false"  # it would refuse the same prompt again
        elif isinstance(error, EngineError):
            status = _OVERLOADED
            if error.retry_after is not None:
                headers["retry-after"] = f"{error.retry_after:.0f}"
        if isinstance(error, ContextOverflow):
            text = f"prompt is too long: {_measured(error)}"
        kind = _ERRORS.get(status, "invalid_request_error")
        body = {
            "type": "error",
            "error": {"type": kind, "message": text},
            "request_id": request_id,
        }
        return status, headers, msgspec.json.encode(body)


def _measured(error: ContextOverflow) -> str:
    if error.prompt is None or error.window is None:
        return str(error)
    return f"{error.prompt} tokens > {error.window} maximum"


def _model(name: str, window: int, created: int) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": window,
        "max_tokens": window,
    }


# --------------------------------------------------------------------------- reading the envelope
def _refuse(body: _Body) -> None:
    if body.mcp_servers:
        msg = "mcp_servers would be called by the API's own servers; none are here, leave it out"
        raise RequestError(msg, param="mcp_servers")
    for i, edit in enumerate(body.context_management.edits if body.context_management else []):
        kind, keep = edit.get("type"), edit.get("keep")
        if not (re.match("clear_thinking_", str(kind)) and keep == "all"):
            place = f"context_management.edits[{i}]"
            msg = (
                f"{place} of type {kind!r} with keep={keep!r} would change the prompt, which is "
                "kept as it was sampled; only clear_thinking with keep='all' is accepted"
            )
            raise RequestError(msg, param=place)


def _constraint(body: _Body) -> Constraint | None:
    wanted = body.output_config.format if body.output_config else None
    wanted = wanted or body.output_format
    if wanted is None:
        return None
    if wanted.type != "json_schema" or bytes(wanted.schema)[:1] != b"{":
        msg = f"output_config.format of type {wanted.type!r} must be json_schema with a schema"
        raise RequestError(msg, param="output_config.format")
    return Constraint(ConstraintKind.JSON_SCHEMA, bytes(wanted.schema).decode())


def _choice(choice: _Choice) -> ToolChoice:
    mode = _CHOICES.get(choice.type)
    if mode is None:
        msg = f"tool_choice.type={choice.type!r} must be one of {', '.join(_CHOICES)}"
        raise RequestError(msg, param="tool_choice.type")
    return ToolChoice(mode, (choice.name,) if mode is ChoiceMode.NAMED else ())


def _tools(items: Any) -> tuple[Tool, ...]:
    if items is None:
        return ()
    if not isinstance(items, list):
        msg = f"tools={items!r:.60} must be a list"
        raise RequestError(msg, param="tools")
    return tuple(_tool(item, f"tools[{i}]") for i, item in enumerate(items))


def _tool(item: Any, where: str) -> Tool:
    name = need(item, "name", str, where)
    kind = item.get("type")
    if kind is not None and kind != "custom":
        msg = (
            f"{where} ({name}) is of type {kind!r}, which only Anthropic's own servers define; "
            "declare a custom tool with an input_schema"
        )
        raise RequestError(msg, param=f"{where}.type")
    if item.get("strict"):
        msg = f"{where} ({name}): strict=true cannot be guaranteed here; leave it out"
        raise RequestError(msg, param=f"{where}.strict")
    description = item.get("description")
    schema = need(item, "input_schema", dict, where)
    return Tool(name, description if isinstance(description, str) else "", schema)


def _native(headers: Mapping[str, str]) -> ThreadInfo:
    session = headers.get("x-claude-code-session-id")
    agent = headers.get("x-claude-code-agent-id")
    if agent:
        parent = headers.get("x-claude-code-parent-agent-id") or session
        return ThreadInfo(agent, parent, TraceKind.SUBAGENT)
    if session:
        return ThreadInfo(session)
    parent = headers.get("x-parent-session-id")
    return ThreadInfo(headers.get("x-session-id"), parent, TraceKind.SUBAGENT if parent else None)
