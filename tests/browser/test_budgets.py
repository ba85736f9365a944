"""The benchmark of the console runs through every measure, in a real Chromium."""

from __future__ import annotations

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
    told = json.loads(done.stdout)
    assert told["sessions"] == 1000
    assert 0 < told["first_paint_ms"] <= told["overview_filled_ms"]
    assert max(told["list_p95_ms_by_filter"].values()) == told["list_p95_ms"] > 0
    assert 0 < told["live_lag_median_ms"] <= told["live_lag_max_ms"]
    assert told["tabs"] == 20
    assert told["tabs_cpu_percent"] >= 0
    assert told["first_javascript_kb"] <= 120
    assert told["assets_kb"] <= 1000
