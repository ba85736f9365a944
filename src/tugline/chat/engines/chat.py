"""Formats of ``/v1/chat/completions``, on which the engine renders messages.

In observed mode the prompt's ids are those that the engine reports; nothing is tokenized again
(I1). A reply without ids is an error that names the option to add (I2). Sessions in text mode can
run but not be trained on: the ledger counts their tokens as `no_token_ids`.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from tugline.chat import model_call
from tugline.chat.engines import base
from tugline.chat.engines.generate import Choice, Vllm, build_structured
from tugline.errors import EngineError
from tugline.types import Finish, LogprobMeaning, Mode, Tool, ToolCall


# --------------------------------------------------------------------------- replies
class _ChatFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ChatToolCall(msgspec.Struct):
    index: int | None = None
    function: _ChatFunction | None = None


class _ChatMessage(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ChatToolCall] | None = None


class _ChatChoice(Choice):
    delta: _ChatMessage | None = None
    message: _ChatMessage | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _ChatIds(msgspec.Struct):
    input_ids: msgspec.Raw = msgspec.Raw()
    output_ids: list[list[int]] = []


class _Metadata(msgspec.Struct):
    weight_versions: list[base.ReportedSpan] | None = None


class ChatReply(base.EngineReply):
    """A reply or one of its events, with the relevant fields of all engines."""

    choices: list[_ChatChoice] = msgspec.field(default_factory=list)
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    usage: _Usage | None = None
    sglext: _ChatIds | None = None
    metadata: _Metadata | None = None


# --------------------------------------------------------------------------- readers
class ChatReader(base.Reader[ChatReply]):
    """Base reader of text and tool calls; subclasses read tokens."""

    decoder = msgspec.json.Decoder(ChatReply)

    @abstractmethod
    def add_tokens(self, reply: ChatReply, delta: base.Delta, *, spoke: bool) -> None:
        """Add tokens; `spoke` is whether the event had text, reasoning or calls.

        Raises `EngineError` if ids are missing.
        """

    def add(self, reply: ChatReply) -> None:
        """Extend the last delta, or start one to keep the order of reasoning, text and calls."""
        spoke = False
        for choice in reply.choices[:1]:
            message = choice.delta or choice.message or _NO_MESSAGE
            last = self.deltas[-1]
            reasoning = message.reasoning or message.reasoning_content
            calls = message.tool_calls
            if (reasoning and (last.text or last.calls)) or (message.content and last.calls):
                last = base.Delta()
                self.deltas.append(last)
            last.reasoning += reasoning or ""
            last.text += message.content or ""
            last.calls += [_read_call(index, call) for index, call in enumerate(calls or ())]
            last.finish = base.parse_finish(choice.finish_reason) or last.finish
            for stop in (choice.stop_reason, choice.matched_stop):
                last.stop = stop if isinstance(stop, str) else last.stop
            spoke = bool(reasoning or message.content or calls)
        self.add_tokens(reply, self.deltas[-1], spoke=spoke)


class ObservedReader(ChatReader):
    """Reader of replies with ids and logprobs in each event."""

    def decode_all(self, payloads: list[bytes]) -> list[ChatReply]:
        """See `Reader.decode_all`; a first event with the prompt's ids is decoded by itself."""
        if self.count or _PROMPT_IDS not in payloads[0]:
            return super().decode_all(payloads)
        rest = payloads[1:]
        return [self.decode(payloads[0]), *(super().decode_all(rest) if rest else ())]

    def decode(self, payload: bytes) -> ChatReply:
        """Decode a reply, except the prompt's ids, which are most of a whole reply."""
        key = payload.find(_PROMPT_IDS)
        start = key + len(_PROMPT_IDS) - 1
        end = payload.find(b"]", start) + 1
        if key < 0 or not end:
            return super().decode(payload)
        view = memoryview(payload)
        reply = super().decode(b"".join((view[:start], b"null", view[end:])))
        reply.prompt_token_ids = msgspec.Raw(view[start:end])
        return reply

    def add_tokens(self, reply: ChatReply, delta: base.Delta, *, spoke: bool) -> None:
        """See `ChatReader.add_tokens`; text without any id is an error."""
        for choice in reply.choices[:1]:
            ids = choice.token_ids or []
            self.count += len(ids)
            delta.ids += ids
            delta.logprobs += choice.list_logprobs()
            delta.prompt = read_array(choice.prompt_token_ids) or delta.prompt
            if (spoke or delta.finish not in {None, Finish.ABORT}) and not self.count:
                raise EngineError(self.missing_ids)
        delta.prompt = read_array(reply.prompt_token_ids) or delta.prompt


