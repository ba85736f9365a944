"""Advantages and losses against numbers worked out by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tugline.config import from_mapping
from tugline.errors import ConfigError
from tugline.trainers.grpo.advantage import SessionReward, baselines, turn_shares
from tugline.trainers.grpo.batch import MicroBatch, Row, pack
from tugline.trainers.grpo.config import Estimator, GrpoConfig
from tugline.trainers.grpo.train import StepReport, TokenTerms, token_terms, token_weights
from tugline.types import Sample

REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 3.0])
"""Mean 1, deviations 0 -1 -1 0 2, population variance 6/5."""


def group_advantages(rewards: npt.ArrayLike, estimator: Estimator, eps: float) -> np.ndarray:
    """Advantage of each session of a group where a session earned one reward."""
    each = [float(one) for one in np.asarray(rewards, np.float64)]
    group = [SessionReward.of([one], [7], otherwise=9.0) for one in each]
    against = baselines(group, estimator, eps)
    return np.array([b.advantage(one) for b, one in zip(against, each, strict=True)])


def test_grpo_divides_by_the_standard_deviation() -> None:
    """Deviation over std, here the square root of 1.2."""
    std = math.sqrt(1.2)
    expected = [0, -1 / std, -1 / std, 0, 2 / std]
    assert group_advantages(REWARDS, "grpo", 0.0) == pytest.approx(expected)


def test_grpo_eps_is_added_to_the_standard_deviation() -> None:
    """Rewards 0 and 2 have mean 1 and std 1; with eps 1 the advantages are halves."""
    assert group_advantages(np.array([0.0, 2.0]), "grpo", 1.0).tolist() == [-0.5, 0.5]


def test_dr_grpo_only_centres() -> None:
    """Deviation from the mean, unscaled."""
    assert group_advantages(REWARDS, "dr_grpo", 1e-6).tolist() == [0, -1, -1, 0, 2]


def test_rloo_compares_with_the_others() -> None:
    """Reward less the mean of the other four: 3 - 0.5, 1 - 1, 0 - 1.25."""
    assert group_advantages(REWARDS, "rloo", 1e-6).tolist() == [0, -1.25, -1.25, 0, 2.5]


def test_noise_in_rewards_stays_small() -> None:
    """Rewards that differ by 1e-5 give advantages below a tenth, not of the size of real ones."""
    noise = np.array([1.0, 1.0 + 1e-5, 1.0, 1.0 + 1e-5])
    got = group_advantages(noise, "grpo", GrpoConfig().advantage_eps)
    assert 0 < np.abs(got).max() < 0.1


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("rewards", [[], [1.0], [0.1, 0.1, 0.1], [0.3, 0.1 + 0.2]])
def test_no_difference_is_no_advantage(estimator: str, rewards: list[float]) -> None:
    """Groups without contrast give exact zeros, without rounding noise or division by zero."""
    got = group_advantages(np.array(rewards), estimator, 0.0)  # type: ignore[arg-type]
    assert got.tolist() == [0.0] * len(rewards)


def test_a_session_of_several_rewards_counts_by_its_tokens() -> None:
    """Rewards 1 (1 token) and 0 (3 tokens) against a session of 0.5: means 1/4 and 1/2.

    The centre is 3/8; the variance of a token's reward is the mean of (1/4 (5/8)^2 + 3/4 (3/8)^2)
    and (1/8)^2, which is 7/64.
    """
    several = SessionReward.of([1.0, 0.0, 1.0], [1, 3, 0], otherwise=9.0)
    group = [several, SessionReward.of([0.5], [2], otherwise=9.0)]
    assert [one.mean for one in group] == [0.25, 0.5]
    centred = baselines(group, "dr_grpo", 0.0)
    assert [b.advantage(1.0) for b in centred] == [0.625, 0.625]
    scaled = baselines(group, "grpo", 0.0)
    assert scaled[0].advantage(1.0) == pytest.approx(0.625 / math.sqrt(7 / 64))
    others = baselines(group, "rloo", 0.0)
    assert [b.advantage(1.0) for b in others] == [0.5, 0.75]


def test_a_session_that_trains_nothing_counts_with_its_outcome() -> None:
    """Its traces' rewards say nothing about tokens that are not there."""
    assert SessionReward.of([5.0], [0], otherwise=2.0).mean == 2.0
    assert SessionReward.of([], [], otherwise=2.0).mean == 2.0


