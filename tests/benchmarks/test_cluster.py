"""The benchmark of a fleet runs real servers on PostgreSQL and light nodes, at a small size."""

import pytest

from benchmarks.conftest import Measure


@pytest.mark.slow
def test_every_row_has_its_figures(measure: Measure) -> None:
    """Every session is committed, by nodes that keep their leases, and a storm ends soon."""
    report = measure("cluster", "run.py", "--json", "--quick")
    assert [(row["nodes"], row["servers"]) for row in report["rows"]] == [
        (10, 1),
        (100, 1),
        (100, 2),
    ]
    for row in report["rows"]:
        assert row["sessions_per_s"] > 1
        assert 0 < row["dispatch_p50_ms"] <= row["dispatch_p99_ms"]
        assert 0 < row["server_cpu_ms_per_session"] < 100
        assert 5 < row["statements_per_session"] < 200
        assert row["wal_bytes_per_session"] > 500
        assert row["rejoined"] == row["failed_calls"] == 0
    storm = report["storm"]
    assert storm["died"] == 30
    assert storm["sessions_lost"] > 0
    assert storm["beyond_lease_s"] < 30
