"""OpenAI Chat Completions, as pi, qwen-code, opencode, mini-swe-agent and the SDKs speak it.

Fields that change nothing of what is sampled are kept with the raw request; fields that do and
cannot be honoured are refused by name. Messages keep their order and their roles, and an answer
that a client echoes, in whichever of the forms clients use, reads as the message it was (I1, I4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from tugline.chat.dialects import openai
from tugline.chat.dialects.base import Action, HttpRequest, ParseCache
from tugline.chat.dialects.reading import Prose, bearer, decode, need
from tugline.chat.request import Request
from tugline.chat.response import Piece, ReasoningDelta, Response, TextDelta, Usage
from tugline.errors import RequestError, TuglineError, Unsupported
from tugline.types import Finish, Message, Role, Sampling, Tool, ToolCall, ToolKind

_HARMLESS: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
"""Fields that change what is sampled or told, and the values that ask for nothing unusual."""

_REASONING = ("reasoning_content", "reasoning", "reasoning_text")
"""Where clients put the reasoning of an answer they echo."""

Positive = Annotated[int, msgspec.Meta(ge=1)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    """What is read of a request."""

    messages: Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1)]
    model: str = ""
    tools: msgspec.Raw = msgspec.Raw(b"null")
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], msgspec.Meta(max_length=4)] | None = None
    response_format: openai.Format | None = None
    logprobs: Any = None
    top_logprobs: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    min_p: Any = None
    logit_bias: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None


_decoder = msgspec.json.Decoder(_Body)
_encode = msgspec.json.Encoder().encode


class OpenAIChat:
    """``POST /chat/completions``, and ``GET /models`` for whoever shows no other sign."""

    name = "openai_chat"

    def match(self, incoming: HttpRequest) -> Action | None:
        """See `Dialect.match`."""
        if incoming.method == "POST" and incoming.path == "/chat/completions":
            return Action.ANSWER
        if incoming.method != "GET":
            return None
        if incoming.path == "/models":
            return Action.MODELS
        return Action.MODEL if incoming.path.startswith("/models/") else None

    def find_secret(self, headers: Mapping[str, str], query: str) -> str | None:
        """The bearer token."""
        return bearer(headers)

    def parse(self, incoming: HttpRequest, cache: ParseCache) -> Request:
        """See `Dialect.parse`."""
        body = decode(incoming.body, _decoder, "the request body")
        openai.refuse(body, _HARMLESS)
        tools = cache.parse_tools(body.tools, _tools)
        return Request(
            model=body.model,
            messages=cache.fold(body.messages, _step),
            tools=tools,
            sampling=_sampling(body),
            stream=bool(body.stream),
            usage_in_stream=bool(body.stream_options and body.stream_options.include_usage),
            n=body.n or 1,
            tool_choice=openai.tool_choice(body.tool_choice, tools),
            parallel=body.parallel_tool_calls is not False,
            constraint=openai.constraint(body.response_format, "response_format"),
            thread=openai.native(incoming.headers),
        )

    def encode(self, request: Request, answers: Sequence[Response]) -> bytes:
        """A ``chat.completion`` object with one choice for each answer."""
        first = answers[0]
        customs = _customs(request.tools)
        choices = [
            {
                "index": index,
                "message": _told(answer.message, customs),
                "logprobs": None,
                "finish_reason": _finish(answer),
            }
            for index, answer in enumerate(answers)
        ]
        return _encode(
            {
                "id": f"chatcmpl-{first.id}",
                "object": "chat.completion",
                "created": first.created,
                "model": first.model,
                "choices": choices,
                "usage": _usage(answers),
            }
        )

    def stream(self, request: Request, response_id: str, created: int) -> _ChatStream:
        """Server-sent ``chat.completion.chunk`` events."""
        return _ChatStream(request, response_id, created)

    def encode_count(self, tokens: int) -> bytes:
        """Chat has no route that counts; this is never asked for."""
        return _encode({"input_tokens": tokens})

    def encode_models(self, names: Sequence[str], window: int, created: int) -> bytes:
        """See `Dialect.models`."""
        return openai.models(names, window, created)

    def encode_model(self, name: str, window: int, created: int) -> bytes:
        """See `Dialect.model`."""
        return openai.model(name, window, created)

    def encode_error(self, error: TuglineError) -> tuple[int, dict[str, str], bytes]:
        """See `Dialect.error`."""
        return openai.failure(error)


class _ChatStream:
    """Answers as server-sent events; what all events share is encoded once."""

    content_type = openai.EVENT_STREAM

    def __init__(self, request: Request, response_id: str, created: int) -> None:
        head = {
            "id": f"chatcmpl-{response_id}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": request.model,
        }
        self._head = b"data: " + _encode(head)[:-1]
        self._tail = b',"usage":null}\n\n' if request.usage_in_stream else b"}\n\n"
        self._usage = request.usage_in_stream
        self._customs = _customs(request.tools)
        self._calls = [0] * request.n

    def start(self, usage: Usage) -> bytes:
        start = b'{"role":"assistant","content":""}'
        return b"".join(self._delta(start, index) for index in range(len(self._calls)))

    def add(self, piece: Piece, index: int = 0) -> bytes:
        if isinstance(piece, TextDelta):
            return self._delta(b'{"content":' + _encode(piece.text) + b"}", index)
        if isinstance(piece, ReasoningDelta):
            return self._delta(b'{"reasoning_content":' + _encode(piece.text) + b"}", index)
        place = self._calls[index]
        self._calls[index] += 1
        whole = _call(piece, self._customs)
        kind = whole["type"]
        field = "input" if kind == "custom" else "arguments"
        text = whole[kind][field]
        start = {"index": place, **whole, kind: {**whole[kind], field: ""}}
        rest = {"index": place, kind: {field: text}}
        return self._delta(_encode({"tool_calls": [start]}), index) + self._delta(
            _encode({"tool_calls": [rest]}), index
        )

    def finish(self, answers: Sequence[Response]) -> bytes:
        end = b"".join(self._delta(b"{}", i, _finish(answer)) for i, answer in enumerate(answers))
        if self._usage:
            end += self._head + b',"choices":[],"usage":' + _encode(_usage(answers)) + b"}\n\n"
        return end + b"data: [DONE]\n\n"

    def fail(self, error: TuglineError) -> bytes:
        return b"data: " + _encode({"error": openai.error_object(error)}) + b"\n\n"

    def keep_alive(self) -> bytes:
        return openai.KEEP_ALIVE

    def _delta(self, delta: bytes, index: int, finish: str | None = None) -> bytes:
        reason = b"null" if finish is None else b'"%b"' % finish.encode()
        choice = b',"choices":[{"index":%d,"delta":%b,"finish_reason":%b}]' % (index, delta, reason)
        return self._head + choice + self._tail


# --------------------------------------------------------------------------- telling
def _customs(tools: Sequence[Tool]) -> frozenset[str]:
    return frozenset(tool.name for tool in tools if tool.kind is ToolKind.CUSTOM)


def _told(message: Message, customs: frozenset[str]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "role": "assistant",
        "content": message.content or (None if message.tool_calls else ""),
        "refusal": None,
    }
    if message.reasoning:
        told["reasoning_content"] = message.reasoning
    if message.tool_calls:
        told["tool_calls"] = [_call(call, customs) for call in message.tool_calls]
    return told


def _call(call: ToolCall, customs: frozenset[str]) -> dict[str, Any]:
    text = openai.free_text(call) if call.name in customs else None
    if text is not None:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _finish(answer: Response) -> str:
    if answer.finish is not Finish.STOP:
        return "length"
    return "tool_calls" if answer.message.tool_calls else "stop"


def _usage(answers: Sequence[Response]) -> dict[str, Any]:
    prompt = answers[0].usage.prompt
    sampled = sum(answer.usage.sampled for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": answers[0].usage.reused},
        "completion_tokens_details": {
            "reasoning_tokens": sum(answer.usage.reasoning for answer in answers)
        },
    }


# --------------------------------------------------------------------------- reading
def _sampling(body: _Body) -> Sampling:
    limit = body.max_completion_tokens
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else max(0, body.top_k),
        max_tokens=body.max_tokens if limit is None else limit,
        seed=body.seed,
        stop=openai.stops(body.stop),
    )


def _step(messages: list[Message], item: Any, index: int) -> None:
    where = f"messages[{index}]"
    name = need(item, "role", str, where)
    try:
        role = Role(name)
    except ValueError as error:
        msg = f"{where}.role={name!r:.60} must be one of {', '.join(Role)}"
        raise RequestError(msg, param=f"{where}.role") from error
    for field in ("function_call", "audio"):
        if item.get(field) is not None:
            msg = f"{where}.{field} is not supported here; use text and tool_calls"
            raise Unsupported(msg, param=f"{where}.{field}")
    prose = _content(item.get("content"), f"{where}.content")
    calls = item.get("tool_calls") or ()
    if calls:
        calls = need(item, "tool_calls", list, where)
    messages.append(
        Message(
            role=role,
            content=prose.text,
            tool_calls=tuple(
                _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
            ),
            tool_call_id=need(item, "tool_call_id", str, where) if role is Role.TOOL else None,
            reasoning=_reasoning(item) if role is Role.ASSISTANT else None,
            images=tuple(prose.images),
        )
    )


def _reasoning(item: Any) -> str | None:
    found = (item.get(field) for field in _REASONING)
    return next((text for text in found if isinstance(text, str) and text), None)


def _content(content: Any, where: str) -> Prose:
    prose = Prose()
    if content is None:
        return prose
    if isinstance(content, str):
        prose.add(content)
        return prose
    if not isinstance(content, list):
        msg = f"{where}={content!r:.60} must be text or a list of parts"
        raise RequestError(msg, param=where)
    for i, part in enumerate(content):
        _part(part, prose, f"{where}[{i}]")
    return prose


def _part(part: Any, prose: Prose, where: str) -> None:
    kind = need(part, "type", str, where)
    if kind in {"text", "refusal"}:
        prose.add(need(part, kind, str, where))
    elif kind == "image_url":
        image = part.get("image_url")
        if isinstance(image, str):
            image = {"url": image}
        detail = image.get("detail") if isinstance(image, dict) else None
        url = need(image, "url", str, f"{where}.image_url")
        prose.picture(url, detail if isinstance(detail, str) else None)
    else:
        msg = f"{where}.type={kind!r:.60} cannot be honoured here; it must be text or image_url"
        raise Unsupported(msg, param=f"{where}.type")


def _tool_call(call: Any, where: str) -> ToolCall:
    typed = isinstance(call, dict) and call.get("type") is not None
    kind = need(call, "type", str, where) if typed else "function"
    if kind not in {"function", "custom"}:
        msg = f"{where}.type={kind!r:.60} must be function or custom"
        raise RequestError(msg, param=f"{where}.type")
    inner = need(call, kind, dict, where)
    name = need(inner, "name", str, f"{where}.{kind}")
    if kind == "custom":
        arguments = openai.freeform(need(inner, "input", str, f"{where}.custom"))
    elif inner.get("arguments") is None:
        arguments = ""
    else:
        arguments = need(inner, "arguments", str, f"{where}.function")
    return ToolCall(str(call.get("id") or ""), name, arguments)


def _tools(items: Any) -> tuple[Tool, ...]:
    if items is None:
        return ()
    if not isinstance(items, list):
        msg = f"tools={items!r:.60} must be a list"
        raise RequestError(msg, param="tools")
    return tuple(_tool(item, f"tools[{i}]") for i, item in enumerate(items))


def _tool(item: Any, where: str) -> Tool:
    kind = need(item, "type", str, where)
    if kind == "function":
        return openai.function_tool(need(item, kind, dict, where), f"{where}.function")
    if kind == "custom":
        return openai.custom_tool(need(item, kind, dict, where), f"{where}.custom")
    msg = f"{where}.type={kind!r:.60} cannot be honoured here; it must be function or custom"
    raise Unsupported(msg, param=f"{where}.type")
