"""The benchmark of the console runs through every measure, in a real Chromium."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser
RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "console" / "run.py"


def test_every_budget_has_its_figure() -> None:
    """The documented keys are there, with figures that can be true; sizes are within budget."""
    command = [sys.executable, str(RUN), "--json", "--sessions", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["sessions"] == 1000
    assert 0 < report["first_paint_ms"] <= report["overview_filled_ms"]
    assert max(report["list_p95_ms_by_filter"].values()) == report["list_p95_ms"] > 0
    assert 0 < report["live_lag_median_ms"] <= report["live_lag_max_ms"]
    assert report["tabs"] == 20
    assert report["tabs_cpu_percent"] >= 0
    assert report["first_javascript_kb"] <= 120
    assert report["assets_kb"] <= 1000
