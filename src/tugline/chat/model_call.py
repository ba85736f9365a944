"""Dialect-neutral requests and responses, parsed and encoded by dialects, sent by engine formats.

`serialize_message` and `serialize_tool` make the JSON objects of the OpenAI API, which engines,
chat templates and exported datasets use.
"""

import io
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from tugline.types import Finish, Image, Message, Role, Sampling, Tool, ToolCall, TraceKind

_SYSTEM = frozenset({Role.SYSTEM, Role.DEVELOPER})


class ChoiceMode(StrEnum):
    """Constraint on the model's tool calls."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


FORCING = frozenset({ChoiceMode.REQUIRED, ChoiceMode.NAMED})
"""Modes that demand a tool call."""


class ToolChoice(msgspec.Struct, frozen=True, gc=False):
    """The client's tool choice; `names` are the tools that must (one) or may be called."""

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
    """Conversation of a call, as far as the harness declares it in headers."""

    id: str | None = None
    parent: str | None = None
    kind: TraceKind | None = None


UNNAMED = ThreadInfo()
"""Thread of a call whose harness declares none."""


class Request(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A parsed model call. A dialect's subclass adds what only its response needs."""

    model: str
    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """Text or ids to continue without a template; None: `messages` are rendered."""
    logprobs: bool = False
    """Whether the client wants the log probability of each sampled token."""
    tools: tuple[Tool, ...] = ()
    sampling: Sampling = Sampling()
    """Sampling parameters that the client requests."""
    stream: bool = False
    n: int = 1
    """Number of responses."""
    tool_choice: ToolChoice = ToolChoice()
    parallel: bool = True
    """Whether a response may hold several tool calls."""
    constraint: Constraint | None = None
    reasoning: bool = True
    """Whether the client wants the model's reasoning in its response."""
    thread: ThreadInfo = UNNAMED


# --------------------------------------------------------------------------- responses
class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """Continuation of the text."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """Continuation of the reasoning."""

    text: str


Piece = TextDelta | ReasoningDelta | ToolCall
"""Element of a streamed response; a tool call is never split."""


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Exact token counts of one call."""

    prompt: int
    sampled: int
    reused: int = 0
    """Leading prompt tokens that are identical to those of a recorded call."""
    reasoning: int = 0
    """Sampled tokens that are reasoning."""


class Response(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A finished response, which any dialect can encode."""

    id: str
    """Unique id without prefix, such as ``s1-4``; each dialect adds its own prefix."""
    model: str
    created: int
    """Unix time in seconds."""
    message: Message
    finish: Finish
    usage: Usage
    stop: str | None = None
    """The stop string that ended the response; not part of the text."""
    tokens: tuple[tuple[str, float], ...] = ()
    """Text and log probability of each sampled token, if `Request.logprobs` asks for them."""


def split_message(message: Message, *, reasoning: bool = True) -> list[Piece]:
    """Split a message into pieces: reasoning (if `reasoning` is true), text, calls."""
    thought = message.reasoning if reasoning else None
    pieces: list[Piece] = [ReasoningDelta(thought)] if thought else []
    pieces += [TextDelta(message.content)] if message.content else []
    return [*pieces, *message.tool_calls]


def join_pieces(pieces: Sequence[Piece]) -> Message | None:
    """Join `pieces` to a message; None if there is no content."""
    text = "".join([piece.text for piece in pieces if isinstance(piece, TextDelta)])
    reasoning = "".join([piece.text for piece in pieces if isinstance(piece, ReasoningDelta)])
    calls = tuple(piece for piece in pieces if isinstance(piece, ToolCall))
    if not (text or reasoning or calls):
        return None
    return Message(Role.ASSISTANT, text, tool_calls=calls, reasoning=reasoning or None)


def sum_usage(responses: Sequence[Response]) -> Usage:
    """Add up the token counts of all responses to one prompt."""
    sampled = sum(response.usage.sampled for response in responses)
    reasoning = sum(response.usage.reasoning for response in responses)
    return msgspec.structs.replace(responses[0].usage, sampled=sampled, reasoning=reasoning)


def add_turn(messages: list[Message], turn: Message) -> None:
    """Append an assistant message, joined with a directly preceding one."""
    if messages and messages[-1].role is Role.ASSISTANT:
        turn = join_messages(messages.pop(), turn)
    messages.append(turn)


def join_messages(first: Message, second: Message) -> Message:
    """Join successive assistant messages into one."""
    text = first.content + second.content
    calls = first.tool_calls + second.tool_calls
    reasoning = (first.reasoning or "") + (second.reasoning or "") or None
    return Message(Role.ASSISTANT, text, calls, reasoning=reasoning, images=first.images)


# --------------------------------------------------------------------------- content
class ContentBuilder:
    """Builder of message content: joined text parts, and the images between them.

    A new line is inserted between two parts that no white space separates, because clients use
    parts for separate texts.
    """

    def __init__(self) -> None:
        self.images: list[Image] = []
        self.empty = True
        self._text = io.StringIO()
        self._last = ""

    @property
    def text(self) -> str:
        """Text added so far."""
        return self._text.getvalue()

    def add_text(self, text: str) -> None:
        """Append a text part."""
        if text and self._last and not (self._last.isspace() or text[0].isspace()):
            self._text.write("\n")
        self._text.write(text)
        self._last = text[-1:] or self._last
        self.empty = False

    def add_image(self, url: str, detail: str | None = None) -> None:
        """Append an image after the text so far."""
        self.images.append(Image(url, self._text.tell(), detail))
        self.empty = False

    def build(self, role: Role, call_id: str | None = None, *, failed: bool = False) -> Message:
        """Build a message with this content; `call_id` is the tool call that it answers."""
        images = tuple(self.images)
        return Message(role, self.text, tool_call_id=call_id, images=images, failed=failed)


# --------------------------------------------------------------------------- JSON objects
JsonObject = dict[str, Any]


def decode_arguments(arguments: str) -> Any:
    """Decode JSON arguments; return other text unchanged."""
    try:
        return msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return arguments


def place_system(messages: Sequence[Message], *, leading: bool = True) -> list[Message]:
    """Join leading system messages, and turn later ones into user messages.

    For templates that allow one system message, at the start. Without `leading`, all are later.
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


def start_with_user(messages: Sequence[Message]) -> Sequence[Message] | None:
    """Put an empty user message before an assistant message that begins the conversation.

    None if another message begins it, system messages aside.
    """
    start = next((at for at, m in enumerate(messages) if m.role not in _SYSTEM), 0)
    if messages[start].role is not Role.ASSISTANT:
        return None
    return (*messages[:start], Message(Role.USER), *messages[start:])


def serialize_message(
    message: Message,
    *,
    reasoning_field: str | None = "reasoning_content",
    arguments: Callable[[str], object] = str,
) -> JsonObject:
    """Serialize a message; the developer role becomes the system role.

    Reasoning goes into `reasoning_field`; None omits it. `arguments` converts the JSON text of
    each tool call's arguments.
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
    """Serialize a tool declaration."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _serialize_content(message: Message) -> str | list[JsonObject]:
    """Serialize content: text, or an ordered list of text and image parts."""
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
