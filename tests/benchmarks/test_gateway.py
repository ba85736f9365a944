"""The gateway's benchmark runs through every mode, and refuses to measure a broken path."""

from typing import Any

import pytest

from benchmarks.conftest import Measure

pytestmark = pytest.mark.slow
KEYS = {"cpu_ms", "opening_cpu_ms", "ratio_to_passthrough", "added_p50_ms", "added_p99_ms"}


@pytest.fixture(scope="module")
def told(measure: Measure) -> dict[str, Any]:
    """A run that is too small to mean anything, from end to end."""
    result: dict[str, Any] = measure("gateway", "run.py", "--json", "--size", "smoke")
    return result


def test_every_mode_has_its_figures(told: dict[str, Any]) -> None:
    """The documented keys are there; the gateway costs more than forwarding and not a fortune."""
    for mode in ("exact", "observed", "stream"):
        assert told[mode].keys() >= KEYS
        assert told[mode]["added_p99_ms"].keys() == {"1", "2"}
        assert 1 < told[mode]["ratio_to_passthrough"] < 100
    assert told["stream"]["first_byte_ms"] > 0
    assert told["stream_paced"]["cpu_ms"] > 0
    assert told["machine"]["noise"].keys() == {"exact", "observed", "stream", "stream_paced"}


def test_what_lasts_has_its_figures(told: dict[str, Any]) -> None:
    """Turns, stalls and memory of open sessions are measured; a later turn does not cost a lot."""
    assert told["growth_cpu_ms"].keys() == {"10", "30"}
    assert 0 < told["growth"] < 5
    assert 0 < told["stall_cpu_ms"] < 1000
    assert told["stall_ms"] > 0
    assert told["rss_open_bytes_per_call"] < 10**6
    assert told["long_results"]["conversation"]["last_prompt_tokens"] > 90_000


def test_a_call_keeps_a_few_kilobytes(told: dict[str, Any]) -> None:
    """512 logprobs alone are 2 kB; more than 10 would mean that history is stored again."""
    assert 2048 < told["kept_bytes_per_call"] < 10_240


def test_the_load_is_what_the_figures_are_quoted_for(told: dict[str, Any]) -> None:
    """A 16k-token prompt on average, 40 turns, 512 sampled tokens."""
    load = told["conversation"]
    assert abs(load["mean_prompt_tokens"] - 16_384) < 100
    assert (load["turns"], load["sampled_tokens"]) == (40, 512)