class TextReader(ChatReader):
    """Reader of replies without ids, which counts tokens."""

    def add_tokens(self, reply: ChatReply, delta: base.Delta, *, spoke: bool) -> None:
        """Count an event with text as one token until the server reports the actual number."""
        delta.unreported_tokens += spoke
        self.count += spoke
        if reply.usage is not None and reply.usage.completion_tokens:
            delta.unreported_tokens += reply.usage.completion_tokens - self.count
            self.count = reply.usage.completion_tokens
            delta.prompt_count = reply.usage.prompt_tokens


_NO_MESSAGE = _ChatMessage()
_PROMPT_IDS = b'"prompt_token_ids":['
"""Key of the prompt's ids; inside a string its quotes would be escaped."""


def _read_call(position: int, call: _ChatToolCall) -> base.CallDelta:
    function = call.function or _ChatFunction()
    index = position if call.index is None else call.index
    return base.CallDelta(index, function.name or "", function.arguments or "")


def read_array(value: msgspec.Raw) -> bytes | None:
    """Return a JSON array unparsed; None if absent or null."""
    data = bytes(value)
    return data if data.startswith(b"[") else None


# --------------------------------------------------------------------------- formats
class ChatFormat(base.EngineFormat):
    """Base format of observed mode, as in vLLM: each event has ids and logprobs with its text."""

    mode = Mode.OBSERVED
    features = frozenset({base.Feature.STRUCTURED, base.Feature.IMAGES, base.Feature.TOOL_CHOICE})
    default_meaning = LogprobMeaning.RAW
    reasoning_field: str | None = "reasoning"
    """Field for the reasoning of past messages; None omits it."""
    reader: type[base.Reader[Any]] = ObservedReader

    def build_request(self, ask: base.EngineRequest) -> base.Post:
        """See `EngineFormat.build_request`."""
        request = ask.request
        sampling = self.adapt_sampling(ask.sampling)
        body: dict[str, Any] = {
            "model": ask.model,
            "messages": [
                model_call.serialize_message(message, reasoning_field=self.reasoning_field)
                for message in request.messages
            ],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "seed": sampling.seed,
            "stop": list(sampling.stop) or None,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_build_tools(request.tools, request.tool_choice, parallel=request.parallel),
            **self.build_fields(replace(ask, sampling=sampling)),
        }
        fields = {name: value for name, value in body.items() if value is not None}
        return base.Post("/v1/chat/completions", [msgspec.json.encode(fields)])

    def build_fields(self, ask: base.EngineRequest) -> dict[str, Any]:
        """Build the server-specific fields."""
        constraint = ask.request.constraint
        return base.NEUTRAL | {
            "logprobs": True,
            "return_token_ids": True,
            "request_id": ask.request_id,
            "stream_interval": ask.stream_interval,
            "top_k": ask.sampling.top_k or 0,
            "min_p": ask.sampling.min_p or 0.0,
            "structured_outputs": None if constraint is None else build_structured(constraint),
        }


class VllmChat(Vllm, ChatFormat):
    """Observed mode of vLLM; forced tool calls and structured output need the server's parsers.

    Aborts need the server's development routes.
    """

    advice = (
        "start it with --enable-auto-tool-choice --tool-call-parser NAME (and --reasoning-parser)"
    )
    missing_ids = "vllm sent text without token ids: `return_token_ids` needs vLLM 0.10.2 or later"
    abort_path = "/abort_requests"
    abort_id = "chatcmpl-{}"


