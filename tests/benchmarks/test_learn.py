"""The benchmark of what real agents learn, in small: every part of it, with a real agent."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.conftest import Measure

REBUILD = Path(__file__).parents[2] / "tools" / "warm_start" / "rebuild.py"


@pytest.mark.slow
@pytest.mark.pi
@pytest.mark.timeout(600)
def test_a_policy_is_made_trained_and_tried(measure: Measure, tmp_path: Path) -> None:
    """A policy that has learned next to nothing: what is shown is that the figures are there.

    Run again it only reads what there is.
    """
    policy, runs = tmp_path / "policy", tmp_path / "runs"
    small = ("--blocks", "--harness", "pi", "--sessions", "2", "--steps", "2", "1", "1")
    subprocess.run([sys.executable, REBUILD, policy, *small], check=True, timeout=300)
    options = (
        "--json", "--harness", "pi", "--seeds", "0", "--steps", "1", "--tasks-per-step", "1",
        "--samples", "2", "--heldout", "3", "--cross", "2", "--policy", str(policy),
        "--out", str(runs), "--plot", str(tmp_path / "plot.png"),
    )  # fmt: skip
    result = measure("learn", "run.py", *options, timeout=500)
    (run,) = result["runs"]
    assert (run["harness"], run["sessions"], run["failed"]) == ("pi", 3 + 2 + 3, 0)
    assert run["before"]["tasks"] == run["after"]["tasks"] == 3
    assert result["cross"]["pi"]["pi"]["tasks"] == 2
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert measure("learn", "run.py", *options, timeout=60) == result
