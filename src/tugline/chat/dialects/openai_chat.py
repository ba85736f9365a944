"""OpenAI Chat Completions, as used by pi, qwen-code, opencode, mini-swe-agent and the SDKs.

Text completions are at the end of the module: a prompt, one text or its token ids, is continued
without a template. The answer is the text of the sampled ids with white space and special tokens,
up to the id that ends it. Log probabilities are known for sampled tokens only, not for others or
for the prompt.

Fields that do not affect sampling are ignored; fields that do and cannot be honoured are refused by
name. Messages keep their order and roles, and an echoed answer parses to the same message in every
form that clients use (I1, I4).
"""

from collections.abc import Sequence
from itertools import accumulate, count
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Raw

from tugline.chat.dialects import base, decoding, openai
from tugline.chat.model_call import (
    ContentBuilder,
    Piece,
    ReasoningDelta,
    Request,
    Response,
    TextDelta,
    Usage,
)
from tugline.errors import Unsupported
from tugline.types import Message, Role, Tool, ToolCall, ToolKind
from tugline.types.task import MaxTokens

_REFUSALS: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    **dict.fromkeys(("audio", "prediction", "web_search_options"), ()),
    **openai.REFUSALS,
}
"""Fields that change the response, and their harmless values."""

_REASONING = ("reasoning_content", "reasoning", "reasoning_text")
"""Field names that clients use for an echoed answer's reasoning."""
_PREFILLS = ("prefix", "partial")
"""Fields of DeepSeek, Mistral and Kimi for a last message that the model continues."""
_ROLES = frozenset(Role)
_TEXTS = {"text": "text", "refusal": "refusal"}


class _ChatBody(openai.ChoiceFields, kw_only=True):
    messages: Annotated[list[Raw], Meta(min_length=1)]
    tools: Raw = decoding.ABSENT
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: MaxTokens | None = None
    response_format: openai.ResponseFormat | None = None


_decoder = decoding.decoder_with_refusals(_ChatBody, _REFUSALS)


class _ChatStream(openai.ChoiceStream):
    """Encoder of responses as server-sent events."""

    label = "chat.completion.chunk", "chatcmpl"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._custom = _find_custom(self.request.tools)
        self._calls = [0] * self.request.n

    def start(self, usage: Usage) -> bytes:
        start = b'{"role":"assistant","content":""}'
        return b"".join(self._delta(start, index) for index in range(len(self._calls)))

    def add(self, piece: Piece, index: int = 0) -> bytes:
        if isinstance(piece, TextDelta):
            return self._delta(b'{"content":' + base.encode(piece.text) + b"}", index)
        if isinstance(piece, ReasoningDelta):
            return self._delta(b'{"reasoning_content":' + base.encode(piece.text) + b"}", index)
        position = self._calls[index]
        self._calls[index] += 1
        call = _build_call(piece, self._custom)
        kind = call["type"]
        field = "input" if kind == "custom" else "arguments"
        start = {"index": position, **call, kind: {**call[kind], field: ""}}
        rest = {"index": position, kind: {field: call[kind][field]}}
        return b"".join(
            self._delta(base.encode({"tool_calls": [part]}), index) for part in (start, rest)
        )

    def finish_choice(self, index: int, response: Response) -> bytes:
        return self._delta(b"{}", index, openai.find_reason(response))

    def _delta(self, delta: bytes, index: int, finish: str | None = None) -> bytes:
        reason = b"null" if finish is None else b'"%b"' % finish.encode()
        choice = b'{"index":%d,"delta":%b,"finish_reason":%b}' % (index, delta, reason)
        return self.before + choice + self.after


