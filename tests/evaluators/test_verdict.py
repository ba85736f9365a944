"""Verdicts are made plain before they are stored; an evaluator's code ends no task of the node."""

from __future__ import annotations

import asyncio
import dataclasses
import decimal
import json
import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.calls import make_call
from support.evaluation import make_task_with_files
from support.failing_plugins import Ending
from tugline.errors import EvaluatorError
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.evaluators.verdict import MAX_VALUES, evaluate, make_plain
from tugline.patch import Patch
from tugline.types import Boundary, Failure, Reward, Status


@dataclasses.dataclass
class Point:
    """A value whose type JSON does not have."""

    x: float


class Odd:
    """An object that cannot even be described."""

    def __str__(self) -> str:
        raise RuntimeError("no")


class Unreadable(Mapping[str, int]):
    """A mapping that fails when it is read."""

    def __getitem__(self, key: str) -> int:
        raise OSError("gone")

    def __iter__(self) -> Iterator[str]:
        raise OSError("gone")

    def __len__(self) -> int:
        return 1


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.text(st.characters(blacklist_categories=())),
    st.binary(),
    st.sampled_from(
        [
            Path("/x"),
            np.float32(0.5),
            np.int64(3),
            np.bool_(True),
            np.arange(3),
            Point(math.nan),
            Status.COMPLETED,
            decimal.Decimal("0.1"),
            datetime(2026, 1, 1, tzinfo=UTC),
            Odd(),
            object,
            10**4000,
            "\ud800",
            "a\0b",
            float("inf"),
            b"\xff",
            {1, 2},
            frozenset("a"),
            1j,
            range(3),
        ]
    ),
)
KEYS = st.one_of(st.text(), st.integers(), st.none(), st.just("\udfff"), st.just(Path("k")))
REPORTS = st.dictionaries(
    KEYS,
    st.recursive(
        LEAVES,
        lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner),
    ),
)


@given(report=REPORTS)
def test_any_report_can_be_written_and_read(report: dict[Any, Any]) -> None:
    """Reports can be msgpack, or JSON in UTF-8 without NUL, which PostgreSQL refuses."""
    plain = make_plain(Verdict(Reward(1.0), report)).report
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plain)) == plain
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
    assert "\0" not in text.encode().decode()
    assert "\\u0000" not in json.dumps(plain)


def test_values_that_json_has_stay_as_they_are() -> None:
    """Texts with any characters, numbers and nested lists are unchanged."""
    report = {"a": [1, 2.5, None, True, {"b": "é\n🙂"}], "c": -(1 << 63)}
    assert make_plain(Verdict(Reward(1.0), report)).report == report


def test_a_report_without_end_is_cut() -> None:
    """A report that holds itself or is huge is cut; one that cannot be read is an error."""
    loop: list[Any] = []
    loop += [loop, loop]
    json.dumps(make_plain(Verdict(Reward(1.0), {"loop": loop})).report)
    many = make_plain(Verdict(Reward(1.0), {"many": list(range(10 * MAX_VALUES))})).report
    assert len(many["many"]) < MAX_VALUES
    with pytest.raises(EvaluatorError, match="the verdict is invalid: OSError: gone"):
        make_plain(Verdict(Reward(1.0), {"x": Unreadable()}))


@pytest.mark.parametrize(
    "value", [np.mean([0, 1]), np.float16(0.5), decimal.Decimal("0.5"), np.array([0.5])]
)
def test_rewards_may_be_numbers_of_any_type(value: Any) -> None:
    """Numbers become floats, also in parts and by trace."""
    reward = make_plain(Verdict(Reward(value, {"p": value}, (value,)), {})).reward
    assert reward == Reward(0.5, {"p": 0.5}, (0.5,))
    assert {type(reward.value), type(reward.parts["p"]), type(reward.per_trace[0])} == {float}


