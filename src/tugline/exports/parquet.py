"""Every trace of a session with all its fields, and every call.

Traces that train nothing are included, and a session without a reward has a null. `docs/export.md`
explains the columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from tugline.chat.serialization import serialize_message, serialize_tool
from tugline.exports.base import ExportRow, SessionExport, SkipReason
from tugline.exports.tables import TableExporter, pairs
from tugline.types import Message, Trace


class Parquet(TableExporter):
    """One row per trace."""

    needs_reward = False
    trains = False
    columns = """
        session:text task:text sample:int group:int trace:int kind:text parent:int shared:int
        thread:text exact:bool thinking_retention:text ids:ids loss_mask:bools logprobs:floats
        versions:ids spans:spans images:texts reward:float trace_reward:float
        reward_parts:numbers status:text failure:failure ledger:ledger tags:tags model:text
        tokenizer:text harness:text builder:text"""

    def row(self, session: SessionExport, index: int, trace: Trace) -> Mapping[str, object]:
        """Return the fields of the trace and of its session."""
        versions = np.full(len(trace.ids), -1, np.int32)
        for span in trace.spans:
            versions[span.start : span.end] = span.version
        values = {
            "trace": index,
            "kind": trace.kind,
            "parent": trace.parent,
            "shared": trace.shared,
            "thread": trace.thread,
            "exact": trace.exact,
            "thinking_retention": trace.thinking_retention,
            "ids": trace.ids,
            "loss_mask": trace.mask,
            "logprobs": trace.logprobs,
            "versions": versions,
            "spans": msgspec.to_builtins(trace.spans),
            "images": list(trace.images),
        }
        return values | _session_columns(session) | _outcome_columns(session, index)


class Arrow(Parquet):
    """The same rows in an Arrow IPC file."""

    suffix = ".arrow"


class Calls(TableExporter):
    """One row per model call; messages, answer and tools are JSON as the OpenAI API writes it."""

    needs_reward = False
    columns = """
        session:text task:text sample:int group:int call:int parent:int branch:text
        echo_changes:texts kind:text thread:text dialect:text mode:text messages:text
        answer:text tools:text
        prompt_tokens:int sampled_tokens:int finish:text outcome:text received:float sent:float
        first_token:float last_token:float tags:tags model:text harness:text builder:text"""

    def rows(self, session: SessionExport) -> Iterator[ExportRow | SkipReason]:
        """Yield every call; the filters of traces do not apply."""
        shared = _session_columns(session)
        for call in session.recording.calls:
            columns = {
                "call": call.number,
                "messages": _json([_serialize(message) for message in call.messages]),
                "answer": None if call.answer is None else _json(_serialize(call.answer)),
                "tools": _json([serialize_tool(tool) for tool in call.tools]),
                "prompt_tokens": len(call.prompt_ids),
                "sampled_tokens": len(call.sampled_ids) + call.unreported_tokens,
            }
            names = ("parent", "branch", "echo_changes", "kind", "thread", "dialect", "mode")
            rest = {name: getattr(call, name) for name in (*names, "finish", "outcome")}
            times = msgspec.structs.asdict(call.timings)
            tokens = len(call.prompt_ids) + len(call.sampled_ids)
            yield ExportRow({**shared, **columns, **rest, **times}, tokens, len(call.sampled_ids))


def _serialize(message: Message) -> dict[str, object]:
    return serialize_message(message) | {"role": message.role.value}  # a developer stays one


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _session_columns(session: SessionExport) -> dict[str, object]:
    return {
        "session": session.header.session.id,
        "task": session.header.task.id,
        "sample": session.header.session.sample,
        "group": session.group,
        "tags": pairs(session.header.task.tags),
        "model": session.header.model,
        "tokenizer": session.header.tokenizer,
        "harness": session.header.task.harness.name,
        "builder": session.builder_name,
    }


def _outcome_columns(session: SessionExport, index: int) -> dict[str, object]:
    """Return the outcome; a trace has its own reward if it was given under the same builder."""
    result, ledger = session.recording.result, session.built.ledger
    reward = result.reward if result is not None else None
    own = reward.per_trace if reward is not None else ()
    if result is None or result.builder != session.builder_name:
        own = ()
    return {
        "reward": session.reward,
        "trace_reward": own[index] if len(own) == len(session.built.traces) else None,
        "reward_parts": pairs(reward.parts if reward is not None else {}),
        "status": result.status if result is not None else None,
        "failure": msgspec.to_builtins(result.failure) if result is not None else None,
        "ledger": {
            "sampled": ledger.sampled,
            "trained": ledger.trained,
            "masked": pairs(ledger.masked),
            "dropped": pairs(ledger.dropped),
        },
    }
