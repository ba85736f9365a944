"""The updates of a step, and what changes the weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from trainers.sessions import VERSION, groups, recaptured, session, tiny, trace, weights
from tugline.errors import ConfigError
from tugline.trainers.grpo.batch import Row
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.samples import prepare
from tugline.trainers.grpo.train import Grpo
from tugline.types import Boundary, Failure, Reason, Reward, SpentLimit, Trajectory, encode

MODEL = tiny()
"""For tests that do not train it."""


def flat_group(task: str) -> list[Trajectory]:
    """Three sessions with the same reward."""
    rng = np.random.default_rng(9)
    return [session([trace(MODEL, rng)], task=task, sample=i, reward=1.0) for i in range(3)]


# --------------------------------------------------------------------------- even updates
@given(sessions=st.integers(1, 40), most=st.integers(1, 10), seed=st.integers(0, 3))
def test_updates_are_of_even_size(sessions: int, most: int, seed: int) -> None:
    """There are as few updates as possible, of sizes that differ by at most 1."""
    sample = prepare(groups(MODEL), GrpoConfig(), version=VERSION)[0][0]
    rows = [Row(replace(sample, session=str(i))) for i in range(sessions)]
    config = GrpoConfig(sessions_per_update=most, seed=seed)
    first, again = (
        [[row.sample.session for row in update] for update in Grpo(MODEL, config)._shuffle(rows)]
        for _ in range(2)
    )
    sizes = [len(update) for update in first]
    assert len(sizes) == math.ceil(sessions / most)
    assert max(sizes) - min(sizes) <= 1
    assert sorted(name for update in first for name in update) == sorted(map(str, range(sessions)))
    assert first == again


def test_updates_are_counted_over_epochs() -> None:
    """Eight sessions make three updates of at most three sessions in each epoch."""
    config = GrpoConfig(sessions_per_update=3, epochs=2)
    report = Grpo(tiny(), config).step(groups(MODEL), version=VERSION)
    assert (report.samples, report.updates, report.updates_skipped) == (10, 6, 0)


# --------------------------------------------------------------------------- without signal
def test_groups_without_signal_are_left_out() -> None:
    """The samples are the same without such groups, and the ledger counts their tokens."""
    flat = [done for task in ("u", "v", "w") for done in flat_group(task)]
    alone, _ = prepare(groups(MODEL), GrpoConfig(), version=VERSION)
    samples, ledger = prepare(groups(MODEL) + flat, GrpoConfig(), version=VERSION)
    assert list(map(encode, samples)) == list(map(encode, alone))
    assert ledger.balanced
    assert ledger.dropped == {Reason.NO_SIGNAL: sum(done.ledger.trained for done in flat)}


@pytest.mark.parametrize("eager", [{}, {"kl": 0.1}], ids=["policy", "kl"])
def test_a_step_without_signal_changes_no_weight(eager: dict[str, float]) -> None:
    """Neither momentum of earlier steps nor weight decay is applied."""
    model = tiny()
    config = GrpoConfig(lr=1e-2, weight_decay=0.1, **eager)  # type: ignore[arg-type]
    trainer = Grpo(model, config, reference=tiny() if eager else None)
    trainer.step(groups(model), version=VERSION)
    before, updates = weights(model), trainer.updates
    report = trainer.step(flat_group("t"), version=VERSION + 1)
    assert torch.equal(before, weights(model))
    assert (report.updates, trainer.updates, report.samples) == (0, updates, 0)
    assert report.mismatch is None


def test_an_update_without_gradient_is_left_out() -> None:
    """The session with the middle one of three rewards has advantage 0 and makes no update."""
    config = GrpoConfig(advantage="dr_grpo", sessions_per_update=1, lr=1e-2)
    rng = np.random.default_rng(3)
    batch = [session([trace(MODEL, rng)], task="t", sample=i, reward=i / 2) for i in range(3)]
    trainer = Grpo(tiny(), config)
    assert trainer.step(batch, version=VERSION).updates == trainer.updates == 2


# --------------------------------------------------------------------------- not finite
def test_an_update_that_is_not_finite_is_skipped() -> None:
    """The report names the session; the update's tokens are dropped, and others are applied."""
    batch = groups(MODEL)
    batch[5] = recaptured(batch[5], lambda each: each.logprobs + math.nan)
    model = tiny()
    trainer = Grpo(model, GrpoConfig(sessions_per_update=4, lr=1e-2))
    before = weights(model)
    report = trainer.step(batch, version=VERSION)
    assert (report.updates, report.updates_skipped) == (1, 1)
    assert report.skipped_because_of == (batch[5].session,)
    assert report.ledger.balanced
    assert 0 < report.tokens_trained < sum(done.ledger.trained for done in batch)
    assert report.ledger.dropped[Reason.NON_FINITE] > batch[5].ledger.trained
    assert all(map(math.isfinite, (report.loss, report.grad_norm, report.ratio_mean)))
    assert report.mismatch.total.non_finite == batch[5].ledger.trained
    after = weights(model)
    assert bool(after.isfinite().all())
    assert not torch.equal(before, after)


