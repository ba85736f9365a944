"""Replay of recorded experts and kept sets, against brute force over the same routes and sets."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from trainers.forced import force
from trainers.routed import PLAIN, add_noise, allow_noise, make_moe, play_groups
from trainers.sessions import VERSION, tiny
from tugline.errors import ConfigError
from tugline.trainers.grpo.batch import Row
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.packing import Costs, pack
from tugline.trainers.grpo.samples import RouterShape, prepare
from tugline.trainers.grpo.train import Grpo
from tugline.trainers.metrics import describe_replay
from tugline.types import Distribution, Kept, LogprobMeaning, Reason, Sample, Trace, Trajectory

KNOBS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.05},
    {"temperature": 0.7},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "temperature": 0.7},
]
WAYS: list[dict[str, Any]] = [
    {"tree_packing": tree} | memory
    for tree in (True, False)
    for memory in (
        {},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "offload_activations": True},
    )
]


# --------------------------------------------------------------------------- brute force
def compute(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    """Logprobs of the trained tokens in float64: one trace, forced experts, its own sets."""
    forced = model
    ids = torch.from_numpy(sample.input_ids.astype(np.int64))
    if sample.experts is not None:
        last = np.zeros_like(sample.experts[:1]) + np.arange(sample.experts.shape[2])
        rows = np.concatenate([sample.experts, last][: 1 + (len(sample.experts) < len(ids))])
        force(forced, torch.from_numpy(rows.astype(np.int64)))
    logits = forced(input_ids=ids[None], use_cache=False).logits[0].double()
    parts = []
    for at in np.flatnonzero(sample.loss_mask):
        row = logits[at - 1] / float(sample.temperatures[at])
        if sample.kept is not None and sample.kept.sizes[at]:
            allowed = sample.kept.ids[slice(*sample.kept.offsets[at : at + 2])].tolist()
            parts.append(row[int(ids[at])] - row[allowed].logsumexp(0))
        else:
            parts.append(row.log_softmax(0)[int(ids[at])])
    return torch.stack(parts)


def draw_routes(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with random experts; some share those of a part of their common prefix."""
    rng = np.random.default_rng(4)
    base = np.stack([rng.permutation(8)[:2] for _ in range(2 * 200)]).reshape(200, 2, 2)
    made = []
    for number, sample in enumerate(samples):
        rows = base[: len(sample.input_ids) - 1].astype(np.uint8).copy()
        own = slice(len(rows) if number == 0 else 7 * number, None)
        rows[own] = rng.permuted(np.tile(np.arange(8), (len(rows[own]), 2, 1)), axis=2)[..., :2]
        made.append(replace(sample, experts=rows))
    return made


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_logprobs_and_gradient_are_those_of_the_recorded_routes(way: dict[str, Any]) -> None:
    """In float64 they equal brute force within 1e-6, in every layout; routers get gradient."""
    model = make_moe(dtype=torch.float64)
    batch = play_groups(make_moe(), Distribution(**KNOBS[-1]), PLAIN, Distribution(top_p=0.5))
    config = GrpoConfig(**way)
    trainer = Grpo(model, config)
    samples, ledger = prepare(batch, config, version=VERSION, routers=trainer.policy.routes.shape)
    assert Reason.UNREPRODUCIBLE not in ledger.masked
    samples = draw_routes(samples)
    rng = np.random.default_rng(6)
    weights = [rng.normal(size=sample.trained) for sample in samples]

    expected_model = make_moe(dtype=torch.float64)
    expected = []
    for sample, weight in zip(samples, weights, strict=True):
        alone = copy.deepcopy(expected_model)
        new = compute(alone, sample)
        (new * torch.from_numpy(weight)).sum().backward()
        expected.append((new.detach(), [p.grad for p in alone.parameters()]))
    names = [name for name, _ in expected_model.named_parameters()]
    whole = {
        name: sum(
            (each[1][i] for each in expected if each[1][i] is not None), start=torch.zeros(())
        )
        for i, name in enumerate(names)
    }

    trainer.model.zero_grad()
    own = {id(sample): torch.from_numpy(w) for sample, w in zip(samples, weights, strict=True)}
    by_sample = {id(sample): each[0] for sample, each in zip(samples, expected, strict=True)}
    for micro in pack(
        [Row(each) for each in samples], trainer.config, trainer.policy.device, Costs()
    ):
        factor = torch.cat([own[id(row.sample)] for row in micro.rows])
        new = trainer.policy.backward(micro, lambda new, tokens, f=factor: new * f[tokens])
        correct = torch.cat([by_sample[id(row.sample)] for row in micro.rows])
        assert float((new - correct).abs().max()) < 1e-5
        assert (micro.computed < sum(row.length for row in micro.rows)) == way["tree_packing"]
    for name, parameter in trainer.model.named_parameters():
        scale = float(whole[name].norm())
        assert float((parameter.grad - whole[name]).norm()) < 1e-6 * scale, name
        if name.endswith("gate.weight"):
            assert scale > 0


