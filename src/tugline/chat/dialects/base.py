"""The contract of a dialect: pure translation between one wire format and the neutral nouns.

No I/O and no async here. A dialect is one class that owns all of its knowledge: routes, where the
secret travels, both translations, the events of a stream, error bodies. The proxy never asks which
dialect it has. What a request asks for and cannot be honoured is a `RequestError` that names the
field; it is never dropped.

`Memory` makes parsing cost what is new in a request (I7): the front that is byte for byte the same
as in an earlier request of the session is not parsed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, StrEnum, auto
from typing import Any, Protocol

import msgspec

from tugline.chat.dialects.reading import decode
from tugline.errors import TuglineError
from tugline.types import Finish, Message, Sampling, Tool, ToolCall, TraceKind


# --------------------------------------------------------------------------- what comes in
class Action(Enum):
    """What a route is for."""

    ANSWER = auto()
    """Sample an answer."""
    COUNT = auto()
    """Tell how many tokens the prompt has; nothing is sampled."""
    MODELS = auto()
    MODEL = auto()


class Incoming(msgspec.Struct, frozen=True):
    """One HTTP request: `path` is what follows the session prefix and the API version."""

    method: str
    version: str
    """``v1``, ``v1beta``, or empty when the client sent none."""
    path: str
    """Such as ``/messages`` or ``/models/m:streamGenerateContent``."""
    query: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes = b""


class ChoiceMode(StrEnum):
    """Whether the model must call a tool."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


class ToolChoice(msgspec.Struct, frozen=True):
    """What the client allows; `names` holds the one that must, or those that may, be called."""

    mode: ChoiceMode = ChoiceMode.AUTO
    names: tuple[str, ...] = ()


class ConstraintKind(StrEnum):
    """What the answer's text must be."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    GRAMMAR = "grammar"
    """A Lark grammar."""
    REGEX = "regex"


class Constraint(msgspec.Struct, frozen=True):
    """Structured output: `schema` is JSON text of a schema, a grammar or a pattern."""

    kind: ConstraintKind
    schema: str = ""
    name: str = ""


class Native(msgspec.Struct, frozen=True):
    """What the harness itself says about the conversation a call belongs to."""

    thread: str | None = None
    parent_thread: str | None = None
    kind: TraceKind | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed model call."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    asked: Sampling = Sampling()
    stream: bool = False
    usage_in_stream: bool = False
    """Whether the client wants token counts in its stream, where the dialect lets it choose."""
    n: int = 1
    tool_choice: ToolChoice = ToolChoice()
    parallel: bool = True
    """Whether one answer may hold several tool calls."""
    constraint: Constraint | None = None
    native: Native = Native()
    echo: bytes = b""
    """The dialect's own: what its answer repeats of the request, or a variant of the route."""


# --------------------------------------------------------------------------- what goes out
class TextDelta(msgspec.Struct, frozen=True):
    """More of the answer's text."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More of the answer's reasoning."""

    text: str


Piece = TextDelta | ReasoningDelta | ToolCall
"""What a stream is made of; a tool call comes whole."""


class Usage(msgspec.Struct, frozen=True):
    """True token counts of one call."""

    prompt: int
    sampled: int
    reused: int = 0
    """Prompt tokens that continue the parent call exactly."""
    reasoning: int = 0
    """Sampled tokens inside reasoning."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A finished answer, ready to be told in any dialect."""

    id: str
    """Unique and plain, such as ``s1-4``; a dialect puts its prefix before it."""
    model: str
    created: int
    message: Message
    finish: Finish
    usage: Usage
    stop: str | None = None
    """The stop string that ended it; not part of the text."""


class Stream(Protocol):
    """Encodes one streamed answer; every method returns bytes to send as they are."""

    content_type: str

    def open(self, usage: Usage) -> bytes:
        """What comes before the first piece; ``usage.prompt`` is true, or 0 if not known yet."""
        ...

    def piece(self, piece: Piece, index: int = 0) -> bytes:
        """One delta or one whole tool call of the answer `index` of several."""
        ...

    def close(self, answers: Sequence[Answer]) -> bytes:
        """Finish reasons, usage and the end marker."""
        ...

    def fault(self, error: TuglineError) -> bytes:
        """An error after the headers are out."""
        ...

    def keep_alive(self) -> bytes:
        """Something the client ignores, before and after `open`; empty if there is none."""
        ...


