"""The builders on sessions written by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calls import make_call as call
from drawn_sessions import showing
from tugline import plugins
from tugline.errors import CaptureError, ConfigError, UnknownPlugin
from tugline.rollout.parts import Parts
from tugline.traces.base import Builder, count_calls, count_spans, make_builder, sum_ledgers
from tugline.traces.builders import PerRequest, PrefixMerging
from tugline.types import (
    Branch,
    Call,
    CallOutcome,
    Finish,
    Image,
    Ledger,
    Mode,
    PluginSpec,
    Reason,
    Task,
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
def test_exact_turns_become_one_trace() -> None:
    """Two turns that continue exactly are one sequence, with tool output as context."""
    (trace,), ledger, _ = PrefixMerging().build(TURNS)
    assert trace.ids.tolist() == [1, 2, 3, 4, 9, 5]
    assert trace.mask.tolist() == [False, False, True, True, False, True]
    expected = np.array([0, 0, -0.01, -0.02, 0, -1.01], np.float32)
    assert np.array_equal(trace.logprobs, expected)
    assert [(s.call, s.start, s.end, s.version) for s in trace.spans] == [
        (0, 2, 4, 3),
        (1, 5, 6, 3),
    ]
    assert (trace.kind, trace.parent) == (TraceKind.MAIN, None)
    assert (ledger.sampled, ledger.trained, ledger.masked, ledger.dropped) == (3, 3, {}, {})


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
        *("a trace per call", "rewritten history forks", "twins keep both answers"),
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


def test_versions_within_one_answer_stay_apart() -> None:
    """A weight swap in the middle of an answer gives one span per version."""
    swapped = call(0, [1], [2, 3, 4], versions=(VersionSpan(3, 0, 1), VersionSpan(4, 1, 3)))
    spans = PrefixMerging().build([swapped]).traces[0].spans
    assert [(s.start, s.end, s.version) for s in spans] == [(1, 2, 3), (2, 4, 4)]


@pytest.mark.parametrize("builder", ALL)
def test_a_trace_names_the_pictures_in_its_context(builder: type[PerRequest]) -> None:
    """In order, once each, by the digest under which a recording keeps them."""
    calls = [
        call(0, [1, 0], [2], messages=showing("data:a")),
        call(1, [1, 0, 2, 0], [3], parent=0, messages=showing("data:b")),
    ]
    last = builder().build(calls).traces[-1]
    assert last.images == (Image("data:a").digest, Image("data:b").digest)


@pytest.mark.parametrize("builder", ALL)
def test_another_picture_is_another_context(builder: type[PerRequest]) -> None:
    """Equal ids do not make two prompts equal if their placeholders stand for other pictures."""
    calls = [
        call(0, [1, 0], [2], messages=showing("data:a")),
        call(1, [1, 0, 2, 5], [3], messages=showing("data:b")),
    ]
    first, second = builder().build(calls).traces
    assert (first.images, second.images) == ((Image("data:a").digest,), (Image("data:b").digest,))
    assert second.mask.tolist() == [False] * 4 + [True]


def test_ledgers_add_up() -> None:
    """Per call, per trace and in sum; an empty sum is an empty ledger."""
    calls = [call(0, [1, 2], [3, 4], outcome=CallOutcome.CLIENT_GONE), call(1, [1], [5, 6, 7])]
    traces, ledger, _ = PrefixMerging(max_length=3).build(calls)
    assert count_calls([TEXT], [])[1] == Ledger(sampled=7, dropped={Reason.NO_TOKEN_IDS: 7})
    assert count_calls(calls, traces) == {
        0: Ledger(sampled=2, masked={Reason.CLIENT_GONE: 1}, dropped={Reason.OVER_LENGTH: 1}),
        1: Ledger(sampled=3, trained=2, dropped={Reason.OVER_LENGTH: 1}),
    }
    assert [count_spans(trace.spans) for trace in traces] == [
        Ledger(sampled=1, masked={Reason.CLIENT_GONE: 1}),
        Ledger(sampled=2, trained=2),
    ]
    assert sum_ledgers([ledger, ledger]) == Ledger(
        sampled=10, trained=4, masked={Reason.CLIENT_GONE: 2}, dropped={Reason.OVER_LENGTH: 4}
    )
    assert sum_ledgers([]) == Ledger()


# --------------------------------------------------------------------------- chosen by a task
def task(builder: PluginSpec) -> Task:
    """A task that names this builder."""
    part = PluginSpec("shell", {"command": "true"})
    return Task(
        id="t", instruction="", harness=part, evaluator=PluginSpec("tests", {}), builder=builder
    )


def test_a_task_chooses_its_builder_by_name_or_by_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built in, ``module:Class`` or an entry point of an installed package; options go along."""
    made = Parts().builder(task(PluginSpec("per_request", {"max_length": 9})).builder)
    assert isinstance(made, PerRequest)
    assert made.max_length == 9
    (tmp_path / "theirs.py").write_text(
        "from tugline.traces.base import Builder\n"
        "class Own(Builder):\n    def __init__(self, **options):\n        self.options = options\n"
        "    def build(self, calls):\n        raise NotImplementedError\n"
    )
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[tugline.builder]\nown = theirs:Own\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("theirs:Own", "own"):
        other = Parts().builder(task(PluginSpec(name, {"deep": 1})).builder)
        assert type(other).__name__ == "Own"
        assert other.options == {"deep": 1}  # type: ignore[attr-defined]
    assert plugins.list_names("builder") == ["own", "per_request", "prefix_merging"]


def test_a_wrong_builder_is_refused_at_the_door() -> None:
    """Where a task comes in, not when its session is over."""
    with pytest.raises(ConfigError, match=r"max_length"):
        Parts().builder(PluginSpec("prefix_merging", {"max_length": 0}))
    message = r"unknown builder 'per_requests'; did you mean 'per_request'"
    with pytest.raises(UnknownPlugin, match=message):
        Parts().builder(PluginSpec("per_requests"))


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
