"""The builders on sessions written by hand."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from calls import make_call as call
from calls import read_calls
from tugline.errors import CaptureError, ConfigError
from tugline.traces.base import PrefixMerging, make_builder
from tugline.types import Ledger, PluginSpec, Trace, TraceKind, VersionSpan

ROWS = list(map(json.loads, Path(__file__).with_name("sessions.jsonl").read_text().splitlines()))
"""Sessions as calls (prompt, sampled ids, other fields), and the traces or the ledger of each."""
ALL = ["per_request", "prefix_merging"]


# --------------------------------------------------------------------------- by hand
@pytest.mark.parametrize("builder", ALL)
def test_a_sub_agents_trace_is_linked_to_the_call_that_started_it(builder: str) -> None:
    """It forks nothing, though its prompt may begin like another's; its tokens are trained."""
    calls = [
        call(0, [1], [2], thread="root"),
        call(1, [1, 2, 3], [4], thread="root", parent=0),
        call(2, [1, 7], [8], thread="a", parent_thread="root", kind=TraceKind.SUBAGENT, parent=0),
        call(3, [1, 7, 8, 9], [10], thread="a", parent_thread="root", parent=2),
    ]
    built = make_builder(PluginSpec(builder)).build(calls)
    agent = next(trace for trace in built.traces if trace.thread == "a")
    assert agent.kind is TraceKind.SUBAGENT
    assert agent.parent is not None
    started = built.traces[agent.parent]
    assert [span.call for span in started.spans][-1] == 1
    assert built.ledger.trained == 4


def describe(trace: Trace) -> list[object]:
    """Ids, which of them are trained, kind, parent, and how many ids are shared with it."""
    mask = "".join(".x"[trained] for trained in trace.mask.tolist())
    return [trace.ids.tolist(), mask, trace.kind, trace.parent, trace.shared]


@pytest.mark.parametrize("row", [r for r in ROWS if "traces" in r], ids=lambda row: row["shows"])
def test_calls_become_traces(row: dict[str, Any]) -> None:
    """Exact continuations stay in one trace; anything else begins another."""
    builder = make_builder(PluginSpec(row["builder"], row.get("options", {})))
    traces, ledger, _ = builder.build(read_calls(row["calls"]))
    assert [describe(trace) for trace in traces] == row["traces"]
    assert ledger.balanced
    assert ledger.trained == sum(mask.count("x") for _, mask, *_ in row["traces"])


@pytest.mark.parametrize("builder", ALL)
@pytest.mark.parametrize("row", [r for r in ROWS if "ledger" in r], ids=lambda row: row["shows"])
def test_every_builder_trains_and_masks_the_same(builder: str, row: dict[str, Any]) -> None:
    """What is not trained has its reason in the ledger."""
    built = make_builder(PluginSpec(builder, row.get("options", {}))).build(
        read_calls(row["calls"])
    )
    assert built.ledger == msgspec.convert(row["ledger"], Ledger)


# --------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_lenght": 3}, "'max_lenght'.*max_length"),
        *(({"max_length": value}, f"max_length is {value!r}") for value in (0, -1, 2.5, "8", True)),
        ({"train_side": "yes"}, "train_side is 'yes', must be true or false"),
    ],
)
def test_wrong_options_are_named(name: str, options: dict[str, object], message: str) -> None:
    """A misspelt name with what is known, a wrong value with what would be right."""
    with pytest.raises(ConfigError, match=f"{name}.*{message}"):
        make_builder(PluginSpec(name, options))


def test_a_call_that_is_there_twice_is_refused() -> None:
    """Its tokens would be counted twice, or two sessions were mixed up."""
    with pytest.raises(CaptureError, match="session s: call 0 is recorded twice"):
        PrefixMerging().build([call(0, [1], [2]), call(0, [1], [2])])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt_ids": np.array([], np.int32)}, "prompt_ids is empty"),
        ({"logprobs": np.zeros(1, np.float32)}, "2 sampled_ids but 1 logprobs"),
        ({"versions": ()}, "versions"),
        ({"versions": (VersionSpan(1, 0, 2), VersionSpan(2, 1, 2))}, "versions"),
        ({"versions": (VersionSpan(1, 0, 3),)}, "versions"),
    ],
)
def test_incomplete_call_is_refused(changes: dict[str, object], field: str) -> None:
    """A call without its ids, logprobs or versions is an error that names the call."""
    with pytest.raises(CaptureError, match=rf"call 0 of session s: .*{field}"):
        PrefixMerging().build([call(0, [1], [2, 3], **changes)])
