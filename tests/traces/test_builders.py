"""The builders on sessions written by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calls import make_call as call
from drawn_sessions import showing
from tugline import plugins
from tugline.errors import CaptureError, ConfigError, UnknownPlugin
from tugline.rollout.parts import Parts
from tugline.traces.base import count_calls, count_spans, make_builder, sum_ledgers
from tugline.traces.builders import PerRequest, PrefixMerging, PrefixTree
from tugline.types import (
    Branch,
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

ALL = [PerRequest, PrefixMerging, PrefixTree]


# --------------------------------------------------------------------------- by hand
def test_exact_turns_become_one_trace() -> None:
    """Two turns that continue exactly are one sequence, with tool output as context."""
    turns = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 9], [5], parent=0)]
    (trace,), ledger, _ = PrefixMerging().build(turns)
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


def test_per_request_gives_each_call_its_own_trace() -> None:
    """The same two turns are two sequences, and the first answer is trained in the first only."""
    turns = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 9], [5], parent=0)]
    (first, second), ledger, _ = PerRequest().build(turns)
    assert first.mask.tolist() == [False, False, True, True]
    assert second.mask.tolist() == [False] * 5 + [True]
    assert second.parent == 0
    assert ledger.trained == 3


def test_rewritten_history_forks_with_untrained_context() -> None:
    """A prompt that changes one id of what came before is a branch; its copy is not trained."""
    turns = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 7, 9], [5], parent=0)]
    (main, fork), ledger, _ = PrefixMerging().build(turns)
    assert main.ids.tolist() == [1, 2, 3, 4]
    assert fork.ids.tolist() == [1, 2, 3, 7, 9, 5]
    assert fork.mask.tolist() == [False] * 5 + [True]
    assert fork.logprobs[:5].tolist() == [0] * 5
    assert (fork.kind, fork.parent) == (TraceKind.BRANCH, 0)
    assert ledger.trained == 3


def test_twins_keep_both_answers() -> None:
    """One prompt answered twice (a retry, best of n) gives two traces and loses no token."""
    turns = [call(0, [1, 2], [3, 4]), call(1, [1, 2], [3, 5]), call(2, [1, 2, 3, 5, 9], [6])]
    (first, second), ledger, _ = PrefixMerging().build(turns)
    assert first.ids.tolist() == [1, 2, 3, 4]
    assert second.ids.tolist() == [1, 2, 3, 5, 9, 6]
    assert (second.kind, second.parent) == (TraceKind.BRANCH, 0)
    assert ledger.trained == 5


def test_unrelated_conversation_is_a_side_trace() -> None:
    """A prompt that continues nothing (a title, a sub-agent) stands beside the main trace."""
    built = PrefixMerging().build([call(0, [1, 2], [3]), call(1, [7, 7], [8])])
    assert [trace.kind for trace in built.traces] == [TraceKind.MAIN, TraceKind.SIDE]
    assert built.traces[1].parent is None


def test_a_wrong_parent_is_verified_and_overruled() -> None:
    """The recorded parent is a hint: ids decide, and the longest trace that fits is taken."""
    turns = [
        call(0, [1], [2]),
        call(1, [1], [2, 3]),
        call(2, [8], [8]),
        call(3, [1, 2, 3, 4], [5], parent=2),
    ]
    built = PrefixMerging().build(turns)
    assert [trace.ids.tolist() for trace in built.traces] == [[1, 2], [1, 2, 3, 4, 5], [8, 8]]


@pytest.mark.parametrize("builder", ALL)
def test_answer_nobody_saw_is_masked(builder: type[PerRequest]) -> None:
    """A harness that hung up never acted on the answer: kept as context, not trained."""
    gone = call(0, [1, 2], [3, 4], outcome=CallOutcome.CLIENT_GONE, finish=Finish.ABORT)
    built = builder().build([gone, call(1, [1, 2], [5])])
    assert not built.traces[0].mask.any()
    assert built.traces[0].spans[0].masked is Reason.CLIENT_GONE
    assert built.ledger.masked == {Reason.CLIENT_GONE: 2}
    assert built.ledger.trained == 1


@pytest.mark.parametrize("builder", ALL)
def test_echo_proves_that_the_answer_was_seen(builder: type[PerRequest]) -> None:
    """A later prompt that carries the answer on, id for id, takes the mask away."""
    gone = call(0, [1, 2], [3, 4], outcome=CallOutcome.CLIENT_GONE, finish=Finish.ABORT)
    built = builder().build([gone, call(1, [1, 2, 3, 4, 9], [5], parent=0)])
    assert (built.ledger.trained, built.ledger.masked) == (3, {})


@pytest.mark.parametrize("builder", ALL)
@pytest.mark.parametrize(
    ("how", "reason"),
    [({"finish": Finish.ABORT}, Reason.ABORTED), ({"kind": TraceKind.SIDE}, Reason.SIDE_CALL)],
)
def test_an_answer_told_to_stop_and_a_side_call_are_context_only(
    builder: type[PerRequest], how: dict[str, object], reason: Reason
) -> None:
    """An answer that was aborted, or is beside the task, is not trained."""
    built = builder().build([call(0, [1], [2, 3], **how), call(1, [1, 2, 3, 9], [5], parent=0)])
    assert built.ledger.masked == {reason: 2}
    assert built.ledger.trained == 1


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


def test_a_compaction_is_linked_to_what_it_summarises() -> None:
    """The trace after a compaction is one of its own, with its kind."""
    calls = [call(0, [1], [2]), call(1, [1, 5], [6], parent=0, branch=Branch.COMPACTED)]
    first, second = PrefixMerging().build(calls).traces
    assert (second.kind, second.parent) == (TraceKind.COMPACTION, 0)
    assert first.kind is TraceKind.MAIN


@pytest.mark.parametrize("builder", ALL)
def test_an_answer_is_trained_as_far_as_its_lost_engine_got(builder: type[PerRequest]) -> None:
    """What was sampled before the last replica died was sampled on policy."""
    lost = call(0, [1], [2, 3], outcome=CallOutcome.ENGINE_LOST, finish=Finish.ABORT)
    assert builder().build([lost]).ledger.trained == 2


@pytest.mark.parametrize("builder", ALL)
def test_tokens_that_nobody_saw_are_in_the_ledger(builder: type[PerRequest]) -> None:
    """An engine that tells only text gives no trace, and a reason for every token."""
    text = call(1, [], [], mode=Mode.TEXT, unreported_tokens=7)
    built = builder().build([call(0, [1], [2]), text, call(2, [1, 2, 3], [4], parent=0)])
    assert built.ledger.dropped == {Reason.NO_TOKEN_IDS: 7}
    assert (built.ledger.sampled, built.ledger.trained) == (9, 2)
    assert built.traces[-1].parent == (0 if builder is PerRequest else None)
    assert count_calls([text], [])[1] == Ledger(sampled=7, dropped={Reason.NO_TOKEN_IDS: 7})


def test_versions_within_one_answer_stay_apart() -> None:
    """A weight swap in the middle of an answer gives one span per version."""
    swapped = call(0, [1], [2, 3, 4], versions=(VersionSpan(3, 0, 1), VersionSpan(4, 1, 3)))
    spans = PrefixMerging().build([swapped]).traces[0].spans
    assert [(s.start, s.end, s.version) for s in spans] == [(1, 2, 3), (2, 4, 4)]


def test_max_length_keeps_the_exact_beginning() -> None:
    """A long trace is cut, not thrown away; the rest is in the ledger."""
    turns = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 9], [5, 6], parent=0)]
    (trace,), ledger, _ = PrefixMerging(max_length=6).build(turns)
    assert trace.ids.tolist() == [1, 2, 3, 4, 9, 5]
    assert trace.spans[-1].end == 6
    assert (ledger.trained, ledger.dropped) == (3, {Reason.OVER_LENGTH: 1})


@pytest.mark.parametrize("builder", ALL)
def test_a_cut_trace_ends_with_an_answer(builder: type[PerRequest]) -> None:
    """Context behind the last answer that fits would teach nothing, so it is not kept."""
    turns = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 9, 9, 9], [5, 6], parent=0)]
    assert PrefixMerging(max_length=6).build(turns).traces[0].ids.tolist() == [1, 2, 3, 4]
    assert builder(max_length=6).build(turns).ledger.dropped == {Reason.OVER_LENGTH: 2}
    assert builder(max_length=1).build(turns).traces[0].ids.tolist() == [1]


@pytest.mark.parametrize("builder", [PrefixMerging, PrefixTree])
def test_a_question_aside_does_not_break_a_conversation_in_two(
    builder: type[PrefixMerging],
) -> None:
    """A router asked about the whole conversation stands beside it; the work goes on unforked."""
    calls = [
        call(0, [1], [2]),
        call(1, [1, 2, 7], [8], kind=TraceKind.SIDE, parent=0),
        call(2, [1, 2, 3], [4], parent=0),
    ]
    traces, ledger, _ = builder().build(calls)
    assert [trace.ids.tolist() for trace in traces] == [[1, 2, 3, 4], [1, 2, 7, 8]]
    assert [trace.kind for trace in traces] == [TraceKind.MAIN, TraceKind.SIDE]
    assert (ledger.trained, ledger.masked) == (2, {Reason.SIDE_CALL: 1})
    assert builder(train_side=True).build(calls).ledger == Ledger(sampled=3, trained=3)


def test_a_title_that_comes_first_does_not_take_the_main_traces_place() -> None:
    """The first call of the task itself begins the main trace, whatever was asked before it."""
    calls = [call(0, [7], [8], kind=TraceKind.SIDE), call(1, [1], [2])]
    kinds = [trace.kind for trace in PrefixMerging().build(calls).traces]
    assert kinds == [TraceKind.SIDE, TraceKind.MAIN]


def test_a_fork_tells_what_it_shares_with_its_parent() -> None:
    """A trainer can take over the work of so many tokens from the parent's trace."""
    turns = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 7, 9], [5], parent=0)]
    assert [trace.shared for trace in PrefixMerging().build(turns).traces] == [0, 3]


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
    assert (first.images, second.images) == (
        (Image("data:a").digest,),
        (Image("data:b").digest,),
    )
    assert second.mask.tolist() == [False] * 4 + [True]


