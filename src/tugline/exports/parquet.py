"""Every trace of a session with all that is known of it, and every call.

Nothing is interpreted: traces that train nothing are there too, and a session without a verdict
has a null for its reward. `docs/export.md` says what the columns mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from tugline.exports.base import Item, Left, Row
from tugline.exports.chat import message_of, tool_of
from tugline.exports.tables import TableExporter, pairs
from tugline.types import Trace


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

    def row(self, item: Item, index: int, trace: Trace) -> Mapping[str, object]:
        """What the trace holds, and what became of its session."""
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
        return values | _session(item) | _outcome(item, index)


class Arrow(Parquet):
    """The same rows in an Arrow IPC file."""

    suffix = ".arrow"


class Calls(TableExporter):
    """One row per model call; messages, answer and tools are JSON as the OpenAI API writes it."""

    needs_reward = False
    columns = """
        session:text task:text sample:int group:int call:int parent:int branch:text
        echo_changes:texts
        kind:text thread:text dialect:text mode:text messages:text answer:text tools:text
        prompt_tokens:int sampled_tokens:int finish:text outcome:text received:float sent:float
        first_token:float last_token:float tags:tags model:text harness:text builder:text"""

    def rows(self, item: Item) -> Iterator[Row | Left]:
        """Every call, whatever became of it; the filters of traces do not apply."""
        shared = _session(item)
        for call in item.recording.calls:
            told = {
                "call": call.number,
                "messages": _json([message_of(message) for message in call.messages]),
                "answer": None if call.answer is None else _json(message_of(call.answer)),
                "tools": _json([tool_of(tool) for tool in call.tools]),
                "prompt_tokens": len(call.prompt_ids),
                "sampled_tokens": len(call.sampled_ids) + call.unreported_tokens,
            }
            plain = ("parent", "branch", "echo_changes", "kind", "thread", "dialect", "mode")
            rest = {name: getattr(call, name) for name in (*plain, "finish", "outcome")}
            times = msgspec.structs.asdict(call.timings)
            tokens = len(call.prompt_ids) + len(call.sampled_ids)
            yield Row({**shared, **told, **rest, **times}, tokens, len(call.sampled_ids))


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _session(item: Item) -> dict[str, object]:
    return {
        "session": item.header.session.id,
        "task": item.header.task.id,
        "sample": item.header.session.sample,
        "group": item.group,
        "tags": pairs(item.header.task.tags),
        "model": item.header.model,
        "tokenizer": item.header.tokenizer,
        "harness": item.header.task.harness.name,
        "builder": item.builder_name,
    }


def _outcome(item: Item, index: int) -> dict[str, object]:
    """A trace's own reward is there if it was given under the builder of this export."""
    result, ledger = item.recording.result, item.built.ledger
    reward = result.reward if result is not None else None
    own = reward.per_trace if reward is not None else ()
    if result is None or result.builder != item.builder_name:
        own = ()
    return {
        "reward": item.reward,
        "trace_reward": own[index] if len(own) == len(item.built.traces) else None,
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
