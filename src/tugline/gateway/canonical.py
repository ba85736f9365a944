"""What a message means, as bytes: equal for every harmless rewriting of it.

JSON spacing and key order of tool arguments, ids of calls, reasoning, and blank space around an
answer do not enter. Ids of calls are replaced by their position in the answer that made them,
because some harnesses issue their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tugline.types import EchoChange, Message, Role, Tool, ToolCall

MessageDigest = bytes
"""Digest of one message's meaning."""

_LONGEST_EXACT_INTEGER = 2**53


def digest_message(message: Message, places: Mapping[str, int]) -> MessageDigest:
    """Digest of `message`; `places` maps ids of the preceding answer's calls to positions."""
    role = Role.SYSTEM if message.role is Role.DEVELOPER else message.role
    answers = places.get(message.tool_call_id or "", message.tool_call_id)
    text = message.content.strip() if role is Role.ASSISTANT else message.content
    calls = [_call(call) for call in message.tool_calls]
    pictures = [(image.at, image.url) for image in message.images]
    meaning = [role.value, text, calls, answers, pictures, message.failed]
    return hashlib.blake2b(msgspec.json.encode(meaning), digest_size=16).digest()


def call_positions(message: Message) -> dict[str, int]:
    """Positions of an answer's calls by their ids."""
    return {call.id: i for i, call in enumerate(message.tool_calls)}


def chain_digest(before: bytes, one: MessageDigest) -> bytes:
    """Digest of a conversation that goes on by one message."""
    return hashlib.blake2b(one, key=before, digest_size=16).digest()


def tools_digest(tools: Sequence[Tool]) -> bytes:
    """Digest of what the model may call."""
    return hashlib.blake2b(msgspec.json.encode(list(tools)), digest_size=16).digest()


def echo_changes(told: Message, echoed: Message) -> tuple[EchoChange, ...]:
    """What an echo that means the same as `told` writes differently."""
    found: list[EchoChange] = []
    pairs = list(zip(told.tool_calls, echoed.tool_calls, strict=False))
    if any(a.arguments != b.arguments for a, b in pairs):
        found.append(EchoChange.ARGUMENTS)
    if (told.reasoning or "").strip() != (echoed.reasoning or "").strip():
        found.append(EchoChange.REASONING)
    if any(a.id != b.id for a, b in pairs):
        found.append(EchoChange.IDS)
    if told.content != echoed.content:
        found.append(EchoChange.TEXT)
    return tuple(found)


def _call(call: ToolCall) -> list[str]:
    try:
        parsed = json.loads(call.arguments or "{}", parse_float=_whole)
    except ValueError:
        return [call.name, "raw", call.arguments]
    return [call.name, "json", json.dumps(parsed, sort_keys=True, separators=(",", ":"))]


def _whole(text: str) -> Any:
    """JavaScript writes 1.0 back as 1."""
    value = float(text)
    exact = value.is_integer() and abs(value) < _LONGEST_EXACT_INTEGER
    return int(value) if exact else value
