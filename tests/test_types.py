from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.calls import make_call
from tugline.types import (
    HANDLING,
    Call,
    Cause,
    Ids,
    Ledger,
    Message,
    PluginSpec,
    Reason,
    Reward,
    Role,
    Sampling,
    Span,
    Task,
    Timings,
    Tool,
    ToolCall,
    Trace,
    count_prompt_tokens,
    decode,
    encode,
    measure_engine,
    union_seconds,
)

COMMAND = ToolCall("c1", "bash", '{"command": "ls"}')


class Arrays(msgspec.Struct):
    """A type with an array."""

    ids: Ids


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_arrays_round_trip(values: list[int]) -> None:
    """Any int32 array, also an empty one, keeps its values and its type."""
    back = decode(encode(Arrays(np.array(values, dtype=np.int32))), Arrays)
    assert back.ids.dtype == np.int32
    assert back.ids.tolist() == values


CALL = make_call(
    3,
    range(5),
    [9, 8, 7],
    parent=2,
    messages=(Message(Role.USER, "fix it"), Message(Role.ASSISTANT, tool_calls=(COMMAND,))),
    tools=(Tool("bash", "Run it.", {"type": "object", "properties": {}}),),
    sampling=Sampling(temperature=1.0, stop=("</s>",)),
)
TRACE = Trace(
    ids=np.array([1, 2, 3], dtype=np.int32),
    mask=np.array([False, True, False]),
    logprobs=np.array([0, -0.5, -0.25], dtype=np.float32),
    spans=(Span(0, 1, 2, 4), Span(1, 2, 3, 4, Reason.CLIENT_GONE, truncated=True, repeats=2)),
)
TASK = Task(id="t", instruction="x", harness=PluginSpec("pi"), evaluator=PluginSpec("tests"))


@pytest.mark.parametrize("noun", [CALL, TRACE, TASK], ids=["call", "trace", "task"])
def test_types_round_trip(noun: msgspec.Struct) -> None:
    """Every field is the same after encode and decode; arrays keep their types."""
    back = decode(encode(noun), type(noun))
    for field in msgspec.structs.fields(noun):
        ours, theirs = getattr(noun, field.name), getattr(back, field.name)
        if isinstance(ours, np.ndarray):
            assert ours.dtype == theirs.dtype
            assert ours.tolist() == theirs.tolist()
        else:
            assert ours == theirs, field.name


def test_results_of_older_versions_are_read() -> None:
    """Spans without marks and rewards without those of calls have the defaults."""
    span = {"call": 0, "start": 1, "end": 2, "version": 4}
    assert decode(msgspec.msgpack.encode(span), Span) == Span(0, 1, 2, 4)
    assert decode(msgspec.msgpack.encode({"value": 1.0}), Reward) == Reward(1.0)
    graded = Reward(1.0, per_call={0: 0.5, 3: 1.0})
    assert decode(encode(graded), Reward) == graded
    assert msgspec.json.decode(msgspec.json.encode(graded), type=Reward) == graded


def test_strided_views_are_encoded_in_their_own_order() -> None:
    """A view that is not contiguous is copied."""
    every_second = np.arange(10, dtype=np.int32)[::2]
    assert decode(encode(Arrays(every_second)), Arrays).ids.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("array", [np.zeros(2, dtype=np.int64), np.zeros((2, 2), dtype=np.int32)])
def test_arrays_of_another_type_are_refused(array: Ids) -> None:
    """A wrong dtype or shape is an error, never a silent conversion."""
    with pytest.raises(NotImplementedError, match="cannot encode a value of type ndarray"):
        encode(Arrays(array))


@pytest.mark.parametrize("payload", [b"", b"x1234", b"i123", b"f\x00\x00\x80\x3f", "text", 5, None])
def test_damaged_arrays_are_decode_errors(payload: object) -> None:
    """Garbage, a cut buffer, and floats in place of ids are errors."""
    with pytest.raises(msgspec.DecodeError):
        decode(msgspec.msgpack.encode({"ids": payload}), Arrays)


def test_decoded_arrays_are_read_only() -> None:
    """Recorded data stays as it was recorded."""
    back = decode(encode(make_call(0, [], [1])), Call)
    with pytest.raises(ValueError, match="read-only"):
        back.sampled_ids[0] = 5


def test_the_ledger_accounts_for_every_token() -> None:
    """A token that is lost or counted twice unbalances it (I2)."""
    kept = {Reason.CLIENT_GONE: 2}
    assert Ledger().balanced
    assert Ledger(sampled=10, trained=7, masked=kept, dropped={Reason.STALE: 1}).balanced
    assert not Ledger(sampled=10, trained=7, masked=kept).balanced
    assert not Ledger(sampled=10, trained=9, masked=kept).balanced


def test_every_cause_is_documented() -> None:
    """docs/errors.md has the rows of the table in code."""
    page = (Path(__file__).parent.parent / "docs" / "errors.md").read_text(encoding="utf-8")
    for cause in Cause:
        handling = HANDLING[cause]
        row = next(line for line in page.splitlines() if line.startswith(f"| `{cause.value}` |"))
        _, _, boundary, _, again, policy, _ = (cell.strip() for cell in row.split("|"))
        tries = {None: "until `group.retry_s` is over", 0: "no"}.get(handling.retries, "once")
        assert boundary == f"`{handling.boundary.value}`"
        assert again == tries + (", elsewhere" if handling.elsewhere else "")
        assert policy == ("evaluated" if handling.evaluated else "masked")
    assert set(HANDLING) == set(Cause)


# --------------------------------------------------------------------------- time at the engine
INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


@given(INTERVALS, st.randoms(use_true_random=False))
def test_the_union_of_intervals_counts_each_moment_once(
    spans: list[tuple[int, int]], order: random.Random
) -> None:
    """It equals the number of unit cells that any interval covers, in whatever order they come."""
    intervals = [(start, start + length) for start, length in spans]
    covered = {cell for start, end in intervals for cell in range(start, end)}
    order.shuffle(intervals)
    assert union_seconds(intervals) == len(covered)


@given(INTERVALS)
def test_calls_at_the_same_time_are_not_added(spans: list[tuple[int, int]]) -> None:
    """The time at the engine is at most that of one call after the other, and at most the whole."""
    calls = [
        make_call(
            0, [1, 2], [3], timings=Timings(float(start), float(start), None, float(start + length))
        )
        for start, length in spans
    ]
    measured = measure_engine(calls)
    assert measured <= sum(length for _, length in spans)
    assert measured <= max((start + length for start, length in spans), default=0)
    assert measured >= max((length for _, length in spans), default=0)


def test_what_was_not_at_the_engine_is_not_counted() -> None:
    """Calls that were never sent or have no token, and those sampled in another session."""
    lost = Timings(0.0, 1.0, None, None)
    unsent = Timings(0.0, None, None, 5.0)
    calls = [make_call(0, [1, 2], [3], timings=lost), make_call(0, [1, 2], [3], timings=unsent)]
    calls += [
        make_call(0, [1, 2], [3], timings=Timings(0.0, 1.0, 2.0, 3.0), replayed=replayed)
        for replayed in (True, False)
    ]
    assert measure_engine(calls) == 2.0
    assert count_prompt_tokens(calls) == sum(len(call.prompt_ids) for call in calls)
