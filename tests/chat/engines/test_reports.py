"""Experts and kept sets in replies: in order, and never a reason to lose tokens."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from chat.engines.test_formats import ask_for
from tugline.chat.engines import reports
from tugline.chat.engines.base import Delta, EngineFormat, parse_engine_error
from tugline.chat.engines.chat import VllmChat
from tugline.chat.engines.generate import Embedded, VllmCompletions, VllmGenerate
from tugline.chat.engines.sglang import SglangChat, SglangGenerate
from tugline.types import LogprobMeaning, Sampling

SHAPE = (3, 2)


def encode(array: np.ndarray) -> str:
    """An array of any type as engines send it."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def make_rows(count: int, seed: int = 0) -> np.ndarray:
    """Experts of `count` tokens."""
    random = np.random.default_rng(seed)
    return random.permuted(np.tile(np.arange(8, dtype=np.uint8), (count, 3, 1)), axis=2)[:, :, :2]


def make_event(ids: list[int], **fields: Any) -> bytes:
    """An event of vLLM's route."""
    content = [{"logprob": -0.5} for _ in ids]
    choice = {"token_ids": ids, "logprobs": {"content": content}, **fields}
    return json.dumps({"choices": [choice]}).encode()


def make_sglang(ids: list[int], **fields: Any) -> bytes:
    """A reply of SGLang."""
    pairs = [[-0.5, token, None] for token in ids]
    meta = {"completion_tokens": len(ids), "output_token_logprobs": pairs, **fields}
    meta["finish_reason"] = {"type": "length"}
    return json.dumps({"meta_info": meta}).encode()


def read(wire: EngineFormat, *payloads: bytes, at_once: int = 1) -> list[Delta]:
    """The deltas of a stream, `at_once` events per read."""
    reader = wire.make_reader()
    parts = [payloads[at : at + at_once] for at in range(0, len(payloads), at_once)]
    return [delta for part in parts for delta in reader.read_events([*part])]


@given(
    st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 12),
)
def test_reports_stay_beside_their_tokens(
    events: list[tuple[int, bool, bool]], at_once: int
) -> None:
    """However a stream is cut into reads, sets belong to their tokens and rows to positions.

    An event may begin again at the first token, after new weights, or have no sets.
    """
    payloads: list[bytes] = []
    expected: list[tuple[int, list[int]]] = []
    tracks: list[np.ndarray] = []
    done = 5
    for number, (count, again, limited) in enumerate(events):
        ids = [100 * number + at for at in range(count)]
        sets = [[token, token + 1] for token in ids]
        start = 0 if again or not number else done
        rows = make_rows(5 + len(expected) + count - 1 - (start and done), number)
        if start:
            tracks[-1] = np.concatenate([tracks[-1], rows])
        else:
            tracks.append(rows)
        done = start + len(rows)
        expected += [*zip(ids, sets if limited else [[]] * count, strict=True)]
        mask = {"sampling_mask": sets} if limited else {}
        start = done - len(rows)
        payloads.append(
            make_event(ids, routed_experts=encode(rows), routed_experts_start=start, **mask)
        )
    seen: list[tuple[int, list[int]]] = []
    joined: list[np.ndarray] = []
    for delta in read(Embedded(), *payloads, at_once=at_once):
        assert len(delta.kept) in {0, len(delta.ids)}
        seen += [*zip(delta.ids, delta.kept or [[]] * len(delta.ids), strict=True)]
        assert delta.experts is not None
        if delta.experts.start:
            assert delta.experts.start == len(joined[-1])
            joined[-1] = np.concatenate([joined[-1], delta.experts.rows])
        else:
            joined.append(delta.experts.rows)
        assert len(joined[-1]) == 5 + len(seen) - 1
    assert seen == expected
    assert len(joined) == len(tracks)
    for one, other in zip(joined, tracks, strict=True):
        assert one.dtype == np.uint8
        assert np.array_equal(one, other)