@given(
    traces=st.lists(
        st.tuples(st.sampled_from([0.0, 0.1, 0.3, 1.0]), st.integers(1, 50)), min_size=1
    ),
    cut=st.data(),
)
def test_cutting_traces_changes_nothing(
    traces: list[tuple[float, int]], cut: st.DataObject
) -> None:
    """A trace cut in two of the same reward leaves its session as it was, to the bit."""
    pieces = []
    for reward, tokens in traces:
        first = cut.draw(st.integers(0, tokens))
        pieces += [(reward, first), (reward, tokens - first)]
    whole, apart = (
        SessionReward.of([r for r, _ in one], [n for _, n in one], otherwise=0.0)
        for one in (traces, cut.draw(st.permutations(pieces)))
    )
    assert whole.rewards.tobytes() == apart.rewards.tobytes()
    assert whole.shares.tobytes() == apart.shares.tobytes()


def test_turns_get_less_the_earlier_they_are() -> None:
    """Half of what the next one gets; several traces with one call name one turn."""
    assert turn_shares([4, 0, 9, 4], 0.5) == {9: 1.0, 4: 0.5, 0: 0.25}


# --------------------------------------------------------------------------- loss
def micro_batch(rows: Sequence[Row]) -> MicroBatch:
    """One forward pass of rows of equal length."""
    (micro,) = pack(rows, GrpoConfig(tree_packing=False), torch.device("cpu"))
    return micro


def terms(
    ratios: list[float],
    advantages: list[float],
    *,
    behaviour: list[float] | None = None,
    reference: list[float] | None = None,
    traces: int = 1,
    **options: Any,
) -> TokenTerms:
    """TokenTerms where new / old has the given ratios and old is 0.5 everywhere.

    `behaviour` and `reference` are probabilities. The tokens are those of `traces` equal traces.
    """
    count = len(ratios) // traces
    old = np.full(len(ratios), math.log(0.5), np.float32)
    captured = old if behaviour is None else np.log(np.array(behaviour, np.float32))
    rows = []
    for i in range(traces):
        part = slice(i * count, (i + 1) * count)
        one = sample(str(i), count)
        one.logprobs[3:], one.advantages[3:] = captured[part], advantages[part]
        rows.append(Row(one, old=old[part]))
    new = (torch.from_numpy(old) + torch.tensor(ratios).log()).requires_grad_()
    other = None if reference is None else torch.tensor(reference).log()
    return token_terms(new, micro_batch(rows), other, GrpoConfig(**options))


def test_clip_is_one_sided_and_asymmetric() -> None:
    """Clipped above 1.28 for good tokens, below 0.8 for bad ones, never where it would help."""
    got = terms([1.5, 0.5, 1.5, 0.5, 1.1], [2.0, 2.0, -2.0, -2.0, 2.0])
    assert got.loss.tolist() == pytest.approx([-2.56, -1.0, 3.0, 1.6, -2.2])
    assert got.clipped.tolist() == [True, False, False, True, False]
    assert got.ratio.tolist() == pytest.approx([1.5, 0.5, 1.5, 0.5, 1.1])