def test_a_selection_that_differs_is_replaced_by_the_recorded_one() -> None:
    """Noise in the trainer's selection moves logprobs by 0.5 nats, and by 1e-4 with replay."""
    batch = play_groups(make_moe())
    model = make_moe()
    gates = {n: p.detach().clone() for n, p in model.named_parameters() if "gate.weight" in n}
    allow_noise(model)
    trainer = Grpo(model, GrpoConfig(lr=1e-3))
    add_noise(model)
    report = trainer.step(batch, version=VERSION)
    assert report.mismatch is not None
    assert report.mismatch.total.max_abs < 1e-4
    assert report.mismatch.without_replay is not None
    assert report.mismatch.without_replay.max_abs > 0.5
    assert report.mismatch.without_replay.tokens == report.mismatch.total.tokens
    assert list(report.mismatch.experts_changed) == [0, 1]
    assert all(share > 0.5 for share in report.mismatch.experts_changed.values())
    layer, share = max(report.mismatch.experts_changed.items(), key=lambda item: item[1])
    assert f"routers differ most in layer {layer}, for {share:.1%}" in (
        describe_replay(report) or ""
    )
    assert report.updates == 1
    for name, before in gates.items():
        assert not torch.equal(model.get_parameter(name), before)


@pytest.mark.parametrize("changes", [{"importance": "mask"}, {"ratio_level": "trace"}, {"kl": 0.1}])
def test_every_kind_of_step_replays(changes: dict[str, Any]) -> None:
    """Recomputed, whole-trace and reference passes see the recorded experts."""
    batch = play_groups(make_moe(), PLAIN, Distribution(**KNOBS[-1]))
    model = make_moe()
    reference = make_moe()
    for each in (model, reference):
        allow_noise(each)
    config = GrpoConfig(**changes, sessions_per_update=2, lr=1e-9)
    trainer = Grpo(model, config, reference if "kl" in changes else None)
    for each in (model, reference):
        add_noise(each)
    report = trainer.step(batch, version=VERSION)
    assert report.mismatch is not None
    assert report.mismatch.total.max_abs < 1e-4
    assert set(report.mismatch.experts_changed) == {0, 1}
    if "kl" in changes:
        assert 0 <= report.kl < 1e-6  # type: ignore[operator]


def test_equal_models_agree_with_and_without_replay() -> None:
    """A trainer like the engine chooses the recorded experts itself."""
    report = Grpo(make_moe(), GrpoConfig()).step(play_groups(make_moe()), version=VERSION)
    assert report.mismatch is not None
    assert report.mismatch.without_replay is not None
    assert report.mismatch.without_replay.max_abs < 1e-4
    assert set(report.mismatch.experts_changed.values()) == {0.0}


def test_a_step_compares_the_experts_of_its_own_first_passes() -> None:
    """What later passes of the step before found is forgotten."""
    batch = play_groups(make_moe())
    model = make_moe()
    allow_noise(model)
    trainer = Grpo(model, GrpoConfig(lr=1e-9, epochs=2))
    shares = []
    for noise in (1.0, 0.0):
        add_noise(model, noise)
        mismatch = trainer.step(batch, version=VERSION).mismatch
        assert mismatch is not None
        shares.append(sum(mismatch.experts_changed.values()))
    assert shares[0] > shares[1] == 0.0


