"""``tugline plan``: figures, limits and warnings."""

from __future__ import annotations

import json

import pytest

from cli.conftest import Run

PLAN = (
    *("plan", "--gpus=4", "--model-tps=1000", "--turns=10", "--turn-tokens=100", "--prompt=1000"),
    *("--result-tokens=200", "--token-ms=10", "--tool-s=1", "--tool-cpu-s=0", "--eval-s=10"),
)
PI = ("--harness", "pi")


def test_a_plan_follows_from_the_constants(run_here: Run) -> None:
    """Four sessions of 1,000 tokens per second have the figures that were computed by hand."""
    plan = json.loads(run_here(*PLAN, *PI, "--json").stdout)
    assert plan["sessions_per_hour"] == pytest.approx(4 * 3600)
    assert plan["session_s"] == pytest.approx(0.8 + 10 * 0.034 + 10 * 1.0 + 10 * 1 + 10)
    assert plan["open_sessions"] == 125
    assert plan["busy"] == 1.0
    assert plan["kv_tokens"] == 125 * (1000 + 4000) // 2
    gateway_s = 10 * (0.0016 + 0.0000068 * 5) + 1000 * 0.000043 + 0.05
    assert plan["gateway_cores"] == pytest.approx(4 * gateway_s)
    assert plan["agent_cores"] == pytest.approx(4 * 11.14)
    assert plan["nodes_for"] == {"processors": 2, "memory": 1}
    assert plan["disk_gb_per_day"] == pytest.approx(4 * 86400 * (4000 * 1.5 + 7000) / 1e9)
    assert (plan["nodes"], plan["slots"], plan["servers"]) == (2, 63, 1)


@pytest.mark.parametrize(
    ("options", "limit"),
    [("--harness pi --cores 8", "processors"), ("--harness qwen_code --memory-gb 16", "memory")],
)
def test_the_scarcest_resource_decides(options: str, limit: str, run_here: Run) -> None:
    """The number of nodes follows from the limit that is reached first, the slots from it."""
    command = [*PLAN, *options.split()]
    plan = json.loads(run_here(*command, "--json").stdout)
    most = max(plan["nodes_for"], key=plan["nodes_for"].get)
    assert (most, plan["nodes"]) == (limit, plan["nodes_for"][limit])
    assert plan["slots"] * plan["nodes"] >= plan["open_sessions"]
    assert f"the bottleneck is {limit}" in run_here(*command).stdout


def test_a_step_with_too_few_sessions_is_reported(run_here: Run) -> None:
    """25 of 125 sessions keep a fifth of the engines busy."""
    out = run_here(*PLAN, *PI, "--sessions", "25").stdout
    assert "25 sessions a step keep 20% of the engines busy" in out