def test_ratio_of_a_trace_is_the_geometric_mean() -> None:
    """Ratios 4 and 1 of one trace are both 2, of which the gradient goes to both; 1 and 1 are 1."""
    got = terms([4.0, 1.0, 1.0, 1.0], [-1.0] * 4, traces=2, ratio_level="trace")
    assert got.ratio.tolist() == pytest.approx([2, 2, 1, 1])
    assert got.loss.tolist() == pytest.approx([2, 2, 1, 1])
    good = terms([4.0, 1.0, 1.0, 1.0], [1.0] * 4, traces=2, ratio_level="trace")
    assert good.clipped.tolist() == [True, True, False, False]


IMPORTANCE = {"importance_low": 0.5, "importance_high": 2.0}


@pytest.mark.parametrize(
    ("options", "weights", "bounded"),
    [
        ({}, [1, 1, 1, 1], [False] * 4),
        ({"importance": "truncate"}, [1.25, 2, 0.5, 1], [False, True, True, False]),
        ({"importance": "mask"}, [1.25, 0, 0, 1], [False, True, True, False]),
        ({"importance": "truncate", "importance_level": "trace"}, [2, 2, 0.5, 0.5], [True] * 4),
        ({"importance": "mask", "importance_level": "trace"}, [0] * 4, [True] * 4),
        (
            {"importance": "mask", "importance_level": "trace", "importance_high": 3},
            [2.5, 2.5, 0, 0],
            [False, False, True, True],
        ),
    ],
)
def test_importance_weight_has_two_bounds(
    options: dict[str, Any], weights: list[float], bounded: list[bool]
) -> None:
    """Old over behaviour is 1.25 and 5, then 0.2 and 1; it scales the loss but not the ratio.

    Geometric means over the two traces: 2.5 and the root of 0.2, which is below 0.5.
    """
    behaviour = [0.4, 0.1, 2.5, 0.5]
    got = terms([1.0] * 4, [1.0] * 4, behaviour=behaviour, traces=2, **(IMPORTANCE | options))
    assert got.loss.tolist() == pytest.approx([-one for one in weights])
    assert got.bounded.tolist() == bounded
    assert got.ratio.tolist() == pytest.approx([1.0] * 4)


@given(
    log_weights=st.lists(st.floats(-5, 5), min_size=1, max_size=20),
    low=st.floats(0, 1),
    high=st.floats(1, 10),
    level=st.sampled_from(["token", "trace"]),
)
def test_importance_weights_never_leave_their_bounds(
    log_weights: list[float], low: float, high: float, level: str
) -> None:
    """Truncated ones are within both; masked ones are the same where they are not 0."""
    behaviour = [0.5 / math.exp(one) for one in log_weights]
    ones = [1.0] * len(log_weights)
    options = {"importance_low": low, "importance_high": high, "importance_level": level}
    cut, masked = (
        -terms(ones, ones, behaviour=behaviour, importance=kind, **options).loss.detach()
        for kind in ("truncate", "mask")
    )
    assert bool(((cut >= low - 1e-6) & (cut <= high + 1e-5)).all())
    assert bool(((masked == 0) | (masked == cut)).all())


def test_kl_is_k3() -> None:
    """With reference twice as likely: 2 - ln 2 - 1, weighted and added to the loss."""
    got = terms([1.0], [1.0], reference=[1.0], kl=0.5)
    assert got.kl.tolist() == pytest.approx([2 - math.log(2) - 1])
    assert got.loss.tolist() == pytest.approx([-1 + 0.5 * (1 - math.log(2))])


