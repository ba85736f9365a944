"""The contract of a dialect: pure translation between one wire format and the neutral nouns.

No I/O and no async here. What a request asks for and cannot be honoured is a `RequestError` that
names the field; it is never dropped. The proxy never asks which dialect it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from tugline.errors import TuglineError
from tugline.types import Finish, Message, Sampling, Tool, ToolCall


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed model call."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    asked: Sampling = Sampling()
    stream: bool = False
    usage_in_stream: bool = False
    """Whether the client wants token counts in its stream."""


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


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A finished answer, ready to be told in any dialect."""

    id: str
    model: str
    created: int
    message: Message
    finish: Finish
    usage: Usage


class Stream(Protocol):
    """Encodes one streamed answer; every method returns bytes to send as they are."""

    content_type: str

    def open(self) -> bytes:
        """What comes before the first piece."""
        ...

    def piece(self, piece: Piece) -> bytes:
        """One delta or one whole tool call."""
        ...

    def close(self, answer: Answer) -> bytes:
        """Finish reason, usage and the end marker."""
        ...

    def fault(self, error: TuglineError) -> bytes:
        """An error after the headers are out."""
        ...

    def keep_alive(self) -> bytes:
        """Something the client ignores; empty where the dialect has no such thing."""
        ...


class Dialect(Protocol):
    """Everything the gateway knows about one wire format."""

    name: str

    def key(self, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """Where this dialect's clients put the session secret."""
        ...

    def parse(self, body: bytes) -> Request:
        """The neutral request. Raises `RequestError` naming the field at fault."""
        ...

    def answer(self, answer: Answer) -> bytes:
        """The whole answer as one body."""
        ...

    def stream(self, request: Request, answer_id: str, created: int) -> Stream:
        """An encoder for a streamed answer."""
        ...

    def error(self, error: TuglineError) -> tuple[int, dict[str, str], bytes]:
        """Status, extra headers and body of a failure."""
        ...
