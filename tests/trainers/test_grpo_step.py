"""The whole step on a small random model, with log probabilities captured from that model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import Gemma2Config, Gemma2ForCausalLM

from trainers.sessions import VERSION, captured, groups, session, tiny, trace
from tugline.errors import CaptureError, ConfigError
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.samples import prepare
from tugline.trainers.grpo.train import Grpo, StepReport
from tugline.types import Ledger, Reason, Reward, Span, Status, Trace, Trajectory, decode, encode

torch.set_num_threads(1)


def gradients(model: torch.nn.Module) -> torch.Tensor:
    """All gradients in one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def trained(config: GrpoConfig) -> tuple[torch.Tensor, object]:
    """Gradient of the last update, and the report, of one step from the same start."""
    model = tiny()
    report = Grpo(model, config).step(groups(model), version=VERSION)
    return gradients(model), report


# --------------------------------------------------------------------------- exactness
def test_captured_logprobs_are_reproduced() -> None:
    """On-policy, the gate is near zero, the ratio is one and nothing is clipped."""
    model = tiny()
    report = Grpo(model, GrpoConfig()).step(groups(model), version=VERSION)
    assert report.mismatch is not None
    assert report.mismatch.total.max_abs < 1e-5
    assert report.ratio_mean == pytest.approx(1, abs=1e-5)
    assert report.clip_fraction == 0


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
def test_gate_measures_the_weights_before_the_update(config: GrpoConfig) -> None:
    """One captured number that is off by 0.25 shows as 0.25, however the step is computed."""
    model = tiny()
    batch = groups(model)
    wrong = batch[3].traces[0]
    logprobs = wrong.logprobs.copy()
    logprobs[int(wrong.mask.argmax())] += 0.25
    batch[3] = session(
        [Trace(ids=wrong.ids, mask=wrong.mask, logprobs=logprobs, spans=wrong.spans)],
        task="t0",
        sample=3,
        reward=0.0,
    )
    eager = replace(config, lr=0.05)
    report = Grpo(model, eager).step(batch, version=VERSION)
    assert report.mismatch is not None
    assert report.mismatch.total.max_abs == pytest.approx(0.25, abs=1e-5)


def noisy(batch: list[Trajectory]) -> list[Trajectory]:
    """The same sessions as an engine of poor precision would report them."""
    rng = np.random.default_rng(6)
    worse = []
    for one in batch:
        traces = [
            msgspec.structs.replace(
                t, logprobs=t.logprobs - t.mask * rng.uniform(0.5, 1, t.ids.size)
            )
            for t in one.traces
        ]
        worse.append(msgspec.structs.replace(one, traces=tuple(traces)))
    return worse


def test_importance_sampling_takes_the_old_policy_from_the_trainer() -> None:
    """With a cap the ratio starts at one whatever the engine reported; without, it does not."""
    model = tiny()
    batch = noisy(groups(model))
    capped = Grpo(tiny(), GrpoConfig(importance="truncate")).step(batch, version=VERSION)
    plain = Grpo(tiny(), GrpoConfig()).step(batch, version=VERSION)
    assert (capped.ratio_mean, capped.clip_fraction) == (pytest.approx(1, abs=1e-5), 0)
    assert plain.ratio_mean > 1.6
    assert capped.mismatch is not None
    assert plain.mismatch is not None
    assert capped.mismatch.total.max_abs == pytest.approx(plain.mismatch.total.max_abs, abs=1e-5)


def test_sessions_from_the_wire_train_the_same() -> None:
    """Read-only arrays, as decoded from bytes, are as good as fresh ones."""
    batch = groups(tiny())
    sent = [decode(encode(one), Trajectory) for one in batch]
    here = Grpo(tiny(), GrpoConfig()).step(batch, version=VERSION)
    there = Grpo(tiny(), GrpoConfig()).step(sent, version=VERSION)
    assert here.grad_norm == there.grad_norm
    assert decode(encode(here), StepReport).ledger == here.ledger


# --------------------------------------------------------------------------- the way it is computed
@pytest.mark.parametrize("normalisation", ["token", "sequence", "constant"])
def test_micro_batches_do_not_change_the_gradient(normalisation: str) -> None:
    """An update cut into passes of one trace has the gradient of an update in one pass."""
    whole = GrpoConfig(normalisation=normalisation)  # type: ignore[arg-type]
    cut = replace(whole, micro_tokens=1)
    one, report = trained(whole)
    many, other = trained(cut)
    assert float((one - many).abs().max()) < 1e-6
    assert float(one.abs().max()) > 1e-3
    assert other.tokens_padding == 0  # type: ignore[attr-defined]
    assert report.loss == pytest.approx(other.loss, abs=1e-6)  # type: ignore[attr-defined]