class OpenAIChat(openai.OpenAIDialect):
    """``POST /chat/completions``, and ``GET /models`` for clients of no other dialect."""

    name = "openai_chat"
    stream_type = _ChatStream
    posts: ClassVar = {"/chat/completions": base.Action.ANSWER}

    def owns_models(self, request: base.HttpRequest) -> bool:
        """Return true, because this dialect is matched last."""
        return True

    def carries_malformed(self, request: Request) -> bool:
        """Arguments are text in this API."""
        return True

    def parse(self, request: base.HttpRequest, cache: decoding.ParseCache) -> Request:
        """See `Dialect.parse`."""
        body, items = cache.decode_body(request.body, _decoder, "messages")
        decoding.check_refusals(body, _REFUSALS)
        tools = cache.parse_tools(body.tools, _parse_tool)
        limit = body.max_completion_tokens
        return openai.ChoiceRequest(
            model=body.model, messages=items.fold(_fold_message), tools=tools,
            sampling=body.build_sampling(body.max_tokens if limit is None else limit, body.stop),
            stream=bool(body.stream),
            usage_in_stream=bool(body.stream_options and body.stream_options.include_usage),
            n=body.n or 1, tool_choice=openai.parse_tool_choice(body.tool_choice, tools),
            parallel=body.parallel_tool_calls is not False,
            constraint=openai.parse_constraint(body.response_format, "response_format"),
            thread=openai.find_thread(request.headers),
        )  # fmt: skip

    def encode(self, request: Request, responses: Sequence[Response]) -> bytes:
        """Encode a ``chat.completion`` object with one choice per response."""
        custom = _find_custom(request.tools)
        choices = [
            {
                "index": index,
                "message": _build_message(response.message, custom),
                "logprobs": None,
                "finish_reason": openai.find_reason(response),
            }
            for index, response in enumerate(responses)
        ]
        return openai.encode_choices(("chat.completion", "chatcmpl"), responses, choices)


# --------------------------------------------------------------------------- responses
def _find_custom(tools: Sequence[Tool]) -> frozenset[str]:
    return frozenset(tool.name for tool in tools if tool.kind is ToolKind.CUSTOM)


def _build_message(message: Message, custom: frozenset[str]) -> dict[str, Any]:
    content = message.content or (None if message.tool_calls else "")
    fields: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [_build_call(call, custom) for call in message.tool_calls]
    return fields


def _build_call(call: ToolCall, custom: frozenset[str]) -> dict[str, Any]:
    text = openai.unwrap_input(call) if call.name in custom else None
    if text is not None:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


# --------------------------------------------------------------------------- requests
def parse_conversation(
    messages: Sequence[Any], tools: Sequence[Any] | None
) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """Parse a conversation outside of a request, such as one of a data set."""
    if not messages:
        raise decoding.invalid(messages, "messages", "must contain at least one message")
    parsed: list[Message] = []
    for index, item in enumerate(messages):
        _fold_message(parsed, item, index)
    groups = decoding.parse_list(tools or None, "tools", _parse_tool)
    return tuple(parsed), tuple(tool for group in groups for tool in group)


def _fold_message(messages: list[Message], item: Any, index: int) -> None:
    where = f"messages[{index}]"
    name = decoding.require(item, "role", str, where)
    if name not in _ROLES:
        raise decoding.invalid(name, f"{where}.role", f"must be one of {', '.join(Role)}")
    role = Role(name)
    for field in ("function_call", "audio"):
        if item.get(field) is not None:
            msg = f"{where}.{field} is not supported here; use text and tool_calls"
            raise Unsupported(msg, param=f"{where}.{field}")
    for field in _PREFILLS:
        if item.get(field) is True:
            advice = ": a message cannot be continued; leave it out to send a complete turn"
            raise decoding.unsupported(value=True, path=f"{where}.{field}", advice=advice)
    content = _parse_content(item.get("content"), f"{where}.content")
    calls = decoding.require(item, "tool_calls", list, where) if item.get("tool_calls") else None
    answers = decoding.require(item, "tool_call_id", str, where) if role is Role.TOOL else None
    messages.append(
        Message(
            role=role,
            content=content.text,
            tool_calls=decoding.parse_list(calls, f"{where}.tool_calls", _parse_call),
            tool_call_id=answers,
            reasoning=_find_reasoning(item) if role is Role.ASSISTANT else None,
            images=tuple(content.images),
        )
    )


def _parse_content(content: Any, where: str) -> ContentBuilder:
    if content is None:
        return ContentBuilder()
    return openai.parse_content(content, where, _TEXTS, "image_url", "text or image_url")


def _find_reasoning(item: Any) -> str | None:
    texts = (item.get(field) for field in _REASONING)
    return next((text for text in texts if isinstance(text, str) and text), None)


def _parse_call(call: Any, where: str) -> ToolCall:
    typed = isinstance(call, dict) and call.get("type") is not None
    kind = decoding.require(call, "type", str, where) if typed else "function"
    if kind not in {"function", "custom"}:
        raise decoding.invalid(kind, f"{where}.type", "must be function or custom")
    inner = decoding.require(call, kind, dict, where)
    path = f"{where}.{kind}"
    name = decoding.require(inner, "name", str, path)
    if kind == "custom":
        arguments = openai.wrap_input(decoding.require(inner, "input", str, path))
    else:
        arguments = decoding.optional(inner, "arguments", "", path)
    return ToolCall(str(call.get("id") or ""), name, arguments)


