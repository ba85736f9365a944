"""Recorded turns, digests of message meaning, and the reason why a request branches.

Messages with the same meaning have the same digest: JSON spacing and key order of tool arguments,
call ids, reasoning, and white space around an answer are ignored. Call ids are replaced by the
call's position in its answer, because some harnesses issue ids of their own.

Turns are compared only when a conversation forks, so a linear search is cheap enough. The reason
is recorded with the call (`Branch`).
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from tugline.chat.model_call import UNNAMED, ThreadInfo, decode_arguments
from tugline.chat.tokens import TokenSequence, count_shared
from tugline.types import Branch, EchoChange, Message, Role, Tool, ToolCall, TraceKind

_SHORTEST_TASK = 12
"""Minimum characters of an argument that is recognized as the task of a sub-agent."""
MessageDigest = bytes
"""Digest of one message's meaning."""

_LONGEST_EXACT_INTEGER = 2**53
_CHANGES = tuple(EchoChange)
_INLINE_REASONING = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
"""Reasoning inlined as text, as some clients such as pydantic-ai echo it."""


def digest_message(message: Message, positions: Mapping[str, int]) -> MessageDigest:
    """Digest `message`; `positions` maps call ids of the preceding answer to call positions."""
    role = Role.SYSTEM if message.role is Role.DEVELOPER else message.role
    answers = positions.get(message.tool_call_id or "", message.tool_call_id)
    text = message.content
    if role is Role.ASSISTANT:
        text = strip_text(text)
    calls = [_canonical_call(call) for call in message.tool_calls]
    images = [(image.at, image.url) for image in message.images]
    meaning = [role.value, text, calls, answers, images, message.failed]
    return hashlib.blake2b(msgspec.json.encode(meaning), digest_size=16).digest()


def strip_text(text: str) -> str:
    """Remove inlined reasoning and the white space around the text of an answer."""
    return _INLINE_REASONING.sub("", text).strip()


def list_call_ids(message: Message) -> tuple[str, ...]:
    """List the ids of an answer's tool calls."""
    return tuple([call.id for call in message.tool_calls])


def restore_malformed(
    echoed: Sequence[ToolCall], sampled: Sequence[ToolCall]
) -> tuple[ToolCall, ...]:
    """Return echoed calls, those with the sampled arguments whose arguments are not an object."""
    return tuple(
        call if isinstance(decode_arguments(original.arguments), dict) else original
        for call, original in zip(echoed, sampled, strict=True)
    )


def gives_task(call: ToolCall, task: str) -> bool:
    """Whether `task`, or its last lines, are an argument of `call`."""
    arguments = decode_arguments(call.arguments)
    return isinstance(arguments, dict) and any(
        isinstance(value, str)
        and len(value.strip()) >= _SHORTEST_TASK
        and task.endswith(f"\n{value.strip()}")
        for value in arguments.values()
    )


def call_positions(message: Message) -> dict[str, int]:
    """Map the ids of an answer's calls to their positions."""
    return {call.id: i for i, call in enumerate(message.tool_calls)}


def chain_digest(before: bytes, digest: MessageDigest) -> bytes:
    """Return the digest of conversation `before` extended by a message."""
    return hashlib.blake2b(digest, key=before, digest_size=16).digest()


def digest_tools(tools: Sequence[Tool]) -> bytes:
    """Digest the declared tools."""
    return hashlib.blake2b(msgspec.json.encode(list(tools)), digest_size=16).digest()


def hash_wording(answer: Message) -> bytes:
    """Hash the parts of an answer that an echo may change, in the order of `EchoChange`."""
    calls = answer.tool_calls
    reasoning = (answer.reasoning or "").strip()
    arguments = tuple(call.arguments for call in calls)
    ids = tuple(call.id for call in calls)
    return struct.pack("4q", hash(arguments), hash(reasoning), hash(ids), hash(answer.content))


def compare_echo(turn: Turn, echoed: Message) -> tuple[EchoChange, ...]:
    """List the changes in an echo that has the digest of the turn's answer.

    An echo with the same text and call ids replaces the answer, so that text is not kept twice.
    """
    hashes = (struct.unpack("4q", packed) for packed in (turn.wording, hash_wording(echoed)))
    pairs = zip(_CHANGES, *hashes, strict=True)
    changes = tuple(change for change, sampled, written in pairs if sampled != written)
    if EchoChange.TEXT not in changes and EchoChange.IDS not in changes:
        turn.answer = echoed
    return changes


