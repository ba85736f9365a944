"""The builders on sessions written by hand."""

from typing import Any

import numpy as np
import pytest

from calls import make_call as call
from tugline.errors import CaptureError, ConfigError
from tugline.traces.base import Builder, PerRequest, PrefixMerging, make_builder
from tugline.types import (
    Branch,
    Call,
    CallOutcome,
    Finish,
    Ledger,
    Mode,
    PluginSpec,
    Reason,
    TraceKind,
    VersionSpan,
)

ALL = [PerRequest, PrefixMerging]
MAIN, BRANCH, SIDE = TraceKind.MAIN, TraceKind.BRANCH, TraceKind.SIDE
TURNS = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 9], [5], parent=0)]
"""The second continues the first exactly."""
FORK = [TURNS[0], call(1, [1, 2, 3, 7, 9], [5], parent=0)]
TWINS = [call(0, [1, 2], [3, 4]), call(1, [1, 2], [3, 5]), call(2, [1, 2, 3, 5, 9], [6])]
HINTS = [
    call(0, [1], [2]),
    call(1, [1], [2, 3]),
    call(2, [8], [8]),
    call(3, [1, 2, 3, 4], [5], parent=2),
]
COMPACTED = [call(0, [1], [2]), call(1, [1, 5], [6], parent=0, branch=Branch.COMPACTED)]
TITLE = [call(0, [7], [8], kind=SIDE), call(1, [1], [2])]
ASIDE = [
    call(0, [1], [2]),
    call(1, [1, 2, 7], [8], kind=SIDE, parent=0),
    call(2, [1, 2, 3], [4], parent=0),
]


# --------------------------------------------------------------------------- by hand
@pytest.mark.parametrize("builder", ALL)
def test_a_sub_agents_trace_is_linked_to_the_call_that_started_it(
    builder: type[PerRequest],
) -> None:
    """It forks nothing, though its prompt may begin like another's; its tokens are trained."""
    calls = [
        call(0, [1], [2], thread="root"),
        call(1, [1, 2, 3], [4], thread="root", parent=0),
        call(2, [1, 7], [8], thread="a", parent_thread="root", kind=TraceKind.SUBAGENT, parent=0),
        call(3, [1, 7, 8, 9], [10], thread="a", parent_thread="root", parent=2),
    ]
    built = builder().build(calls)
    agent = next(trace for trace in built.traces if trace.thread == "a")
    assert agent.kind is TraceKind.SUBAGENT
    assert agent.parent is not None
    started = built.traces[agent.parent]
    assert [span.call for span in started.spans][-1] == 1
    assert built.ledger.trained == 4


