"""Read replies of ``/v1/chat/completions``: text, tool calls, and the ids beside them.

Engines differ in where the ids are; `ObservedReader` finds them where vLLM puts them, `TextReader`
does without. Decoding is typed, so fields that nobody needs cost nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tugline.chat.engines.base import (
    CallDelta,
    Delta,
    EngineReply,
    Reader,
    ReportedSpan,
    decode_reply,
    parse_finish,
)
from tugline.errors import EngineError
from tugline.types import Finish, VersionSpan


# --------------------------------------------------------------------------- the wire
class _ChatFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ChatToolCall(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _ChatFunction | None = None


class _ChatMessage(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ChatToolCall] | None = None


class _ChatLogprob(msgspec.Struct, gc=False):
    logprob: float


class _ChatLogprobs(msgspec.Struct):
    content: list[_ChatLogprob] | None = None


class ChatChoice(msgspec.Struct):
    """A response, or what an event adds to it."""

    delta: _ChatMessage | None = None
    message: _ChatMessage | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    logprobs: _ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _ChatIds(msgspec.Struct):
    input_ids: msgspec.Raw = msgspec.Raw()
    output_ids: list[list[int]] = []


class _Metadata(msgspec.Struct):
    weight_versions: list[ReportedSpan] | None = None


class ChatReply(EngineReply):
    """A reply, or one event of it; of every engine's own fields those that matter."""

    choices: list[ChatChoice] = msgspec.field(default_factory=list)
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    usage: _Usage | None = None
    sglext: _ChatIds | None = None
    metadata: _Metadata | None = None


_decoder = msgspec.json.Decoder(ChatReply)


# --------------------------------------------------------------------------- readers
@dataclass(slots=True)
class DeltaBuilder:
    """Collects one `Delta`, in which reasoning comes before text, and text before calls."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: tuple[VersionSpan, ...] = ()
    finish: Finish | None = None
    prompt: bytes | None = None
    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    stop: str | None = None
    unreported_tokens: int = 0
    prompt_count: int = 0

    def precedes(self, message: _ChatMessage) -> bool:
        """Whether `message` keeps the order of the parts."""
        reasoning = message.reasoning or message.reasoning_content
        return not ((reasoning and (self.text or self.calls)) or (message.content and self.calls))

    def add(self, message: _ChatMessage) -> bool:
        """Add text, reasoning and calls; whether there were any."""
        reasoning = message.reasoning or message.reasoning_content or ""
        self.reasoning += reasoning
        self.text += message.content or ""
        for place, call in enumerate(message.tool_calls or ()):
            index = place if call.index is None else call.index
            function = call.function or _ChatFunction()
            name, arguments = function.name or "", function.arguments or ""
            self.calls.append(CallDelta(index, call.id or "", name, arguments))
        return bool(reasoning or message.content or message.tool_calls)

    def build(self) -> Delta:
        """Build the immutable form."""
        return Delta(
            ids=np.asarray(self.ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            spans=self.spans,
            finish=self.finish,
            prompt=self.prompt,
            text=self.text,
            reasoning=self.reasoning,
            calls=tuple(self.calls),
            stop=self.stop,
            unreported_tokens=self.unreported_tokens,
            prompt_count=self.prompt_count,
        )


_EMPTY = DeltaBuilder()


class ChatReader(Reader):
    """Base of the readers; a subclass says where tokens are."""

    @abstractmethod
    def add(self, reply: ChatReply, delta: DeltaBuilder) -> None:
        """Add the content of an event. Raises `EngineError` where ids are missing."""

    def read_events(self, payloads: list[bytes]) -> list[Delta]:
        """One `Delta`, or more where text and calls took turns within one read."""
        return self._read([decode_reply(_decoder, payload) for payload in payloads])

    def read_body(self, body: bytes) -> list[Delta]:
        """Read the first choice. Raises `EngineError` where there is none."""
        reply = decode_reply(_decoder, body)
        if not reply.choices:
            msg = "the engine answered without a choice"
            raise EngineError(msg)
        return self._read([reply])

    def _read(self, replies: list[ChatReply]) -> list[Delta]:
        deltas = [DeltaBuilder()]
        for reply in replies:
            message = _find_message(reply.choices[0]) if reply.choices else None
            if message is not None and not deltas[-1].precedes(message):
                deltas.append(DeltaBuilder())
            self.add(reply, deltas[-1])
        return [delta.build() for delta in deltas if delta != _EMPTY]


class ObservedReader(ChatReader):
    """Ids and logprobs come with each event."""

    def __init__(self, error: str) -> None:
        """`error` is the text of the error when ids are missing."""
        self._error = error
        self._count = 0

    def add(self, reply: ChatReply, delta: DeltaBuilder) -> None:
        """Tokens first: text without any is of no use."""
        for choice in reply.choices[:1]:
            ids = choice.token_ids or []
            self._count += len(ids)
            delta.ids += ids
            delta.logprobs += read_logprobs(choice)
            delta.prompt = read_array(choice.prompt_token_ids) or delta.prompt
            if (add_choice(choice, delta) or delta.finish) and not self._count:
                raise EngineError(self._error)
        delta.prompt = read_array(reply.prompt_token_ids) or delta.prompt


class TextReader(ChatReader):
    """No ids at all: tokens are only counted."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, reply: ChatReply, delta: DeltaBuilder) -> None:
        """Count an event with text as one token until the server reports the true number."""
        for choice in reply.choices[:1]:
            new = int(add_choice(choice, delta))
            delta.unreported_tokens += new
            self._count += new
        if reply.usage is not None and reply.usage.completion_tokens:
            delta.unreported_tokens += reply.usage.completion_tokens - self._count
            self._count = reply.usage.completion_tokens
            delta.prompt_count = reply.usage.prompt_tokens


def _find_message(choice: ChatChoice) -> _ChatMessage | None:
    return choice.delta or choice.message


def add_choice(choice: ChatChoice, delta: DeltaBuilder) -> bool:
    """Add a choice's text and end; whether it had any text, reasoning or calls."""
    message = _find_message(choice)
    added = message is not None and delta.add(message)
    delta.finish = parse_finish(choice.finish_reason) or delta.finish
    for stop in (choice.stop_reason, choice.matched_stop):
        delta.stop = stop if isinstance(stop, str) else delta.stop
    return added


def read_logprobs(choice: ChatChoice) -> list[float]:
    """The log probability of each sampled token."""
    content = choice.logprobs.content if choice.logprobs is not None else None
    return [item.logprob for item in content or ()]


def read_array(value: msgspec.Raw) -> bytes | None:
    """A JSON array as it was written; None for nothing and for null."""
    data = bytes(value)
    return data if data.startswith(b"[") else None
