"""Unbiased gradients of rewards of calls when the policy decides when to stop."""

from benchmarks.programs import measure


def test_only_baselines_of_a_turn_index_are_biased() -> None:
    """Over 10 seeds, ours is within 2 standard errors of the known gradient; theirs is not."""
    biases = measure("training", "credit.py", "--json", "--seeds", "10", "--groups", "150")
    for each in biases:
        ratio = abs(each["mean"]) / each["error"]
        if each["estimator"].startswith("ours"):
            assert ratio < 2, each
        else:
            assert ratio > 20, each
    assert len(biases) == 5
