"""JSON lines: chats for supervised fine-tuning, trajectories for Harbor, samples for slime.

Conversations are built from the recorded parents, so that sessions of text mode, which have no ids,
can be exported as well. The longest unedited conversation of each thread is written.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np

from tugline.chat import model_call
from tugline.exports.base import Exporter, ExportRow, SessionExport, SkipReason, TrainerExporter
from tugline.exports.forms import place_experts
from tugline.traces.lineage import adds_to_parent
from tugline.types import (
    Call,
    CallOutcome,
    Finish,
    Message,
    Mode,
    Role,
    Status,
    ToolCall,
    Trace,
    TraceKind,
)

_DEFAULT_KINDS = frozenset({TraceKind.MAIN, TraceKind.SUBAGENT})


class Conversations(Exporter):
    """Base of formats with a row per conversation."""

    needs_reward = False
    trains = False
    about = "metadata"
    """Name of the column that identifies the conversation."""

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
        if skip is None and any(message.images for call in calls for message in call.messages):
            skip = SkipReason.IMAGES
        skip = skip or (SkipReason.RAW_PROMPT if calls[0].raw_prompt else None)
        if skip is not None:
            return skip
        columns = self.make_columns(session, calls)
        columns[self.about] = {
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

    def make_columns(self, session: SessionExport, calls: Sequence[Call]) -> dict[str, object]:
        """Return the other columns of the conversation of `calls`."""
        raise NotImplementedError


@dataclass(kw_only=True, eq=False)
class Sft(Conversations):
    """Chats for supervised fine-tuning.

    `reasoning` is written as ``reasoning_content``. `arguments` of tool calls are JSON text as in
    the OpenAI API, or objects. `system` messages keep their positions, or are joined at the front.
    `shape` is one list of messages, or a list up to the first answer and a list of the rest.
    """

    reasoning: bool = True
    arguments: Literal["text", "object"] = "text"
    system: Literal["keep", "front"] = "keep"
    shape: Literal["messages", "prompt_completion"] = "messages"

    def make_columns(self, session: SessionExport, calls: Sequence[Call]) -> dict[str, object]:
        """Return messages and tools."""
        field = "reasoning_content" if self.reasoning else None
        parse = _parse_object if self.arguments == "object" else str
        messages = join_messages(calls, front=self.system == "front")
        serialized = [
            model_call.serialize_message(message, reasoning_field=field, arguments=parse)
            for message in messages
        ]
        tools = {"tools": [model_call.serialize_tool(tool) for tool in calls[-1].tools]}
        if self.shape == "messages":
            return {"messages": serialized, **tools}
        first = next(i for i, message in enumerate(messages) if message.role is Role.ASSISTANT)
        return {"prompt": serialized[:first], "completion": serialized[first:], **tools}


@dataclass(kw_only=True, eq=False)
class Atif(Conversations):
    """Harbor's Agent Trajectory Interchange Format, version 1.7; a row is a trajectory.

    `tokens` adds the ids of prompt and answer and the log probabilities of each step.
    """

    tokens: bool = True
    about = "extra"

    def make_columns(self, session: SessionExport, calls: Sequence[Call]) -> dict[str, object]:
        """Return the steps, the agent that made them, and totals."""
        harness = session.header.task.harness
        steps = list[dict[str, Any]]()
        for call in calls:
            if not call.messages and steps and steps[-1]["source"] == "agent":
                steps.pop()  # the call resumed this answer and contains all of it
            for message in call.messages:
                _add_step(steps, message)
            if call.answer is not None:
                _add_step(steps, call.answer)
                received = datetime.fromtimestamp(call.timings.received, UTC).isoformat()
                metrics = self._measure(call)
                steps[-1] |= {"timestamp": received, "llm_call_count": 1, "metrics": metrics}
        measured = [step["metrics"] for step in steps if "metrics" in step]
        totals = {
            f"total_{name}": sum(metrics[name] for metrics in measured)
            for name in ("prompt_tokens", "completion_tokens")
        }
        return {
            "schema_version": "ATIF-v1.7",
            "session_id": session.header.session.id,
            "trajectory_id": f"{session.header.session.id}:{calls[-1].number}",
            "agent": {
                "name": harness.name,
                "version": str(harness.options.get("version", "unknown")),
                "model_name": session.header.model,
                "tool_definitions": [model_call.serialize_tool(tool) for tool in calls[-1].tools],
            },
            "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
            "final_metrics": {**totals, "total_steps": len(steps)},
        }

    def _measure(self, call: Call) -> dict[str, object]:
        counts: dict[str, object] = {
            "prompt_tokens": len(call.prompt_ids) or call.unreported_prompt_tokens,
            "completion_tokens": len(call.sampled_ids) + call.unreported_tokens,
        }
        if self.tokens and len(call.sampled_ids):
            counts["prompt_token_ids"] = call.prompt_ids
            counts["completion_token_ids"] = call.sampled_ids
            counts["logprobs"] = call.logprobs
        return counts


def _add_step(steps: list[dict[str, Any]], message: Message) -> None:
    """Add a message as a step; a tool's result is added to the previous step."""
    if message.role is Role.TOOL and steps:
        calls = {call["tool_call_id"] for call in steps[-1].get("tool_calls", ())}
        known = {"source_call_id": message.tool_call_id} if message.tool_call_id in calls else {}
        observation = steps[-1].setdefault("observation", {"results": []})
        observation["results"].append({"content": message.content, **known})
        return
    source = {Role.ASSISTANT: "agent", Role.USER: "user"}.get(message.role, "system")
    step: dict[str, Any] = {"source": source, "message": message.content}
    if message.reasoning:
        step["reasoning_content"] = message.reasoning
    if message.tool_calls:
        step["tool_calls"] = [_describe_call(call) for call in message.tool_calls]
    steps.append(step)


