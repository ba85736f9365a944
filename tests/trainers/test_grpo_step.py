"""Whole training steps of a small random model, on sessions with its log probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import peft
import pytest
import torch
from msgspec.structs import replace
from transformers import Gemma2Config, Gemma2ForCausalLM

from support.models import SMALL
from trainers.sessions import VERSION, groups, recaptured, session, tiny, trace, weights
from tugline.errors import CaptureError, ConfigError
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.samples import prepare
from tugline.trainers.grpo.train import Grpo
from tugline.types import Ledger, Reason, Reward, Trajectory


# --------------------------------------------------------------------------- exactness
@pytest.mark.parametrize(
    "config",
    [
        GrpoConfig(),
        GrpoConfig(tree_packing=False),
        GrpoConfig(epochs=2),
        GrpoConfig(sessions_per_update=2),
        GrpoConfig(importance="truncate"),
    ],
)
def test_mismatch_is_measured_before_the_update(config: GrpoConfig) -> None:
    """An error of 0.25 in one log probability is measured, however the step is computed."""
    model = tiny()
    batch = groups(model)
    (wrong,) = batch[3].traces
    first = int(wrong.mask.argmax())
    off = np.where(np.arange(len(wrong.ids)) == first, 0.25, 0)
    batch[3] = recaptured(batch[3], lambda each: each.logprobs + off)
    eager = replace(config, lr=0.05)
    report = Grpo(model, eager).step(batch, version=VERSION)
    assert report.mismatch.total.max_abs == pytest.approx(0.25, abs=1e-5)


# --------------------------------------------------------------------------- learning
def test_models_that_change_their_logits_are_refused() -> None:
    """A soft-capped head is an error."""
    config = Gemma2Config(**SMALL, final_logit_softcapping=1.0)
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM changes its logits"):
        Grpo(Gemma2ForCausalLM(config), GrpoConfig())


def test_kl_grows_with_the_distance_from_the_reference() -> None:
    """The divergence is 0 at first, and larger after the weights have changed."""
    model = tiny()
    trainer = Grpo(model, GrpoConfig(kl=0.1, lr=1e-3), reference=tiny())
    first = trainer.step(groups(model), version=VERSION)
    second = trainer.step(groups(model), version=VERSION)
    assert first.kl == pytest.approx(0, abs=1e-9)
    assert second.kl is not None
    assert second.kl > 1e-6


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # in PEFT
def test_the_reference_of_an_adapter_is_its_model_without_it() -> None:
    """The divergence is that from a second model, and gradients and weights are the same."""
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    runs = []
    for reference in (None, tiny()):
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny(), lora)
        trainer = Grpo(model, GrpoConfig(kl=0.1, lr=1e-2), reference=reference)
        reports = [trainer.step(groups(tiny()), version=VERSION) for _ in range(2)]
        runs.append((weights(model), [report.kl for report in reports]))
    (own, divergences), (other, expected) = runs
    assert divergences == pytest.approx(expected, rel=1e-4)
    assert divergences[0] == pytest.approx(0, abs=1e-9)
    assert divergences[1] > 1e-6
    assert float((own - other).abs().max()) < 1e-6


def test_kl_without_a_reference_is_refused() -> None:
    """The error names the option."""
    with pytest.raises(ConfigError, match=r"kl is 0\.1"):
        Grpo(tiny(), GrpoConfig(kl=0.1))


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ({}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ({"decay_updates": 6}, [0.25, 0.5, 0.75, 1, 1, 0.5, 0, 0]),
        ({"decay_updates": 6, "final_lr": 0.2}, [0.25, 0.5, 0.75, 1, 1, 0.6, 0.2, 0.2]),
        ({"decay_updates": 7, "decay": "cosine"}, [0.25, 0.5, 0.75, 1, 1, 0.75, 0.25, 0]),
    ],
)
def test_learning_rate_follows_its_schedule(
    schedule: dict[str, Any], shares: Sequence[float]
) -> None:
    """The rate rises linearly, falls to its last share, and stays there."""
    model = tiny()
    trainer = Grpo(model, GrpoConfig(lr=1.0e-3, warmup_updates=4, **schedule))
    rates = [trainer.step(groups(model), version=VERSION).learning_rate for _ in shares]
    assert rates == pytest.approx([1e-3 * share for share in shares], abs=1e-12)


# --------------------------------------------------------------------------- rewards and ledger
def test_tokens_that_are_not_trained_have_a_reason() -> None:
    """Failed sessions, groups without signal and stale tokens are named; the ledger balances."""
    model = tiny()
    rng = np.random.default_rng(2)
    old = trace(model, rng)
    spans = (replace(old.spans[0], version=VERSION - 3), old.spans[1])
    stale = replace(old, spans=spans)
    batch = [
        *groups(model, tasks=1),
        session([trace(model, rng)], task="t0", sample=9, reward=None),
        session([trace(model, rng)], task="t0", sample=10, reward=float("nan")),
        session([stale], task="t0", sample=11, reward=1.0),
        *(session([trace(model, rng)], task="flat", sample=i, reward=1.0) for i in range(2)),
    ]
    config = GrpoConfig(max_staleness=2)
    report = Grpo(model, config).step(batch, version=VERSION)
    ledger = report.ledger
    assert ledger.balanced
    assert ledger.sampled == sum(done.ledger.sampled for done in batch)
    assert ledger.trained == report.tokens_trained > 0
    assert ledger.masked[Reason.ABORTED] == 2 * len(batch)
    assert ledger.masked[Reason.STALE] == old.spans[0].end - old.spans[0].start
    assert ledger.dropped[Reason.SESSION_FAILED] == sum(b.ledger.trained for b in batch[4:6])
    assert ledger.dropped[Reason.NO_SIGNAL] == sum(b.ledger.trained for b in batch[7:])


def two_sessions(model: torch.nn.Module, *per_trace: float) -> list[Trajectory]:
    """Two traces with these rewards and outcome 1, and a session with outcome 0."""
    rng = np.random.default_rng(0)
    two = session([trace(model, rng) for _ in range(2)], task="t", sample=0, reward=1.0)
    rewarded = replace(two, reward=Reward(1.0, per_trace=per_trace))
    return [rewarded, session([trace(model, rng)], task="t", sample=1, reward=0.0)]


def test_traces_may_have_their_own_rewards() -> None:
    """A trace's advantage is half of its reward less the mean of the other of two sessions."""
    batch = two_sessions(tiny(), 3.0, math.nan)
    samples, _ = prepare(batch, GrpoConfig(credit="trace", advantage="dr_grpo"), version=5)
    many, few = (int(each.mask.sum()) for each in batch[0].traces)
    mean = (3 * many + 1 * few) / (many + few)
    expected = [3 / 2, 1 / 2, -mean / 2]
    for row, advantage in zip(samples, expected, strict=True):
        assert row.advantages[row.loss_mask] == pytest.approx(advantage, rel=1e-6)
        assert not row.advantages[~row.loss_mask].any()
    plain, _ = prepare(batch, GrpoConfig(advantage="dr_grpo"), version=5)
    assert [row.advantages.max() for row in plain[:2]] == [0.5, 0.5]


