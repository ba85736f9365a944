"""Input of the `renderers` library: conversations and tools.

Whatever a model sampled and a client declares can be rendered. A call whose arguments are not a
JSON object is assistant text; so are all calls, where a template cannot write them. A schema that a
template cannot write is declared as JSON.
"""

import json
import re
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from renderers.base import build_training_sample

from tugline.chat.model_call import (
    JsonObject,
    decode_arguments,
    place_system,
    serialize_message,
    serialize_tool,
    start_with_user,
)
from tugline.chat.templates.base import Template
from tugline.chat.templates.contents import ContentTokenizer
from tugline.chat.tokenizer import Tokenizer
from tugline.errors import Unsupported
from tugline.schema import decode, read_values
from tugline.types import Ids, Message, Role, Tool, ToolCall

LIBRARY_ERRORS = (Exception,)
"""Raised by the library for what it cannot render or parse: it does not check its input."""
_WORDS = {
    name: frozenset(words)
    for name, words in decode(
        read_values(Path(__file__).with_name("words.yaml")), dict[str, list[str]], name="words"
    ).items()
}
_OWN_CALL_ID = re.compile(r"call_.*_(\d+)")
_DATA = frozenset({"const", "default", "enum", "examples"})
"""Keys of schemas with values that are not schemas; null is such a value."""


class CallForm(Enum):
    """Form of the calls and results in a conversation."""

    RESULTS = auto()
    """A result whose call is text, or absent, stays a result."""
    MATCHED = auto()
    """Such a result is a user message."""
    TEXT = auto()
    """All calls are text, and all results user messages."""


class Library:
    """Renderer of the library, for any conversation and any tools."""

    def __init__(
        self, name: str, renderer: Any, template: Template, contents: ContentTokenizer
    ) -> None:
        self.contents = contents
        self._name, self._renderer, self._template = name, renderer, template
        self._declared: tuple[Sequence[Tool], list[JsonObject], list[JsonObject]] = ((), [], [])

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Render a conversation and the start of the next turn. Raises `Unsupported`.

        Where a template needs a user's message, an empty one is added.
        """
        render = partial(self._renderer.render_ids, add_generation_prompt=True)
        ids: list[int]
        try:
            ids = self._call(render, self.escape, messages, tools)
        except Unsupported:
            started = start_with_user(messages)
            if started is None:
                raise
            ids = self._call(render, self.escape, started, tools)
        if messages[-1].role is Role.ASSISTANT and self._template.reopening:
            ids = [*ids, *self.contents.encode(self._template.reopening)]
        return ids

    def render_answers(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Any:
        """Render a finished conversation, with a mask of its answers. Raises `Unsupported`."""
        render = partial(
            build_training_sample,
            self._renderer,
            role_to_mask=lambda message: message["role"] == Role.ASSISTANT,
            ensure_final_stop=True,
        )
        return self._call(render, self._escape_answers, messages, tools)

    def escape(self, messages: Sequence[JsonObject]) -> list[JsonObject]:
        """Escape the contents of serialized messages."""
        return [self.contents.escape_all(message, _WORDS["message"]) for message in messages]

    def _escape_answers(self, messages: Sequence[JsonObject]) -> list[JsonObject]:
        """Escape the contents of messages whose answers may begin with marked reasoning."""
        escaped = self.escape(messages)
        marks = self._template.think, self._template.think_end
        for message, fields in zip(messages, escaped, strict=True):
            if message["role"] == Role.ASSISTANT:
                fields["content"] = self.contents.escape_answer(message["content"], *marks)
        return escaped

    def _call(
        self,
        render: Callable[..., Any],
        escape: Callable[[Sequence[JsonObject]], list[JsonObject]],
        messages: Sequence[Message],
        tools: Sequence[Tool],
    ) -> Any:
        """Call `render` with the first form of calls and tools that the template can write."""
        failure: Exception | None = None
        for form in (CallForm.RESULTS, *CallForm):
            try:
                before, declared = self._declare(tools, check=failure is not None)
                serialized = serialize_conversation(messages, self._template, form)
                return render(escape([*before, *serialized]), tools=declared or None)
            except Unsupported:
                raise
            except LIBRARY_ERRORS as error:
                failure = failure or error
        reason = self.contents.remove_keys(str(failure))
        msg = f"the template of {self._name} cannot render these messages: {reason}"
        raise Unsupported(msg, param="messages") from failure

    def _declare(
        self, tools: Sequence[Tool], *, check: bool
    ) -> tuple[list[JsonObject], list[JsonObject]]:
        """Return messages that declare tools, and declarations; cached while `tools` is the same.

        With `check`, tools that the template cannot write are replaced.
        """
        known, before, declared = self._declared  # large requests are rendered in threads
        if check or tools is not known:
            before = []
            declared = [serialize_tool(tool) for tool in tools]
            if check:
                before, declared = declare_tools(tools, self._template, self._can_declare)
            declared = [self.contents.escape_all(tool, _WORDS["tool"]) for tool in declared]
            self._declared = (tools, before, declared)
        return before, declared

    def _can_declare(self, tool: JsonObject) -> bool:
        """Whether the template can write the declaration of a tool."""
        try:
            escaped = self.contents.escape_all(tool, _WORDS["tool"])
            self._renderer.render_ids([{"role": "user", "content": "x"}], tools=[escaped])
        except LIBRARY_ERRORS:
            return False
        return True


# --------------------------------------------------------------------------- messages
def serialize_conversation(
    messages: Sequence[Message], template: Template, form: CallForm
) -> list[JsonObject]:
    """Serialize a whole conversation, with tool results linked to their calls."""
    calls: dict[str, tuple[str, str]] = {}
    number = count()
    serialized: list[JsonObject] = []
    for original in place_late_system(messages, template):
        message = write_malformed_calls(original, template, every=form is CallForm.TEXT)
        if form is not CallForm.RESULTS and message.role is Role.TOOL:
            matched = message.tool_call_id in calls
            message = message if matched else msgspec.structs.replace(message, role=Role.USER)
        fields = serialize_text(message)
        for call, fields_of_call in zip(
            message.tool_calls, fields.get("tool_calls", ()), strict=True
        ):
            numbered = f"functions.{call.name}:{next(number)}"
            call_id = numbered if template.numbered_calls else call.id
            calls[call.id] = (call.name, call_id)
            fields_of_call["id"] = call_id
        if message.tool_call_id in calls:
            link_result(fields, calls[message.tool_call_id], template)
        serialized.append(fields)
    return serialized


def serialize_text(message: Message) -> JsonObject:
    """Serialize a message. Raises `Unsupported` for images."""
    if message.images:
        raise Unsupported("this model's chat template does not support images", param="messages")
    return serialize_message(message, arguments=decode_arguments)


def place_late_system(
    messages: Sequence[Message], template: Template, *, leading: bool = True
) -> Sequence[Message]:
    """Make late system messages the user's, for templates that have no place for them."""
    return messages if template.late_system else place_system(messages, leading=leading)