def _describe_call(call: ToolCall) -> dict[str, object]:
    arguments = _parse_object(call.arguments)
    given = arguments if isinstance(arguments, dict) else {"text": arguments}
    return {"tool_call_id": call.id, "function_name": call.name, "arguments": given}


def find_conversations(calls: Sequence[Call]) -> Iterator[tuple[TraceKind | None, list[Call]]]:
    """Yield the longest conversation of each thread, in order; kind None for each shorter one.

    A final answer that is incomplete, or that the harness never received, is omitted; a thread
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
    """Return the conversation of `tip` in order, up to its last complete answer."""
    chain: list[Call] = []
    call: Call | None = tip
    while call is not None:
        complete = call.finish is Finish.STOP and call.outcome is CallOutcome.COMPLETE
        if chain or (complete and call.answer is not None):
            chain.append(call)
        call = _find_previous(call, known)
    return chain[::-1]


def join_messages(calls: Sequence[Call], *, front: bool = False) -> list[Message]:
    """Return the conversation of `calls`, each of which continues the previous one.

    A call without messages resumed the previous answer and contains all of it. With `front`,
    leading system messages are joined, and later ones become user messages.
    """
    messages: list[Message] = []
    for call in calls:
        if not call.messages and messages and messages[-1].role is Role.ASSISTANT:
            messages.pop()
        messages += [*call.messages, *([call.answer] if call.answer is not None else [])]
    return model_call.place_system(messages) if front else messages


def _parse_object(arguments: str) -> object:
    """Parse arguments if they are a JSON object; return others as text."""
    value = model_call.decode_arguments(arguments)
    return value if isinstance(value, dict) else arguments


# --------------------------------------------------------------------------- slime
_STATUSES = {Finish.STOP: "completed", Finish.LENGTH: "truncated", Finish.ABORT: "aborted"}


@dataclass(kw_only=True, eq=False)
class Slime(TrainerExporter):
    """Input of slime's ``Sample.from_dict``; the response begins with the first sampled token.

    The traces of a session are siblings: they share ``index``, the reward, and ``rollout_id``, by
    which slime counts them as one rollout. Sessions of a task share ``group_index``.
    `dense_layers` are the numbers of the model's layers without a router.
    """

    holds_experts = True
    holds_kept = True
    dense_layers: tuple[int, ...] = ()

    def row(self, session: SessionExport, index: int, trace: Trace) -> Mapping[str, object]:
        """Return the fields of a `Sample`; other fields keep their defaults."""
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
            **self._choices(trace, first),
        }

    def _choices(self, trace: Trace, first: int) -> dict[str, object]:
        """Return experts of all tokens but the last, and the sets of the response, if any."""
        columns = dict[str, object]()
        if trace.experts is not None:
            known = len(trace.ids) - 1
            layers = self.dense_layers
            spread = place_experts(trace.experts, known, layers, distinct=True)
            columns["rollout_routed_experts"] = spread
        if trace.kept is not None:
            kept = trace.kept[first:]
            columns["rollout_top_p_token_ids"] = kept.ids
            columns["rollout_top_p_token_offsets"] = kept.offsets
        return columns


def _status(session: SessionExport, trace: Trace) -> str:
    result = session.recording.result
    last = max(span.call for span in trace.spans)
    if result is None or result.status is not Status.COMPLETED:
        out_of_time = result is not None and result.status is Status.TIMED_OUT
        return "truncated" if out_of_time else "failed"
    return _STATUSES[next(call.finish for call in session.recording.calls if call.number == last)]