def test_ledgers_add_up() -> None:
    """Per call, per trace and in sum; an empty sum is an empty ledger."""
    calls = [
        call(0, [1, 2], [3, 4], outcome=CallOutcome.CLIENT_GONE),
        call(1, [1], [5, 6, 7]),
    ]
    traces, ledger, _ = PrefixMerging(max_length=3).build(calls)
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
    made = Parts().builder(task(PluginSpec("tree", {"max_length": 9})).builder)
    assert isinstance(made, PrefixTree)
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
    assert plugins.list_names("builder") == ["own", "per_request", "prefix_merging", "tree"]


def test_a_wrong_builder_is_refused_at_the_door() -> None:
    """Where a task comes in, not when its session is over."""
    with pytest.raises(ConfigError, match=r"max_length"):
        Parts().builder(PluginSpec("prefix_merging", {"max_length": 0}))
    with pytest.raises(UnknownPlugin, match=r"unknown builder 'trees'; did you mean 'tree'"):
        Parts().builder(PluginSpec("trees"))


# --------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("name", ["per_request", "prefix_merging", "tree"])
def test_unknown_option_is_named(name: str) -> None:
    """A misspelt option is refused by name, with what is known."""
    with pytest.raises(ConfigError, match=rf"{name}.*'max_lenght'.*max_length"):
        make_builder(PluginSpec(name, {"max_lenght": 3}))


@pytest.mark.parametrize("name", ["per_request", "prefix_merging", "tree"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "8", True])
def test_wrong_length_is_named(name: str, value: object) -> None:
    """A limit that is no positive whole number is refused with its value."""
    with pytest.raises(ConfigError, match=f"max_length is {value!r}"):
        make_builder(PluginSpec(name, {"max_length": value}))


@pytest.mark.parametrize("name", ["per_request", "prefix_merging", "tree"])
def test_a_wrong_switch_is_named(name: str) -> None:
    """So is a word where true or false is wanted, and the builder that was told it."""
    with pytest.raises(ConfigError, match="train_side is 'yes', must be true or false"):
        make_builder(PluginSpec(name, {"train_side": "yes"}))


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