def test_plain_tokens_after_sets_keep_the_order() -> None:
    """An event without a set beside one that has it gets an empty set."""
    events = [make_event([1], sampling_mask=[[1, 4]]), make_event([2]), make_event([3])]
    (delta,) = read(VllmGenerate(), *events, at_once=3)
    assert (delta.ids, delta.kept) == ([1, 2, 3], [[1, 4], [], []])
    (delta,) = read(VllmGenerate(), *reversed(events), at_once=3)
    assert (delta.ids, delta.kept) == ([3, 2, 1], [[], [], [1, 4]])


def test_vllm_reports_experts_of_a_whole_answer_at_its_end() -> None:
    """They begin at the prompt's first token, and stand in the delta of the last tokens."""
    versions = [{"version": "3", "start": 0, "end": 2}]
    end = {"finish_reason": "length", "weight_versions": versions}
    events = [make_event([1]), make_event([2], routed_experts=encode(make_rows(9)), **end)]
    for at_once in (1, 2):
        deltas = read(VllmGenerate(), *events, at_once=at_once)
        assert [delta.experts is not None for delta in deltas] == [False, True]
        assert deltas[-1].experts is not None
        assert deltas[-1].experts.start == 0
        assert np.array_equal(deltas[-1].experts.rows, make_rows(9))


def test_sglang_reports_flat_experts_and_logprobs_among_kept_ids() -> None:
    """Rows have the probed shape; logprobs are those of the distribution sampled from."""
    flat = base64.b64encode(make_rows(9).astype(np.int32).tobytes()).decode()
    reply = make_sglang(
        [7, 8],
        routed_experts=flat,
        output_token_sampling_mask=[[7, 1], [2, 8]],
        output_token_sampling_logprobs=[-0.1, -0.2],
    )
    (delta,) = read(SglangGenerate(experts=SHAPE), reply)
    assert delta.experts is not None
    assert delta.experts.rows.dtype == np.uint8
    assert np.array_equal(delta.experts.rows, make_rows(9))
    assert (delta.ids, delta.kept, delta.logprobs) == ([7, 8], [[7, 1], [2, 8]], [-0.1, -0.2])
    (delta,) = read(SglangGenerate(), reply)
    assert delta.experts is not None
    assert delta.experts.rows.shape == (1, 1, 54), "all values, if the shape is not known"