def link_result(result: JsonObject, call: tuple[str, str | None], template: Template) -> None:
    """Write the name and id of its call into a serialized result, where the template has them."""
    name, call_id = call
    if template.named_results:
        result["name"] = name
    if template.numbered_calls and call_id:
        result["tool_call_id"] = call_id


def find_call_index(result: JsonObject) -> int:
    """Return the index of the call that a result answers, from a gateway's id; else -1."""
    match = _OWN_CALL_ID.fullmatch(str(result.get("tool_call_id")))
    return int(match[1]) if match else -1


def find_opening(closed: Ids, text: str, sampled: Ids, tokenizer: Tokenizer) -> Ids | None:
    """Return the ids that open an answer right after the answer `sampled`.

    `closed` is a prompt whose last message is the answer `text`. None unless `sampled` ends with
    the id that closes an answer.
    """
    ends = np.flatnonzero(closed == sampled[-1]).tolist() if len(sampled) else []
    if not ends or not tokenizer.decode(closed[: ends[-1]].tolist()).rstrip().endswith(text):
        return None
    opening = closed[ends[-1] + 1 :]
    return opening if len(opening) else None


# --------------------------------------------------------------------------- calls as text
def write_malformed_calls(message: Message, template: Template, *, every: bool) -> Message:
    """Write calls whose arguments are not a JSON object (or `every` one) into the content."""
    calls = message.tool_calls
    kept = () if every else tuple(call for call in calls if _has_object(call))
    if template.lone_calls and (len(calls) > 1 or not kept):
        kept = ()
    if len(kept) == len(calls):
        return message
    parts = [message.content] if message.content else []
    parts += [write_call(call.name, call.arguments, template) for call in calls if call not in kept]
    return msgspec.structs.replace(message, content="\n".join(parts), tool_calls=kept)


def _has_object(call: ToolCall) -> bool:
    """Whether the arguments of a call are a JSON object."""
    return isinstance(decode_arguments(call.arguments), dict)


def write_call(name: str, arguments: str, template: Template) -> str:
    """Write a call as text that resembles the template's calls, with its arguments as they are."""
    force = template.force
    if force is None or force.after is None:
        return f"{template.call}{name} {arguments}{template.call_end}"
    return f"{force.opening.strip()}{name}{force.after}{arguments}{template.call_end}"


# --------------------------------------------------------------------------- tools
def declare_tools(
    tools: Sequence[Tool], template: Template, can_render: Callable[[JsonObject], bool]
) -> tuple[list[JsonObject], list[JsonObject]]:
    """Serialize tools, some of which the template cannot write; `can_render` tests a declaration.

    Returns messages before the conversation, and declarations.
    """
    specs = [serialize_tool(tool) for tool in tools]
    if template.json_tools and not all(map(can_render, specs)):
        content = json.dumps(specs, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        return [{"role": template.json_tools, "content": content}], []
    return [], [_simplify(tool, can_render) for tool in tools]


def _simplify(tool: Tool, can_render: Callable[[JsonObject], bool]) -> JsonObject:
    """Declare a tool as it is, or without null keywords, or with its schema as JSON."""
    spec = serialize_tool(tool)
    if can_render(spec):
        return spec
    without = msgspec.structs.replace(tool, parameters=_drop_nulls(tool.parameters))
    spec = serialize_tool(without)
    if can_render(spec):
        return spec
    schema = msgspec.json.encode(tool.parameters).decode()
    text = f"{tool.description}\n\nParameters, as a JSON schema: {schema}".strip()
    nothing = {"type": "object", "properties": {}}
    return serialize_tool(msgspec.structs.replace(tool, description=text, parameters=nothing))


def _drop_nulls(schema: Any) -> Any:
    """Remove keywords without a value, such as ``"properties": null`` of servers written in Go."""
    if isinstance(schema, list):
        return [_drop_nulls(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in _DATA:
            kept[key] = value
        elif key == "properties" and isinstance(value, dict):
            kept[key] = {name: _drop_nulls(of) or {} for name, of in value.items()}
        elif value is not None:
            kept[key] = _drop_nulls(value)
    return kept
