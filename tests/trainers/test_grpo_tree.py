"""How log probabilities are computed: trees, chunks of logits, checkpointed layers."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import GPT2Config, GPT2LMHeadModel, JambaConfig, JambaForCausalLM, PreTrainedModel

from support.models import SMALL, make_kind, make_mistral
from trainers.sessions import (
    VERSION,
    captured,
    gradient,
    groups,
    run_policy,
    sample,
    session,
    tiny,
    weights,
)
from tugline.errors import CaptureError, ConfigError
from tugline.trainers.grpo import forward
from tugline.trainers.grpo.batch import Row, plain_sample
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.forward import PolicyModel
from tugline.trainers.grpo.packing import Costs, pack
from tugline.trainers.grpo.train import Grpo
from tugline.types import Sample, Span, Trace

HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
PLAIN = GrpoConfig(tree_packing=False)
TREE = GrpoConfig(tree_packing=True)
AUTO = GrpoConfig()


def make_sample(ids: Sequence[int], mask: Sequence[bool]) -> Sample:
    """A sample whose tokens have different advantages."""
    advantages = np.where(mask, np.linspace(-1, 1, len(ids)), 0).astype(np.float32)
    temperatures = np.full(len(ids), 0.7, np.float32)
    return sample(ids, mask, advantages=advantages, temperatures=temperatures)


FIVE = make_sample([1, 2, 3, 4, 5], [False, True, True, True, True])


@st.composite
def make_samples(draw: st.DrawFn) -> list[Sample]:
    """Rows that share prefixes of any length, some of them equal."""
    token = st.integers(0, 47)
    rows = [draw(st.lists(token, min_size=2, max_size=12))]
    for _ in range(draw(st.integers(0, 6))):
        parent = rows[draw(st.integers(0, len(rows) - 1))]
        start = parent[: draw(st.integers(0, len(parent)))]
        rows.append(start + draw(st.lists(token, min_size=max(0, 2 - len(start)), max_size=6)))
    masks = [draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))) for ids in rows]
    return [
        make_sample(ids, [False, *mask[1:-1], True]) for ids, mask in zip(rows, masks, strict=True)
    ]


# --------------------------------------------------------------------------- the tree
@settings(max_examples=40, deadline=None)
@given(make_samples(), st.sampled_from([1, 20, 10_000]))
def test_trees_give_the_results_of_separate_rows(samples: list[Sample], micro_tokens: int) -> None:
    """A tree has the log probabilities and gradient of its rows.

    A single pass computes as many tokens as there are different prefixes.
    """
    model = tiny()
    alone = run_policy(model, samples, replace(PLAIN, micro_tokens=1))
    packed = run_policy(model, samples, replace(TREE, micro_tokens=micro_tokens))
    assert float((alone.gradient - packed.gradient).abs().max()) < 1e-5
    if micro_tokens == 10_000:
        prefixes = {
            row.input_ids[:end].tobytes()
            for row in samples
            for end in range(1, len(row.input_ids) + 1)
        }
        assert packed.tokens == len(prefixes)
    for row, *results in zip(samples, alone.logprobs, packed.logprobs, strict=True):
        expected = captured(model, row.input_ids, 0.7)[row.loss_mask]
        assert max(float(np.abs(logprobs - expected).max()) for logprobs in results) < 1e-5


def test_micro_tokens_bounds_the_tokens_of_a_tree() -> None:
    """Shared tokens count once, so that a tree has more rows than a padded batch."""
    prompt = list(range(1, 31))
    samples = [make_sample([*prompt, own, 1, 2], [False] * 30 + [True] * 3) for own in range(20)]
    rows = [Row(each) for each in samples]
    trees, plain = (
        list(pack(rows, replace(each, micro_tokens=60), torch.device("cpu"), Costs()))
        for each in (TREE, PLAIN)
    )
    assert [len(micro.rows) for micro in trees] == [10, 10]
    assert max(micro.computed for micro in trees) <= 60
    assert len(plain) == 20


def test_a_step_with_trees_computes_fewer_tokens() -> None:
    """A step computes the common prompt once, and no padding."""
    plain, tree = (
        Grpo(tiny(), config).step(groups(tiny()), version=VERSION) for config in (PLAIN, TREE)
    )
    assert tree.tokens_forwarded < 0.7 * plain.tokens_forwarded
    assert (tree.tokens_padding, plain.tokens_padding > 0) == (0, True)


def jamba() -> PreTrainedModel:
    """A model with a recurrent state of another kind."""
    changes = {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
    config = JambaConfig(**SMALL, **changes, mamba_d_state=4, use_mamba_kernels=False)
    return JambaForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "message"), [(make_mistral, "sliding_attention"), (jamba, "linear_attention|mamba")]
)
def test_models_without_trees(make: Any, message: str) -> None:
    """Sliding windows and other recurrent states are refused, or trained without trees."""
    model = make()
    with pytest.raises(ConfigError, match=f"({message}).*tree_packing to false") as error:
        PolicyModel(model, TREE)
    assert error.value.field == "tree_packing"
    policy = PolicyModel(model, AUTO)
    assert policy.config.tree_packing is False
    assert re.search(f"computed by itself: model .* ({message})", policy.packing)
    (logprobs,) = run_policy(model, [FIVE], policy.config).logprobs
    assert logprobs == pytest.approx(captured(model, FIVE.input_ids, 0.7)[1:], abs=1e-5)


def test_the_packing_of_a_run_is_decided_and_named() -> None:
    """The model decides about packing, unless the configuration does."""
    assert PolicyModel(tiny(), AUTO).packing == "prefixes that traces share are computed once"
    assert PolicyModel(tiny(), PLAIN).packing.endswith("tree_packing is false")
    assert Grpo(tiny(), AUTO).config.tree_packing is True


# --------------------------------------------------------------------------- recurrent states
def draw_rows(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random ids."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 48, length).tolist() for length in lengths]


def nested() -> list[Sample]:
    """Forks, forks within forks, prefixes of each other, and single tokens."""
    trunk, first, second, third, fourth = draw_rows(150, 80, 40, 33, 9)
    lone, one = [7], [8]
    rows = [
        trunk + second,
        trunk + first,
        trunk + first + one,
        trunk + first + third,
        trunk[:70] + fourth,
        trunk[:70] + lone,
        fourth + third,
        trunk,
    ]
    return [make_sample(ids, [False] + [True] * (len(ids) - 1)) for ids in rows]


@pytest.mark.parametrize("kind", HYBRID)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_traces_of_a_hybrid_do_not_affect_each_other(
    kind: str,
    checkpointing: bool,  # noqa: FBT001
) -> None:
    """In a batch or a tree, a trace has the log probabilities and gradient of a pass alone."""
    samples = nested()
    options = {"gradient_checkpointing": checkpointing}
    alone, padded, packed = (
        run_policy(make_kind(kind), samples, replace(config, micro_tokens=tokens, **options))
        for config, tokens in ((PLAIN, 1), (PLAIN, 10_000), (TREE, 10_000))
    )
    assert packed.tokens < alone.tokens / 3
    model = make_kind(kind)
    for result in (alone, padded, packed):
        assert float((alone.gradient - result.gradient).abs().max()) < 2e-5
        for row, logprobs in zip(samples, result.logprobs, strict=True):
            expected = captured(model, row.input_ids, 0.7)[1:]
            assert float(np.abs(logprobs - expected).max()) < 1e-4


@settings(max_examples=10, deadline=None)
@given(make_samples())
def test_trees_of_a_hybrid_give_the_results_of_separate_rows(samples: list[Sample]) -> None:
    """Runs shorter than the convolution have the results of separate rows, too."""
    alone = run_policy(make_kind("qwen3_5"), samples, replace(PLAIN, micro_tokens=1))
    packed = run_policy(make_kind("qwen3_5"), samples, TREE)
    assert float((alone.gradient - packed.gradient).abs().max()) < 1e-4
    for one, other in zip(alone.logprobs, packed.logprobs, strict=True):
        assert float(np.abs(one - other).max()) < 1e-4


def test_a_hybrid_computes_turns_that_drop_reasoning_once() -> None:
    """Forty such turns need at least four times fewer positions."""
    context, *parts = draw_rows(60, *[8, 4, 6] * 40)
    samples = []
    for reasoning, answer, tool in zip(*(parts[i::3] for i in range(3)), strict=True):
        ids = [*context, *reasoning, *answer]
        samples.append(make_sample(ids, np.arange(len(ids)) >= len(context)))
        context += answer + tool
    plain, tree = (
        run_policy(make_kind("qwen3_next"), samples, replace(config, micro_tokens=20_000))
        for config in (PLAIN, TREE)
    )
    assert plain.tokens > 4 * tree.tokens
    assert float((plain.gradient - tree.gradient).abs().max()) < 1e-4
    for one, other in zip(plain.logprobs, tree.logprobs, strict=True):
        assert float(np.abs(one - other).max()) < 1e-4


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_a_step_of_a_hybrid_does_not_depend_on_the_packing(kind: str) -> None:
    """The loss, the norm of the gradient and the weights after the step are the same."""
    reports, trained = [], []
    for each in (replace(PLAIN, micro_tokens=1), PLAIN, AUTO):
        model = make_kind(kind)
        batch = groups(make_kind(kind), tasks=1, samples=4)
        config = replace(each, lr=1e-3, replay_experts=False)
        reports.append(Grpo(model, config).step(batch, version=VERSION))
        trained.append(weights(model))
    for report in reports[1:]:
        assert report.loss == pytest.approx(reports[0].loss, abs=1e-5)
        assert report.grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-4)
        assert report.mismatch is not None
        assert report.mismatch.total.max_abs < 1e-4
    assert reports[2].tokens_forwarded < reports[1].tokens_forwarded
    assert float((trained[0] - trained[1]).abs().max()) < 1e-4


def test_a_copy_of_a_hybrid_computes_its_own_weights() -> None:
    """A copy made after the layers were set up for trees does not use the original's weights."""
    model = make_kind("qwen3_5")
    PolicyModel(model, TREE)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    (logprobs,) = run_policy(other, [FIVE], TREE).logprobs
    expected = captured(make_kind("qwen3_5"), FIVE.input_ids, 0.7)[1:]
    assert logprobs == pytest.approx(expected, abs=1e-5)


