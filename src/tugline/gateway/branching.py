"""Why a request does not extend a recorded turn, told by comparing it with the turns there are.

Asked when a conversation forks, so it may look at everything. The reasons go into the record
(`Branch`), for whoever wonders why a session became several traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tugline.gateway.canonical import MessageDigest, digest_message
from tugline.gateway.turns import Turn
from tugline.types import Branch, Ids, Message, Role

_TURNS_TO_COMPACT = 2
"""Answers that a conversation must hold for its restart to be a compaction."""


class Asked(NamedTuple):
    """A request in the terms of the comparison."""

    messages: Sequence[Message]
    marks: Sequence[MessageDigest]
    tools: bytes
    thread: str | None


class _Entry(NamedTuple):
    """One message of a recorded conversation; `answered` is the turn whose answer it is."""

    mark: MessageDigest
    answered: Turn | None


def nearest(turns: Sequence[Turn], ids: Ids) -> tuple[int, Turn | None]:
    """The turn that shares the longest front with `ids`, the earliest of equals."""
    best, found = 0, None
    for turn in _leaves(turns):
        shared = turn.tokens.shared_prefix(ids)
        if shared > best or found is None:
            best, found = shared, turn
    return best, found


def beside(children: Sequence[Turn], parent: Turn, marks: Sequence[MessageDigest]) -> Branch | None:
    """`TURN_DELETED` if the request repeats what a child of `parent` was asked, and goes on."""
    for turn in children:
        asked = turn.marks
        if (
            turn.before is parent
            and len(asked) < len(marks)
            and asked == tuple(marks[: len(asked)])
        ):
            return Branch.TURN_DELETED
    return None


def reason(turns: Sequence[Turn], asked: Asked) -> tuple[Turn | None, Branch | None]:
    """The turn that comes nearest in meaning, and why it is not extended; None for a twin."""
    best, at, lines = None, -1, []
    for leaf in _leaves(turns):
        entries = _conversation(leaf)
        shared = _shared(entries, asked.marks)
        if shared > at:
            best, at, lines = leaf, shared, entries
    if best is None:
        return None, None
    return best, _why(best, lines, at, asked)


def _why(best: Turn, lines: list[_Entry], at: int, asked: Asked) -> Branch | None:
    theirs = lines[at] if at < len(lines) else None
    ours = asked.messages[at] if at < len(asked.messages) else None
    known_answers = any(message.role is Role.ASSISTANT for message in asked.messages)
    if best.tools != asked.tools and at and (known_answers or theirs is None):
        return Branch.TOOLS_CHANGED
    if ours is None:
        twin = theirs is not None and theirs.answered is not None and best.tools == asked.tools
        return None if twin else Branch.HISTORY_EDITED
    if not known_answers:
        return _restarted(best, lines, at, asked)
    if theirs is None:
        return Branch.HARNESS_ASSISTANT
    if theirs.answered is not None:
        if ours.role is not Role.ASSISTANT:
            return Branch.TURN_DELETED
        return _edited(theirs.answered.answer, ours)
    if _run(lines, asked, at):
        return Branch.RESULTS_REORDERED
    return Branch.HARNESS_ASSISTANT if ours.role is Role.ASSISTANT else Branch.HISTORY_EDITED


def _restarted(best: Turn, lines: list[_Entry], at: int, asked: Asked) -> Branch:
    """A request without any answer in it, beside conversations that have some."""
    others = asked.thread is not None and asked.thread != best.thread
    answers = sum(entry.answered is not None for entry in lines)
    first_asked = lines[at].answered is not None if at < len(lines) else True
    if others:
        return Branch.NEW_THREAD
    if first_asked and answers < _TURNS_TO_COMPACT:
        return Branch.TURN_DELETED
    shares_task = (
        any(message.role is Role.USER for message in asked.messages[:at])
        or asked.thread is not None
    )
    if shares_task and answers >= _TURNS_TO_COMPACT:
        return Branch.COMPACTED
    return Branch.NEW_THREAD


def _edited(told: Message, echoed: Message) -> Branch:
    """An answer that came back as something else."""
    if told.tool_calls and told.content.strip() == echoed.content.strip():
        return Branch.CALL_REPAIRED
    return Branch.HISTORY_EDITED


def _run(lines: list[_Entry], asked: Asked, at: int) -> bool:
    """Whether both sides go on with the same tool results in another order."""
    end = at
    while end < len(asked.messages) and asked.messages[end].role is Role.TOOL:
        end += 1
    start = at
    while start > 0 and asked.messages[start - 1].role is Role.TOOL:
        start -= 1
    theirs = [entry.mark for entry in lines[start:end]]
    return end > at and sorted(theirs) == sorted(asked.marks[start:end])


def _conversation(turn: Turn) -> list[_Entry]:
    """Every message up to and including the answer of `turn`."""
    path: list[Turn] = []
    node: Turn | None = turn
    while node is not None:
        path.append(node)
        node = node.before
    entries: list[_Entry] = []
    for one in reversed(path):
        entries += [_Entry(each, None) for each in one.marks]
        entries.append(_Entry(digest_message(one.answer, {}), one))
    return entries


def _shared(entries: list[_Entry], marks: Sequence[MessageDigest]) -> int:
    for index, (entry, other) in enumerate(zip(entries, marks, strict=False)):
        if entry.mark != other:
            return index
    return min(len(entries), len(marks))


def _leaves(turns: Sequence[Turn]) -> list[Turn]:
    inner = {id(turn.before) for turn in turns if turn.before is not None}
    return [turn for turn in turns if id(turn) not in inner]
