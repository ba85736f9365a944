"""OpenAI Chat Completions, as pi, qwen-code, opencode, mini-swe-agent and the SDKs speak it.

Unknown fields are kept with the raw request and change nothing; fields that would change what is
sampled and that exact mode cannot honour are refused by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tugline.errors import BudgetExhausted, ContextOverflow, EngineError, RequestError, TuglineError
from tugline.gateway.dialects.base import (
    Answer,
    Piece,
    ReasoningDelta,
    Request,
    TextDelta,
)
from tugline.types import Finish, Message, Role, Sampling, Tool, ToolCall

_BAD_GATEWAY = 502
_OVERLOADED = 503

_MUST_BE: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([], ""),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "audio": (),
    "prediction": (),
}
"""Fields that change what is sampled, and the values that ask for nothing unusual."""


class OpenAIChat:
    """``POST /v1/chat/completions``."""

    name = "openai_chat"

    def key(self, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """The bearer token."""
        for name, value in headers:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                return value[7:].decode("latin-1").strip()
        return None

    def parse(self, body: bytes) -> Request:
        """The neutral request; see `Dialect.parse`."""
        try:
            raw = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            msg = f"the request body is not valid JSON: {error}"
            raise RequestError(msg) from error
        if not isinstance(raw, dict):
            msg = f"the request body must be a JSON object, not {type(raw).__name__}"
            raise RequestError(msg)
        _refuse(raw)
        messages = _list(raw, "messages")
        if not messages:
            msg = "messages must hold at least one message"
            raise RequestError(msg, param="messages")
        stream_options = raw.get("stream_options") or {}
        return Request(
            model=_typed(raw, "model", str, ""),
            messages=tuple(_message(item, i) for i, item in enumerate(messages)),
            tools=tuple(_tool(item, i) for i, item in enumerate(_list(raw, "tools"))),
            asked=_sampling(raw),
            stream=_typed(raw, "stream", bool, default=False),
            usage_in_stream=bool(
                isinstance(stream_options, dict) and stream_options.get("include_usage")
            ),
        )

    def answer(self, answer: Answer) -> bytes:
        """A ``chat.completion`` object."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.message.content or None}
        if answer.message.reasoning:
            message["reasoning_content"] = answer.message.reasoning
        if answer.message.tool_calls:
            message["tool_calls"] = [_call(call) for call in answer.message.tool_calls]
        choice = {"index": 0, "message": message, "finish_reason": _finish(answer)}
        return msgspec.json.encode(
            {
                "id": answer.id,
                "object": "chat.completion",
                "created": answer.created,
                "model": answer.model,
                "choices": [choice],
                "usage": _usage(answer),
            }
        )

    def stream(self, request: Request, answer_id: str, created: int) -> _ChatStream:
        """Server-sent ``chat.completion.chunk`` events."""
        return _ChatStream(request, answer_id, created)

    def error(self, error: TuglineError) -> tuple[int, dict[str, str], bytes]:
        """OpenAI's error object; engine faults become 502 or 503 with Retry-After."""
        status, headers = 500, {}
        if isinstance(error, RequestError):
            status = error.status
            if isinstance(error, BudgetExhausted | ContextOverflow):
                headers["x-should-retry"] = "false"
        elif isinstance(error, EngineError):
            status = _OVERLOADED if error.retry_after is not None else _BAD_GATEWAY
            if error.retry_after is not None:
                headers["retry-after"] = f"{error.retry_after:.0f}"
        return status, headers, msgspec.json.encode(_error(error))

    def models(self, names: Sequence[str], window: int) -> bytes:
        """The body of ``GET /v1/models``."""
        created = int(time.time())
        data = [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "tugline",
                "max_model_len": window,
            }
            for name in names
        ]
        return msgspec.json.encode({"object": "list", "data": data})


class _ChatStream:
    """One answer as server-sent events."""

    content_type = "text/event-stream"

    def __init__(self, request: Request, answer_id: str, created: int) -> None:
        self._head = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": request.model,
        }
        self._usage = request.usage_in_stream
        self._calls = 0

    def open(self) -> bytes:
        return self._delta({"role": "assistant", "content": ""})

    def piece(self, piece: Piece) -> bytes:
        if isinstance(piece, TextDelta):
            return self._delta({"content": piece.text})
        if isinstance(piece, ReasoningDelta):
            return self._delta({"reasoning_content": piece.text})
        index, self._calls = self._calls, self._calls + 1
        return self._delta({"tool_calls": [{"index": index, **_call(piece)}]})

    def close(self, answer: Answer) -> bytes:
        end = self._delta({}, _finish(answer))
        if self._usage:
            end += _event({**self._head, "choices": [], "usage": _usage(answer)})
        return end + b"data: [DONE]\n\n"

    def fault(self, error: TuglineError) -> bytes:
        return _event(_error(error))

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def _delta(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return _event({**self._head, "choices": [choice]})


# --------------------------------------------------------------------------- telling
def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _finish(answer: Answer) -> str:
    if answer.finish is not Finish.STOP:
        return "length"
    return "tool_calls" if answer.message.tool_calls else "stop"


def _usage(answer: Answer) -> dict[str, Any]:
    usage = answer.usage
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.sampled,
        "total_tokens": usage.prompt + usage.sampled,
        "prompt_tokens_details": {"cached_tokens": usage.reused},
    }


