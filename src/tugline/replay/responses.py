"""The answers of a recording, each with the whole conversation that it answers. Pure.

A recording keeps what each request added; here conversations are whole again, so that a request can
be recognised by what it says. An answer that broke off and was taken up again is one answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from tugline.gateway.canonical import MessageDigest, call_positions
from tugline.replay.normalizers import Normalizers
from tugline.traces.lineage import adds_to_parent
from tugline.types import Call, CallOutcome, Message, Role, VersionSpan


@dataclass(frozen=True, slots=True, eq=False)
class RecordedResponse:
    """One recorded answer, and how its request is recognised."""

    call: Call
    """With all that was sampled for its answer."""
    messages: tuple[Message, ...]
    """In the order of `ordered`."""
    order: tuple[str, ...]
    """Calls of which the results came, in their own order."""
    marks: tuple[MessageDigest, ...]
    tools: dict[str, str]

    def asks(self, marks: tuple[MessageDigest, ...], tools: Mapping[str, str]) -> bool:
        """Whether a request that means this is the recorded one."""
        return len(marks) == len(self.marks) and marks == self.marks and tools == self.tools

    @property
    def needed(self) -> bool:
        """False for an answer that the harness hung up on: another run may never ask for it."""
        return self.call.outcome is not CallOutcome.CLIENT_GONE


def takes(calls: Sequence[Call], masks: Normalizers) -> list[RecordedResponse]:
    """Every answer in the order in which it was asked for."""
    first: dict[int, int] = {}
    whole: dict[int, Call] = {}
    said: dict[int, tuple[Message, ...]] = {}
    for call in sorted(calls, key=lambda call: call.number):
        parent = call.parent if call.parent in first and adds_to_parent(call) else None
        start = None if parent is None else first[parent]
        if start is not None and not call.messages:
            first[call.number] = start
            whole[start] = _joined(whole[start], call)
            continue
        first[call.number] = call.number
        whole[call.number] = call
        before: tuple[Message, ...] = ()
        if start is not None:
            answer = whole[start].answer
            before = (*said[start], answer) if answer is not None else said[start]
        said[call.number] = (*before, *call.messages)
    return [_take(call, said[number], masks) for number, call in whole.items()]


def ordered(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The same with results of parallel calls in the order of the calls, not as they came."""
    found: list[Message] = []
    places: dict[str, int] = {}
    start = 0
    for message in messages:
        found.append(message)
        if message.role is not Role.TOOL:
            places, start = call_positions(message), len(found)
        elif len(found) - start > 1:
            found[start:] = sorted(
                found[start:], key=lambda one: places.get(one.tool_call_id or "", 0)
            )
    return tuple(found)


def order(messages: Sequence[Message]) -> tuple[str, ...]:
    """Calls of which the results came, as they came."""
    return tuple(message.tool_call_id for message in messages if message.tool_call_id)


def _take(call: Call, said: tuple[Message, ...], masks: Normalizers) -> RecordedResponse:
    messages = ordered(said)
    return RecordedResponse(
        call, messages, order(said), masks.marks(messages), masks.tools(call.tools)
    )


def _joined(call: Call, rest: Call) -> Call:
    """An answer and what was sampled when it was taken up."""
    shift = len(call.sampled_ids)
    later = (VersionSpan(v.version, v.start + shift, v.end + shift) for v in rest.versions)
    return msgspec.structs.replace(
        call,
        sampled_ids=np.concatenate((call.sampled_ids, rest.sampled_ids)),
        logprobs=np.concatenate((call.logprobs, rest.logprobs)),
        versions=(*call.versions, *later),
        unreported_tokens=call.unreported_tokens + rest.unreported_tokens,
        answer=rest.answer,
        finish=rest.finish,
        stop=rest.stop,
        outcome=rest.outcome,
    )
