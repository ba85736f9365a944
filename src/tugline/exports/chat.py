"""Conversations as the OpenAI API writes them, which chat templates and datasets read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tugline.types import Call, Message, Role, Tool


def message_of(
    message: Message, *, reasoning: bool = True, objects: bool = False
) -> dict[str, Any]:
    """`objects` gives the arguments of tool calls as objects, where they are one; else as text."""
    plain: dict[str, Any] = {"role": message.role.value, "content": _content(message)}
    if reasoning and message.reasoning:
        plain["reasoning_content"] = message.reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _object(call.arguments) if objects else call.arguments,
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _content(message: Message) -> str | list[dict[str, Any]]:
    """Text, or parts of text and images in their order."""
    if not message.images:
        return message.content
    parts: list[dict[str, Any]] = []
    at = 0
    for image in message.images:
        parts.append({"type": "text", "text": message.content[at : image.at]})
        parts.append({"type": "image_url", "image_url": {"url": image.url}})
        at = image.at
    parts.append({"type": "text", "text": message.content[at:]})
    return [part for part in parts if part.get("text") != ""]


def _object(text: str) -> object:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return value if isinstance(value, dict) else text


def tool_of(tool: Tool) -> dict[str, Any]:
    """A tool as the API declares it."""
    function = {name: getattr(tool, name) for name in ("name", "description", "parameters")}
    return {"type": "function", "function": function}


def dialogue(calls: Sequence[Call], *, front: bool = False) -> list[Message]:
    """What was said in `calls`, each of which goes on from the one before; no one is a developer.

    A call without messages went on in the middle of the answer before it, and tells it whole. With
    `front`, leading system messages become one, and later ones speak as the user.
    """
    said: list[Message] = []
    for call in calls:
        if not call.messages and said and said[-1].role is Role.ASSISTANT:
            said.pop()
        said += [*call.messages, *([call.answer] if call.answer is not None else [])]
    said = [_as(Role.SYSTEM, one) if one.role is Role.DEVELOPER else one for one in said]
    if not front:
        return said
    at = next((i for i, one in enumerate(said) if one.role is not Role.SYSTEM), len(said))
    leading = [Message(Role.SYSTEM, "\n\n".join(one.content for one in said[:at]))] if at else []
    return leading + [_as(Role.USER, one) if one.role is Role.SYSTEM else one for one in said[at:]]


def _as(role: Role, message: Message) -> Message:
    return msgspec.structs.replace(message, role=role)