def _canonical_call(call: ToolCall) -> list[Any]:
    try:
        parsed = _ARGUMENTS.decode(call.arguments or "{}")
        return [call.name, "json", msgspec.Raw(_SORTED.encode(parsed))]
    except (ValueError, RecursionError):
        return [call.name, "raw", call.arguments]


def _parse_float(text: str) -> Any:
    """Parse 1.0 as 1, because JavaScript writes 1.0 as 1."""
    value = float(text)
    exact = value.is_integer() and abs(value) < _LONGEST_EXACT_INTEGER
    return int(value) if exact else value


_ARGUMENTS = msgspec.json.Decoder(float_hook=_parse_float)
_SORTED = msgspec.json.Encoder(order="sorted")


# --------------------------------------------------------------------------- turns
_MIN_COMPACTED_ANSWERS = 2
"""Answers that a conversation must hold for its restart to be a compaction."""


class Turn(msgspec.Struct, eq=False, gc=False):
    """A recorded call as a node of the session's tree."""

    number: int
    tokens: TokenSequence
    """Ids of prompt and answer; empty if the engine reported none."""
    prompt_length: int
    """Number of leading `tokens` that are prompt."""
    answer: Message
    """The answer as sampled, or with arguments and reasoning as echoed."""
    wording: bytes
    """`hash_wording` of the answer as sampled."""
    digest: MessageDigest
    """Digest of the answer."""
    digests: tuple[MessageDigest, ...]
    """Digests of the messages added to the conversation of `parent`, without the answer."""
    parent: Turn | None
    """The turn whose conversation this turn extends."""
    tools: bytes
    """Digest of the declared tools."""
    thread: ThreadInfo = UNNAMED


@dataclass(slots=True)
class Conversation:
    """The messages of a request and their digests."""

    tools: bytes
    """Digest of the declared tools."""
    thread: ThreadInfo = UNNAMED
    messages: Sequence[Message] = ()
    digests: list[MessageDigest] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    """``chain[k]`` is the digest of the tools and the first `k` messages."""
    refused: bool = False
    """Whether the template cannot append the new messages to the turn that they extend."""

    def cut(self, count: int) -> Conversation:
        """Return the first `count` messages; `self`, to be extended, if those are all."""
        if count < len(self.messages):
            digests = self.digests[:count]
            chain = self.chain[: count + 1]
            return Conversation(self.tools, digests=digests, chain=chain)
        del self.digests[count:], self.chain[count + 1 :]  # left by a refused request
        return self


class _Entry(NamedTuple):
    """A message of a recorded conversation; `turn` is set if it is that turn's answer."""

    digest: MessageDigest
    turn: Turn | None


def nearest_by_tokens(turns: Sequence[Turn], tokens: TokenSequence) -> tuple[int, Turn | None]:
    """Return the longest prefix that `tokens` share with a turn, and the first such turn."""
    shared = ((turn.tokens.shared_prefix(tokens), turn) for turn in _leaves(turns))
    return max(shared, key=itemgetter(0), default=(0, None))


def nearest_by_meaning(
    turns: Sequence[Turn], request: Conversation
) -> tuple[Turn | None, Branch | None]:
    """Return the turn with most messages in common, and why it is not extended (None: a twin)."""
    best = None
    longest = -1
    best_entries = []
    for leaf in _leaves(turns):
        entries = _entries(leaf)
        shared = count_shared([entry.digest for entry in entries], request.digests)
        if shared > longest:
            best = leaf
            longest = shared
            best_entries = entries
    if best is None:
        return None, None
    reason = _branch_reason(best, best_entries, longest, request)
    quotes = longest < len(request.messages) and _quotes_answer(turns, request, longest, reason)
    return best, Branch.COMPACTED if quotes else reason


def repeats_sibling(siblings: Sequence[Turn], digests: Sequence[MessageDigest]) -> bool:
    """Whether a request begins with the whole request of a sibling whose answer it omits."""
    return any(
        len(turn.digests) < len(digests) and turn.digests == tuple(digests[: len(turn.digests)])
        for turn in siblings
    )


