"""Anthropic Messages, as used by Claude Code, pi, opencode, litellm and the SDKs.

A conversation stays one token sequence (I1) although every request repeats its history:
``cache_control`` marks are ignored; text as a string equals text as one block; Claude Code's
billing block, which differs in every request, is dropped from the system prompt; a tool's input is
written compactly, because clients echo it as an object. Order is kept: a ``system`` message stays
at its position, and so do the results and texts of a user message.

Fields that would change the response and cannot be honoured are refused by name (I4): server-side
tools, documents, context edits, and responses started by the client.
"""

import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw

from tugline.chat.dialects import anthropic_messages, base, decoding
from tugline.chat.model_call import (
    ChoiceMode,
    Constraint,
    ConstraintKind,
    Request,
    Response,
    ThreadInfo,
    ToolChoice,
    split_message,
)
from tugline.errors import ContextOverflow, RequestError, TuglineError
from tugline.types import Sampling, Tool, TraceKind
from tugline.types.task import MaxTokens, Temperature, TopK, TopP

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
_PREVIOUS = "thread.previous_message_id"


class _ToolChoiceBody(msgspec.Struct):
    type: str
    name: str = ""
    disable_parallel_tool_use: bool = False


class _Format(msgspec.Struct):
    type: str
    schema: Raw = decoding.ABSENT


class _Thinking(msgspec.Struct):
    type: str


class _OutputConfig(msgspec.Struct):
    format: _Format | None = None


class _Context(msgspec.Struct):
    edits: list[dict[str, Any]] = []


class _Thread(msgspec.Struct):
    """Request to store this conversation, or to continue a stored one."""

    type: Literal["create", "continue"]
    previous_message_id: str = ""


class _MessagesBody(msgspec.Struct):
    """Request body; other fields are accepted and ignored."""

    model: str
    messages: Annotated[list[Raw], Meta(min_length=1)]
    system: Raw = decoding.ABSENT
    tools: Raw = decoding.ABSENT
    max_tokens: MaxTokens | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: decoding.Stops | None = None
    tool_choice: _ToolChoiceBody | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None
    context_management: _Context | None = None
    mcp_servers: list[Any] | None = None
    thread: _Thread | None = None


_decoder = msgspec.json.Decoder(_MessagesBody)


class _MessagesRequest(Request, frozen=True, kw_only=True, gc=False):
    begins_thread: bool = False
    """Whether later requests may continue the conversation by the response's id."""


class Anthropic(base.Dialect):
    """``POST /v1/messages``, its token count, and the list of models."""

    name = "anthropic"
    stream_type = anthropic_messages.MessageStream
    unavailable = 529
    posts: ClassVar = {"/messages": base.Action.ANSWER, "/messages/count_tokens": base.Action.COUNT}

    def owns_models(self, request: base.HttpRequest) -> bool:
        """Whether the request has the header that all Anthropic clients send."""
        return "anthropic-version" in request.headers

    def find_secret(self, headers: Mapping[str, str], query: str) -> str | None:
        """Return ``x-api-key``, or a bearer token."""
        return headers.get("x-api-key") or base.bearer(headers)

    def carries_malformed(self, request: Request) -> bool:
        """Only in a stream, whose clients keep an input that is not JSON."""
        return request.stream

    def keep(self, request: Request, response: Response, cache: decoding.ParseCache) -> None:
        """Keep the conversation of a thread."""
        if isinstance(request, _MessagesRequest) and request.begins_thread:
            conversation = (*request.messages, response.message)
            cache.conversations[response.id] = conversation, request.tools

    def parse(self, request: base.HttpRequest, cache: decoding.ParseCache) -> Request:
        """See `Dialect.parse`."""
        counting = self.match(request) is base.Action.COUNT
        body, items = cache.decode_body(request.body, _decoder, "messages")
        _check(body)
        if body.max_tokens is None and not counting:
            msg = "max_tokens is required: the maximum number of tokens to generate"
            raise RequestError(msg, param="max_tokens")
        messages = items.fold(anthropic_messages.fold_message, [bytes(body.system)])
        tools = cache.parse_tools(body.tools, _parse_tool)
        if body.thread is not None and body.thread.type == "continue":
            before, tools = cache.recall(body.thread.previous_message_id, _PREVIOUS)
            messages = (*before, *messages)
        if not counting:
            decoding.refuse_prefill(messages)
        choice = body.tool_choice or _ToolChoiceBody("auto")
        return _MessagesRequest(
            model=body.model,
            messages=messages,
            tools=tools,
            sampling=Sampling(
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=body.top_k,
                max_tokens=body.max_tokens,
                stop=decoding.build_stops(body.stop_sequences),
            ),
            stream=bool(body.stream),
            tool_choice=_parse_choice(choice),
            parallel=not choice.disable_parallel_tool_use,
            constraint=_parse_constraint(body),
            thread=_find_thread(request.headers),
            begins_thread=body.thread is not None,
            reasoning=body.thinking is None or body.thinking.type != "disabled",
        )

    def encode(self, request: Request, responses: Sequence[Response]) -> bytes:
        """Encode a ``message`` object."""
        response = responses[0]
        pieces = split_message(response.message, reasoning=request.reasoning)
        head = anthropic_messages.build_message(response.id, response.model, response.usage)
        content = [anthropic_messages.build_block(piece) for piece in pieces]
        end = anthropic_messages.build_end(response)
        return base.encode({**head, "content": content, **end})

    def encode_models(self, names: Sequence[str], window: int, created: int) -> bytes:
        """Encode all models as one page."""
        data = [self.build_model(name, window, created) for name in names]
        first, last = (names[0], names[-1]) if names else (None, None)
        return base.encode({"data": data, "has_more": False, "first_id": first, "last_id": last})

    def build_model(self, name: str, window: int, created: int) -> dict[str, Any]:
        """Build a ``model`` object."""
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "max_input_tokens": window,
            "max_tokens": window,
        }

    def encode_error(self, error: TuglineError) -> tuple[int, dict[str, str], bytes]:
        """See `Dialect.encode_error`; the headers contain the request id as well."""
        body = self.build_error(error)
        headers = {"request-id": body["request_id"], **base.retry_headers(error)}
        return self.find_status(error), headers, base.encode(body)

    def build_error(self, error: TuglineError) -> dict[str, Any]:
        """Build the ``error`` object. Claude Code compacts on the text "prompt is too long"."""
        text = str(error)
        if isinstance(error, ContextOverflow):
            known = error.prompt is not None and error.window is not None
            counts = f"{error.prompt} tokens > {error.window} maximum" if known else text
            text = f"prompt is too long: {counts}"
        kind = _ERRORS.get(self.find_status(error), "invalid_request_error")
        fields: dict[str, Any] = {"type": kind, "message": text}
        if isinstance(error, RequestError) and error.param == _PREVIOUS:
            fields["details"] = {"error_code": "thread_not_found"}  # the SDK resends everything
        return {"type": "error", "error": fields, "request_id": f"req_{uuid.uuid4().hex}"}


