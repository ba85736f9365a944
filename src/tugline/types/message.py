"""Dialect-neutral messages and tools."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Any

import msgspec


class Role(StrEnum):
    """Author of a message. `developer` stays distinct from `system` until a renderer maps it."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call by the model; `arguments` is its JSON text, unchanged."""

    id: str
    name: str
    arguments: str


class Image(msgspec.Struct, frozen=True, omit_defaults=True):
    """An image in a message, as a ``data:`` or ``https:`` URL."""

    url: str
    at: int = 0
    """Position: characters of the message's `content` before it."""
    detail: str | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of the URL in hex: its name in recordings and traces."""
        return hashlib.sha256(self.url.encode()).hexdigest()


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """A dialect-neutral message. `content` has its text parts joined."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None
    images: tuple[Image, ...] = ()
    failed: bool = False
    """Whether the harness marked a tool result as an error; templates do not render it."""


class ToolKind(StrEnum):
    """How a dialect declares and calls a tool; the model always sees a function."""

    FUNCTION = "function"
    CUSTOM = "custom"
    """Free-form text: for the model, a function with one string argument, ``input``."""
    LOCAL_SHELL = "local_shell"


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function the model may call; `parameters` is its JSON schema."""

    name: str
    """As the model sees it: ``namespace__name`` for a namespaced tool."""
    description: str
    parameters: dict[str, Any]
    kind: ToolKind = ToolKind.FUNCTION
    namespace: str | None = None
