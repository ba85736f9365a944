"""The server's benchmark runs through every measure, and refuses to measure a broken path."""

import pytest

from benchmarks.conftest import Measure


@pytest.mark.slow
def test_every_measure_has_its_figures(measure: Measure) -> None:
    """The documented keys are there, from real processes, with figures that can be true."""
    report = measure("server", "run.py", "--json", "--size", "smoke")
    assert report["store"] == "sqlite"
    assert report["sessions_per_s"] > 1
    assert 0 < report["dispatch_p50_ms"] <= report["dispatch_p99_ms"]
    assert 0 < report["idle_dispatch_p50_ms"] <= report["idle_dispatch_p99_ms"]
    assert report["submit_per_s"] > 100
    assert report["queued"] == 2000
    assert 0 < report["list_ms"] < 5000
    assert 0 < report["status_ms"] < 5000
    assert report["rss_growth_mb"] < report["rss_mb"]
    assert report["long_polls_open"] == report["long_polls"] == 20
