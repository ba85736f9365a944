"""Verdicts are made plain before they are stored, whatever values a plug-in puts into them."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tugline.errors import EvaluatorError
from tugline.evaluators.base import Verdict
from tugline.evaluators.plain import make_plain
from tugline.recording.trajectories import pack, unpack
from tugline.types import Ledger, Reward, Status, Trajectory

CYCLE: list[Any] = []
CYCLE += [CYCLE, CYCLE]
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]
SHARED: list[Any] = []
for _ in range(60):
    SHARED = [SHARED, SHARED]


class Silent:
    """An object without a usable text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


class Growing(dict[str, Any]):
    """A mapping with a key that is not text."""


VALUES = [
    np.float32(0.5), np.int64(3), np.bool_(True), np.arange(4), np.array(["\ud800"]),
    "\ud800 lone", Path("/srv/x"), 10**30, -(10**30), 10**5000, {1, 2}, frozenset({"a", 1}),
    float("nan"), float("inf"), 1 + 2j, b"\xff\x00", {1: {("a", "b"): "\udcff"}}, CYCLE, DEEP,
    SHARED, Decimal("1.5"), EvaluatorError, object(), Reward(np.float64(1)), range(3),
    Growing({"a": Growing()}), "x" * 100,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_any_value_in_a_report_is_stored(value: Any) -> None:
    """It is stored as msgpack and JSON, as a number, as text, or left out."""
    verdict = make_plain(Verdict(Reward(1.0), {"value": value, "kept": 1}))
    trajectory = Trajectory(
        session="t-0", task="t", sample=0, status=Status.COMPLETED, traces=(), ledger=Ledger(),
        reward=verdict.reward, report=verdict.report,
    )  # fmt: skip
    assert unpack(pack(trajectory)).report == verdict.report
    assert msgspec.json.decode(msgspec.json.encode(verdict.report))["kept"] == 1


def test_a_plain_report_is_unchanged() -> None:
    """Values that JSON has are the same afterwards."""
    report = {"a": [1, 2.5, None, True, {"b": "text"}], "c": {}, "d": []}
    assert make_plain(Verdict(Reward(0.5, {"p": 1.0}, (1.0,)), report)) == Verdict(
        Reward(0.5, {"p": 1.0}, (1.0,)), report
    )


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), np.array(0.5), Decimal("0.5")])
def test_a_reward_is_any_real_number(value: Any) -> None:
    """Numbers of other libraries become floats."""
    reward = make_plain(Verdict(Reward(value, {"part": value}, (value,)), {})).reward
    assert msgspec.structs.astuple(reward) == (0.5, {"part": 0.5}, (0.5,))
    assert type(reward.value) is type(reward.parts["part"]) is type(reward.per_trace[0]) is float


@pytest.mark.parametrize(
    "value", ["1", None, float("nan"), np.float32("inf"), 1j, np.arange(2), Silent()]
)
def test_a_reward_that_is_no_finite_number_is_no_verdict(value: Any) -> None:
    """The error says what it is."""
    with pytest.raises(EvaluatorError, match="must be a finite number"):
        make_plain(Verdict(Reward(value), {}))


def test_a_report_without_text_is_no_verdict() -> None:
    """An object whose methods raise is a failure of the evaluator, not of the node."""
    with pytest.raises(EvaluatorError, match="cannot be stored: RuntimeError: no text"):
        make_plain(Verdict(Reward(1.0), {"value": Silent()}))
    with pytest.raises(EvaluatorError, match="must be a Verdict"):
        make_plain(0.5)
