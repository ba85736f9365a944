"""Experts of an answer, put together from the reports of its requests."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.calls import make_call, write_calls
from support.random_experts import LAYERS, TOP_K, choose
from tugline.chat.engines.base import ReportedExperts
from tugline.recording.experts import AnswerExperts, check_experts, hash_rows
from tugline.recording.file import read
from tugline.types import Experts, Reason, shared_prefix

SHAPE = (LAYERS, TOP_K)


@settings(max_examples=300)
@given(st.randoms(use_true_random=True))
def test_a_token_that_is_not_masked_has_the_experts_of_its_context(draw: random.Random) -> None:
    """Chunks, late reports, other replicas and new weights in the middle of an answer (I1)."""
    ids = [draw.randrange(10) for _ in range(draw.randint(1, 5))]
    prompt = len(ids)
    experts = AnswerExperts()
    context = list[Experts]()
    """Experts of the context of each sampled token when it was sampled."""
    for _ in range(draw.randint(1, 4)):  # requests
        experts.begin_reply(len(ids), len(ids) - prompt, expected=True)
        late = draw.random() < 0.5  # one report at the end, as vLLM's, or with each chunk
        state = draw.randrange(2)
        sent = 0
        for _ in range(draw.randint(0, 4)):  # chunks
            if not late and draw.random() < 0.2:
                state = 1 - state  # new weights: the context is computed again
                sent = 0
            for token in range(draw.randint(1, 3)):
                context.append(choose(ids, state))
                ids.append(token)
            if not late:
                rows = choose(ids, state)[sent : len(ids) - 1]
                experts.add(ReportedExperts(sent, rows), SHAPE, len(ids) - prompt)
                sent = len(ids) - 1
        if late and len(ids) > prompt and draw.random() < 0.8:
            whole = choose(ids, state)[: len(ids) - 1]
            experts.add(ReportedExperts(0, whole), SHAPE, len(ids) - prompt)
    count = draw.randint(0, len(context))  # the rest is cut at a stop string
    rows, masked = experts.finish(count)
    usable = set(range(count))
    for span in masked:
        assert 0 <= span.start < span.end <= count
        usable -= set(range(span.start, span.end))
    assert sum(span.end - span.start for span in masked) == count - len(usable)
    for at in usable:
        assert rows is not None
        assert np.array_equal(rows[: prompt + at], context[at])
    assert rows is None or len(rows) <= prompt + count - 1
    assert experts.fault is None


def test_the_longer_part_of_an_answer_is_kept() -> None:
    """The part that was computed with other experts is masked, whichever came first."""
    for first, second in ((1, 3), (3, 1)):
        experts = AnswerExperts()
        experts.begin_reply(2, 0, expected=True)
        ids = [5, 6, *range(first)]
        experts.add(ReportedExperts(0, choose(ids, 0)[:-1]), SHAPE, first)
        ids += range(second)
        experts.add(ReportedExperts(0, choose(ids, 1)[:-1]), SHAPE, first + second)
        _, (span,) = experts.finish(first + second)
        assert span.reason is Reason.ROUTES_CHANGED
        assert (span.start, span.end) == ((0, 1) if first == 1 else (3, 4))


GOOD = choose([1, 2, 3, 4], 0)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (np.zeros((4, 2, 2), np.uint8), "every token has expert 0 only"),
        (np.full((4, 2, 2), 3, np.uint8), "token 0 has the same expert twice in a layer"),
        (GOOD[:, :1], "experts are of 1 layers and 2 a token, must be of 2 layers and 2 experts"),
        (GOOD.astype(np.float32), "experts are float32 of 3 dimensions"),
        (np.full((4, 2, 2), np.nan), "experts are float64 of 3 dimensions"),
        (GOOD[:0], "no experts are reported"),
    ],
)
def test_wrong_experts_are_named_and_their_tokens_masked(rows: Experts, text: str) -> None:
    """Zeros, repeats, other shapes and no numbers are never used."""
    assert text in (check_experts(rows, SHAPE) or "")
    experts = AnswerExperts()
    experts.begin_reply(3, 0, expected=True)
    experts.add(ReportedExperts(0, rows), SHAPE, 2)
    kept, (span,) = experts.finish(2)
    assert kept is None
    assert (span.reason, span.start, span.end) == (Reason.NO_ROUTES, 0, 2)
    assert text in (experts.fault or "")


def test_missing_rows_are_a_fault_of_what_comes_behind_them() -> None:
    """Tokens up to the gap are trained; those after a report that leaves a gap are not."""
    experts = AnswerExperts()
    experts.begin_reply(3, 0, expected=True)
    experts.add(ReportedExperts(0, GOOD[:3]), SHAPE, 1)
    experts.add(ReportedExperts(4, GOOD[:1]), SHAPE, 2)
    _, (span,) = experts.finish(2)
    assert (span.reason, span.start, span.end) == (Reason.NO_ROUTES, 1, 2)
    assert experts.fault == "experts begin at token 4, but are known of 3 tokens only"


@given(st.randoms(use_true_random=True))
def test_hashes_of_rows_are_equal_for_equal_rows_only(draw: random.Random) -> None:
    """The shared prefix of hashes is that of the rows, whatever their types."""
    values = np.array([draw.randrange(4) for _ in range(24)]).reshape(6, 2, 2)
    other = values.copy()
    other[draw.randrange(6), 1, 0] = draw.randrange(4)
    first = values.astype(np.uint8)
    second = other.astype(np.uint16)
    assert shared_prefix(hash_rows(first), hash_rows(second)) == shared_prefix(first, second)


def test_experts_of_new_tokens_only_are_stored(tmp_path: Path) -> None:
    """A session of forty turns takes at most 1.1 times the bytes of its tokens' experts more.

    They are random, so that compression does not help; each call has those of its whole context.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 1000, 40 * 100).astype(np.int32)
    rows = rng.integers(0, 256, (len(ids), 24, 8)).astype(np.uint8)
    sizes = []
    for with_experts in (False, True):
        calls = []
        for turn in range(40):
            end = 100 * (turn + 1)
            changes = {"experts": rows[: end - 1]} if with_experts else {}
            parent = turn - 1 if turn else None
            prompt, sampled = ids[: end - 20], ids[end - 20 : end]
            calls.append(make_call(turn, prompt, sampled, parent=parent, **changes))
        path = tmp_path / f"{with_experts}.rec"
        write_calls(path, calls)
        sizes.append(path.stat().st_size)
        if with_experts:
            for loaded, call in zip(read(path).calls, calls, strict=True):
                assert np.array_equal(loaded.experts, call.experts)
    assert sizes[1] - sizes[0] <= 1.1 * rows[:-1].nbytes
