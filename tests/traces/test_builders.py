"""Trace builders on hand-written sessions."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from support.calls import make_call as call
from support.calls import read_calls
from tugline.errors import CaptureError, ConfigError
from tugline.schema import read_jsonl
from tugline.traces.base import PrefixMerging, make_builder
from tugline.types import Ledger, PluginSpec, Trace, VersionSpan

ROWS = [row for _, row in read_jsonl(Path(__file__).with_name("sessions.jsonl"))]
"""Sessions as calls (prompt, sampled ids, other fields), and the traces or the ledger of each."""
ALL = ["per_request", "prefix_merging"]


def describe(trace: Trace) -> list[object]:
    """Ids, which of them are trained, kind, parent, and how many ids are shared with it."""
    mask = "".join(".x"[trained] for trained in trace.mask.tolist())
    return [trace.ids.tolist(), mask, trace.kind, trace.parent, trace.shared]


@pytest.mark.parametrize("row", [r for r in ROWS if "traces" in r], ids=lambda row: row["shows"])
def test_calls_become_traces(row: dict[str, Any]) -> None:
    """Exact continuations stay in one trace; anything else starts a new one."""
    builder = make_builder(PluginSpec(row["builder"], row.get("options", {})))
    traces, ledger, _ = builder.build(read_calls(row["calls"]))
    assert [describe(trace) for trace in traces] == row["traces"]
    assert ledger.balanced
    assert ledger.trained == sum(mask.count("x") for _, mask, *_ in row["traces"])


@pytest.mark.parametrize("builder", ALL)
@pytest.mark.parametrize("row", [r for r in ROWS if "ledger" in r], ids=lambda row: row["shows"])
def test_builders_have_the_same_ledger(builder: str, row: dict[str, Any]) -> None:
    """Tokens that are not trained are counted by reason."""
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
    """The error has the known names, or the values that are allowed."""
    with pytest.raises(ConfigError, match=f"{name}.*{message}"):
        make_builder(PluginSpec(name, options))


def test_a_duplicate_call_is_refused() -> None:
    """A duplicate call is an error, since its tokens would be counted twice."""
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
    """The error names the call and the field that is missing or too short."""
    with pytest.raises(CaptureError, match=rf"call 0 of session s: .*{field}"):
        PrefixMerging().build([call(0, [1], [2, 3], **changes)])
