"""Messages, calls and tools as the `renderers` library takes them, and calls as it gives them."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from tugline.errors import Unsupported
from tugline.types import Message, Role, Tool, ToolCall

Plain = dict[str, Any]
"""A message or tool as the library takes it."""


class _JsonCall(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any]


_JSON_CALL = msgspec.json.Decoder(_JsonCall)
_LONG_NUMBER = re.compile(r"\d{16}")
"""Digits that the library's parser reads in more precision than this one."""


def json_call(text: str) -> tuple[str, str] | None:
    """The one call that a block of plain JSON holds; None leaves it to the library's parser."""
    if _LONG_NUMBER.search(text):
        return None
    try:
        call = _JSON_CALL.decode(text)
    except (ValueError, RecursionError):
        return None
    named = call.name != "" and call.name.isprintable()
    return (call.name, written(call.arguments)) if named else None


def written(arguments: Any) -> str:
    """Arguments as JSON text."""
    if isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.encode(arguments).decode()
    except (ValueError, OverflowError):  # halves of characters, and numbers beyond 64 bits
        return json.dumps(arguments)


def plain_message(message: Message) -> Plain:
    """One message. Raises `Unsupported` for images."""
    if message.images:
        msg = "this model's template has no place for images"
        raise Unsupported(msg, param="messages")
    role = Role.SYSTEM if message.role is Role.DEVELOPER else message.role
    plain: Plain = {"role": role.value, "content": message.content}
    if message.tool_calls:
        plain["tool_calls"] = [_called(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        plain["reasoning_content"] = message.reasoning
    return plain


def _called(call: ToolCall) -> Plain:
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except msgspec.DecodeError:
        arguments = call.arguments
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def plain_tool(tool: Tool) -> Plain:
    """One tool as the OpenAI API writes it."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
        },
    }
