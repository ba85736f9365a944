"""Cost of sessions at given prices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tugline.errors import ConfigError
from tugline.launch.prices import Cost, Prices, describe_cost, measure_cost
from tugline.launch.settings import load_settings
from tugline.protocol import ResultView
from tugline.types import Status

PRICES = Prices(gpu_hour=3.6, gpus=2, prompt_tokens=1.0, sampled_tokens=10.0)


def end(created: float, seconds: float, reward: float | None, prompt: int | None) -> ResultView:
    """A result of 1,000 sampled tokens."""
    return ResultView(
        position=1, session="s", task="t", tenant="default", sample=0, attempt=0,
        status=Status.COMPLETED, reward=reward, failure=None, sampled=1000, trained=0, bytes=1,
        seconds={"run": seconds}, created=created, prompt_tokens=prompt,
    )  # fmt: skip


def test_gpus_and_tokens_are_paid_for() -> None:
    """GPUs cost while any session runs: 0 to 30 s and 100 to 110 s here, at 2 for a thousand s."""
    results = [
        end(20.0, 20.0, 1.0, 10_000),
        end(30.0, 20.0, 0.5, 20_000),
        end(110.0, 10.0, None, None),
    ]
    cost = measure_cost(results, PRICES)
    assert cost is not None
    assert cost.total == pytest.approx(40 * 0.002 + 0.03 + 3 * 0.01)
    assert cost.solved == cost.total
    assert describe_cost(cost) == [("cost", "0.14; 0.14 per solved task")]


def test_without_a_solved_task_its_cost_is_unknown() -> None:
    """It is neither 0 nor infinite."""
    cost = measure_cost([end(20.0, 20.0, 0.0, 10_000)], PRICES)
    assert cost is not None
    assert cost.solved is None
    assert cost.figures == {"cost/total": cost.total}
    assert describe_cost(Cost(total=1.5, solved=None)) == [("cost", "1.5; no task was solved")]


def test_without_prices_there_is_no_cost() -> None:
    """The number of GPUs is no price."""
    assert measure_cost([end(20.0, 20.0, 1.0, 1)], Prices(gpus=8)) is None
    assert describe_cost(None) == []


def test_prices_are_settings(tmp_path: Path) -> None:
    """They are in the file of settings; a negative one is refused with its key."""
    file = tmp_path / "settings.yaml"
    file.write_text("prices: {gpu_hour: 2.5, gpus: 4}\n")
    given = {"server": {}, "node": {}, "engine": {}}
    assert load_settings(file, **given).prices == Prices(gpu_hour=2.5, gpus=4)
    with pytest.raises(ConfigError, match=r"prices\.gpu_hour"):
        load_settings(None, **given, changes={"prices.gpu_hour": -1})
