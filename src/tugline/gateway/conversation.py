"""Find the turn that a request extends, and its exact prompt ids (I1).

A session is a tree of turns. A turn is found by a chain of digests over its conversation in
canonical form: what a harness may rewrite without changing meaning (JSON spacing and key order of
tool arguments, call ids, reasoning left out, blank space around text) does not enter the digest.
The deepest turn whose digest matches is the parent, and the new prompt is the parent's exact ids
plus the rendered tail. Anything else is a branch, with its reason.

Recognising a turn costs one short hash per message of the request.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tugline.capture.segments import shared_prefix
from tugline.gateway.rendering import Rendering
from tugline.types import Branch, Ids, Message, Role, Tool, ToolCall


@dataclass(frozen=True, slots=True)
class Turn:
    """A recorded call as a place to continue from."""

    number: int
    prompt: Ids
    sampled: Ids
    tools: bytes
    """Digest of the tools its conversation started with."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request will be answered from."""

    prompt: Ids
    parent: int | None
    branch: Branch | None
    added: tuple[Message, ...]
    """The messages that are new with respect to the parent; all of them on a branch."""
    reused: int
    """Leading prompt ids that are the parent's own."""
    digest: bytes
    tools: bytes


class Conversation:
    """The turns of one session."""

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._turns: dict[bytes, Turn] = {}

    def plan(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Plan:
        """Find the parent turn and the exact prompt for a request."""
        tools_digest = _hash(b"", msgspec.json.encode(list(tools)))
        chain = digests(tools_digest, messages)
        found = self._deepest(chain, messages)
        if found is None:
            return self._branch(messages, tools, chain[-1], tools_digest)
        depth, turn = found
        tail = tuple(messages[depth:])
        if not tail or any(message.role is Role.ASSISTANT for message in tail):
            return self._branch(messages, tools, chain[-1], tools_digest, Branch.HARNESS_ASSISTANT)
        prompt = self._rendering.bridge(turn.prompt, turn.sampled, tail, tools)
        if prompt is None:
            return self._branch(messages, tools, chain[-1], tools_digest, Branch.RENDERER_REFUSED)
        reused = len(turn.prompt) + len(turn.sampled)
        return Plan(prompt, turn.number, None, tail, reused, chain[-1], tools_digest)

    def record(self, plan: Plan, number: int, sampled: Ids, answer: Message) -> None:
        """Make an answered call a turn that later requests may extend."""
        digest = _hash(plan.digest, canonical(answer, {}))
        self._turns[digest] = Turn(number, plan.prompt, sampled, plan.tools)

    def _deepest(
        self, chain: Sequence[bytes], messages: Sequence[Message]
    ) -> tuple[int, Turn] | None:
        for depth in range(len(messages), 0, -1):
            if messages[depth - 1].role is Role.ASSISTANT:
                turn = self._turns.get(chain[depth])
                if turn is not None:
                    return depth, turn
        return None

    def _branch(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        digest: bytes,
        tools_digest: bytes,
        reason: Branch | None = None,
    ) -> Plan:
        """Render everything anew; the nearest turn by shared ids is named as the parent."""
        prompt = self._rendering.first(messages, tools)
        if not self._turns:
            return Plan(prompt, None, None, tuple(messages), 0, digest, tools_digest)
        shared, nearest = max(
            (
                (shared_prefix(np.concatenate((turn.prompt, turn.sampled)), prompt), turn)
                for turn in self._turns.values()
            ),
            key=lambda pair: (pair[0], -pair[1].number),
        )
        if reason is None:
            changed = all(turn.tools != tools_digest for turn in self._turns.values())
            reason = Branch.TOOLS_CHANGED if changed else Branch.HISTORY_EDITED
        return Plan(prompt, nearest.number, reason, tuple(messages), shared, digest, tools_digest)


# --------------------------------------------------------------------------- canonical form
def digests(tools: bytes, messages: Sequence[Message]) -> list[bytes]:
    """Digest of every prefix of a conversation; ``[k]`` covers the first `k` messages."""
    chain = [tools]
    places: dict[str, int] = {}
    for message in messages:
        chain.append(_hash(chain[-1], canonical(message, places)))
        if message.tool_calls:
            places = {call.id: i for i, call in enumerate(message.tool_calls)}
    return chain


def canonical(message: Message, places: dict[str, int]) -> bytes:
    """What a message means, as bytes: equal for every harmless rewriting of it.

    `places` maps the ids of the preceding calls to their positions, since ids may be re-issued.
    """
    role = Role.SYSTEM if message.role is Role.DEVELOPER else message.role
    answers = places.get(message.tool_call_id or "", message.tool_call_id)
    text = message.content.strip() if role is Role.ASSISTANT else message.content
    calls = [_canonical_call(call) for call in message.tool_calls]
    return msgspec.json.encode([role.value, text, calls, answers])


def _canonical_call(call: ToolCall) -> list[str]:
    try:
        parsed = json.loads(call.arguments or "{}", parse_float=_whole)
    except ValueError:
        return [call.name, "raw", call.arguments]
    return [call.name, "json", json.dumps(parsed, sort_keys=True, separators=(",", ":"))]


def _whole(text: str) -> Any:
    """JavaScript writes 1.0 back as 1."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _hash(before: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=before, digest_size=16).digest()