# --------------------------------------------------------------------------- request fields
def _check(body: _MessagesBody) -> None:
    if body.mcp_servers:
        advice = ": MCP servers are not called from here; leave it out"
        raise decoding.unsupported(body.mcp_servers, "mcp_servers", advice)
    for index, edit in enumerate(body.context_management.edits if body.context_management else []):
        kind = edit.get("type")
        keep = edit.get("keep")
        if not (str(kind).startswith("clear_thinking_") and keep == "all"):
            path = f"context_management.edits[{index}]"
            advice = "; only clear_thinking with keep='all' keeps the prompt as it was sampled"
            raise decoding.unsupported(edit, path, advice)


def _parse_constraint(body: _MessagesBody) -> Constraint | None:
    form = body.output_config.format if body.output_config else None
    form = form or body.output_format
    if form is None:
        return None
    if form.type != "json_schema" or bytes(form.schema)[:1] != b"{":
        msg = f"output_config.format.type={form.type!r} must be 'json_schema', with a schema object"
        raise RequestError(msg, param="output_config.format")
    return Constraint(ConstraintKind.JSON_SCHEMA, bytes(form.schema).decode())


def _parse_choice(choice: _ToolChoiceBody) -> ToolChoice:
    mode = _CHOICES.get(choice.type)
    if mode is None:
        problem = f"must be one of {', '.join(_CHOICES)}"
        raise decoding.invalid(choice.type, "tool_choice.type", problem)
    return ToolChoice(mode, (choice.name,) if mode is ChoiceMode.NAMED else ())


def _parse_tool(item: Any, where: str) -> tuple[Tool, ...]:
    name = decoding.require(item, "name", str, where)
    kind = item.get("type")
    strict = item.get("strict") is True
    if isinstance(kind, str) and kind.rpartition("_")[0] in base.CLIENT_TOOLS:
        tool = base.CLIENT_TOOLS[kind.rpartition("_")[0]]
        return (msgspec.structs.replace(tool, name=name, strict=strict),)
    if kind is not None and kind != "custom":
        advice = (
            f" ({name}): it is defined by Anthropic's servers; declare a tool with an input_schema"
        )
        raise decoding.unsupported(kind, f"{where}.type", advice)
    schema = decoding.require_schema(item, "input_schema", where)
    return (Tool(name, decoding.optional_text(item, "description") or "", schema, strict=strict),)


def _find_thread(headers: Mapping[str, str]) -> ThreadInfo:
    session = headers.get("x-claude-code-session-id")
    agent = headers.get("x-claude-code-agent-id")
    if agent:
        parent = headers.get("x-claude-code-parent-agent-id") or session
        return ThreadInfo(agent, parent, TraceKind.SUBAGENT)
    return ThreadInfo(session) if session else base.session_thread(headers)
