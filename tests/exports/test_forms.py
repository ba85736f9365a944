"""Experts and kept sets in the rows of exports: those of the calls that sampled each token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from msgspec.structs import replace

from exports.made import call, export, read_rows, record, two_turns
from support.calls import make_header
from support.random_experts import SESSIONS_WITH_EXPERTS, TOP_K
from support.random_sessions import RandomSession
from tugline.errors import UsageError
from tugline.exports.base import SessionExport, SkipReason, TraceFilter, make_exporter
from tugline.exports.forms import find_truncated, place_experts
from tugline.recording.file import Recording
from tugline.recording.records import RecordedResult
from tugline.traces.base import PrefixMerging
from tugline.types import Call, Kept, Ledger, PluginSpec, Reward, Sampling, Status, Trace

DENSE = [0, 2]
"""Layers without a router, of four."""
EXPERTS = np.arange(5 * 4, dtype=np.uint8).reshape(5, 2, 2)
"""Of the session of two turns, whose last token is sampled from all but its own row."""


def routed_turns(*, truncated: bool = False) -> list[Call]:
    """Two turns with experts; if `truncated`, the second answer has a kept set."""
    first, second = two_turns()
    changes: dict[str, Any] = {"experts": EXPERTS}
    if truncated:
        changes |= {"sampling": Sampling(top_p=0.5), "kept": Kept.of([[15, 3]])}
    return [replace(first, experts=EXPERTS[:3]), replace(second, **changes)]


def open_session(calls: list[Call]) -> SessionExport:
    """A finished session with a reward."""
    builder = "prefix_merging"
    done = RecordedResult(
        status=Status.COMPLETED, builder=builder, ledger=Ledger(), reward=Reward(1.0)
    )
    recording = Recording(make_header(), tuple(calls), results=(done,))
    place = (0, 0, 0.5)
    builder = PrefixMerging()
    return SessionExport(make_header(), recording, "prefix_merging", builder, TraceFilter(), *place)


def make_row(
    form: str, session: SessionExport, trace: Trace, **options: Any
) -> tuple[Trace, Mapping[str, Any]] | SkipReason:
    """The trace as the format can hold it, and its row with arrays as a reader of JSON has them."""
    exporter = make_exporter(PluginSpec(form, options))
    fitted = exporter.fit(trace)
    if isinstance(fitted, SkipReason):
        return fitted
    row = exporter.row(session, 0, fitted)
    assert not isinstance(row, SkipReason)
    return fitted, json.loads(msgspec.json.encode(row, enc_hook=np.ndarray.tolist))


def check_experts(trace: Trace, mask: list[int], experts: Any, calls: dict[int, Call]) -> None:
    """Every trained token has the experts of its context at the time, and of all layers."""
    held = np.array(experts)
    assert not held[:, DENSE].any()
    for span in trace.spans:
        for at in range(span.start, span.end):
            if mask[at]:
                own = calls[span.call].experts
                assert own is not None
                assert np.array_equal(held[:at, [1, 3]], own[:at])
                assert len(own) >= at


@given(SESSIONS_WITH_EXPERTS)
def test_rows_of_verl_have_the_experts_of_each_trained_token(drawn: RandomSession) -> None:
    """A token is trained with the experts of its context, and not at all if it needs a set."""
    session = open_session(drawn.calls)
    calls = {call.number: call for call in drawn.calls}
    for trace in session.built.traces:
        made = make_row("verl", session, trace, kept=False, dense_layers=DENSE)
        if isinstance(made, SkipReason):
            continue
        fitted, row = made
        mask = [0] * len(row["prompts"]) + row["response_mask"]
        assert mask == fitted.mask.tolist()
        assert len(row["routed_experts"]) == len(trace.ids)
        check_experts(trace, mask, row["routed_experts"], calls)
        for span in trace.spans:
            if span.distribution.needs_kept:
                assert not any(mask[span.start : span.end])


@given(SESSIONS_WITH_EXPERTS)
def test_rows_of_slime_have_what_decided_each_trained_token(drawn: RandomSession) -> None:
    """A token is trained with the experts of its context and with its kept set.

    A batch of slime normalises either all tokens over their sets, or none. So a row has a set for
    each trained token, or for none.
    """
    session = open_session(drawn.calls)
    calls = {call.number: call for call in drawn.calls}
    for trace in session.built.traces:
        made = make_row("slime", session, trace, dense_layers=DENSE)
        needed = find_truncated(trace)
        if made is SkipReason.KEPT:
            assert needed.any()
            assert (trace.mask & ~needed).any()
        if isinstance(made, SkipReason):
            assert made is SkipReason.KEPT or trace.images or not trace.trained
            continue
        _, row = made
        mask = [0] * (len(row["tokens"]) - row["response_length"]) + row["loss_mask"]
        assert mask == trace.mask.tolist()
        assert len(row["rollout_routed_experts"]) == len(trace.ids) - 1
        check_experts(trace, mask, row["rollout_routed_experts"], calls)
        check_sets(trace, row, calls)


def check_sets(trace: Trace, row: Mapping[str, Any], calls: dict[int, Call]) -> None:
    """A trained token has the set of its call if its log probability depends on it, else none."""
    first = len(row["tokens"]) - row["response_length"]
    offsets = row.get("rollout_top_p_token_offsets", [0] * (row["response_length"] + 1))
    ids = row.get("rollout_top_p_token_ids", [])
    assert len(offsets) == row["response_length"] + 1
    assert offsets[-1] == len(ids)
    actual = [ids[start:end] for start, end in pairwise(offsets)]
    for span in trace.spans:
        of = calls[span.call]
        for at in range(span.start, span.end):
            own = of.kept and list(of.kept)[at - len(of.prompt_ids)].tolist()
            needed = span.distribution.needs_kept and trace.mask[at]
            assert actual[at - first] == (own if needed else [])


@given(SESSIONS_WITH_EXPERTS)
def test_filled_rows_of_slime_have_different_experts(drawn: RandomSession) -> None:
    """All rows are replayed, and a router cannot send a token to the same expert twice."""
    session = open_session(drawn.calls)
    for trace in session.built.traces:
        made = make_row("slime", session, trace, kept=False)
        if not isinstance(made, SkipReason):
            rows = np.sort(np.array(made[1]["rollout_routed_experts"]))
            assert rows.shape[-1] == TOP_K
            assert (rows[..., 1:] != rows[..., :-1]).all()


# --------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("form", ["trl", "verl", "slime"])
def test_without_experts_rows_are_as_of_a_dense_model(tmp_path: Path, form: str) -> None:
    """The option `experts` removes the experts and nothing else."""
    record(tmp_path / "dense", "a")
    record(tmp_path / "routed", "a", calls=routed_turns())
    outs = [tmp_path / "out1", tmp_path / "out2"]
    export(form, tmp_path / "dense", outs[0])
    export(form, tmp_path / "routed", outs[1], options={"experts": False})
    assert read_rows(outs[0]) == read_rows(outs[1])


def test_trl_refuses_experts(tmp_path: Path) -> None:
    """Rows with experts are left out and counted; without another row the error has the option."""
    record(tmp_path / "a", "a", calls=routed_turns())
    with pytest.raises(UsageError, match="--with experts=false writes these rows without"):
        export("trl", tmp_path / "a", tmp_path / "out")
    record(tmp_path / "a", "b", sample=1)
    summary = export("trl", tmp_path / "a", tmp_path / "out")
    assert (summary.exported, summary.rows_left_out) == (1, {SkipReason.EXPERTS: 1})
    assert summary.hints


@pytest.mark.parametrize("form", ["trl", "verl", "slime"])
def test_tokens_with_a_kept_set_are_refused_or_not_trained(tmp_path: Path, form: str) -> None:
    """A trainer that normalises over the whole vocabulary never trains such a token.

    A row of slime has sets for all of its trained tokens, or for none.
    """
    record(tmp_path / "a", "a", calls=routed_turns(truncated=True))
    record(tmp_path / "a", "b", sample=1, calls=routed_turns())
    options = {"experts": False}
    out = tmp_path / "out"
    summary = export(form, tmp_path / "a", out, options=options)
    assert summary.rows_left_out == {SkipReason.KEPT: 1}
    export(form, tmp_path / "a", out, options=options | {"kept": False}, force=True)
    name = {"trl": "env_mask", "verl": "response_mask", "slime": "loss_mask"}[form]
    assert [row[name] for row in read_rows(out)] == [[1, 1, 0, 0], [1, 1, 0, 1]]


def test_a_missing_set_is_not_trained(tmp_path: Path) -> None:
    """A trained token of a truncated distribution needs its set."""
    first, second = two_turns()
    second = replace(second, sampling=Sampling(top_k=5))
    record(tmp_path / "a", "a", calls=[first, second])
    with pytest.raises(UsageError, match="--with kept=false"):
        export("slime", tmp_path / "a", tmp_path / "out")
    export("slime", tmp_path / "a", tmp_path / "out", options={"kept": False})
    (row,) = read_rows(tmp_path / "out")
    assert row["loss_mask"] == [1, 1, 0, 0]
    assert "rollout_top_p_token_ids" not in row


# --------------------------------------------------------------------------- files
def test_a_table_is_read_with_numpy(tmp_path: Path) -> None:
    """The columns of the full table give the arrays of the trace; others are null."""
    record(tmp_path / "a", "a", calls=routed_turns(truncated=True))
    record(tmp_path / "a", "b", sample=1)
    export("parquet", tmp_path / "a", tmp_path / "x.parquet")
    routed, plain = pq.read_table(tmp_path / "x.parquet").to_pylist()
    held = np.frombuffer(routed["experts"], routed["experts_type"])
    assert np.array_equal(held.reshape(routed["experts_shape"]), EXPERTS)
    sets = np.split(routed["kept_ids"], routed["kept_offsets"][1:-1])
    assert [each.tolist() for each in sets] == [[], [], [], [], [], [3, 15]]
    new = ("experts", "experts_shape", "experts_type", "kept_offsets", "kept_ids")
    assert [plain[name] for name in new] == [None] * 5


def test_padding_of_verl_has_no_experts(tmp_path: Path) -> None:
    """Experts are where their tokens are in the padded table, and 0 elsewhere."""
    record(tmp_path / "a", "a", calls=routed_turns())
    options = {"prompt_length": 3, "response_length": 6}
    export("verl", tmp_path / "a", tmp_path / "v.parquet", options=options)
    (row,) = read_rows(tmp_path / "v.parquet")
    held = np.array(row["routed_experts"])
    assert held.shape == (9, 2, 2)
    assert np.array_equal(held[1:6], EXPERTS)
    assert not held[0].any()
    assert not held[6:].any()


def test_layers_that_do_not_exist_are_refused() -> None:
    """Layers without a router are different layers of the model."""
    with pytest.raises(UsageError, match=r"dense_layers is \[0, 9\], must be .* below 4"):
        place_experts(EXPERTS, 5, [0, 9])


def test_rows_of_dense_models_have_no_experts(tmp_path: Path) -> None:
    """Rows of dense models have null experts in verl's table and no columns in slime's lines."""
    record(tmp_path / "a", "a", calls=[call(0, [1], [2])])
    export("verl", tmp_path / "a", tmp_path / "v.parquet")
    export("slime", tmp_path / "a", tmp_path / "s.jsonl")
    assert read_rows(tmp_path / "v.parquet")[0]["routed_experts"] is None
    (line,) = read_rows(tmp_path / "s.jsonl")
    assert not any(name.startswith(("rollout_routed", "rollout_top_p")) for name in line)


def test_experts_of_all_layers_are_placed_as_they_are() -> None:
    """An engine may report zeros for layers without a router, which are not added again."""
    routed = np.array([[[3, 1], [7, 2]], [[4, 5], [6, 0]]], np.uint8)
    placed = place_experts(routed, 3, (0, 2))
    assert placed.shape == (3, 4, 2)
    assert np.array_equal(place_experts(placed[:2], 3, (0, 2)), placed)
