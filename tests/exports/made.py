"""Recordings of small sessions with known tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from msgspec.structs import replace

from support.calls import make_call, make_header
from tugline.exports.base import make_exporter
from tugline.exports.pipeline import Export, ExportSummary, run
from tugline.recording.file import Writer
from tugline.recording.records import RecordedResult
from tugline.types import (
    Call,
    Ledger,
    Message,
    PluginSpec,
    Reward,
    Role,
    Status,
    Timings,
    Tool,
    ToolCall,
    VersionSpan,
)

READ = Tool("read", "Read a file", {"type": "object", "properties": {"path": {"type": "string"}}})


def call(number: int, prompt: Sequence[int], sampled: Sequence[int], **fields: Any) -> Call:
    """A call that continues the previous one; its answer is a tool call."""
    use = ToolCall(f"c{number}", "read", f'{{"path":"{number}.py"}}')
    added = (
        Message(Role.TOOL, f"file {number}", tool_call_id=f"c{number - 1}")
        if number
        else Message(Role.USER, "Mend it.")
    )
    defaults: dict[str, Any] = {
        "parent": number - 1 if number else None,
        "messages": (added,),
        "answer": Message(Role.ASSISTANT, f"Look {number}.", (use,), reasoning="Hm."),
        "tools": (READ,),
        "logprobs": np.linspace(-0.25, -0.5, len(sampled)).astype(np.float32),
        "versions": (VersionSpan(3 + number, 0, len(sampled)),),
        "engine": "embedded",
        "timings": Timings(1.0, 1.5, 2.0, 3.0),
    }
    return make_call(number, prompt, sampled, **defaults | fields)


def two_turns(first: int = 10) -> list[Call]:
    """``[10 11] -> 12 13``, then ``[10 11 12 13 14] -> 15``."""
    ids = list(range(first, first + 6))
    done = Message(Role.ASSISTANT, "Done.")
    return [call(0, ids[:2], ids[2:4]), call(1, ids[:5], ids[5:], answer=done)]


def record(
    folder: Path,
    session: str,
    *,
    task: str = "t",
    sample: int = 0,
    epoch: int = 0,
    reward: float | None = 1.0,
    status: Status | None = Status.COMPLETED,
    tags: Mapping[str, str] | None = None,
    calls: Sequence[Call] | None = None,
    tokenizer: str = "",
) -> Path:
    """Write a session of two turns; `status` None leaves it without a result."""
    header = make_header(
        session,
        task,
        sample,
        epoch,
        task_fields={"instruction": "Mend it.", "tags": dict(tags or {})},
        model="tiny",
        tokenizer=tokenizer,
    )
    path = folder / f"{session}.{epoch}.rec"
    with Writer(path, header) as writer:
        for each in two_turns() if calls is None else calls:
            writer.append(replace(each, session=session))
        if status is not None:
            reward_given = None if reward is None else Reward(reward, {"passed": reward})
            ledger = Ledger(sampled=3, trained=3)
            builder = "prefix_merging"
            writer.append_record(
                RecordedResult(status=status, builder=builder, ledger=ledger, reward=reward_given)
            )
    return path


def export(
    form: str, where: Path, out: Path, *, options: Mapping[str, Any] | None = None, **plan: Any
) -> ExportSummary:
    """Export every recording of a folder."""
    exporter = make_exporter(PluginSpec(form, dict(options or {})))
    paths = sorted(where.rglob("*.rec"))
    return run(Export(exporter=exporter, out=out, **plan), paths, lambda *_: None)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of an export: a table, or JSON lines."""
    if path.read_bytes().startswith(b"PAR1"):
        table: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return table
    return [json.loads(line) for line in path.read_text().splitlines()]
