"""Digests of messages that are equal for every rewriting which keeps the meaning.

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


def digest_message(message: Message, positions: Mapping[str, int]) -> MessageDigest:
    """Digest `message`; `positions` maps ids of the preceding answer's calls to their places."""
    role = Role.SYSTEM if message.role is Role.DEVELOPER else message.role
    answers = positions.get(message.tool_call_id or "", message.tool_call_id)
    text = message.content.strip() if role is Role.ASSISTANT else message.content
    calls = [_canonical_call(call) for call in message.tool_calls]
    images = [(image.at, image.url) for image in message.images]
    meaning = [role.value, text, calls, answers, images, message.failed]
    return hashlib.blake2b(msgspec.json.encode(meaning), digest_size=16).digest()


def call_positions(message: Message) -> dict[str, int]:
    """Positions of an answer's calls by their ids."""
    return {call.id: i for i, call in enumerate(message.tool_calls)}


def chain_digest(before: bytes, digest: MessageDigest) -> bytes:
    """Digest of a conversation that is extended by one message."""
    return hashlib.blake2b(digest, key=before, digest_size=16).digest()


def digest_tools(tools: Sequence[Tool]) -> bytes:
    """Digest of the declared tools."""
    return hashlib.blake2b(msgspec.json.encode(list(tools)), digest_size=16).digest()


def compare_echo(sampled: Message, echoed: Message) -> tuple[EchoChange, ...]:
    """List what an echo with the same digest as `sampled` writes differently."""
    changes: list[EchoChange] = []
    pairs = list(zip(sampled.tool_calls, echoed.tool_calls, strict=False))
    if any(a.arguments != b.arguments for a, b in pairs):
        changes.append(EchoChange.ARGUMENTS)
    if (sampled.reasoning or "").strip() != (echoed.reasoning or "").strip():
        changes.append(EchoChange.REASONING)
    if any(a.id != b.id for a, b in pairs):
        changes.append(EchoChange.IDS)
    if sampled.content != echoed.content:
        changes.append(EchoChange.TEXT)
    return tuple(changes)


def _canonical_call(call: ToolCall) -> list[str]:
    try:
        parsed = json.loads(call.arguments or "{}", parse_float=_parse_float)
    except ValueError:
        return [call.name, "raw", call.arguments]
    return [call.name, "json", json.dumps(parsed, sort_keys=True, separators=(",", ":"))]


def _parse_float(text: str) -> Any:
    """Read 1.0 as 1, since JavaScript writes it back so."""
    value = float(text)
    exact = value.is_integer() and abs(value) < _LONGEST_EXACT_INTEGER
    return int(value) if exact else value