# --------------------------------------------------------------------------- kept sets
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_logprobs_of_a_truncated_distribution_are_those_of_the_sampler(
    knobs: dict[str, Any],
) -> None:
    """Every token is trained under its own distribution, beside calls with others."""
    batch = play_groups(make_moe(), Distribution(**knobs), PLAIN, Distribution(top_p=0.5))
    report = Grpo(make_moe(), GrpoConfig()).step(batch, version=VERSION)
    assert report.mismatch is not None
    assert report.mismatch.total.max_abs < 1e-4
    assert report.ledger.masked.keys() == {Reason.ABORTED}
    assert report.mismatch.total.tokens == report.tokens_trained == report.ledger.trained


def test_raw_logprobs_are_not_renormalised() -> None:
    """A kept set beside raw logprobs is left out."""
    raw = Distribution(top_p=0.9, logprobs=LogprobMeaning.RAW)
    (first, *_), _ = prepare(play_groups(make_moe(), raw), GrpoConfig(), version=VERSION)
    assert first.kept is None
    assert first.trained


# --------------------------------------------------------------------------- what is left out
BATCH = play_groups(make_moe(), Distribution(top_p=0.9), PLAIN, samples=2)
SHAPE = RouterShape(layers=2, experts=8, top_k=2)


@st.composite
def make_batches(draw: st.DrawFn) -> list[Trajectory]:
    """Sessions some of whose tokens lost their experts, their set, or their id in it."""
    batch = []
    for each in BATCH:
        (trace,) = each.traces
        rows = np.zeros((draw(st.integers(1, len(trace.ids))), 2, 2), np.uint8)
        rows[..., 1] = 1
        sampled = st.sets(st.sampled_from(np.flatnonzero(trace.mask).tolist()))
        sets = list(trace.kept or ())
        for at in draw(sampled):
            sets[at] = sets[at][:0]
        for at in draw(sampled):
            sets[at] = sets[at][sets[at] != trace.ids[at]]
        experts = draw(st.sampled_from([rows, None] if batch else [rows]))
        batch.append(replace(each, traces=(replace(trace, experts=experts, kept=Kept.of(sets)),)))
    return batch


def find_trainable(trace: Trace) -> np.ndarray:
    """Whether each token has the experts of its context, and its set if it needs one."""
    trainable = np.zeros(len(trace.ids), np.bool_)
    known = 0 if trace.experts is None else len(trace.experts)
    sets = list(trace.kept or ())
    for span in trace.spans:
        for at in range(span.start, span.end):
            fine = not span.distribution.needs_kept or trace.ids[at] in sets[at]
            trainable[at] = at <= known and fine
    return trainable


@settings(max_examples=50, deadline=None)
@given(make_batches())
def test_tokens_without_experts_or_sets_are_never_trained(batch: list[Trajectory]) -> None:
    """Trained tokens have the experts of their context and their set; all others are counted."""
    samples, ledger = prepare(batch, GrpoConfig(), version=VERSION, routers=SHAPE)
    assert ledger.balanced
    made = {sample.session: sample for sample in samples}
    trainable = {each.session: find_trainable(each.traces[0]) for each in batch}
    assert ledger.trained == sum(int(each.sum()) for each in trainable.values())
    assert made.keys() == {name for name, each in trainable.items() if each.any()}
    for each in batch:
        if each.session in made:
            sample = made[each.session]
            assert np.array_equal(sample.loss_mask, trainable[each.session])
            assert sample.trained + sum(sample.masked.values()) == each.traces[0].trained
            assert set(sample.masked) <= {Reason.NO_ROUTES, Reason.UNREPRODUCIBLE}


def test_a_step_without_any_experts_ends_the_run() -> None:
    """The error names the settings of engine and trainer; with replay off, it trains."""
    batch = [strip(each) for each in BATCH]
    with pytest.raises(
        ConfigError, match=r"(?s)--enable-return-routed-experts.*replay_experts to false"
    ):
        Grpo(make_moe(), GrpoConfig()).step(batch, version=VERSION)
    report = Grpo(make_moe(), GrpoConfig(replay_experts=False)).step(batch, version=VERSION)
    assert report.ledger.trained > 0
    assert report.mismatch is not None
    assert report.mismatch.without_replay is None


def strip(each: Trajectory) -> Trajectory:
    """The session without experts."""
    return replace(each, traces=tuple(replace(trace, experts=None) for trace in each.traces))