def _parse_tool(item: Any, where: str) -> tuple[Tool, ...]:
    kind = decoding.require(item, "type", str, where)
    if kind not in openai.TOOLS:
        raise decoding.unsupported(kind, f"{where}.type", "; it must be function or custom")
    inner = decoding.require(item, kind, dict, where)
    return (openai.TOOLS[kind](inner, f"{where}.{kind}"),)


# --------------------------------------------------------------------------- text completions
_TEXT_REFUSALS: dict[str, tuple[Any, ...]] = {
    "logprobs": (0,),
    "suffix": ("",),
    "best_of": (1,),
    "add_special_tokens": (True,),
    **dict.fromkeys(("include_stop_str_in_output", "return_token_ids"), (False,)),
    **dict.fromkeys(("prompt_embeds", "response_format", "use_beam_search"), ()),
    "truncate_prompt_tokens": (),
    **openai.REFUSALS,
}
"""Refused fields of text completions, in the form of `_REFUSALS`."""


class _TextBody(openai.ChoiceFields, kw_only=True):
    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None


_text_decoder = decoding.decoder_with_refusals(_TextBody, _TEXT_REFUSALS)


class _TextRequest(openai.ChoiceRequest, frozen=True, kw_only=True, gc=False):
    echo: str = ""
    """Prompt that the response repeats."""


class _TextStream(openai.ChoiceStream):
    """Encoder of responses as server-sent events; log probabilities come with the last one."""

    request: _TextRequest

    label = "text_completion", "cmpl"

    def start(self, usage: Usage) -> bytes:
        return b"".join(self._add(i, self.request.echo) for i in range(self.request.n))

    def add(self, piece: Piece, index: int = 0) -> bytes:
        return self._add(index, piece.text if isinstance(piece, TextDelta) else "")

    def finish_choice(self, index: int, response: Response) -> bytes:
        return self._add(index, "", response)

    def _add(self, index: int, text: str, response: Response | None = None) -> bytes:
        return self.before + _encode_text(index, text, response) + self.after


class OpenAICompletions(openai.OpenAIDialect):
    """``POST /completions``."""

    name = "openai_completions"
    stream_type = _TextStream
    posts: ClassVar = {"/completions": base.Action.ANSWER}
    fields: ClassVar = {"messages": "prompt"}

    def parse(self, request: base.HttpRequest, cache: decoding.ParseCache) -> Request:
        """See `Dialect.parse`."""
        body = decoding.decode(request.body, _text_decoder, "the request body")
        decoding.check_refusals(body, _TEXT_REFUSALS)
        prompt = _parse_prompt(body.prompt)
        options = body.stream_options
        if body.echo and (body.logprobs is not None or not isinstance(prompt, str)):
            advice = " together with logprobs or a prompt of token ids; it must be false"
            raise decoding.unsupported(value=True, path="echo", advice=advice)
        return _TextRequest(
            model=body.model, prompt=prompt, logprobs=body.logprobs is not None,
            sampling=body.build_sampling(body.max_tokens or 16, body.stop), n=body.n or 1,
            stream=bool(body.stream), usage_in_stream=bool(options and options.include_usage),
            echo=str(prompt) if body.echo else "",
            thread=openai.find_thread(request.headers),
        )  # fmt: skip

    def encode(self, request: Request, responses: Sequence[Response]) -> bytes:
        """Encode a ``text_completion`` object with one choice per response."""
        echo = request.echo if isinstance(request, _TextRequest) else ""
        texts = [echo + response.message.content for response in responses]
        choices = [Raw(_encode_text(*choice)) for choice in zip(count(), texts, responses)]
        return openai.encode_choices(_TextStream.label, responses, choices)


def _parse_prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and all(type(token) is int for token in value):
        return tuple(value)
    if not isinstance(value, str):
        problem = (
            "must be one string or one list of token ids; send a separate request for each prompt"
        )
        raise decoding.invalid(value, "prompt", problem)
    return value


def _encode_text(index: int, text: str, response: Response | None = None) -> bytes:
    reason = None if response is None else openai.find_reason(response)
    logprobs: dict[str, Any] | None = None
    if response is not None and response.tokens:
        texts, values = zip(*response.tokens, strict=True)
        offsets = list(accumulate(map(len, texts[:-1]), initial=0))
        logprobs = {"tokens": texts, "token_logprobs": values, "text_offset": offsets}
        logprobs["top_logprobs"] = [{text: value} for text, value in response.tokens]
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
    return base.encode(choice)
