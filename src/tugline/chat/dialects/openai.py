"""What both OpenAI APIs share: the secret, models, errors, tools, tool choice and formats.

`custom` tools take free text. The model sees a function with the one string ``input``, and what it
calls is told as a custom call only if it kept to that; otherwise it is told as a function call
with the arguments as written, so that nothing of an answer is lost on its way out and back (I1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from tugline.chat.dialects.reading import need
from tugline.chat.request import ChoiceMode, Constraint, ConstraintKind, ThreadInfo, ToolChoice
from tugline.errors import (
    EngineError,
    RequestError,
    TuglineError,
    Unsupported,
)
from tugline.types import Tool, ToolCall, ToolKind, TraceKind

CUSTOM_INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""Parameters of a custom tool as the model sees it."""

_THREADS = ("session-id", "session_id", "x-session-id", "x-session-affinity")
_PARENTS = ("x-codex-parent-thread-id", "x-parent-session-id")

KEEP_ALIVE = b": keep-alive\n\n"
EVENT_STREAM = "text/event-stream"

_encode = msgspec.json.Encoder().encode


# --------------------------------------------------------------------------- models and errors
def models(names: Sequence[str], window: int, created: int) -> bytes:
    """The body of ``GET /models``."""
    return _encode({"object": "list", "data": [_model(name, window, created) for name in names]})


def model(name: str, window: int, created: int) -> bytes:
    """The body of ``GET /models/{name}``."""
    return _encode(_model(name, window, created))


def _model(name: str, window: int, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tugline",
        "max_model_len": window,
    }


