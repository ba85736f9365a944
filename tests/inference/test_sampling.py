"""Sampled tokens: distribution, reproducibility and log probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tugline.inference.sampling import Drawn, sample, uniforms

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -torch.inf]])


ROW = [
    ("temperature", np.float32),
    ("top_p", np.float32),
    ("top_k", np.int32),
    ("min_p", np.float32),
]


def draw(
    rows: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> Drawn:
    """Many rows with the same logits."""
    uniform = uniforms(np.arange(rows, dtype=np.uint64), np.zeros(rows, np.int32))
    settings = np.array([(temperature, top_p, top_k, min_p)] * rows, ROW)
    return sample(LOGITS.expand(rows, -1), settings, uniform)


def assert_frequencies(tokens: np.ndarray, expected: torch.Tensor) -> None:
    """Observed frequencies are within five standard errors of `expected`."""
    seen = np.bincount(tokens, minlength=len(expected)) / len(tokens)
    p = expected.double().numpy()
    assert (np.abs(seen - p) <= 5 * np.sqrt(p * (1 - p) / len(tokens)) + 1e-12).all(), seen


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"temperature": 0.7}, 5),
        ({"top_k": 2}, 2),
        ({"top_p": 0.7}, 2),
        ({"top_p": 0.1}, 1),
        ({"top_p": 1e-300}, 1),
        ({"min_p": 0.1}, 3),
        ({"min_p": 1.0}, 1),
    ],
)
def test_frequencies_follow_the_truncated_distribution(options: dict[str, Any], left: int) -> None:
    """Truncated tokens are never sampled, and log probabilities are renormalised."""
    tokens, logprobs, _ = draw(20_000, **options)
    expected = torch.log_softmax(LOGITS[0, :left] / options.get("temperature", 1), -1)
    assert_frequencies(tokens, expected.exp())
    assert np.allclose(logprobs, expected.numpy()[tokens], atol=1e-6)


KNOBS = [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"temperature": 0.7}]


def brute_force(logits: np.ndarray, knobs: dict[str, float]) -> np.ndarray:
    """Sorted ids that truncation leaves, one id after the other in float64."""
    scores = logits.astype(np.float64) / knobs.get("temperature", 1.0)
    mass = np.exp(scores - scores.max())
    order = sorted(range(len(mass)), key=lambda token: -mass[token])
    order = [token for token in order if mass[token] >= knobs.get("min_p", 0.0)]
    order = order[: int(knobs.get("top_k", len(order)))]
    total = mass[order].sum()
    kept: list[int] = []
    for token in order:
        if kept and mass[kept].sum() / total >= knobs.get("top_p", 2.0):
            break
        kept.append(token)
    return np.sort(kept)


@pytest.mark.parametrize("chosen", range(1, 16))
def test_kept_sets_are_those_of_a_brute_force(chosen: int) -> None:
    """A token is drawn from the reported set, with its renormalised log probability.

    For each combination of top-p, top-k, min-p and a temperature, in a batch with other rows.
    """
    knobs = {k: v for bit, each in enumerate(KNOBS) if chosen >> bit & 1 for k, v in each.items()}
    random = np.random.default_rng(chosen)
    logits = (random.standard_normal((64, 300)) * 3).astype(np.float32)
    settings = np.zeros(64, ROW)
    settings["temperature"] = settings["top_p"] = 1
    for name, value in knobs.items():
        settings[name][::2] = value
    uniform = random.random(64)
    tokens, logprobs, kept = sample(torch.from_numpy(logits), settings, uniform)
    for row in range(64):
        mine = knobs if row % 2 == 0 else {}
        expected = brute_force(logits[row], mine)
        scores = logits[row].astype(np.float64) / mine.get("temperature", 1.0)
        left = np.log(np.exp(scores[expected]).sum())
        assert tokens[row] in expected
        assert abs(scores[tokens[row]] - left - logprobs[row]) < 1e-5
        reported = kept[row]
        if mine.keys() - {"temperature"}:
            assert reported is not None
            assert reported.tolist() == expected.tolist()
            assert len(expected) < 300
        else:
            assert reported is None


def test_ids_without_probability_are_in_no_set() -> None:
    """A truncation that leaves out nothing reports all ids that can be sampled."""
    reported = draw(1, top_k=100, top_p=0.9999999).kept[0]
    assert reported is not None
    assert reported.tolist() == [0, 1, 2, 3]


def test_temperature_zero_is_greedy() -> None:
    """A greedy row beside sampled ones has the log probabilities of temperature 1."""
    settings = np.array([(1, 1, 0, 0), (0, 0.2, 3, 0.5), (1, 0.9, 1, 0)], ROW)
    tokens, logprobs, kept = sample(LOGITS.expand(3, -1), settings, np.array([0.999, 0.999, 0.5]))
    assert tokens[1] == tokens[2] == 0
    assert np.isclose(logprobs[1], torch.log_softmax(LOGITS[0], -1)[0])
    assert logprobs[2] == 0.0
    assert kept[0] is kept[1] is None
    assert kept[2] is not None
    assert kept[2].tolist() == [0]


def test_uniforms_depend_on_seed_and_position_alone() -> None:
    """The same pair gives the same number in any batch; neighbours are unrelated."""
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 200)
    positions = np.tile(np.arange(200, dtype=np.int32), 200)
    numbers = uniforms(seeds, positions)
    assert numbers[4321] == uniforms(seeds[4321:4322], positions[4321:4322])[0]
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert len(np.unique(numbers)) == len(numbers)
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    assert np.abs(counts - 800).max() < 5 * np.sqrt(800)
    square = numbers.reshape(200, 200)
    assert abs(np.corrcoef(square[:, :-1].ravel(), square[:, 1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(square[:-1].ravel(), square[1:].ravel())[0, 1]) < 0.03


def test_the_largest_uniform_never_samples_an_impossible_token() -> None:
    """Rounding at the upper end never selects a token of probability 0."""
    logits = torch.tensor([[0.1] * 999 + [-torch.inf]])
    settings = np.array([(1, 1, 0, 0)], ROW)
    tokens, logprobs, _ = sample(logits, settings, np.array([1 - 2.0**-48]))
    assert tokens[0] == 998
    assert np.isfinite(logprobs[0])
