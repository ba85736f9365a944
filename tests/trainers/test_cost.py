"""Cost of a training."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.training import write_config
from tugline.launch.prices import Prices
from tugline.trainers.config import read_config, store_config
from tugline.trainers.cost import CostMeter, count_solved
from tugline.types import Ledger, Reward, Status, Trajectory

PRICES = Prices(gpu_hour=1.8, gpus=2, prompt_tokens=1.0, sampled_tokens=10.0)


def trajectory(reward: float | None) -> Trajectory:
    """A session of 100,000 prompt tokens and 10,000 sampled ones."""
    return Trajectory(
        session="s", task="t", sample=0, status=Status.COMPLETED, traces=(),
        ledger=Ledger(sampled=10_000), prompt_tokens=100_000,
        reward=None if reward is None else Reward(reward),
    )  # fmt: skip


def test_a_step_has_the_cost_since_the_last_one() -> None:
    """Time of GPUs and tokens, also of held-out sessions; per solved task, all cost until then."""
    times = [0.0]
    meter = CostMeter(PRICES, 0.0, clock=lambda: times[-1])
    sessions = [trajectory(1.0), trajectory(0.0), trajectory(None)]
    assert count_solved(sessions) == 1
    meter.add_sessions(sessions)
    times.append(1000.0)
    first = meter.report(1)
    assert first == pytest.approx({"cost/step": 1.6, "cost/total": 1.6, "cost/solved": 1.6})
    times.append(2000.0)
    second = meter.report(4)
    assert second == pytest.approx({"cost/step": 1.0, "cost/total": 2.6, "cost/solved": 0.65})
    assert "cost/solved" not in CostMeter(PRICES, 0.0).report(0)
    assert CostMeter(Prices(), 0.0).report(1) == {}


def test_a_resumed_run_continues_the_total() -> None:
    """What came before the checkpoint is in the total and in no step."""
    times = [0.0]
    before = CostMeter(PRICES, 0.0, clock=lambda: times[-1])
    times.append(500.0)
    saved = before.total
    times.append(9000.0)
    meter = CostMeter(PRICES, saved, clock=lambda: times[-1])
    times.append(10_000.0)
    figures = meter.report(1)
    assert figures == pytest.approx({"cost/step": 1.0, "cost/total": 1.5, "cost/solved": 1.5})


def test_prices_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    """They are no part of what was trained."""
    folder = tmp_path / "run"
    folder.mkdir()
    model = Path("none")
    store_config(folder, read_config(write_config(tmp_path), model))
    store_config(folder, read_config(write_config(tmp_path, prices={"gpu_hour": 2.0}), model))