def test_other_forward_passes_are_unchanged() -> None:
    """Forward passes with padding on the left have the same results as before."""
    model = tiny().eval()
    ids = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    before = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    PolicyModel(model, TREE)
    after = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    assert torch.equal(before, after)


# --------------------------------------------------------------------------- memory and context
@pytest.mark.parametrize("config", [PLAIN, TREE])
def test_a_trained_token_needs_a_context(config: GrpoConfig) -> None:
    """A mask that begins with True is refused."""
    ids = np.arange(1, 9, dtype=np.int32)
    mask = np.ones(8, np.bool_)
    bad = Trace(ids=ids, mask=mask, logprobs=-mask.astype(np.float32), spans=(Span(0, 0, 8, 5),))
    batch = [session([bad], task="t", sample=number, reward=float(number)) for number in range(2)]
    with pytest.raises(CaptureError, match=r"session t/0: loss_mask\[0\] is True"):
        Grpo(tiny(), config).step(batch, version=VERSION)


@pytest.mark.parametrize(("chunk", "rows"), [(1000, [78]), (12, [12] * 6 + [6])])
def test_logits_are_computed_in_chunks(chunk: int, rows: list[int]) -> None:
    """Chunks give the same results; the backward pass computes the logits again."""
    samples = [make_sample(list(range(1, 41)), [False] + [True] * 39) for _ in range(2)]
    whole, model, seen = run_policy(tiny(), samples, TREE), tiny(), list[int]()

    def note(_module: object, _args: object, logits: torch.Tensor) -> None:
        if logits.requires_grad:
            seen.append(len(logits))

    model.lm_head.register_forward_hook(note)
    again = run_policy(model, samples, replace(TREE, logits_chunk=chunk))
    assert seen[: len(rows)] == rows
    assert sorted(seen) == sorted(2 * rows)
    assert float(np.abs(np.subtract(whole.logprobs, again.logprobs)).max()) < 1e-6
    assert float((whole.gradient - again.gradient).abs().max()) < 1e-6


