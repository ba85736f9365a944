"""A model call in neutral terms: what dialects parse and encode, and engine formats send.

`serialize_message` and `serialize_tool` make the JSON objects of the OpenAI API, which engines,
chat templates and exported datasets read.
"""

import io
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from tugline.types import Finish, Image, Message, Role, Sampling, Tool, ToolCall, TraceKind

_SYSTEM = frozenset({Role.SYSTEM, Role.DEVELOPER})


class ChoiceMode(StrEnum):
    """Whether the model must call a tool."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


class ToolChoice(msgspec.Struct, frozen=True, gc=False):
    """The client's tool choice; `names` holds the tool that must, or those that may, be called."""

    mode: ChoiceMode = ChoiceMode.AUTO
    names: tuple[str, ...] = ()


class ConstraintKind(StrEnum):
    """Format that the text of a response must have."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"


class Constraint(msgspec.Struct, frozen=True, gc=False):
    """Structured output: `schema` is the JSON text of a schema."""

    kind: ConstraintKind
    schema: str = ""
    name: str = ""


class ThreadInfo(msgspec.Struct, frozen=True, gc=False):
    """The conversation that a call belongs to, as far as the harness says so in headers."""

    id: str | None = None
    parent: str | None = None
    kind: TraceKind | None = None


UNNAMED = ThreadInfo()
"""Of a harness that says nothing."""


class Request(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A parsed model call."""

    model: str
    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """Text or ids to continue as they are, without a template; None: `messages` are rendered."""
    logprobs: bool = False
    """Whether the client wants the log probability of each sampled token."""
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
    reasoning: bool = True
    """Whether the client wants the model's reasoning in its response."""
    thread: ThreadInfo = UNNAMED
    echo: bytes = b""
    """For the dialect alone: fields that its response repeats, or a variant of the route."""
    kept_from: int | None = None
    """First of the messages that a later request may refer to by the response's id; else None."""
    dialect: str = ""


# --------------------------------------------------------------------------- responses
class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """More text."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """More reasoning."""

    text: str


Piece = TextDelta | ReasoningDelta | ToolCall
"""One element of a streamed response; a tool call is never split."""


class Usage(msgspec.Struct, frozen=True, gc=False):
    """True token counts of one call."""

    prompt: int
    sampled: int
    reused: int = 0
    """Prompt tokens that continue the parent call exactly."""
    reasoning: int = 0
    """Sampled tokens inside reasoning."""


class Response(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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
    tokens: tuple[tuple[str, float], ...] = ()
    """Text and log probability of each sampled token, if `Request.logprobs` asks for them."""


def split_message(message: Message, *, reasoning: bool = True) -> list[Piece]:
    """The pieces that add up to a response: `reasoning` if that is wanted, text, calls."""
    thought = message.reasoning if reasoning else None
    pieces: list[Piece] = [ReasoningDelta(thought)] if thought else []
    pieces += [TextDelta(message.content)] if message.content else []
    return [*pieces, *message.tool_calls]


def join_pieces(pieces: Sequence[Piece]) -> Message | None:
    """The message that `pieces` add up to; None if they are empty."""
    text = "".join([piece.text for piece in pieces if isinstance(piece, TextDelta)])
    reasoning = "".join([piece.text for piece in pieces if isinstance(piece, ReasoningDelta)])
    calls = tuple(piece for piece in pieces if isinstance(piece, ToolCall))
    if not (text or reasoning or calls):
        return None
    return Message(Role.ASSISTANT, text, tool_calls=calls, reasoning=reasoning or None)


def sum_usage(responses: Sequence[Response]) -> Usage:
    """The token counts of all responses to one prompt."""
    sampled = sum(response.usage.sampled for response in responses)
    reasoning = sum(response.usage.reasoning for response in responses)
    return msgspec.structs.replace(responses[0].usage, sampled=sampled, reasoning=reasoning)


def add_turn(messages: list[Message], turn: Message) -> None:
    """Append an assistant's message; successive ones are one turn."""
    if messages and messages[-1].role is Role.ASSISTANT:
        turn = join_messages(messages.pop(), turn)
    messages.append(turn)


def join_messages(first: Message, second: Message) -> Message:
    """Join successive assistant messages to one turn."""
    text, calls = first.content + second.content, first.tool_calls + second.tool_calls
    reasoning = (first.reasoning or "") + (second.reasoning or "") or None
    return Message(Role.ASSISTANT, text, calls, reasoning=reasoning, images=first.images)


# --------------------------------------------------------------------------- content
class ContentBuilder:
    """Text parts joined, and the images between them.

    A new line separates two texts without white space between them: clients that send one text in
    several parts mean several things.
    """

    def __init__(self) -> None:
        self.images: list[Image] = []
        self.empty = True
        self._text, self._last = io.StringIO(), ""

    @property
    def text(self) -> str:
        """All text so far."""
        return self._text.getvalue()

    def add_text(self, text: str) -> None:
        """Append one text part."""
        if text and self._last and not (self._last.isspace() or text[0].isspace()):
            self._text.write("\n")
        self._text.write(text)
        self._last = text[-1:] or self._last
        self.empty = False

    def add_image(self, url: str, detail: str | None = None) -> None:
        """Put an image behind the text so far."""
        self.images.append(Image(url, self._text.tell(), detail))
        self.empty = False

    def build(self, role: Role, call_id: str | None = None, *, failed: bool = False) -> Message:
        """Build a message of this content; `call_id` is of the call that it answers."""
        images = tuple(self.images)
        return Message(role, self.text, tool_call_id=call_id, images=images, failed=failed)


# --------------------------------------------------------------------------- JSON objects
JsonObject = dict[str, Any]


def decode_arguments(arguments: str) -> Any:
    """Decode arguments; text that is no JSON stays as it is."""
    try:
        return msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return arguments


def place_system(messages: Sequence[Message], *, leading: bool = True) -> list[Message]:
    """Join the leading system messages, and turn later ones into a user's.

    For templates that allow one system message, at the beginning; without `leading` all are late.
    """
    front = 0
    while leading and front < len(messages) and messages[front].role in _SYSTEM:
        front += 1
    joined = "\n\n".join(message.content for message in messages[:front])
    placed = [Message(Role.SYSTEM, joined)] if front else []
    for message in messages[front:]:
        late = message.role in _SYSTEM
        placed.append(msgspec.structs.replace(message, role=Role.USER) if late else message)
    return placed


def serialize_message(
    message: Message,
    *,
    reasoning_field: str | None = "reasoning_content",
    arguments: Callable[[str], object] = str,
) -> JsonObject:
    """Serialize one message; a developer's is a system message.

    Reasoning goes into `reasoning_field`, or is left out for None. `arguments` converts the JSON
    text of each tool call's arguments.
    """
    role = Role.SYSTEM if message.role is Role.DEVELOPER else message.role
    fields: JsonObject = {"role": role.value, "content": _serialize_content(message)}
    if message.reasoning and reasoning_field:
        fields[reasoning_field] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def serialize_tool(tool: Tool) -> JsonObject:
    """Serialize the declaration of one tool."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _serialize_content(message: Message) -> str | list[JsonObject]:
    """Text, or parts of text and images in their order."""
    if not message.images:
        return message.content
    parts: list[JsonObject] = []
    start = 0
    for image in message.images:
        parts.append({"type": "text", "text": message.content[start : image.at]})
        url = {"url": image.url} | ({"detail": image.detail} if image.detail else {})
        parts.append({"type": "image_url", "image_url": url})
        start = image.at
    parts.append({"type": "text", "text": message.content[start:]})
    return [part for part in parts if part.get("text") != ""]