def test_models_that_change_their_logits_are_refused() -> None:
    """A soft-capped head cannot be applied in part, and is an error at the door."""
    config = Gemma2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=1.0,
    )
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM changes its logits"):
        Grpo(Gemma2ForCausalLM(config), GrpoConfig())


# --------------------------------------------------------------------------- learning
def test_a_step_makes_good_sessions_likelier() -> None:
    """After some updates, rewarded answers have gained and the others have lost."""
    model = tiny()
    batch = groups(model)
    trainer = Grpo(model, GrpoConfig(lr=3e-3))
    for version in range(VERSION, VERSION + 3):
        trainer.step(batch, version=version)
    change = {0.0: 0.0, 1.0: 0.0}
    for one in batch:
        for each in one.traces:
            now = captured(model, each.ids)
            change[one.reward.value] += float((now - each.logprobs)[each.mask].sum())  # type: ignore[union-attr]
    assert change[1.0] > 1
    assert change[0.0] < -1


def test_reference_pulls_back() -> None:
    """The KL term is zero at the reference and grows as the policy leaves it."""
    model = tiny()
    trainer = Grpo(model, GrpoConfig(kl=0.1, lr=1e-3), reference=tiny())
    first = trainer.step(groups(model), version=VERSION)
    second = trainer.step(groups(model), version=VERSION)
    assert first.kl == pytest.approx(0, abs=1e-9)
    assert second.kl is not None
    assert second.kl > 1e-6


def test_kl_without_a_reference_is_refused() -> None:
    """A penalty with nothing to measure it against is an error that says what to do."""
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
    """It rises linearly, falls to its last share, and stays there; what is left moves nothing."""
    model = tiny()
    trainer = Grpo(model, GrpoConfig(lr=1.0e-3, warmup_updates=4, **schedule))
    rates = [trainer.step(groups(model), version=VERSION).learning_rate for _ in shares]
    assert rates == pytest.approx([1e-3 * share for share in shares], abs=1e-12)


# --------------------------------------------------------------------------- the books
def test_books_balance_over_every_exit() -> None:
    """Failed sessions, groups without signal and stale tokens all leave with their reason."""
    model = tiny()
    rng = np.random.default_rng(2)
    old = trace(model, rng)
    stale = Trace(
        ids=old.ids,
        mask=old.mask,
        logprobs=old.logprobs,
        spans=(Span(0, old.spans[0].start, old.spans[0].end, VERSION - 3), old.spans[1]),
    )
    batch = [
        *groups(model, tasks=1),
        session([trace(model, rng)], task="t0", sample=9, reward=None),
        session([trace(model, rng)], task="t0", sample=10, reward=float("nan")),
        session([stale], task="t0", sample=11, reward=1.0),
        *(session([trace(model, rng)], task="flat", sample=i, reward=1.0) for i in range(2)),
    ]
    config = GrpoConfig(max_staleness=2)
    report = Grpo(model, config).step(batch, version=VERSION)
    books = report.ledger
    assert books.balanced
    assert books.sampled == sum(one.ledger.sampled for one in batch)
    assert books.trained == report.tokens_trained > 0
    assert books.masked[Reason.ABORTED] == 2 * len(batch)
    assert books.masked[Reason.STALE] == old.spans[0].end - old.spans[0].start
    assert books.dropped[Reason.SESSION_FAILED] == sum(b.ledger.trained for b in batch[4:6])
    assert books.dropped[Reason.NO_SIGNAL] == sum(b.ledger.trained for b in batch[7:])


def test_a_session_of_many_traces_counts_once() -> None:
    """The baseline is the mean over sessions; all traces of one share its advantage."""
    model = tiny()
    rng = np.random.default_rng(0)
    many = session([trace(model, rng) for _ in range(5)], task="t", sample=0, reward=1.0)
    one = session([trace(model, rng)], task="t", sample=1, reward=0.0)
    samples, _ = prepare([many, one], GrpoConfig(advantage="dr_grpo"), version=VERSION)
    assert [set(s.advantages[s.loss_mask]) for s in samples] == [{0.5}] * 5 + [{-0.5}]