@pytest.mark.parametrize("chunk", [2, 1000])
def test_the_logits_of_an_update_are_computed_once(chunk: int) -> None:
    """`backward` gives the gradient of a sum of token losses without a second pass of the head."""
    samples = [make_sample(range(n, n + 6), [False, *[True] * 5]) for n in (1, 2, 20)]
    once, twice = (PolicyModel(tiny(), replace(TREE, logits_chunk=chunk)) for _ in range(2))
    (micro,) = pack([Row(each) for each in samples], TREE, torch.device("cpu"), Costs())
    head = once.model.get_output_embeddings()
    computed = list[int]()
    head.register_forward_hook(lambda _, args, __: computed.append(len(args[0])))
    new = once.backward(micro, lambda new, tokens: new.square() * micro.advantage[tokens])
    expected = twice.logprobs(micro)
    (expected.square() * micro.advantage).sum().backward()
    assert sum(computed) == len(micro.target) == 15
    assert float((new - expected.detach()).abs().max()) < 1e-6
    right = gradient(twice.model)
    assert float((gradient(once.model) - right).abs().max() / right.abs().max()) < 1e-6


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_checkpointed_layers_are_computed_twice(tree: bool, checkpointing: bool) -> None:  # noqa: FBT001
    """The backward pass computes each layer again, with the same results."""
    config = replace(TREE if tree else PLAIN, gradient_checkpointing=checkpointing)
    model, computed = tiny(), list[bool]()
    layer = model.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: computed.append(torch.is_grad_enabled()))
    again = run_policy(model, [FIVE], config)
    assert sum(computed) == (2 if checkpointing else 1)
    assert float((run_policy(tiny(), [FIVE], TREE).gradient - again.gradient).abs().max()) < 1e-6