@pytest.mark.parametrize(
    "value", ["1", b"1", None, math.nan, math.inf, 10**400, np.ones(2), object(), Odd(), [1.0]]
)
def test_other_rewards_are_no_verdict(value: Any) -> None:
    """The error names the place and the value."""
    for reward, name in (
        (Reward(value), "reward.value"),
        (Reward(1.0, {"p": value}), r"reward.parts\['p'\]"),
        (Reward(1.0, {}, (0.0, value)), r"reward.per_trace\[1\]"),
        (Reward(1.0, per_call={0: 0.0, 3: value}), r"reward.per_call\[3\]"),
    ):
        with pytest.raises(EvaluatorError, match=f"^{name} is .*, must be a finite number$"):
            make_plain(Verdict(reward, {}))


class Gives(Evaluator):
    """An evaluator with a given reward."""

    def __init__(self, **fields: Any) -> None:
        self._reward = Reward(1.0, **fields)

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Give the reward."""
        return Verdict(self._reward, {})


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"per_call": {2: 0.5, 0: 1.0}}, ""),
        ({}, ""),
        ({"per_call": {0: 1.0}}, r"session s: .*1 values for 2 recorded calls.*recorded: 2\)"),
        ({"per_call": {0: 1.0, 1: 1.0, 2: 1.0}}, r"3 values for 2 recorded.*recorded: 1\)"),
        ({"per_call": (1.0, 1.0)}, r"reward.per_call is \(1.0, 1.0\), must be a mapping from the"),
        ({"per_trace": (1.0,)}, "session s: reward.per_trace has 1 values for 0 traces"),
    ],
)
async def test_rewards_of_calls_fit_the_session(fields: dict[str, Any], error: str) -> None:
    """There is one for each recorded call or none, in order; the error names the session."""
    outcome = dataclasses.replace(OUTCOME, calls=[make_call(0, [1], [2]), make_call(2, [1], [2])])
    if error:
        with pytest.raises(EvaluatorError, match=error):
            await evaluate(Gives(**fields), outcome)
    else:
        verdict = await evaluate(Gives(**fields), outcome)
        assert list(verdict.reward.per_call.items()) == sorted(fields.get("per_call", {}).items())


def test_texts_of_failures_can_be_written() -> None:
    """Any text of an exception can be encoded."""
    failure = Failure(Boundary.EVALUATOR, "half a pair \ud83d, NUL \0, é")
    assert failure.message == "half a pair \\ud83d, NUL \\x00, é"
    assert msgspec.json.decode(msgspec.json.encode(failure), type=Failure) == failure


# --------------------------------------------------------------------------- cancellation
OUTCOME = SessionOutcome(make_task_with_files(), Patch(), lambda _: pytest.fail("no sandbox"), 10.0)


@pytest.mark.parametrize("by", ["cancellation", "exit"])
async def test_code_that_ends_its_task_gives_no_verdict(by: str) -> None:
    """An evaluator cannot end the node's task or process."""
    with pytest.raises(EvaluatorError, match=r"Ending raised (CancelledError|SystemExit)"):
        await evaluate(Ending(by=by), OUTCOME)


async def test_an_order_to_cancel_is_obeyed() -> None:
    """A cancellation is obeyed while the evaluator runs, too."""

    class Waiting(Evaluator):
        async def evaluate(self, outcome: SessionOutcome) -> Verdict:
            started.set()
            await asyncio.Event().wait()
            raise AssertionError

    started = asyncio.Event()
    running = asyncio.create_task(evaluate(Waiting(), OUTCOME))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await evaluate(Waiting(), OUTCOME)


async def test_another_value_than_a_verdict_is_an_error() -> None:
    """The error names the evaluator."""

    class Forgetful(Evaluator):
        async def evaluate(self, outcome: SessionOutcome) -> Verdict:
            return None  # type: ignore[return-value]

    with pytest.raises(EvaluatorError, match="Forgetful returned None, must be a Verdict"):
        await evaluate(Forgetful(), OUTCOME)
