"""Experts and kept sets of traces: those under which each token was sampled (I1)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from support.calls import make_call
from support.random_experts import SESSIONS_WITH_EXPERTS, choose
from support.random_sessions import RandomSession, whole
from tugline.traces.base import PerRequest, PrefixMerging
from tugline.traces.lineage import Continuation, trace_lineage
from tugline.types import Call, Kept, MaskedSpan, Reason, Sampling, Trace

pytestmark = pytest.mark.timeout(600)


def list_trained(traces: tuple[Trace, ...]) -> Counter[tuple[object, ...]]:
    """Every trained token with all that decided it."""
    trained: Counter[tuple[object, ...]] = Counter()
    for trace in traces:
        for span in trace.spans:
            for at in range(span.start, span.end):
                if not trace.mask[at]:
                    continue
                rows = None if trace.experts is None else trace.experts[:at]
                sizes = 0 if rows is None else len(rows)
                kept = () if trace.kept is None else tuple(trace.kept[at : at + 1].ids.tolist())
                context = tuple(trace.ids[: at + 1].tolist())
                values = None if rows is None else rows.astype(int).tobytes()
                trained[span.call, context, sizes, values, kept, span.distribution] += 1
    return trained


@settings(max_examples=300)
@given(SESSIONS_WITH_EXPERTS)
def test_every_trained_token_has_the_experts_and_the_set_that_it_was_sampled_with(
    drawn: RandomSession,
) -> None:
    """Both builders train the same tokens with the same experts and sets; ledgers balance."""
    calls = {call.number: call for call in drawn.calls}
    trained = []
    for builder in (PerRequest(), PrefixMerging()):
        traces, ledger, _ = builder.build(drawn.calls)
        assert ledger.balanced
        trained.append((list_trained(traces), ledger))
        for trace in traces:
            for span in trace.spans:
                call = calls[span.call]
                offset = len(call.prompt_ids)
                for at in range(span.start, span.end):
                    mine = [m for m in call.masked if m.start <= at - offset < m.end]
                    assert not (mine and trace.mask[at])
                    if not trace.mask[at]:
                        continue
                    assert trace.experts is not None
                    assert call.experts is not None
                    assert len(trace.experts) >= at
                    assert np.array_equal(trace.experts[:at], call.experts[:at])
                    if call.kept is not None:
                        assert trace.kept is not None
                        own = call.kept[at - offset : at - offset + 1].ids
                        assert np.array_equal(trace.kept[at : at + 1].ids, own)
    assert trained[0] == trained[1]


def test_a_prefix_computed_with_other_experts_forks() -> None:
    """The later call starts a trace with its own experts, and both answers are trained."""
    first = make_call(0, [5, 6, 7], [8, 9])
    second = make_call(1, [*whole(first), 4], [3], parent=0)
    before = _with_rows(first, 0)
    after = _with_rows(second, 1)
    traces, ledger, _ = PrefixMerging().build([before, after])
    assert [trace.trained for trace in traces] == [2, 1]
    assert (ledger.trained, ledger.masked) == (3, {})
    assert traces[1].parent == 0
    assert traces[1].shared == 1, "only the tokens with the same experts can be reused"
    lineage = trace_lineage(after, before)
    assert lineage.continuation is Continuation.FORKED
    assert lineage.reasons == ("routes_changed",)
    same = [_with_rows(first, 0), _with_rows(second, 0)]
    assert len(PrefixMerging().build(same).traces) == 1


def _with_rows(call: Call, state: int) -> Call:
    return replace(call, experts=choose(whole(call)[:-1], state))


def test_a_span_is_divided_where_experts_are_missing() -> None:
    """Tokens of one call are trained up to the one whose context has no experts."""
    masked = (MaskedSpan(Reason.ROUTES_CHANGED, 0, 1), MaskedSpan(Reason.NO_ROUTES, 3, 4))
    call = make_call(0, [1, 2], [3, 4, 5, 6], masked=masked, experts=choose([1, 2, 3, 4], 0))
    (trace,), ledger, _ = PrefixMerging().build([call])
    assert trace.mask.tolist() == [False, False, False, True, True, False]
    assert ledger.trained == 2
    assert ledger.masked == {Reason.ROUTES_CHANGED: 1, Reason.NO_ROUTES: 1}


def test_sets_of_a_trace_are_cut_with_it() -> None:
    """A trace that is cut in the middle of an answer has the sets of what is left."""
    kept = Kept.of([[3, 8], [4], [5, 6]])
    call = make_call(0, [1, 2], [3, 4, 5], kept=kept, sampling=Sampling(top_k=2))
    (trace,), *_ = PrefixMerging(max_length=4).build([call])
    assert trace.kept is not None
    assert [ids.tolist() for ids in trace.kept] == [[], [], [3, 8], [4]]
