"""Distance of captured log probabilities from the trainer's, and their temperature."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from trainers.sessions import VERSION, captured, groups, recaptured, session, tiny
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.samples import prepare
from tugline.trainers.grpo.train import Grpo
from tugline.trainers.grpo.update import Mismatch
from tugline.types import Distribution, LogprobMeaning, Reason, Span, Trace, Trajectory


def sampled_at(model: torch.nn.Module, *distributions: Distribution) -> list[Trajectory]:
    """A group of two sessions with a span of each distribution."""
    batch = []
    for number in range(2):
        rng = np.random.default_rng(number)
        ids = rng.integers(0, 48, 40 + 10 * len(distributions)).astype(np.int32)
        logprobs = np.zeros(len(ids), np.float32)
        spans = []
        for i, distribution in enumerate(distributions):
            start = 40 + 10 * i
            raw = distribution.logprobs is LogprobMeaning.RAW or not distribution.temperature
            whole = captured(model, ids, 1.0 if raw else distribution.temperature)
            logprobs[start : start + 10] = whole[start : start + 10]
            spans.append(Span(i, start, start + 10, VERSION, distribution=distribution))
        mask = np.arange(len(ids)) >= 40
        made = Trace(ids=ids, mask=mask, logprobs=logprobs, spans=tuple(spans))
        batch.append(session([made], task="t", sample=number, reward=float(number)))
    return batch


# --------------------------------------------------------------------------- sampling parameters
def test_calls_may_have_different_temperatures() -> None:
    """Sessions at 0.5, 1 and 2, and one with raw logprobs, have no mismatch."""
    at = [
        *(Distribution(temperature=temperature) for temperature in (0.5, 1.0, 2.0)),
        Distribution(temperature=0.5, top_p=0.9, logprobs=LogprobMeaning.RAW),
    ]
    report = Grpo(tiny(), GrpoConfig()).step(sampled_at(tiny(), *at), version=VERSION)
    assert report.mismatch.total.tokens == report.tokens_trained == 80
    assert report.mismatch.total.max_abs < 1e-5
    assert (report.ratio_mean, report.clip_fraction) == (pytest.approx(1, abs=1e-5), 0)


@pytest.mark.parametrize(
    "distribution",
    [Distribution(top_p=0.9), Distribution(top_k=20), Distribution(temperature=0.0)],
    ids=["top_p", "top_k", "greedy"],
)
def test_truncated_distributions_are_not_trained(distribution: Distribution) -> None:
    """Tokens that the trainer cannot reproduce are masked, with the reason in the ledger."""
    batch = sampled_at(tiny(), Distribution(), distribution)
    samples, ledger = prepare(batch, GrpoConfig(), version=VERSION)
    assert ledger.balanced
    assert ledger.masked[Reason.UNREPRODUCIBLE] == ledger.trained == 20
    assert [int(row.loss_mask.sum()) for row in samples] == [10, 10]


# --------------------------------------------------------------------------- the distribution
def test_mismatch_describes_the_distribution() -> None:
    """Figures of 99 differences of 0.01 and one of -1 equal those computed by hand."""
    got = Mismatch.of(np.array([0.01] * 99 + [-1.0, math.nan, math.inf]))
    assert (got.tokens, got.non_finite) == (100, 2)
    assert got.max_abs == 1
    assert got.mean_abs == pytest.approx((0.99 + 1) / 100)
    assert got.p99_abs == pytest.approx(0.01 + 0.01 * 0.99)
    assert got.share_large == 0.01
    small, large = math.exp(0.01), math.exp(-1)
    assert got.k3 == pytest.approx((99 * (small - 1.01) + large) / 100)
    weights = 99 * small + large
    squares = 99 * small**2 + large**2
    assert got.effective_sample_size == pytest.approx(weights**2 / (100 * squares))


def test_mismatch_without_a_finite_difference() -> None:
    """All figures are 0, none is NaN."""
    got = Mismatch.of(np.array([math.nan]))
    assert (got.tokens, got.non_finite, got.max_abs, got.k3) == (0, 1, 0, 0)


def off(each: Trace) -> np.ndarray:
    """Half a nat in the first span."""
    return np.where(np.arange(len(each.ids)) < each.spans[0].end, 0.5, 0)


def test_mismatch_is_measured_by_version_engine_and_harness() -> None:
    """Each group's mismatch is measured over all of its tokens, stale ones included."""
    batch = groups(tiny())
    for i, original in enumerate(batch):
        traces = []
        for each in original.traces:
            first, last = (replace(span, engine="vllm") for span in each.spans)
            traces.append(replace(each, spans=(replace(first, version=VERSION - 2), last)))
        stale = replace(original, traces=tuple(traces), harness="pi" if i % 2 else "")
        batch[i] = recaptured(stale, lambda each: each.logprobs + off(each))
    report = Grpo(tiny(), GrpoConfig()).step(batch, version=VERSION)
    assert report.mismatch.total.tokens == report.tokens_trained
    by_version = report.mismatch.by_version
    assert by_version[VERSION - 2].mean_abs == pytest.approx(0.5, abs=1e-5)
    assert by_version[VERSION - 2].share_large == 1
    assert by_version[VERSION].max_abs < 1e-5
    assert report.mismatch.by_engine["vllm"].tokens == report.tokens_trained
    assert list(report.mismatch.by_harness) == ["pi"]
