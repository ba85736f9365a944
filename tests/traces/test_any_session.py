"""Properties of every builder on generated sessions, in any order of arrival."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from canonical import Canonical
from hypothesis import given, settings
from hypothesis import strategies as st

from support.random_sessions import SESSIONS, RandomSession, whole
from tugline.traces.base import (
    Builder,
    PerRequest,
    PrefixMerging,
    count_calls,
    count_spans,
    sum_ledgers,
)
from tugline.types import (
    Call,
    CallOutcome,
    Finish,
    Mode,
    Reason,
    Trace,
    TraceKind,
    encode,
    shared_prefix,
)

MANY = settings(max_examples=2000 if os.environ.get("CI") else 300)
pytestmark = pytest.mark.timeout(600)
LIMITS = st.none() | st.integers(1, 14)
Pairs = Counter[tuple[object, ...]]


def trained_pairs(traces: Iterable[Trace], drawn: RandomSession) -> Pairs:
    """Every trained token as (call, offset, token, logprob); checks its context on the way."""
    by_number = {call.number: call for call in drawn.calls}
    pairs: Pairs = Counter()
    for trace in traces:
        covered = np.zeros(len(trace.ids), np.bool_)
        last = 0
        for span in trace.spans:
            assert not covered[span.start : span.end].any()
            assert last <= span.start < span.end <= len(trace.ids)
            last = span.end
            covered[span.start : span.end] = True
            origin = by_number[span.call]
            assert trace.ids[: span.end].tolist() == whole(origin)[: span.end]
            pictures = drawn.images[span.call]
            assert trace.images[: len(pictures)] == pictures
            assert trace.mask[span.start : span.end].all() == (span.masked is None)
            first = span.start - len(origin.prompt_ids)
            part = slice(first, first + span.end - span.start)
            assert np.array_equal(trace.logprobs[span.start : span.end], origin.logprobs[part])
            assert any(
                v.version == span.version and v.start <= part.start and part.stop <= v.end
                for v in origin.versions
            )
            if span.masked is None:
                pairs.update((origin.number, at) for at in range(part.start, part.stop))
        assert not trace.mask[~covered].any()
        assert not trace.logprobs[~covered].any()
    return pairs


def check_links(traces: Sequence[Trace]) -> None:
    """A parent comes before its child, and `shared` is their longest common prefix."""
    for i, trace in enumerate(traces):
        if trace.parent is None:
            assert trace.shared == 0
            continue
        assert trace.parent < i
        parent = traces[trace.parent]
        n = trace.shared
        assert np.array_equal(trace.ids[:n], parent.ids[:n])
        same_pictures = all(a == b for a, b in zip(trace.images, parent.images, strict=False))
        assert n == (shared_prefix(trace.ids, parent.ids) if same_pictures else 0)


def check_ledgers(calls: Sequence[Call], traces: Sequence[Trace], builder: Builder) -> None:
    """Ledgers balance per call, trace and session, and agree with the traces."""
    _, ledger, dropped = builder.build(calls)
    each = count_calls(calls, traces, dropped)
    assert ledger.balanced
    assert ledger == sum_ledgers(each.values())
    assert ledger.sampled == sum(len(call.sampled_ids) + call.unreported_tokens for call in calls)
    for call in calls:
        assert each[call.number].balanced
        assert each[call.number].sampled == len(call.sampled_ids) + call.unreported_tokens
        without_ids = (Reason.NO_TOKEN_IDS, Reason.BEHIND_STOP)
        lost = sum(each[call.number].dropped.get(reason, 0) for reason in without_ids)
        assert lost == call.unreported_tokens
    held = sum_ledgers(count_spans(trace.spans) for trace in traces)
    assert (held.trained, held.masked) == (ledger.trained, ledger.masked)
    assert held.balanced
    for trace in traces:
        assert count_spans(trace.spans).trained == int(trace.mask.sum())


@MANY
@given(SESSIONS, LIMITS, st.booleans())
def test_builders_train_the_same_tokens_in_their_exact_contexts(
    drawn: RandomSession,
    limit: int | None,
    side: bool,  # noqa: FBT001 - drawn, not passed
) -> None:
    """Every builder trains the same tokens once, in their contexts, with an equal ledger."""
    calls = drawn.calls
    made: list[Pairs] = []
    ledgers = []
    for kind in (PerRequest, PrefixMerging):
        builder = kind(max_length=limit, train_side=side)
        traces, ledger, _ = builder.build(calls)
        made.append(trained_pairs(traces, drawn))
        ledgers.append(ledger)
        check_links(traces)
        check_ledgers(calls, traces, builder)
        assert all(trace.exact for trace in traces)
        assert all(len(trace.ids) <= (limit or 999) for trace in traces)
        assert ledger.trained == made[-1].total()
        assert (Reason.SIDE_CALL in ledger.masked) <= (not side)
    assert made[0] == made[1]
    assert ledgers[0] == ledgers[1]
    assert max(made[0].values(), default=1) == 1


@MANY
@given(SESSIONS)
def test_only_untrained_tokens_have_a_reason(drawn: RandomSession) -> None:
    """A token is trained unless its call is a side call, aborted or unread.

    Tokens after an image are untrained, too, unless `train_images` is set. A limit is not part of
    this test.
    """
    ledgers = count_calls(drawn.calls, PrefixMerging().build(drawn.calls).traces)
    every = count_calls(drawn.calls, PrefixMerging(train_images=True).build(drawn.calls).traces)
    for number, ledger in ledgers.items():
        with_images = ledger.masked.get(Reason.IMAGES, 0)
        assert every[number].trained == ledger.trained + with_images
        assert not with_images or drawn.images[number]
    for call in drawn.calls:
        ledger = ledgers[call.number]
        if call.mode is Mode.TEXT or not len(call.sampled_ids):
            continue
        echoed = any(
            later.number > call.number and whole(later)[: len(whole(call))] == whole(call)
            for later in drawn.calls
        )
        aborted = call.outcome is CallOutcome.COMPLETE and call.finish is Finish.ABORT
        if call.kind is TraceKind.SIDE:
            assert set(ledger.masked) == {Reason.SIDE_CALL}
        elif aborted:
            assert set(ledger.masked) == {Reason.ABORTED}
        elif Reason.IMAGES in ledger.masked:
            assert set(ledger.masked) == {Reason.IMAGES}
        elif drawn.images[call.number]:
            assert set(ledger.masked) == {Reason.CLIENT_GONE}
        elif ledger.masked:
            assert set(ledger.masked) == {Reason.CLIENT_GONE}
            assert call.outcome is CallOutcome.CLIENT_GONE
        else:
            assert call.outcome is not CallOutcome.CLIENT_GONE or echoed


@MANY
@given(SESSIONS, st.randoms(use_true_random=False))
def test_order_of_arrival_does_not_matter(drawn: RandomSession, random: object) -> None:
    """Calls are numbered, so a shuffled recording gives the same traces and ledger."""
    shuffled = list(drawn.calls)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for builder in (PerRequest(), PrefixMerging(), Canonical()):
        built, again = builder.build(drawn.calls), builder.build(shuffled)
        assert built.ledger == again.ledger
        assert [encode(t) for t in built.traces] == [encode(t) for t in again.traces]


@MANY
@given(SESSIONS)
def test_exact_continuations_never_start_a_new_trace(drawn: RandomSession) -> None:
    """A new trace starts only if no trace so far is a prefix of the call's prompt."""
    traces = PrefixMerging(train_side=True).build(drawn.calls).traces
    home = {span.call: i for i, trace in enumerate(traces) for span in trace.spans}
    tips: dict[int, tuple[list[int], tuple[str, ...], bool]] = {}
    for call in sorted(drawn.calls, key=lambda call: call.number):
        if call.mode is Mode.TEXT:
            continue
        if call.number not in home:
            return  # an empty answer leaves no span to find it by
        aside = call.kind is TraceKind.SIDE
        if home[call.number] not in tips:
            prompt, pictures = call.prompt_ids.tolist(), drawn.images[call.number]
            assert not any(
                prompt[: len(tip)] == tip and pictures[: len(seen)] == seen and side == aside
                for tip, seen, side in tips.values()
            )
        tips[home[call.number]] = (whole(call), drawn.images[call.number], aside)
