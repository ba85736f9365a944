"""How log probabilities are computed: trees, chunks of logits, checkpointed layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from support.models import SMALL, make_mistral
from trainers.sessions import VERSION, captured, groups, run_policy, sample, session, tiny
from tugline.errors import CaptureError, ConfigError
from tugline.trainers.grpo.batch import Row, pack
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.forward import PolicyModel
from tugline.trainers.grpo.train import Grpo
from tugline.types import Sample, Span, Trace

PLAIN = GrpoConfig(tree_packing=False)
TREE = GrpoConfig(tree_packing=True)


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
        list(pack(rows, replace(each, micro_tokens=60), torch.device("cpu")))
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


def linear() -> PreTrainedModel:
    """A model whose first layer has a recurrent state."""
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SMALL | {"head_dim": 16},
            num_experts=2,
            num_experts_per_tok=1,
            layer_types=["linear_attention", "full_attention"],
        )
    )


@pytest.mark.parametrize(
    ("make", "message"), [(make_mistral, "sliding_attention"), (linear, "linear_attention")]
)
def test_models_without_full_attention_need_no_trees(make: Any, message: str) -> None:
    """Sliding windows and recurrent states are refused, and trained without trees."""
    model = make()
    with pytest.raises(ConfigError, match=f"{message}.*tree_packing to false") as error:
        PolicyModel(model, TREE)
    assert error.value.field == "tree_packing"
    (logprobs,) = run_policy(model, [FIVE], PLAIN).logprobs
    assert logprobs == pytest.approx(captured(model, FIVE.input_ids, 0.7)[1:], abs=1e-5)


def test_other_forward_passes_are_unchanged() -> None:
    """Those with padding on the left have the same results as before."""
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


def test_training_has_no_dropout() -> None:
    """A model with dropout is deterministic in the trainer."""
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=48, n_embd=16, n_layer=2, n_head=2, n_positions=64, attn_pdrop=0.9)
    )
    first, again = (run_policy(model, [FIVE], PLAIN).logprobs for _ in range(2))
    assert model.training
    assert np.array_equal(first, again)
