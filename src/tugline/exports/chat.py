"""Conversations as the OpenAI API writes them, which chat templates and datasets read."""

from __future__ import annotations

from typing import Any

import msgspec

from tugline.types import Message, Tool


def serialize_message(
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


def serialize_tool(tool: Tool) -> dict[str, Any]:
    """A tool as the API declares it."""
    function = {name: getattr(tool, name) for name in ("name", "description", "parameters")}
    return {"type": "function", "function": function}