def _branch_reason(
    best: Turn, entries: list[_Entry], at: int, request: Conversation
) -> Branch | None:
    """Classify by the first message that differs, number `at`; None for a twin."""
    recorded = entries[at] if at < len(entries) else None
    requested = request.messages[at] if at < len(request.messages) else None
    has_answers = any(message.role is Role.ASSISTANT for message in request.messages)
    if best.tools != request.tools and at and (has_answers or recorded is None):
        return Branch.TOOLS_CHANGED
    if requested is None:
        twin = recorded is not None and recorded.turn is not None and best.tools == request.tools
        return None if twin else Branch.HISTORY_EDITED
    if not has_answers:
        return _restart_reason(best, entries, at, request)
    if recorded is None:
        return Branch.HARNESS_ASSISTANT
    if recorded.turn is not None:
        if requested.role is not Role.ASSISTANT:
            return Branch.TURN_DELETED
        return _edit_reason(recorded.turn.answer, requested)
    if _results_reordered(entries, request, at):
        return Branch.RESULTS_REORDERED
    return Branch.HARNESS_ASSISTANT if requested.role is Role.ASSISTANT else Branch.HISTORY_EDITED


def _quotes_answer(
    turns: Sequence[Turn], request: Conversation, at: int, reason: Branch | None
) -> bool:
    """Whether message number `at`, the first that differs, has an earlier answer as its summary.

    It is the text of any answer as the assistant's message where there was none, or it contains the
    answer to a request for a summary.
    """
    message = request.messages[at]
    if message.role is Role.ASSISTANT:
        is_new = reason is Branch.HARNESS_ASSISTANT and message.content and not message.tool_calls
        return bool(is_new) and any(turn.digest == request.digests[at] for turn in turns)
    summaries = (t.answer.content.strip() for t in turns if t.thread.kind is TraceKind.COMPACTION)
    return any(summary and summary in message.content for summary in summaries)


def _restart_reason(best: Turn, entries: list[_Entry], at: int, request: Conversation) -> Branch:
    """Classify a request without answers that differs from recorded conversations."""
    if request.thread.id is not None and request.thread.id != best.thread.id:
        return Branch.NEW_THREAD
    answers = sum(entry.turn is not None for entry in entries)
    differs_at_answer = entries[at].turn is not None if at < len(entries) else True
    if differs_at_answer and answers < _MIN_COMPACTED_ANSWERS:
        return Branch.TURN_DELETED
    same_task = request.thread.id is not None or any(
        message.role is Role.USER for message in request.messages[:at]
    )
    if same_task and answers >= _MIN_COMPACTED_ANSWERS:
        return Branch.COMPACTED
    return Branch.NEW_THREAD


def _edit_reason(sampled: Message, echoed: Message) -> Branch:
    kept = echoed.content.strip() in {"", sampled.content.strip()}
    if sampled.tool_calls and kept:
        return Branch.CALL_REPAIRED
    return Branch.HISTORY_EDITED


def _results_reordered(entries: list[_Entry], request: Conversation, at: int) -> bool:
    """Whether request and recording have the same tool results around `at`, reordered."""
    end = at
    while end < len(request.messages) and request.messages[end].role is Role.TOOL:
        end += 1
    start = at
    while start > 0 and request.messages[start - 1].role is Role.TOOL:
        start -= 1
    recorded = [entry.digest for entry in entries[start:end]]
    return end > at and sorted(recorded) == sorted(request.digests[start:end])


def _entries(turn: Turn) -> list[_Entry]:
    """List the messages of a conversation up to and including the answer of `turn`."""
    path: list[Turn] = []
    node: Turn | None = turn
    while node is not None:
        path.append(node)
        node = node.parent
    entries: list[_Entry] = []
    for step in reversed(path):
        entries += [_Entry(digest, None) for digest in step.digests]
        entries.append(_Entry(step.digest, step))
    return entries


def _leaves(turns: Sequence[Turn]) -> list[Turn]:
    parents = {id(turn.parent) for turn in turns if turn.parent is not None}
    return [turn for turn in turns if id(turn) not in parents]