def test_an_update_whose_gradient_is_not_finite_is_skipped() -> None:
    """The report names the session, also if its loss is finite, and training continues."""
    model = tiny()
    batch = groups(model)
    huge = recaptured(batch[2], lambda each: each.logprobs - 88)
    batch[2] = replace(huge, reward=Reward(-1.0))
    trainer = Grpo(model, GrpoConfig(lr=1e-2))
    before = weights(model)
    report = trainer.step(batch, version=VERSION)
    assert (report.updates, report.updates_skipped) == (0, 1)
    assert report.skipped_because_of == (batch[2].session,)
    assert torch.equal(before, weights(model))
    assert trainer.step(groups(model), version=VERSION).updates == 1


# --------------------------------------------------------------------------- truncated sessions
@pytest.mark.parametrize(
    "end",
    [
        {"failure": Failure(Boundary.AGENT, "agent_timeout after 600 s")},
        {"spent": SpentLimit.MAX_TURNS},
    ],
    ids=["stopped", "spent"],
)
def test_sessions_stopped_at_a_limit_can_be_left_out(end: dict[str, Any]) -> None:
    """Tokens of such sessions are dropped, but the rewards still count in the baseline."""
    batch = groups(MODEL)
    stopped = replace(batch[1], **end)
    batch[1] = stopped
    kept, _ = prepare(batch, GrpoConfig(), version=VERSION)
    samples, ledger = prepare(batch, GrpoConfig(truncated="mask"), version=VERSION)
    assert ledger.balanced
    assert ledger.dropped == {Reason.TRUNCATED: stopped.ledger.trained}
    rest = [row for row in kept if row.session != stopped.session]
    assert len(samples) == len(rest)
    for row, other in zip(samples, rest, strict=True):
        assert np.array_equal(row.advantages, other.advantages)


# --------------------------------------------------------------------------- precision
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_low_precision_are_refused(dtype: torch.dtype) -> None:
    """The error has the parameter, its type, and what to do."""
    model = tiny().to(dtype)
    with pytest.raises(ConfigError, match=rf"embed_tokens.weight is {dtype}.*dtype=torch.float32"):
        Grpo(model, GrpoConfig())


def test_float32_weights_change_under_autocast() -> None:
    """Nearly all weights change, at a learning rate whose changes bfloat16 would round away."""
    model = tiny()
    before = weights(model)
    report = Grpo(model, GrpoConfig(lr=1e-6, autocast="bfloat16")).step(
        groups(model), version=VERSION
    )
    after = weights(model)
    assert after.dtype is torch.float32
    assert float((before != after).float().mean()) > 0.9
    assert float((before.bfloat16() != after.bfloat16()).float().mean()) < 0.1
    assert 1e-5 < report.mismatch.total.mean_abs < 0.05