BROKEN = {
    "not base64": "%%%",
    "not text": 5,
    "cut": encode(make_rows(9))[:-8],
    "no header": base64.b64encode(b"x" * 99).decode(),
    "two dimensions": encode(np.zeros((9, 2), np.uint8)),
    "objects": encode(np.array([[["a"]]])),
    "a shape beyond memory": base64.b64encode(
        b"\x93NUMPY\x01\x00\x76\x00"
        + b"{'descr': '|u1', 'fortran_order': False, 'shape': (9999999999999, 3, 2)}".ljust(118)
    ).decode(),
    "brackets": base64.b64encode(b"\x93NUMPY\x01\x00\x76\x00" + b"[" * 118).decode(),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("wire", [VllmGenerate(), SglangGenerate(experts=SHAPE)])
def test_unreadable_experts_end_no_answer(wire: EngineFormat, name: str) -> None:
    """The tokens are delivered, and the report has a shape that no model's has."""
    vllm = wire.name == "vllm"
    make = make_event if vllm else make_sglang
    if not vllm and name not in {"not base64", "not text", "cut"}:
        pytest.skip("SGLang's experts have no header")
    (delta,) = read(wire, make([1, 2], routed_experts=BROKEN[name]))
    assert delta.ids == [1, 2]
    assert delta.experts is not None
    assert delta.experts.rows.shape == (0, 0, 0)


@pytest.mark.parametrize("value", [np.nan, -1.0, 0.5, -1])
def test_wrong_values_are_passed_on(value: float) -> None:
    """Numbers that are no experts reach the recorder, which names what is wrong with them."""
    array = np.full((9, 3, 2), value)
    (delta,) = read(VllmGenerate(), make_event([1], routed_experts=encode(array)))
    assert delta.experts is not None
    assert np.array_equal(delta.experts.rows, array, equal_nan=True)


@pytest.mark.parametrize("mask", [5, "x", [5], [[-1]], [[2**31]], [["a"]], [None], [[1], [2], [3]]])
def test_unreadable_sets_end_no_answer(mask: Any) -> None:
    """The tokens are delivered without sets, so that they are masked."""
    (delta,) = read(VllmGenerate(), make_event([1, 2], sampling_mask=mask))
    assert (delta.ids, delta.kept) == ([1, 2], [])
    masked = make_sglang([1, 2], output_token_sampling_mask=mask)
    if mask != [[1], [2], [3]]:
        (delta,) = read(SglangGenerate(), masked)
        assert (delta.ids, delta.kept, delta.logprobs) == ([1, 2], [], [-0.5, -0.5])


@given(st.integers(1, 6), st.sampled_from([1, 2, 4, 8]), st.sampled_from([16, 64, 512]))
def test_the_shape_of_experts_is_inferred(layers: int, top_k: int, experts: int) -> None:
    """Layers and top-k follow from the values of many tokens, or are unknown, but never wrong."""
    random = np.random.default_rng(layers * 100 + top_k)
    scores = random.random((1024, layers, experts))
    rows = np.argsort(scores, axis=2)[:, :, :top_k]
    inferred = reports.infer_shape(rows.reshape(1024, -1))
    assert inferred in {None, (layers, top_k)}
    assert inferred is not None or experts == 512


# --------------------------------------------------------------------------- requests
def build(wire: EngineFormat, sampling: Sampling, **asked: bool) -> dict[str, Any]:
    """The body of a request."""
    ask = replace(ask_for(wire), sampling=sampling, **asked)
    body: dict[str, Any] = json.loads(b"".join(wire.build_request(ask).body))
    return body


PLAIN = Sampling(temperature=1.0, top_p=0.9, top_k=0, min_p=0.05, max_tokens=3)


def test_vllm_gets_a_top_k_if_it_reports_sets() -> None:
    """A server that reports kept sets refuses requests without one, so all have one."""
    for kind in (VllmGenerate, VllmCompletions, VllmChat):
        without, with_sets = (build(kind(kept=kept), PLAIN) for kept in (False, True))
        params, others = (body.get("sampling_params", body) for body in (without, with_sets))
        assert (params["top_k"], others["top_k"]) == (0, 2**31 - 1)
        assert params["min_p"] == others["min_p"] == 0.05
        low = build(kind(kept=True), replace(PLAIN, top_k=7))
        assert low.get("sampling_params", low)["top_k"] == 7
        greedy = build(kind(kept=True), replace(PLAIN, temperature=0.0, top_k=7))
        sent = greedy.get("sampling_params", greedy)
        assert (sent["temperature"], sent["top_k"]) == (1.0, 1), "the likeliest token alone"


def test_sampling_that_is_not_truncated_stays_so_on_other_engines() -> None:
    """Only vLLM requires a top-k; the embedded engine would report the whole vocabulary."""
    plain = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_tokens=3)
    for wire in (Embedded(kept=True), SglangGenerate(kept=True), SglangChat(kept=True)):
        body = build(wire, plain)
        sent = body.get("sampling_params", body)
        assert sent["top_k"] in {0, -1}
        assert sent["temperature"] == 0.0


def test_sglang_is_asked_for_reports_by_request() -> None:
    """Fields are sent only if asked for; sets need a bounded top-k and processed logprobs."""
    wire = SglangGenerate()
    plain = build(wire, PLAIN)
    assert not plain.keys() & {"return_routed_experts", "return_sampling_mask"}
    assert plain["sampling_params"]["top_k"] == -1
    for top_k, expected in ((0, 4096), (7, 7), (9999, 4096)):
        body = build(wire, replace(PLAIN, top_k=top_k), experts=True, kept=True)
        assert body["return_routed_experts"] is True
        assert body["return_sampling_mask"] is True
        assert body["sampling_params"]["top_k"] == expected
    raw = build(SglangGenerate(LogprobMeaning.RAW), PLAIN, kept=True)
    assert raw == plain


def test_an_error_without_a_message_names_a_likely_reason() -> None:
    """VLLM answers so to a request that its kept sets do not permit."""
    for body in (b'{"error": {"message": "", "code": 500}}', b'{"message": ""}'):
        text = str(parse_engine_error(500, body, None))
        assert "--return-sampling-mask" in text
        assert "top_k" in text