def _error(error: TuglineError) -> dict[str, Any]:
    body = {"message": str(error), "type": "server_error", "param": None, "code": "engine_error"}
    if isinstance(error, RequestError):
        body |= {"type": "invalid_request_error", "param": error.param, "code": error.code}
    return {"error": body}


# --------------------------------------------------------------------------- reading
def _refuse(raw: dict[str, Any]) -> None:
    for field, harmless in _MUST_BE.items():
        value = raw.get(field)
        if value is not None and value not in harmless:
            right = " or ".join(repr(value) for value in harmless) or "left out"
            msg = f"{field}={value!r} cannot be honoured here; it must be {right}"
            raise RequestError(msg, param=field)


def _typed(raw: dict[str, Any], field: str, kind: type | tuple[type, ...], default: Any) -> Any:
    value = raw.get(field)
    if value is None:
        return default
    wrong_bool = isinstance(value, bool) and kind is not bool
    if wrong_bool or not isinstance(value, kind):
        names = kind.__name__ if isinstance(kind, type) else "number"
        msg = f"{field} must be {names}, not {value!r:.60}"
        raise RequestError(msg, param=field)
    return value


def _list(raw: dict[str, Any], field: str) -> list[Any]:
    value: list[Any] = _typed(raw, field, list, [])
    return value


def _sampling(raw: dict[str, Any]) -> Sampling:
    limit = _typed(raw, "max_completion_tokens", int, None)
    limit = limit if limit is not None else _typed(raw, "max_tokens", int, None)
    temperature = _typed(raw, "temperature", (int, float), None)
    top_p = _typed(raw, "top_p", (int, float), None)
    _within("max_tokens", limit, lambda v: v >= 1, "at least 1")
    _within("temperature", temperature, lambda v: v >= 0, "0 or more")
    _within("top_p", top_p, lambda v: 0 < v <= 1, "above 0 and at most 1")
    seed = _typed(raw, "seed", int, None)
    return Sampling(temperature=temperature, top_p=top_p, max_tokens=limit, seed=seed)


def _within(field: str, value: Any, holds: Callable[[Any], bool], right: str) -> None:
    if value is not None and not holds(value):
        msg = f"{field}={value} must be {right}"
        raise RequestError(msg, param=field)


def _message(item: Any, index: int) -> Message:
    where = f"messages[{index}]"
    if not isinstance(item, dict):
        msg = f"{where} must be an object"
        raise RequestError(msg, param=where)
    try:
        role = Role(str(item.get("role")))
    except ValueError as error:
        msg = f"{where}.role={item.get('role')!r} must be one of {', '.join(Role)}"
        raise RequestError(msg, param=f"{where}.role") from error
    tool_call_id = item.get("tool_call_id")
    if role is Role.TOOL and not isinstance(tool_call_id, str):
        msg = f"{where}.tool_call_id must name the call this result answers"
        raise RequestError(msg, param=f"{where}.tool_call_id")
    reasoning = item.get("reasoning_content") or item.get("reasoning")
    return Message(
        role=role,
        content=_text(item.get("content"), f"{where}.content"),
        tool_calls=tuple(
            _tool_call(call, f"{where}.tool_calls[{i}]")
            for i, call in enumerate(item.get("tool_calls") or [])
        ),
        tool_call_id=tool_call_id if role is Role.TOOL else None,
        reasoning=reasoning if isinstance(reasoning, str) else None,
    )


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        msg = f"{where} must be text or a list of parts, not {type(content).__name__}"
        raise RequestError(msg, param=where)
    parts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get(kind) if kind in {"text", "refusal"} else None
        if not isinstance(text, str):
            msg = f"{where}[{i}] is a part of type {kind!r}; only text is supported"
            raise RequestError(msg, param=f"{where}[{i}]")
        parts.append(text)
    return "".join(parts)


def _tool_call(call: Any, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        msg = f"{where} must be a function call with function.name and function.arguments"
        raise RequestError(msg, param=where)
    arguments = function.get("arguments") or ""
    if not isinstance(arguments, str):
        msg = f"{where}.function.arguments must be JSON text, not {type(arguments).__name__}"
        raise RequestError(msg, param=where)
    return ToolCall(str(call.get("id") or ""), function["name"], arguments)


def _tool(item: Any, index: int) -> Tool:
    where = f"tools[{index}]"
    function = item.get("function") if isinstance(item, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        msg = f"{where} must be a function tool with function.name"
        raise RequestError(msg, param=where)
    if function.get("strict"):
        msg = f"{where}.function.strict cannot be honoured here; leave it out"
        raise RequestError(msg, param=f"{where}.function.strict")
    return Tool(
        function["name"], function.get("description") or "", function.get("parameters") or {}
    )
