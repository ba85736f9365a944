"""The benchmark of the console in a real Chromium."""

import pytest

from benchmarks.programs import measure

pytestmark = pytest.mark.browser


def test_every_budget_is_measured() -> None:
    """The report has the documented keys with plausible values; sizes are within budget."""
    report = measure("console", "run.py", "--json", "--sessions", "1000", timeout=250)
    assert report["sessions"] == 1000
    assert 0 < report["first_paint_ms"] <= report["overview_filled_ms"]
    assert max(report["list_p95_ms_by_filter"].values()) == report["list_p95_ms"] > 0
    assert 0 < report["live_lag_median_ms"] <= report["live_lag_max_ms"]
    assert report["tabs"] == 20
    assert report["tabs_cpu_percent"] >= 0
    assert report["first_javascript_kb"] <= 120
    assert report["assets_kb"] <= 1000