@pytest.mark.parametrize(
    "change",
    [
        lambda experts: experts[:, :1],
        lambda experts: experts[:, :, :1],
        lambda experts: experts + np.uint8(7),
        np.zeros_like,
    ],
    ids=["layers", "top_k", "numbers", "repeated"],
)
def test_tokens_with_experts_of_another_model_are_masked(change: Any) -> None:
    """Other sessions are trained."""
    first, *others = BATCH
    (trace,) = first.traces
    broken = replace(first, traces=(replace(trace, experts=change(trace.experts)),))
    samples, ledger = prepare([broken, *others], GrpoConfig(), version=VERSION, routers=SHAPE)
    assert {sample.session for sample in samples} == {each.session for each in others}
    assert ledger.masked[Reason.NO_ROUTES] == trace.trained


def test_experts_of_all_layers_are_those_of_the_layers_with_a_router() -> None:
    """Engines report zeros for layers without experts, which are left out."""
    shape = RouterShape(2, 8, 2, places=(1, 3), depth=4)
    rows = np.array([[[0, 0], [3, 1], [0, 0], [7, 2]]], np.uint8)
    selected = shape.select(rows)
    assert selected is not None
    assert selected.tolist() == [[[3, 1], [7, 2]]]
    assert shape.select(rows[:, [0, 1, 0, 2]]) is None, "a layer with a router has zeros"


def test_replay_is_refused_for_a_model_without_experts() -> None:
    """`true` is an error there, `auto` trains it."""
    with pytest.raises(ConfigError, match="has no experts"):
        Grpo(tiny(), GrpoConfig(replay_experts=True))
    with pytest.raises(ConfigError, match=r"load_balancing: .* has no experts"):
        Grpo(tiny(), GrpoConfig(load_balancing=0.1))
    Grpo(tiny(), GrpoConfig())


# --------------------------------------------------------------------------- balance
@pytest.mark.parametrize("tree", [True, False])
def test_the_load_balancing_loss_is_that_of_transformers(tree: bool) -> None:  # noqa: FBT001
    """Value and gradient equal theirs over the same tokens, without padding."""
    config = GrpoConfig(load_balancing=0.5, tree_packing=tree, lr=1e-3)
    model = make_moe()
    trainer = Grpo(model, config)
    samples, _ = prepare(BATCH, config, version=VERSION, routers=trainer.policy.routes.shape)
    (micro,) = trainer.pack([Row(each) for each in samples])
    trainer.policy.backward(
        micro, lambda new, _: 0 * new, further=lambda: trainer.policy.routes.balance(micro.real)
    )
    value = float(trainer.policy.routes.balance(micro.real).detach())

    plain = make_moe()
    mask = micro.real.reshape(micro.ids.shape)
    if tree:
        rows = [torch.from_numpy(each.input_ids[:-1].astype(np.int64)) for each in samples]
        seen: list[torch.Tensor] = []
        outputs = [
            plain(input_ids=row[None], output_router_logits=True).router_logits for row in rows
        ]
        shared = int((rows[0][: len(rows[1])] == rows[1][: len(rows[0])]).cumprod(0).sum())
        seen = [torch.cat([a, b[shared:]]) for a, b in zip(*outputs, strict=True)]
        expected = load_balancing_loss_func(tuple(seen), 8, 2)
    else:
        outputs = plain(input_ids=micro.ids, output_router_logits=True).router_logits
        expected = load_balancing_loss_func(outputs, 8, 2, mask.long())
    expected.backward()
    assert value == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, parameter in plain.named_parameters():
        got = model.get_parameter(name).grad
        if parameter.grad is None:
            assert got is None or float(got.abs().max()) == 0, name
        else:
            assert float((got - parameter.grad).norm()) < 1e-4 * float(parameter.grad.norm()), name


def test_the_weight_of_the_load_balancing_loss_counts() -> None:
    """The figure of a step is the loss; the update differs from one without it."""
    moved = []
    for weight in (0.0, 1.0):
        model = make_moe()
        config = GrpoConfig(load_balancing=weight, lr=1e-3)
        report = Grpo(model, config).step(BATCH, version=VERSION)
        assert (report.load_balancing > 0.5) == (weight > 0)
        moved.append(model.model.layers[0].mlp.gate.weight.detach())
    assert not torch.equal(*moved)