@pytest.mark.parametrize("offload", [False, True])
def test_offloaded_inputs_of_layers_are_not_kept_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
    offload: bool,  # noqa: FBT001
) -> None:
    """The backward pass gets them from copies, with the same gradient."""

    def copying(*, pin_memory: bool) -> torch.autograd.graph.saved_tensors_hooks:
        assert not pin_memory  # on a CPU, where `save_on_cpu` would keep the tensor itself
        return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copied: copied)

    monkeypatch.setattr(forward, "save_on_cpu", copying)
    config = replace(TREE, gradient_checkpointing=True, offload_activations=offload)
    model = tiny()
    inputs = list[weakref.ref[torch.Tensor]]()
    model.model.layers[1].register_forward_pre_hook(
        lambda _, args: inputs.append(weakref.ref(args[0]))
    )
    policy = PolicyModel(model, config)
    inputs.clear()
    (micro,) = pack([Row(FIVE)], policy.config, policy.device, Costs())
    new = policy.logprobs(micro)
    assert [each() is None for each in inputs] == [offload]
    new.sum().backward()
    plain = tiny()
    PolicyModel(plain, TREE).logprobs(micro).sum().backward()
    assert float((gradient(model) - gradient(plain)).abs().max()) < 1e-6


def test_the_paths_of_a_tree_are_gathered_in_groups() -> None:
    """No group of several runs has more than four keys for each token of the tree."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 48, 400)
    rows = [np.append(trunk[: 10 * n], rng.integers(0, 48, 3)) for n in range(1, 41)]
    samples = [plain_sample(row.astype(np.int32), np.arange(len(row)) > 5) for row in rows]
    alone, packed = (
        run_policy(tiny(), samples, replace(config, micro_tokens=tokens))
        for config, tokens in ((PLAIN, 1), (TREE, 20_000))
    )
    (micro,) = pack([Row(each) for each in samples], TREE, torch.device("cpu"), Costs())
    assert micro.paths is not None
    keys = [sum(group.keys) for group in micro.paths.groups]
    assert len(keys) > 3
    assert sum(keys) > 15 * micro.computed
    assert max(keys) <= 4 * micro.computed
    assert (
        float(np.abs(np.concatenate(alone.logprobs) - np.concatenate(packed.logprobs)).max()) < 1e-5
    )
    assert float((alone.gradient - packed.gradient).abs().max()) < 1e-5


def test_training_has_no_dropout() -> None:
    """A model with dropout is deterministic in the trainer."""
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=48, n_embd=16, n_layer=2, n_head=2, n_positions=64, attn_pdrop=0.9)
    )
    first, again = (run_policy(model, [FIVE], PLAIN).logprobs for _ in range(2))
    assert model.training
    assert np.array_equal(first, again)