def two_sessions(model: torch.nn.Module, *per_trace: float) -> list[Trajectory]:
    """Two traces with these numbers and outcome 1, against one trace with outcome 0."""
    rng = np.random.default_rng(0)
    two = session([trace(model, rng) for _ in range(2)], task="t", sample=0, reward=1.0)
    judged = msgspec.structs.replace(two, reward=Reward(1.0, per_trace=per_trace))
    return [judged, session([trace(model, rng)], task="t", sample=1, reward=0.0)]


def test_each_trace_can_have_a_reward_of_its_own() -> None:
    """Its tokens' advantage is its own number less the mean of the sessions' means."""
    batch = two_sessions(tiny(), 3.0, math.nan)
    samples, _ = prepare(batch, GrpoConfig(reward="per_trace", advantage="dr_grpo"), version=5)
    many, few = (int(one.mask.sum()) for one in batch[0].traces)
    centre = (3 * many + 1 * few) / (many + few) / 2
    expected = [3 - centre, 1 - centre, -centre]
    for one, advantage in zip(samples, expected, strict=True):
        assert one.advantages[one.loss_mask] == pytest.approx(advantage, rel=1e-6)
        assert not one.advantages[~one.loss_mask].any()
    plain, _ = prepare(batch, GrpoConfig(advantage="dr_grpo"), version=5)
    assert [one.advantages.max() for one in plain[:2]] == [0.5, 0.5]


def test_rewards_of_other_traces_are_refused() -> None:
    """Numbers given under another builder do not fit, and the session is named."""
    batch = two_sessions(tiny(), 1.0, 0.0, 0.5)
    with pytest.raises(CaptureError, match=r"session t/0: reward\.per_trace has 3 numbers for 2"):
        prepare(batch, GrpoConfig(reward="per_trace"), version=5)
    prepare(batch, GrpoConfig(), version=5)


def test_earlier_turns_can_count_for_less() -> None:
    """Two turns at discount 0.5: the last has the session's advantage, the first half of it."""
    batch = two_sessions(tiny())
    config = GrpoConfig(turn_discount=0.5, advantage="dr_grpo")
    samples, _ = prepare(batch, config, version=VERSION)
    traces = [*batch[0].traces, *batch[1].traces]
    for one, made_of, sign in zip(samples, traces, (1, 1, -1), strict=True):
        first, last = made_of.spans
        assert set(one.advantages[first.start : first.end]) == {sign * 0.25}
        assert set(one.advantages[last.start : last.end]) == {sign * 0.5}


def test_what_is_not_trained_is_no_turn() -> None:
    """Where the second answer is masked, the first is the last turn and has the whole advantage."""
    batch = two_sessions(tiny())
    (one,) = batch[1].traces
    first, last = one.spans
    gone = msgspec.structs.replace(last, masked=Reason.CLIENT_GONE)
    mask = one.mask & (np.arange(len(one.ids)) < last.start)
    cut = msgspec.structs.replace(one, spans=(first, gone), mask=mask)
    batch[1] = session([cut], task="t", sample=1, reward=0.0)
    config = GrpoConfig(turn_discount=0.5, advantage="dr_grpo")
    samples, _ = prepare(batch, config, version=VERSION)
    assert set(samples[2].advantages[first.start : first.end]) == {-0.5}
    assert not samples[2].advantages[first.end :].any()


def test_a_step_without_samples_changes_nothing() -> None:
    """When every session failed outside the policy, the report says so and the weights stay."""
    model = tiny()
    before = [p.clone() for p in model.parameters()]
    failed = session([trace(model, np.random.default_rng(0))], task="t", sample=0, reward=None)
    report = Grpo(model, GrpoConfig()).step([failed], version=VERSION)
    assert (report.updates, report.samples, report.mismatch) == (0, 0, None)
    assert report.ledger.balanced
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_ledger_that_contradicts_its_traces_is_refused() -> None:
    """Books that do not balance on arrival are an error that names the session."""
    model = tiny()
    good = session([trace(model, np.random.default_rng(0))], task="t", sample=0, reward=1.0)
    bad = Trajectory(
        session="t/0",
        task="t",
        sample=0,
        status=Status.COMPLETED,
        traces=good.traces,
        ledger=Ledger(sampled=1, trained=1),
        reward=Reward(1.0),
    )
    with pytest.raises(CaptureError, match="session t/0"):
        prepare([bad], GrpoConfig(), version=VERSION)
