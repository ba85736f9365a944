"""Sampled tokens: distribution, reproducibility and log probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tugline.inference.sampling import sample, uniforms

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -torch.inf]])


ROW = [("temperature", np.float32), ("top_p", np.float32), ("top_k", np.int32)]


def draw(
    rows: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Many rows with the same logits."""
    uniform = uniforms(np.arange(rows, dtype=np.uint64), np.zeros(rows, np.int32))
    settings = np.array([(temperature, top_p, top_k)] * rows, ROW)
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
    ],
)
def test_frequencies_follow_the_truncated_distribution(options: dict[str, Any], left: int) -> None:
    """Truncated tokens are never sampled, and log probabilities are renormalised."""
    tokens, logprobs = draw(20_000, **options)
    expected = torch.log_softmax(LOGITS[0, :left] / options.get("temperature", 1), -1)
    assert_frequencies(tokens, expected.exp())
    assert np.allclose(logprobs, expected.numpy()[tokens], atol=1e-6)


def test_temperature_zero_is_greedy() -> None:
    """A greedy row beside sampled ones has the log probabilities of temperature 1."""
    settings = np.array([(1, 1, 0), (0, 0.2, 3), (1, 0.9, 1)], ROW)
    tokens, logprobs = sample(LOGITS.expand(3, -1), settings, np.array([0.999, 0.999, 0.5]))
    assert tokens[1] == tokens[2] == 0
    assert np.isclose(logprobs[1], torch.log_softmax(LOGITS[0], -1)[0])
    assert logprobs[2] == 0.0


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
    settings = np.array([(1, 1, 0)], ROW)
    tokens, logprobs = sample(logits, settings, np.array([1 - 2.0**-48]))
    assert tokens[0] == 998
    assert np.isfinite(logprobs[0])
