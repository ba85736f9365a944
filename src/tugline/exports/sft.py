"""Chat JSONL for supervised fine-tuning: what was said, one conversation per line.

Conversations are followed by their recorded parents, so sessions of text mode, which have no ids,
can be exported too. Of each thread the longest conversation that was never edited is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from tugline.exports.base import Exporter, Item, Left, Row
from tugline.exports.chat import dialogue, message_of, tool_of
from tugline.types import Call, CallOutcome, Finish, Mode, Role, TraceKind

_USUAL = frozenset({TraceKind.MAIN, TraceKind.SUBAGENT})


class _Options(msgspec.Struct, frozen=True, kw_only=True):
    reasoning: bool = True
    """Whether thoughts are written, as ``reasoning_content``."""
    arguments: Literal["text", "object"] = "text"
    """Arguments of tool calls: JSON text as in the OpenAI API, or an object."""
    system: Literal["keep", "front"] = "keep"
    """Where system messages stand: where they were, or as one at the front."""
    shape: Literal["messages", "prompt_completion"] = "messages"
    """One list, or two: what the model was given first, and all that came of it."""


class Sft(Exporter):
    """One row per conversation."""

    needs_reward = False
    trains = False
    Options = _Options

    def rows(self, item: Item) -> Iterator[Row | Left]:
        """The longest conversation of each thread."""
        for kind, chain in conversations(item.recording.calls):
            yield Left.SHORTER if kind is None else self._row(item, kind, chain)

    def _row(self, item: Item, kind: TraceKind, calls: Sequence[Call]) -> Row | Left:
        if not calls:
            return Left.UNANSWERED
        tokens = len(calls[-1].prompt_ids) + len(calls[-1].sampled_ids)
        exact = all(call.mode is not Mode.TEXT for call in calls)
        left = item.wanted.refuses(kind, exact=exact, length=tokens, usual=_USUAL)
        said = dialogue(calls, front=self.options.system == "front")
        if left is None and any(message.images for message in said):
            left = Left.IMAGES
        if left is not None:
            return left
        objects = self.options.arguments == "object"
        plain = [message_of(m, reasoning=self.options.reasoning, objects=objects) for m in said]
        first = next(i for i, message in enumerate(said) if message.role is Role.ASSISTANT)
        told: Mapping[str, object] = (
            {"messages": plain}
            if self.options.shape == "messages"
            else {"prompt": plain[:first], "completion": plain[first:]}
        )
        metadata = {
            "session": item.header.session.id,
            "task": item.header.task.id,
            "sample": item.header.session.sample,
            "reward": item.reward,
            "kind": kind,
            "thread": calls[0].thread,
            "turns": len(calls),
            "tokens": tokens,
            "model": item.header.model,
            "harness": item.header.task.harness.name,
        }
        tools = [tool_of(tool) for tool in calls[-1].tools]
        values = {**told, "tools": tools, "metadata": metadata}
        return Row(values, tokens, sum(len(call.sampled_ids) for call in calls))


def conversations(calls: Sequence[Call]) -> Iterator[tuple[TraceKind | None, list[Call]]]:
    """The longest conversation of each thread, in order; a None for each shorter one.

    An answer at the end that was cut off, or that the harness never saw, is left off; no calls
    are left of a thread in which nothing was answered.
    """
    known = {call.number: call for call in calls}
    carried = {call.parent for call in calls if _before(call, known) is not None}
    best: dict[tuple[TraceKind, str | None], list[Call]] = {}
    for tip in calls:
        if tip.number in carried:
            continue
        chain, thread = _answered(tip, known), (tip.kind, tip.thread)
        if thread in best:
            yield None, []
        best[thread] = max(best.get(thread, []), chain, key=len)
    for (kind, _), chain in best.items():
        yield kind, chain


def _before(call: Call, known: Mapping[int, Call]) -> Call | None:
    """The call whose conversation `call` carries on; None if it begins one."""
    goes_on = call.branch is None and call.parent is not None
    return known.get(call.parent) if goes_on and call.parent is not None else None


def _answered(tip: Call, known: Mapping[int, Call]) -> list[Call]:
    """`tip` and the calls before it, up to the last whole answer."""
    chain: list[Call] = []
    at: Call | None = tip
    while at is not None:
        whole = at.finish is Finish.STOP and at.outcome is CallOutcome.COMPLETE
        if chain or (whole and at.answer is not None):
            chain.append(at)
        at = _before(at, known)
    return chain[::-1]
