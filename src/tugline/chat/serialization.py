"""Neutral messages and tools as JSON objects of the OpenAI API.

Engines, chat templates and exported datasets all read this form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tugline.types import Message, Role, Tool

JsonObject = dict[str, Any]


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
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
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
