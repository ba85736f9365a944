"""A model call in neutral terms, as every dialect parses it and every engine format sends it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from tugline.types import Message, Sampling, Tool, TraceKind


class ChoiceMode(StrEnum):
    """Whether the model must call a tool."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


class ToolChoice(msgspec.Struct, frozen=True):
    """The client's tool choice; `names` holds the tool that must, or those that may, be called."""

    mode: ChoiceMode = ChoiceMode.AUTO
    names: tuple[str, ...] = ()


class ConstraintKind(StrEnum):
    """Format that the text of a response must have."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    GRAMMAR = "grammar"
    """A Lark grammar."""
    REGEX = "regex"


class Constraint(msgspec.Struct, frozen=True):
    """Structured output: `schema` is the JSON text of a schema, a grammar or a pattern."""

    kind: ConstraintKind
    schema: str = ""
    name: str = ""


class ThreadInfo(msgspec.Struct, frozen=True):
    """The conversation that a call belongs to, as far as the harness says so in headers."""

    id: str | None = None
    parent: str | None = None
    kind: TraceKind | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed model call."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    sampling: Sampling = Sampling()
    """As the client requests it."""
    stream: bool = False
    usage_in_stream: bool = False
    """Whether the client wants token counts in its stream, where the dialect lets it choose."""
    n: int = 1
    """Number of responses."""
    tool_choice: ToolChoice = ToolChoice()
    parallel: bool = True
    """Whether one response may hold several tool calls."""
    constraint: Constraint | None = None
    thread: ThreadInfo = ThreadInfo()
    echo: bytes = b""
    """For the dialect alone: fields that its response repeats, or a variant of the route."""
    dialect: str = ""
    body: bytes = b""
    """As it was received, to be recorded; not sent to engines."""
