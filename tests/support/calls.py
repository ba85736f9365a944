"""Calls and headers written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tugline.recording.file import Writer
from tugline.recording.records import Header
from tugline.types import (
    Call,
    Finish,
    Ids,
    PluginSpec,
    Sampling,
    Session,
    Task,
    Timings,
    VersionSpan,
)


def make_call(
    number: int, prompt: Sequence[int] | Ids, sampled: Sequence[int] | Ids, **changes: Any
) -> Call:
    """One call whose logprob at each token names the call and the position."""
    count = len(sampled)
    fields: dict[str, Any] = {
        "session": "s",
        "number": number,
        "dialect": "openai_chat",
        "messages": (),
        "sampling": Sampling(),
        "prompt_ids": np.array(prompt, np.int32),
        "sampled_ids": np.array(sampled, np.int32),
        "logprobs": -(number + np.arange(1, count + 1, dtype=np.float32) / 100),
        "versions": (VersionSpan(3, 0, count),) if count else (),
        "finish": Finish.STOP,
        "engine": "e",
        "timings": Timings(received=0.0),
    }
    return Call(**(fields | changes))


def read_calls(rows: Iterable[Sequence[Any]], make: Callable[..., Call] = make_call) -> list[Call]:
    """Calls from rows: prompt ids, sampled ids, and optionally a mapping of other fields."""
    types = {field.name: field.type for field in msgspec.structs.fields(Call)}
    calls = []
    for number, (prompt, sampled, *more) in enumerate(rows):
        given = dict(*more)
        changes = {name: msgspec.convert(given[name], types[name]) for name in given}
        calls.append(make(number, prompt, sampled, **changes))
    return calls


def make_header(
    session: str = "s", task: str = "t", sample: int = 0, epoch: int = 0, **changes: Any
) -> Header:
    """The header of a session; fields of its task are given as a mapping `task_fields`."""
    task_fields = {
        "instruction": "",
        "harness": PluginSpec("shell"),
        "evaluator": PluginSpec("tests"),
        **changes.pop("task_fields", {}),
    }
    fields: dict[str, Any] = {
        "session": Session(id=session, task=task, sample=sample, epoch=epoch),
        "task": Task(id=task, **task_fields),
        "created": 0.0,
        "tugline": "0",
    }
    return Header(**(fields | changes))


def write_calls(path: Path, calls: Iterable[Call], header: Header | None = None) -> list[int]:
    """Write or extend a recording; returns the offsets of the first record and of each end."""
    with Writer(path, header) as writer:
        ends = [writer.size]
        for call in calls:
            writer.append(call)
            ends.append(writer.size)
    return ends