def failure(
    error: TuglineError, names: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body: engine faults may be tried again, refusals may not.

    `names` says what the neutral fields are called in this API.
    """
    headers: dict[str, str] = {}
    status = 500
    if isinstance(error, RequestError):
        status = error.status
        headers["x-should-retry"] = "false"
    elif isinstance(error, EngineError):
        status = _engine_status(error)
        if error.retry_after is not None:
            headers["retry-after"] = f"{error.retry_after:.0f}"
        if error.status is not None and 400 <= error.status < 429:
            headers["x-should-retry"] = "false"
    return status, headers, _encode({"error": error_object(error, names)})


def _engine_status(error: EngineError) -> int:
    if error.status == 429:
        return 429
    return 503 if error.status == 503 or error.retry_after is not None else 502


def error_object(
    error: TuglineError, names: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """What stands under ``error``."""
    kind, param, code = "server_error", None, "server_error"
    if isinstance(error, RequestError):
        kind, param, code = "invalid_request_error", error.param, error.code
        param = names.get(param, param) if param else None
    elif isinstance(error, EngineError) and error.status == 429:
        kind, code = "rate_limit_error", "rate_limit_exceeded"
    return {"message": str(error), "type": kind, "param": param, "code": code}


# --------------------------------------------------------------------------- reading
def native(headers: Mapping[str, str]) -> ThreadInfo:
    """What codex, opencode and pi say in headers: the thread, and the one that waits for it."""
    about = _turn_metadata(headers)
    thread = headers.get("thread-id") or about.get("thread_id") or _first(headers, _THREADS)
    parent = about.get("parent_thread_id") or _first(headers, _PARENTS)
    subagent = headers.get("x-openai-subagent") or about.get("subagent_kind")
    kind = None
    if "compact" in f"{subagent} {about.get('request_kind')}":
        kind = TraceKind.COMPACTION
    elif subagent or (parent and parent != thread):
        kind = TraceKind.SUBAGENT
    return ThreadInfo(thread, parent if parent != thread else None, kind)


def _first(headers: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((headers[name] for name in names if headers.get(name)), None)


def _turn_metadata(headers: Mapping[str, str]) -> dict[str, str]:
    raw = headers.get("x-codex-turn-metadata")
    if raw is None:
        return {}
    try:
        about = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}
    if not isinstance(about, dict):
        return {}
    return {name: value for name, value in about.items() if isinstance(value, str) and value}


def refuse(body: msgspec.Struct, harmless: dict[str, tuple[Any, ...]]) -> None:
    """Raises `Unsupported` for a field that asks for anything but what changes nothing."""
    for field, values in harmless.items():
        value = getattr(body, field)
        if value is not None and value not in values:
            right = " or ".join(map(_shown, values)) or "left out"
            msg = f"{field}={value!r:.60} cannot be honoured here; it must be {right}"
            raise Unsupported(msg, param=field)


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings; empty ones stop nothing."""
    return tuple(text for text in ([stop] if isinstance(stop, str) else stop or ()) if text)


def function_tool(item: Any, where: str) -> Tool:
    """A function as both APIs describe it; `item` holds its name."""
    if item.get("strict"):
        msg = f"{where}.strict=true cannot be honoured here; make it false or leave it out"
        raise Unsupported(msg, param=f"{where}.strict")
    parameters = need(item, "parameters", dict, where) if item.get("parameters") else {}
    return Tool(_name(item, where), _text(item, "description", where), parameters)


def custom_tool(item: Any, where: str) -> Tool:
    """A tool that takes free text; a grammar for it cannot be enforced inside an answer."""
    form = item.get("format") or {"type": "text"}
    kind = need(form, "type", str, f"{where}.format")
    if kind != "text":
        msg = (
            f"{where}.format.type={kind!r} cannot be honoured here: a grammar cannot be enforced "
            "inside an answer; it must be 'text'"
        )
        raise Unsupported(msg, param=f"{where}.format.type")
    description = _text(item, "description", where)
    return Tool(_name(item, where), description, CUSTOM_INPUT, ToolKind.CUSTOM)


def _name(item: Any, where: str) -> str:
    name = need(item, "name", str, where)
    if not name:
        msg = f"{where}.name must not be empty"
        raise RequestError(msg, param=f"{where}.name")
    return name


def _text(item: Any, field: str, where: str) -> str:
    return need(item, field, str, where) if item.get(field) is not None else ""


def tool_choice(choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Any form of ``tool_choice``: a word, one named tool, or those that are allowed."""
    if choice is None:
        return ToolChoice()
    if isinstance(choice, str):
        if choice not in {"none", "auto", "required"}:
            msg = f"tool_choice={choice!r} must be none, auto, required or an object"
            raise RequestError(msg, param="tool_choice")
        return ToolChoice(ChoiceMode(choice))
    kind = need(choice, "type", str, "tool_choice")
    if kind == "allowed_tools":
        return _allowed(choice.get("allowed_tools") or choice, tools)
    if kind not in {"function", "custom", "local_shell"}:
        msg = (
            f"tool_choice.type={kind!r} cannot be honoured here; it must be function, custom, "
            "local_shell or allowed_tools"
        )
        raise Unsupported(msg, param="tool_choice.type")
    return ToolChoice(ChoiceMode.NAMED, (_chosen(choice, "tool_choice"),))


def _chosen(item: Any, where: str) -> str:
    kind = need(item, "type", str, where)
    if kind == "local_shell":
        return kind
    inner = item.get(kind)
    name = need(inner if isinstance(inner, dict) else item, "name", str, where)
    namespace = item.get("namespace")
    return f"{namespace}__{name}" if isinstance(namespace, str) else name


def _allowed(item: Any, tools: Sequence[Tool]) -> ToolChoice:
    mode = need(item, "mode", str, "tool_choice")
    if mode not in {"auto", "required"}:
        msg = f"tool_choice.mode={mode!r} must be auto or required"
        raise RequestError(msg, param="tool_choice.mode")
    listed = need(item, "tools", list, "tool_choice")
    names = tuple(_chosen(tool, f"tool_choice.tools[{i}]") for i, tool in enumerate(listed))
    everything = {tool.name for tool in tools} <= set(names)
    if everything:
        return ToolChoice(ChoiceMode(mode))
    one = mode == "required" and len(names) == 1
    return ToolChoice(ChoiceMode.NAMED if one else ChoiceMode(mode), names)


class Schema(msgspec.Struct):
    """A named JSON schema."""

    schema: msgspec.Raw = msgspec.Raw(b"")
    name: str = ""


class Format(Schema):
    """``response_format`` of Chat (the schema nested) or ``text.format`` of Responses (flat)."""

    type: str = "text"
    json_schema: Schema | None = None


def constraint(form: Format | None, field: str) -> Constraint | None:
    """What the answer's text must be; None for any text."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Constraint(ConstraintKind.JSON_OBJECT)
    if form.type != "json_schema":
        msg = f"{field}.type={form.type!r} must be text, json_object or json_schema"
        raise RequestError(msg, param=f"{field}.type")
    described = form.json_schema or form
    schema = bytes(described.schema)
    if not schema.startswith(b"{"):
        place = f"{field}.json_schema.schema" if field == "response_format" else f"{field}.schema"
        msg = f"{place} must be a JSON schema, an object"
        raise RequestError(msg, param=place)
    return Constraint(ConstraintKind.JSON_SCHEMA, schema.decode(), described.name)


# --------------------------------------------------------------------------- custom calls
def freeform(text: str) -> str:
    """Free text as the arguments the model would have written."""
    return _encode({"input": text}).decode()


def free_text(call: ToolCall) -> str | None:
    """The text of a call to a custom tool; None if the model kept to no such form."""
    try:
        arguments = msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if isinstance(arguments, dict) and arguments.keys() == {"input"}:
        text = arguments["input"]
        return text if isinstance(text, str) else None
    return None
