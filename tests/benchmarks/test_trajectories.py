"""The benchmark of trajectories runs, and what does not depend on the machine is within bounds."""

from typing import Any

import pytest

from benchmarks.conftest import Measure


@pytest.fixture(scope="module")
def figures(measure: Measure) -> dict[str, Any]:
    """Sessions of 10 and 100 turns, with few repetitions."""
    result: dict[str, Any] = measure("trajectories", "run.py", "--json", "--size", "smoke")
    return result


def test_the_session_is_the_one_that_is_spoken_of(figures: dict[str, Any]) -> None:
    """8,000 tokens, then 600 a turn, of which 300 are sampled."""
    assert figures["unique_ids_100"] == 8000 + 600 * 100 - 300
    assert figures["sampled_100"] == 300 * 100


def test_bytes_are_linear_and_few(figures: dict[str, Any]) -> None:
    """The limit is 1.5 times 1.4 bytes an id and 4 a logprob."""
    limit = 1.5 * (figures["unique_ids_100"] * 1.4 + figures["sampled_100"] * 4)
    assert figures["sampled_100"] * 4 < figures["recording_bytes_100"] <= limit
    assert 0 < figures["slope_bytes"] <= 1.1


def test_memory_is_linear_and_little(figures: dict[str, Any]) -> None:
    """Building holds less than four times the ids, reading less than twice the build's bound."""
    ids = 4 * figures["unique_ids_100"]
    assert ids < figures["peak_bytes_100"] <= 4 * ids
    assert figures["read_peak_bytes_100"] < 8 * ids
    assert figures["slope_peak"] <= 1.1


def test_times_are_told(figures: dict[str, Any]) -> None:
    """CPU times; the bounds leave a busy machine some room, the accepted ones are in the docs."""
    assert 0 < figures["build_ms_100"] <= 50
    assert 0 < figures["decode_ms_40"] <= 20
    assert 0 < figures["slope_time"] < 1.5
    assert figures["decode_parts_ms_40"].keys() == {
        "checksums", "zstd", "msgpack", "numpy and joining",
    }  # fmt: skip
