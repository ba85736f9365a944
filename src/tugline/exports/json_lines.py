"""JSON lines: chats for supervised fine-tuning, and samples for slime.

Conversations are followed by their recorded parents, so sessions of text mode, which have no ids,
can be exported too. Of each thread the longest conversation that was never edited is taken.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from tugline.chat.model_call import (
    decode_arguments,
    place_system,
    serialize_message,
    serialize_tool,
)
from tugline.exports.base import Exporter, ExportRow, SessionExport, SkipReason
from tugline.traces.lineage import adds_to_parent
from tugline.types import Call, CallOutcome, Finish, Message, Mode, Role, Status, Trace, TraceKind

_DEFAULT_KINDS = frozenset({TraceKind.MAIN, TraceKind.SUBAGENT})


@dataclass(kw_only=True, eq=False)
class Sft(Exporter):
    """One row per conversation.

    `reasoning` is written as ``reasoning_content``. `arguments` of tool calls are JSON text as in
    the OpenAI API, or objects. `system` messages stay where they were, or are joined at the front.
    `shape` is one list, or the messages before the first answer and the rest.
    """

    needs_reward = False
    trains = False

    reasoning: bool = True
    arguments: Literal["text", "object"] = "text"
    system: Literal["keep", "front"] = "keep"
    shape: Literal["messages", "prompt_completion"] = "messages"

    def rows(self, session: SessionExport) -> Iterator[ExportRow | SkipReason]:
        """Yield the longest conversation of each thread."""
        for kind, chain in find_conversations(session.recording.calls):
            yield SkipReason.SHORTER if kind is None else self._make_row(session, kind, chain)

    def _make_row(
        self, session: SessionExport, kind: TraceKind, calls: Sequence[Call]
    ) -> ExportRow | SkipReason:
        if not calls:
            return SkipReason.UNANSWERED
        tokens = len(calls[-1].prompt_ids) + len(calls[-1].sampled_ids)
        exact = all(call.mode is not Mode.TEXT for call in calls)
        skip = session.filter.check(kind, exact=exact, length=tokens, default=_DEFAULT_KINDS)
        messages = join_messages(calls, front=self.system == "front")
        if skip is None and any(message.images for message in messages):
            skip = SkipReason.IMAGES
        skip = skip or (SkipReason.RAW_PROMPT if calls[0].raw_prompt else None)
        if skip is not None:
            return skip
        columns = self._make_columns(messages)
        columns["tools"] = [serialize_tool(tool) for tool in calls[-1].tools]
        columns["metadata"] = {
            "session": session.header.session.id,
            "task": session.header.task.id,
            "sample": session.header.session.sample,
            "reward": session.reward,
            "kind": kind,
            "thread": calls[0].thread,
            "turns": len(calls),
            "tokens": tokens,
            "model": session.header.model,
            "harness": session.header.task.harness.name,
        }
        return ExportRow(columns, tokens, sum(len(call.sampled_ids) for call in calls))

    def _make_columns(self, messages: Sequence[Message]) -> dict[str, object]:
        field = "reasoning_content" if self.reasoning else None
        parse = _parse_object if self.arguments == "object" else str
        serialized = [
            serialize_message(message, reasoning_field=field, arguments=parse)
            for message in messages
        ]
        if self.shape == "messages":
            return {"messages": serialized}
        first = next(i for i, message in enumerate(messages) if message.role is Role.ASSISTANT)
        return {"prompt": serialized[:first], "completion": serialized[first:]}


def find_conversations(calls: Sequence[Call]) -> Iterator[tuple[TraceKind | None, list[Call]]]:
    """Yield the longest conversation of each thread, in order; a None for each shorter one.

    An answer at the end that was cut off, or that the harness never received, is omitted; a thread
    without any answer has no calls.
    """
    known = {call.number: call for call in calls}
    extended = {call.parent for call in calls if _find_previous(call, known) is not None}
    longest: dict[tuple[TraceKind, str | None], list[Call]] = {}
    for tip in calls:
        if tip.number in extended:
            continue
        chain = _walk_back(tip, known)
        thread = (chain[0].kind if chain else tip.kind), tip.thread
        if thread in longest:
            yield None, []
        longest[thread] = max(longest.get(thread, []), chain, key=len)
    for (kind, _), chain in longest.items():
        yield kind, chain


def _find_previous(call: Call, known: Mapping[int, Call]) -> Call | None:
    """Return the call whose conversation `call` continues; None if it begins one."""
    return known.get(call.parent) if call.parent is not None and adds_to_parent(call) else None


def _walk_back(tip: Call, known: Mapping[int, Call]) -> list[Call]:
    """Return `tip` and the calls before it, up to the last complete answer."""
    chain: list[Call] = []
    call: Call | None = tip
    while call is not None:
        complete = call.finish is Finish.STOP and call.outcome is CallOutcome.COMPLETE
        if chain or (complete and call.answer is not None):
            chain.append(call)
        call = _find_previous(call, known)
    return chain[::-1]


def join_messages(calls: Sequence[Call], *, front: bool = False) -> list[Message]:
    """Return the conversation of `calls`, each of which continues the one before.

    A call without messages resumed the answer before it and has all of it. Developer messages are
    system messages. With `front`, leading system messages become one, and later ones user messages.
    """
    messages: list[Message] = []
    for call in calls:
        if not call.messages and messages and messages[-1].role is Role.ASSISTANT:
            messages.pop()
        messages += [*call.messages, *([call.answer] if call.answer is not None else [])]
    messages = [
        msgspec.structs.replace(one, role=Role.SYSTEM) if one.role is Role.DEVELOPER else one
        for one in messages
    ]
    return place_system(messages) if front else messages


def _parse_object(arguments: str) -> object:
    """Parse arguments that are a JSON object; others stay text."""
    value = decode_arguments(arguments)
    return value if isinstance(value, dict) else arguments


# --------------------------------------------------------------------------- slime
_STATUSES = {Finish.STOP: "completed", Finish.LENGTH: "truncated", Finish.ABORT: "aborted"}


class Slime(Exporter):
    """The input of slime's ``Sample.from_dict``; the response begins with the first sampled token.

    The traces of a session are siblings: they share ``rollout_id``, by which slime counts them as
    one rollout, ``index`` and the reward. Sessions of a task share ``group_index``.
    """

    def row(self, session: SessionExport, index: int, trace: Trace) -> Mapping[str, object]:
        """Return the fields of `Sample`; all others keep their default."""
        first = trace.spans[0].start
        return {
            "group_index": session.group,
            "index": session.index,
            "rollout_id": session.index,
            "prompt": session.header.task.instruction,
            "tokens": trace.ids,
            "response_length": len(trace.ids) - first,
            "reward": session.reward,
            "loss_mask": trace.mask[first:].astype(np.int8),
            "weight_versions": list(dict.fromkeys(str(span.version) for span in trace.spans)),
            "rollout_log_probs": trace.logprobs[first:],
            "status": _status(session, trace),
            "session_id": session.header.session.id,
            "metadata": {
                "task": session.header.task.id,
                "trace": index,
                "kind": trace.kind,
                "advantage": session.advantage,
            },
        }


def _status(session: SessionExport, trace: Trace) -> str:
    result, last = session.recording.result, max(span.call for span in trace.spans)
    if result is None or result.status is not Status.COMPLETED:
        out_of_time = result is not None and result.status is Status.TIMED_OUT
        return "truncated" if out_of_time else "failed"
    return _STATUSES[next(call.finish for call in session.recording.calls if call.number == last)]