def test_corrected_kl_has_the_gradient_of_the_true_divergence() -> None:
    """Averaged over the old policy, exactly; without the correction it does not."""
    old = torch.tensor([0.2, 0.3, 0.5])
    reference = torch.tensor([0.6, 0.3, 0.1])
    logits = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    new = torch.log_softmax(logits, 0)
    divergence = (new.exp() * (new - reference.log())).sum()
    (true,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    one = sample("a", 3)
    one.logprobs[3:], one.advantages[3:] = old.log().numpy(), 0.0
    found = []
    for correction in (True, False):
        config = GrpoConfig(kl=1.0, kl_correction=correction)
        got = token_terms(new, micro_batch([Row(one)]), reference.log(), config)
        found += torch.autograd.grad((old * got.loss).sum(), logits, retain_graph=True)
    assert torch.allclose(found[0], true, atol=1e-6)
    assert not torch.allclose(found[1], true, atol=1e-2)


def test_gradient_is_that_of_the_policy_gradient_on_policy() -> None:
    """At ratio one, the gradient by each log probability is minus the advantage."""
    new = torch.full((3,), -1.0).requires_grad_()
    one = sample("a", 3)
    one.logprobs[3:], one.advantages[3:] = -1.0, [1.0, -2.0, 0.0]
    got = token_terms(new, micro_batch([Row(one)]), None, GrpoConfig())
    got.loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-1.0, 2.0, 0.0])


def sample(session: str, trained: int) -> Sample:
    """A sample of which so many tokens are trained."""
    n = trained + 3
    return Sample(
        input_ids=np.zeros(n, np.int32),
        loss_mask=np.arange(n) >= 3,
        logprobs=np.zeros(n, np.float32),
        versions=np.zeros(n, np.int32),
        advantages=np.ones(n, np.float32),
        temperatures=np.ones(n, np.float32),
        group="g",
        session=session,
    )


@pytest.mark.parametrize(
    ("normalisation", "expected"),
    [
        ("token", [1 / 20, 1 / 20, 1 / 20]),
        ("sequence", [1 / 2 / 10, 1 / 2 / 10, 1 / 2 / 10]),
        ("constant", [1 / 2 / 100, 1 / 2 / 100, 1 / 2 / 100]),
    ],
)
def test_weights_of_equal_sessions(normalisation: str, expected: list[float]) -> None:
    """Two sessions of ten tokens each, one of them in two traces of 4 and 6."""
    config = GrpoConfig(normalisation=normalisation, constant_length=100)  # type: ignore[arg-type]
    got = token_weights([sample("a", 4), sample("b", 10), sample("a", 6)], config)
    assert got == pytest.approx(expected)


def test_weights_of_unequal_sessions() -> None:
    """`sequence` gives a token of a short session more weight, `token` does not."""
    samples = [sample("a", 2), sample("b", 8)]
    assert token_weights(samples, GrpoConfig(normalisation="token")) == [0.1, 0.1]
    assert token_weights(samples, GrpoConfig(normalisation="sequence")) == [1 / 4, 1 / 16]


# --------------------------------------------------------------------------- config
def test_unknown_keys_are_refused() -> None:
    """A misspelt knob does not go by unnoticed."""
    with pytest.raises(ConfigError, match="learning_rate"):
        from_mapping({"learning_rate": 1e-4}, GrpoConfig)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"reward": "best"}, "reward is 'best', must be one of outcome, per_trace"),
        ({"importance_low": 1.5}, "importance_low is 1.5, must be a number <= 1"),
        ({"importance_high": 0.5}, "importance_high is 0.5, must be a number >= 1"),
        (
            {"warmup_updates": 5, "decay_updates": 5},
            "decay_updates is 5, must be more than warmup_updates, which is 5",
        ),
        ({"turn_discount": 0}, "turn_discount is 0, must be a number > 0"),
        ({"turn_discount": 1.5}, "is 1.5, must be a number <= 1"),
    ],
)
def test_a_wrong_choice_of_reward_is_named(given_: dict[str, object], message: str) -> None:
    """Field, value and what would be right, in one line."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_mapping(given_, GrpoConfig)


def test_every_option_and_figure_is_documented() -> None:
    """The table of keys has each field of the config, the guide each of the report."""
    docs = Path(__file__).parents[2] / "docs"
    keys, guide = ((docs / name).read_text() for name in ("configuration.md", "training.md"))
    assert [name for name in GrpoConfig.__struct_fields__ if f"`grpo.{name}`" not in keys] == []
    assert [name for name in StepReport.__struct_fields__ if f"`{name}`" not in guide] == []
