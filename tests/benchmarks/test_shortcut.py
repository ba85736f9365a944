"""The comparison of a shortcut that is refused with one that is believed, in few steps."""

import pytest

from benchmarks.conftest import Measure


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_only_a_believed_shortcut_is_rewarded(measure: Measure) -> None:
    """Both runs offer it; of the evaluator `tests` only changes of the code have a reward."""
    refused, believed = measure("training", "shortcut.py", "--steps", "3", "--json", timeout=500)
    assert (refused["judge"], believed["judge"]) == ("Refused", "Believed")
    assert sum(refused["write"]) > 0
    assert sum(believed["write"]) > 0
    for step in range(3):
        assert refused["reward"][step] <= refused["change"][step]
        assert believed["reward"][step] >= believed["write"][step]
