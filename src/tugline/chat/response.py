"""A response in neutral terms: the deltas of a stream, token counts, and the finished message."""

from __future__ import annotations

import msgspec

from tugline.types import Finish, Message, ToolCall


class TextDelta(msgspec.Struct, frozen=True):
    """More text."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More reasoning."""

    text: str


Piece = TextDelta | ReasoningDelta | ToolCall
"""One element of a streamed response; a tool call is never split."""


class Usage(msgspec.Struct, frozen=True):
    """True token counts of one call."""

    prompt: int
    sampled: int
    reused: int = 0
    """Prompt tokens that continue the parent call exactly."""
    reasoning: int = 0
    """Sampled tokens inside reasoning."""


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A finished response, ready to be encoded by any dialect."""

    id: str
    """Unique and without prefix, such as ``s1-4``; a dialect adds its own."""
    model: str
    created: int
    """Unix time in seconds."""
    message: Message
    finish: Finish
    usage: Usage
    stop: str | None = None
    """The stop string that ended it; not part of the text."""
