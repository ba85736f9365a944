"""Both builders on sessions written by hand and on random ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from tugline import plugins
from tugline.builders.base import Built
from tugline.builders.per_request import PerRequest
from tugline.builders.prefix_merging import PrefixMerging
from tugline.errors import CaptureError, ConfigError
from tugline.types import (
    Branch,
    Call,
    Finish,
    Mode,
    Outcome,
    Reason,
    Sampling,
    Timings,
    TraceKind,
    VersionSpan,
)

BOTH = [PerRequest, PrefixMerging]


def call(number: int, prompt: Sequence[int], sampled: Sequence[int], **changes: object) -> Call:
    """One call whose logprob at each token names the call and the place."""
    fields: dict[str, object] = {
        "session": "s",
        "number": number,
        "dialect": "openai_chat",
        "messages": (),
        "sampling": Sampling(),
        "prompt_ids": np.array(prompt, np.int32),
        "sampled_ids": np.array(sampled, np.int32),
        "logprobs": -(number + np.arange(1, len(sampled) + 1, dtype=np.float32) / 100),
        "versions": (VersionSpan(3, 0, len(sampled)),) if len(sampled) else (),
        "finish": Finish.STOP,
        "engine": "e",
        "timings": Timings(received=0.0),
    }
    return Call(**(fields | changes))  # type: ignore[arg-type]


# --------------------------------------------------------------------------- by hand
def test_exact_turns_become_one_trace() -> None:
    """Two turns that continue exactly are one sequence, with tool output as context."""
    turns = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 9], [5], parent=0)]
    (trace,), ledger = PrefixMerging().build(turns)
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
    (first, second), ledger = PerRequest().build(turns)
    assert first.mask.tolist() == [False, False, True, True]
    assert second.mask.tolist() == [False] * 5 + [True]
    assert second.parent == 0
    assert ledger.trained == 3


def test_rewritten_history_forks_with_untrained_context() -> None:
    """A prompt that changes one id of what came before is a branch; its copy is not trained."""
    turns = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 7, 9], [5], parent=0)]
    (main, fork), ledger = PrefixMerging().build(turns)
    assert main.ids.tolist() == [1, 2, 3, 4]
    assert fork.ids.tolist() == [1, 2, 3, 7, 9, 5]
    assert fork.mask.tolist() == [False] * 5 + [True]
    assert fork.logprobs[:5].tolist() == [0] * 5
    assert (fork.kind, fork.parent) == (TraceKind.BRANCH, 0)
    assert ledger.trained == 3


def test_twins_keep_both_answers() -> None:
    """One prompt answered twice (a retry, best of n) gives two traces and loses no token."""
    turns = [call(0, [1, 2], [3, 4]), call(1, [1, 2], [3, 5]), call(2, [1, 2, 3, 5, 9], [6])]
    (first, second), ledger = PrefixMerging().build(turns)
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


@pytest.mark.parametrize("builder", BOTH)
def test_answer_nobody_saw_is_masked(builder: type[PerRequest]) -> None:
    """A harness that hung up never acted on the answer: kept as context, not trained."""
    gone = call(0, [1, 2], [3, 4], outcome=Outcome.CLIENT_GONE, finish=Finish.ABORT)
    built = builder().build([gone, call(1, [1, 2], [5])])
    assert not built.traces[0].mask.any()
    assert built.traces[0].spans[0].masked is Reason.CLIENT_GONE
    assert built.ledger.masked == {Reason.CLIENT_GONE: 2}
    assert built.ledger.trained == 1


@pytest.mark.parametrize("builder", BOTH)
def test_echo_proves_that_the_answer_was_seen(builder: type[PerRequest]) -> None:
    """A later prompt that carries the answer on, id for id, takes the mask away."""
    gone = call(0, [1, 2], [3, 4], outcome=Outcome.CLIENT_GONE, finish=Finish.ABORT)
    built = builder().build([gone, call(1, [1, 2, 3, 4, 9], [5], parent=0)])
    assert (built.ledger.trained, built.ledger.masked) == (3, {})


@pytest.mark.parametrize("builder", BOTH)
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


@pytest.mark.parametrize("builder", BOTH)
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


@pytest.mark.parametrize("builder", BOTH)
def test_an_answer_is_trained_as_far_as_its_lost_engine_got(builder: type[PerRequest]) -> None:
    """What was sampled before the last replica died was sampled on policy."""
    lost = call(0, [1], [2, 3], outcome=Outcome.ENGINE_LOST, finish=Finish.ABORT)
    assert builder().build([lost]).ledger.trained == 2


@pytest.mark.parametrize("builder", BOTH)
def test_tokens_that_nobody_saw_are_in_the_ledger(builder: type[PerRequest]) -> None:
    """An engine that tells only text gives no trace, and a reason for every token."""
    text = call(1, [], [], mode=Mode.TEXT, unseen=7)
    built = builder().build([call(0, [1], [2]), text, call(2, [1, 2, 3], [4], parent=0)])
    assert built.ledger.dropped == {Reason.NO_TOKEN_IDS: 7}
    assert (built.ledger.sampled, built.ledger.trained) == (9, 2)
    assert built.traces[-1].parent == (0 if builder is PerRequest else None)


def test_versions_within_one_answer_stay_apart() -> None:
    """A weight swap in the middle of an answer gives one span per version."""
    swapped = call(0, [1], [2, 3, 4], versions=(VersionSpan(3, 0, 1), VersionSpan(4, 1, 3)))
    spans = PrefixMerging().build([swapped]).traces[0].spans
    assert [(s.start, s.end, s.version) for s in spans] == [(1, 2, 3), (2, 4, 4)]


def test_max_length_keeps_the_exact_beginning() -> None:
    """A long trace is cut, not thrown away; the rest is in the ledger."""
    turns = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 9], [5, 6], parent=0)]
    (trace,), ledger = PrefixMerging(max_length=6).build(turns)
    assert trace.ids.tolist() == [1, 2, 3, 4, 9, 5]
    assert trace.spans[-1].end == 6
    assert (ledger.trained, ledger.dropped) == (3, {Reason.OVER_LENGTH: 1})


# --------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("name", ["per_request", "prefix_merging"])
def test_unknown_option_is_named(name: str) -> None:
    """A misspelt option is refused by name, with what is known."""
    with pytest.raises(ConfigError, match=rf"{name}.*'max_lenght'.*max_length"):
        plugins.find("builder", name)(max_lenght=3)


@pytest.mark.parametrize("value", [0, -1, 2.5, "8", True])
def test_wrong_length_is_named(value: object) -> None:
    """A limit that is no positive whole number is refused with its value."""
    with pytest.raises(ConfigError, match=f"max_length is {value!r}"):
        PrefixMerging(max_length=value)


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


# --------------------------------------------------------------------------- any session
@st.composite
def sessions(draw: DrawFn) -> list[Call]:
    """A session grown call by call; few distinct ids, so accidental prefixes happen."""
    ids = st.lists(st.integers(0, 2), max_size=4)
    grown: list[Call] = []
    for number in range(draw(st.integers(1, 9))):
        base = draw(st.sampled_from(grown)) if grown else None
        how = draw(st.sampled_from(["continue", "twin", "edit", "fresh"])) if base else "fresh"
        prompt: list[int] = [draw(st.integers(0, 2)), *draw(ids)]
        if base is not None and how != "fresh":
            whole = [*base.prompt_ids.tolist(), *base.sampled_ids.tolist()]
            if how == "continue":
                prompt = whole + prompt
            elif how == "twin":
                prompt = base.prompt_ids.tolist()
            else:
                prompt = whole[: draw(st.integers(0, len(whole)))] + prompt
        told = draw(st.sampled_from(["right", "none", "wrong"]))
        parent = {"right": base and base.number, "none": None, "wrong": draw(st.integers(0, 9))}
        grown.append(
            call(
                number,
                prompt,
                draw(ids),
                parent=parent[told] if parent[told] != number else None,
                finish=draw(st.sampled_from(Finish)),
                outcome=draw(st.sampled_from(Outcome)),
            )
        )
    return draw(st.permutations(grown))


def trained_pairs(built: Built, calls: Sequence[Call]) -> Counter[tuple[object, ...]]:
    """Every trained token as (call, context, token, logprob); checks its context on the way."""
    by_number = {one.number: one for one in calls}
    pairs: Counter[tuple[object, ...]] = Counter()
    for trace in built.traces:
        covered = np.zeros(len(trace.ids), np.bool_)
        for span in trace.spans:
            covered[span.start : span.end] = True
            origin = by_number[span.call]
            whole = np.concatenate([origin.prompt_ids, origin.sampled_ids])
            assert np.array_equal(trace.ids[: span.end], whole[: span.end])
            assert trace.mask[span.start : span.end].all() == (span.masked is None)
            for at in range(span.start, span.end):
                offset = at - len(origin.prompt_ids)
                assert trace.logprobs[at] == origin.logprobs[offset]
                if trace.mask[at]:
                    context = tuple(trace.ids[:at].tolist())
                    pairs[origin.number, context, int(trace.ids[at]), offset] += 1
        assert not trace.mask[~covered].any()
        assert not trace.logprobs[~covered].any()
    return pairs


@given(sessions(), st.none() | st.integers(1, 12))
def test_builders_train_the_same_tokens_in_their_exact_contexts(
    calls: list[Call], limit: int | None
) -> None:
    """On any session: contexts exact, each token once, ledgers balanced and equal, same tokens."""
    plain = PerRequest(max_length=limit).build(calls)
    merged = PrefixMerging(max_length=limit).build(calls)
    pairs = trained_pairs(plain, calls)
    assert pairs == trained_pairs(merged, calls)
    assert max(pairs.values(), default=1) == 1
    assert plain.ledger == merged.ledger
    assert plain.ledger.balanced
    assert plain.ledger.sampled == sum(len(one.sampled_ids) for one in calls)
    assert plain.ledger.trained == pairs.total()
    assert all(len(trace.ids) <= (limit or 99) for trace in merged.traces)


@given(sessions())
def test_only_untrained_tokens_have_a_reason(calls: list[Call]) -> None:
    """Without a limit: a token is trained unless its call was aborted or never heard."""
    built = PrefixMerging().build(calls)
    masked = {span.call for trace in built.traces for span in trace.spans if span.masked}
    for one in calls:
        whole = [*one.prompt_ids.tolist(), *one.sampled_ids.tolist()]
        echoed = any(
            later.number > one.number and later.prompt_ids.tolist()[: len(whole)] == whole
            for later in calls
        )
        aborted = one.outcome is Outcome.COMPLETE and one.finish is Finish.ABORT
        if one.number in masked:
            assert aborted or one.outcome is Outcome.CLIENT_GONE
        elif len(one.sampled_ids):
            assert not aborted
            assert one.outcome is not Outcome.CLIENT_GONE or echoed


@given(sessions(), st.randoms())
def test_order_of_arrival_does_not_matter(calls: list[Call], random: object) -> None:
    """Calls are numbered, so a shuffled recording gives the same traces."""
    shuffled = list(calls)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = PrefixMerging().build(calls), PrefixMerging().build(shuffled)
    assert one.ledger == other.ledger
    assert [t.ids.tolist() for t in one.traces] == [t.ids.tolist() for t in other.traces]
    assert [t.spans for t in one.traces] == [t.spans for t in other.traces]


@given(sessions())
def test_exact_continuations_of_an_open_trace_never_fork(calls: list[Call]) -> None:
    """A new trace appears only where no trace, as it then stood, began the call's prompt."""
    built = PrefixMerging().build(calls)
    first = {i: t.spans[0].call for i, t in enumerate(built.traces) if t.spans}
    tips: dict[int, list[int]] = {}
    for one in sorted(calls, key=lambda one: one.number):
        prompt = one.prompt_ids.tolist()
        home = next(
            (i for i, t in enumerate(built.traces) for s in t.spans if s.call == one.number), None
        )
        if home is None:
            return  # an empty answer leaves no span to find it by
        if first[home] == one.number:
            assert not any(prompt[: len(tip)] == tip for tip in tips.values())
        tips[home] = prompt + one.sampled_ids.tolist()