class Dialect(Protocol):
    """Everything the gateway knows about one wire format."""

    name: str

    def action(self, incoming: Incoming) -> Action | None:
        """What this request is for; None if it is not this dialect's."""
        ...

    def key(self, headers: Mapping[str, str], query: str) -> str | None:
        """Where this dialect's clients put the session secret."""
        ...

    def parse(self, incoming: Incoming, memory: Memory) -> Request:
        """The neutral request, also for `Action.COUNT`. Raises `RequestError` naming the field."""
        ...

    def answer(self, request: Request, answers: Sequence[Answer]) -> bytes:
        """The whole reply as one body; `answers` holds ``request.n`` of them."""
        ...

    def stream(self, request: Request, answer_id: str, created: int) -> Stream:
        """An encoder for a streamed answer."""
        ...

    def count(self, tokens: int) -> bytes:
        """The reply to `Action.COUNT`."""
        ...

    def models(self, names: Sequence[str], window: int, created: int) -> bytes:
        """The reply to `Action.MODELS`; for `Action.MODEL` call it through `model`."""
        ...

    def model(self, name: str, window: int, created: int) -> bytes:
        """The reply to `Action.MODEL`."""
        ...

    def error(self, error: TuglineError) -> tuple[int, dict[str, str], bytes]:
        """Status, extra headers and body of a failure."""
        ...


# --------------------------------------------------------------------------- parsing what is new
Step = Callable[[list[Message], Any, int], None]
"""Appends the messages of one decoded item, or replaces the last one that it extends.

It sees only the messages so far, the item and its index, so equal fronts give equal messages.
"""

_REMEMBERED = 4
_ANY = msgspec.json.Decoder()


class _Seen:
    __slots__ = ("ends", "items", "messages")

    def __init__(
        self,
        items: list[msgspec.Raw],
        messages: list[Message],
        ends: list[tuple[int, Message | None]],
    ) -> None:
        self.items, self.messages, self.ends = items, messages, ends

    def shared(self, items: Sequence[msgspec.Raw]) -> int:
        for index, (old, new) in enumerate(zip(self.items, items, strict=False)):
            if old != new:
                return index
        return min(len(self.items), len(items))


class Memory:
    """The last requests of one session, one each for the threads that take turns."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []
        self._tools: dict[bytes, tuple[Tool, ...]] = {b"": ()}

    def messages(self, items: Sequence[msgspec.Raw], step: Step) -> tuple[Message, ...]:
        """Fold raw JSON `items` into messages, beginning where they differ from a known request.

        The messages of the shared front are the same objects as before.
        """
        best, at = None, 0
        for seen in self._seen:
            shared = seen.shared(items)
            if shared > at:
                best, at = seen, shared
        messages: list[Message] = []
        ends: list[tuple[int, Message | None]] = []
        if best is not None and at:
            ends = best.ends[:at]
            count, last = ends[-1]
            messages = best.messages[:count]
            if last is not None:
                messages[-1] = last
        for index in range(at, len(items)):
            step(messages, decode(items[index], _ANY, f"message {index} of the request"), index)
            ends.append((len(messages), messages[-1] if messages else None))
        kept = [msgspec.Raw(bytes(item)) for item in items[at:]]
        front = best.items[:at] if best is not None else []
        fresh = _Seen(front + kept, messages, ends)
        if best is not None and at == len(best.items):
            self._seen.remove(best)
        self._seen = [fresh, *self._seen][:_REMEMBERED]
        return tuple(messages)

    def tools(self, raw: bytes, parse: Callable[[Any], tuple[Tool, ...]]) -> tuple[Tool, ...]:
        """The tools that `raw` JSON declares; the same object while the bytes stay the same."""
        raw = bytes(raw)  # a `msgspec.Raw` equals no bytes
        known = self._tools.get(raw)
        if known is None:
            known = parse(decode(raw, _ANY, "the list of tools"))
            if len(self._tools) >= _REMEMBERED:
                self._tools.clear()
            self._tools[raw] = known
        return known
