"""The server's benchmark runs through every measure, and refuses to measure a broken path."""

from __future__ import annotations

import pytest

from benchmarks.conftest import Measure


@pytest.mark.slow
def test_every_measure_has_its_figures(measure: Measure) -> None:
    """The documented keys are there, from real processes, with figures that can be true."""
    told = measure("server", "run.py", "--json", "--size", "smoke")
    assert told["store"] == "sqlite"
    assert told["sessions_per_s"] > 1
    assert 0 < told["dispatch_p50_ms"] <= told["dispatch_p99_ms"]
    assert 0 < told["idle_dispatch_p50_ms"] <= told["idle_dispatch_p99_ms"]
    assert told["submit_per_s"] > 100
    assert told["queued"] == 2000
    assert 0 < told["list_ms"] < 5000
    assert 0 < told["status_ms"] < 5000
    assert told["rss_growth_mb"] < told["rss_mb"]
    assert told["long_polls_open"] == told["long_polls"] == 20