def test_a_wrong_number_of_rewards_is_refused() -> None:
    """Rewards made for another builder's traces are an error that names the session."""
    batch = two_sessions(tiny(), 1.0, 0.0, 0.5)
    with pytest.raises(CaptureError, match=r"session t/0: reward\.per_trace has 3 numbers for 2"):
        prepare(batch, GrpoConfig(credit="trace"), version=5)
    prepare(batch, GrpoConfig(), version=5)


def test_earlier_turns_are_discounted() -> None:
    """At discount 0.5 the last of two turns has the session's reward, the first half of it."""
    batch = two_sessions(tiny())
    config = GrpoConfig(credit="return", turn_discount=0.5, advantage="rloo")
    samples, _ = prepare(batch, config, version=VERSION)
    earned = tokens = 0.0
    for row, made_of in zip(samples[:2], batch[0].traces, strict=True):
        first, last = made_of.spans
        assert set(row.advantages[first.start : first.end]) == {0.5}
        assert set(row.advantages[last.start : last.end]) == {1.0}
        earned += 0.5 * (first.end - first.start) + last.end - last.start
        tokens += first.end - first.start + last.end - last.start
    mean = pytest.approx(-earned / tokens, rel=1e-6)
    assert samples[2].advantages[samples[2].loss_mask] == mean


def test_masked_answers_are_no_turns() -> None:
    """If the second answer is masked, the first counts as the last turn."""
    batch = two_sessions(tiny())
    (whole,) = batch[1].traces
    first, last = whole.spans
    gone = replace(last, masked=Reason.CLIENT_GONE)
    mask = whole.mask & (np.arange(len(whole.ids)) < last.start)
    cut = replace(whole, spans=(first, gone), mask=mask)
    batch = [
        session([cut], task="t", sample=0, reward=1.0),
        session([whole], task="t", sample=1, reward=0.0),
    ]
    config = GrpoConfig(credit="return", turn_discount=0.5, advantage="rloo")
    samples, _ = prepare(batch, config, version=VERSION)
    assert set(samples[0].advantages[first.start : first.end]) == {1.0}
    assert not samples[0].advantages[first.end :].any()


def test_a_ledger_that_contradicts_its_traces_is_refused() -> None:
    """The error names the session."""
    bad = replace(two_sessions(tiny())[0], ledger=Ledger(sampled=1, trained=1))
    with pytest.raises(CaptureError, match="session t/0"):
        prepare([bad], GrpoConfig(), version=VERSION)