@pytest.mark.parametrize(
    ("builder", "calls", "expected"),
    [
        (PrefixMerging(), TURNS, [([1, 2, 3, 4, 9, 5], "..xx.x", MAIN, None, 0)]),
        (
            PerRequest(),
            TURNS,
            [([1, 2, 3, 4], "..xx", MAIN, None, 0), ([1, 2, 3, 4, 9, 5], ".....x", MAIN, 0, 4)],
        ),
        (
            PrefixMerging(),
            FORK,
            [([1, 2, 3, 4], "..xx", MAIN, None, 0), ([1, 2, 3, 7, 9, 5], ".....x", BRANCH, 0, 3)],
        ),
        (
            PrefixMerging(),
            TWINS,
            [([1, 2, 3, 4], "..xx", MAIN, None, 0), ([1, 2, 3, 5, 9, 6], "..xx.x", BRANCH, 0, 3)],
        ),
        (
            PrefixMerging(),
            [call(0, [1, 2], [3]), call(1, [7, 7], [8])],
            [([1, 2, 3], "..x", MAIN, None, 0), ([7, 7, 8], "..x", SIDE, None, 0)],
        ),
        (
            PrefixMerging(),
            HINTS,
            [
                ([1, 2], ".x", MAIN, None, 0),
                ([1, 2, 3, 4, 5], ".xx.x", BRANCH, 0, 2),
                ([8, 8], ".x", SIDE, None, 0),
            ],
        ),
        (
            PrefixMerging(),
            COMPACTED,
            [([1, 2], ".x", MAIN, None, 0), ([1, 5, 6], "..x", TraceKind.COMPACTION, 0, 1)],
        ),
        (PrefixMerging(max_length=5), TURNS, [([1, 2, 3, 4], "..xx", MAIN, None, 0)]),
        (PrefixMerging(max_length=3), TURNS, [([1, 2, 3], "..x", MAIN, None, 0)]),
        (PerRequest(max_length=1), TURNS[:1], [([1], ".", MAIN, None, 0)]),
        (PrefixMerging(), TITLE, [([7, 8], "..", SIDE, None, 0), ([1, 2], ".x", MAIN, None, 0)]),
        (
            PrefixMerging(),
            ASIDE,
            [([1, 2, 3, 4], ".x.x", MAIN, None, 0), ([1, 2, 7, 8], "....", SIDE, None, 0)],
        ),
    ],
    ids=[
        *("exact turns are one trace", "a trace per call", "rewritten history forks"),
        "twins keep both answers",
        *("another conversation stands aside", "ids overrule the recorded parent", "a compaction"),
        *("a cut trace ends with an answer", "or with a part of one", "or with its context"),
        *("a title takes no place", "a question aside forks nothing"),
    ],
)
def test_calls_become_traces(builder: Builder, calls: list[Call], expected: list[object]) -> None:
    """Ids, which of them are trained, kind, parent, and how many ids are shared with it."""
    traces, ledger, _ = builder.build(calls)
    found = [
        (
            trace.ids.tolist(),
            "".join(".x"[trained] for trained in trace.mask.tolist()),
            trace.kind,
            trace.parent,
            trace.shared,
        )
        for trace in traces
    ]
    assert found == expected
    assert ledger.balanced
    assert ledger.trained == sum(mask.count("x") for _, mask, *_ in found)


GONE = call(0, [1, 2], [3, 4], outcome=CallOutcome.CLIENT_GONE, finish=Finish.ABORT)
LOST = call(0, [1], [2, 3], outcome=CallOutcome.ENGINE_LOST, finish=Finish.ABORT)
TEXT = call(1, [], [], mode=Mode.TEXT, unreported_tokens=7)
AFTER = call(1, [1, 2, 3, 9], [5], parent=0)


@pytest.mark.parametrize("builder", ALL)
@pytest.mark.parametrize(
    ("calls", "options", "ledger"),
    [
        ([GONE, call(1, [1, 2], [5])], {}, Ledger(3, 1, {Reason.CLIENT_GONE: 2})),
        ([GONE, TURNS[1]], {}, Ledger(3, 3)),
        ([call(0, [1], [2, 3], finish=Finish.ABORT), AFTER], {}, Ledger(3, 1, {Reason.ABORTED: 2})),
        ([call(0, [1], [2, 3], kind=SIDE), AFTER], {}, Ledger(3, 1, {Reason.SIDE_CALL: 2})),
        (ASIDE, {"train_side": True}, Ledger(3, 3)),
        ([LOST], {}, Ledger(2, 2)),
        (
            [call(0, [1], [2]), TEXT, call(2, [1, 2, 3], [4], parent=0)],
            {},
            Ledger(9, 2, {}, {Reason.NO_TOKEN_IDS: 7}),
        ),
        (TURNS, {"max_length": 5}, Ledger(3, 2, {}, {Reason.OVER_LENGTH: 1})),
    ],
    ids=[
        *("nobody saw it", "an echo proves that it was seen", "told to stop", "a side call"),
        *("side calls if wanted", "as far as a lost engine got", "only text", "too long"),
    ],
)
def test_every_builder_trains_and_masks_the_same(
    builder: type[PerRequest], calls: list[Call], options: dict[str, Any], ledger: Ledger
) -> None:
    """What is not trained has its reason in the ledger."""
    assert builder(**options).build(calls).ledger == ledger


# --------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("name", ["per_request", "prefix_merging"])
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
    with pytest.raises(CaptureError, match="session s: call 0 is there twice"):
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