class ObservedChat(ChatFormat):
    """Observed mode of another server that supports `return_token_ids`."""

    name = "openai"
    advice = "use an engine that supports `return_token_ids`"
    missing_ids = (
        "the engine sent text without token ids; use mode `text`, or an engine that supports "
        "`return_token_ids`"
    )


class TextChat(ChatFormat):
    """Text mode of any server with OpenAI's chat route; only OpenAI's own fields are sent."""

    name = "openai"
    mode = Mode.TEXT
    advice = "give the model a chat template"
    reader = TextReader
    reasoning_field = None

    def build_fields(self, ask: base.EngineRequest) -> dict[str, Any]:
        """See `ChatFormat.build_fields`; the only field is structured output."""
        return {"response_format": build_response_format(ask.request.constraint)}


def _build_tools(
    tools: Sequence[Tool], choice: model_call.ToolChoice, *, parallel: bool
) -> dict[str, Any]:
    """Build the fields of allowed tools and of the tool choice."""
    if choice.names:
        tools = [tool for tool in tools if tool.name in choice.names]
    if not tools:
        return {}
    fields: dict[str, Any] = {"tools": [model_call.serialize_tool(tool) for tool in tools]}
    if choice.mode is model_call.ChoiceMode.NAMED and len(tools) == 1:
        fields["tool_choice"] = {"type": "function", "function": {"name": tools[0].name}}
    elif choice.mode is model_call.ChoiceMode.NAMED:
        fields["tool_choice"] = model_call.ChoiceMode.REQUIRED.value
    elif choice.mode is not model_call.ChoiceMode.AUTO:
        fields["tool_choice"] = choice.mode.value
    if not parallel:
        fields["parallel_tool_calls"] = False
    return fields


def build_response_format(constraint: model_call.Constraint | None) -> dict[str, Any] | None:
    """Build the OpenAI API's field of structured output."""
    if constraint is None:
        return None
    if constraint.kind is model_call.ConstraintKind.JSON_OBJECT:
        return {"type": "json_object"}
    schema = msgspec.json.decode(constraint.schema)
    named = {"name": constraint.name or "answer", "schema": schema}
    return {"type": "json_schema", "json_schema": named}


# --------------------------------------------------------------------------- tool calls
class ToolCallAssembler:
    """Assembler of tool calls that an engine streams in parts, in observed and text mode.

    A call is emitted when it is complete: when the next one begins, or at the end.
    """

    def __init__(self, id_prefix: str) -> None:
        """`id_prefix` makes the ids of tool calls unique within the session."""
        self._prefix = id_prefix
        self._count = 0
        self._open: base.CallDelta | None = None

    def feed(self, delta: base.Delta) -> list[model_call.Piece]:
        """Add a part of the reply; return the pieces that it completes."""
        pieces: list[model_call.Piece] = []
        if delta.reasoning:
            pieces.append(model_call.ReasoningDelta(delta.reasoning))
        if delta.text:
            pieces.append(model_call.TextDelta(delta.text))
        for part in delta.calls:
            pieces += self._add(part)
        return pieces

    def finish(self) -> list[model_call.Piece]:
        """Return the last call, if one is open."""
        if self._open is None:
            return []
        done = self._open
        self._open = None
        self._count += 1
        number = f"{self._prefix}{self._count - 1}"
        return [ToolCall(number, done.name, done.arguments or "{}")]

    def _add(self, part: base.CallDelta) -> list[model_call.Piece]:
        pieces: list[model_call.Piece] = []
        if self._open is None or self._open.index != part.index:
            pieces = self.finish()
            self._open = base.CallDelta(part.index)
        self._open.name += part.name
        self._open.arguments += part.arguments
        return pieces
