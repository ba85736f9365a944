"""Advantages and losses against numbers worked out by hand."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tugline.config import from_mapping
from tugline.errors import ConfigError
from tugline.trainers.grpo.advantage import SessionReward, baselines, turn_shares
from tugline.trainers.grpo.config import Estimator, GrpoConfig
from tugline.trainers.grpo.loss import TokenTerms, token_terms, token_weights
from tugline.trainers.grpo.train import StepReport
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


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("rewards", [[], [1.0], [0.1, 0.1, 0.1]])
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
def terms(ratios: list[float], advantages: list[float], **changes: object) -> TokenTerms:
    """TokenTerms where new / old has the given ratios and old is 0.5 everywhere."""
    old = torch.full((len(ratios),), math.log(0.5))
    new = (old + torch.tensor(ratios).log()).requires_grad_()
    fields: dict[str, object] = {
        "old": old,
        "behaviour": old,
        "advantage": torch.tensor(advantages),
        "reference": None,
        "config": GrpoConfig(clip_low=0.2, clip_high=0.28),
    }
    return token_terms(new, **(fields | changes))  # type: ignore[arg-type]


def test_clip_is_one_sided_and_asymmetric() -> None:
    """Clipped above 1.28 for good tokens, below 0.8 for bad ones, never where it would help."""
    got = terms([1.5, 0.5, 1.5, 0.5, 1.1], [2.0, 2.0, -2.0, -2.0, 2.0])
    assert got.loss.tolist() == pytest.approx([-2.56, -1.0, 3.0, 1.6, -2.2])
    assert got.clipped.tolist() == [True, False, False, True, False]
    assert got.ratio.tolist() == pytest.approx([1.5, 0.5, 1.5, 0.5, 1.1])


def test_importance_weight_is_truncated_and_constant() -> None:
    """Old over behaviour, 0.5 / 0.4 and 0.5 / 0.1, capped at 2, scales loss but not ratio."""
    behaviour = torch.tensor([0.4, 0.1]).log()
    config = GrpoConfig(importance_cap=2.0)
    got = terms([1.0, 1.0], [1.0, 1.0], behaviour=behaviour, config=config)
    assert got.loss.tolist() == pytest.approx([-1.25, -2.0])
    assert got.ratio.tolist() == pytest.approx([1.0, 1.0])


def test_kl_is_k3() -> None:
    """With reference twice as likely: 2 - ln 2 - 1, weighted and added to the loss."""
    reference = torch.full((1,), math.log(1.0))
    got = terms([1.0], [1.0], reference=reference, config=GrpoConfig(kl=0.5))
    assert got.kl.tolist() == pytest.approx([2 - math.log(2) - 1])
    assert got.loss.tolist() == pytest.approx([-1 + 0.5 * (1 - math.log(2))])


def test_gradient_is_that_of_the_policy_gradient_on_policy() -> None:
    """At ratio one, the gradient by each log probability is minus the advantage."""
    old = torch.full((3,), -1.0)
    new = old.clone().requires_grad_()
    advantage = torch.tensor([1.0, -2.0, 0.0])
    got = token_terms(
        new, old=old, behaviour=old, advantage=advantage, reference=None, config=GrpoConfig()
    )
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
        ({"reward": "best"}, "reward is 'best', must be one of discounted, outcome, per_trace"),
        ({"reward": "discounted"}, "turn_discount is missing: reward 'discounted' needs"),
        ({"turn_discount": 0.9}, "turn_discount has no effect with reward 'outcome'"),
        ({"reward": "discounted", "turn_discount": 0}, "turn_discount is 0, must be a number > 0"),
        (
            {"reward": "discounted", "turn_discount": 1.5},
            "is 1.5, must be a number <= 1",
        ),
    ],
)
def test_a_wrong_choice_of_reward_is_named(given_: dict[str, object], message: str) -> None:
    """Field, value and what would be right, in one line."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_mapping(given_, GrpoConfig)


def test_digest_follows_every_field() -> None:
    """Equal configs have equal digests, and any change shows."""
    assert GrpoConfig(lr=1e-4).digest() == GrpoConfig(lr=1e-4).digest()
    assert GrpoConfig(lr=1e-4).digest() != GrpoConfig(lr=2e-4).digest()


def test_every_option_and_figure_is_documented() -> None:
    """The guide names each field of the config and of the report."""
    guide = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    for name in [*GrpoConfig.__struct_fields__, *StepReport.__struct_fields__]:
        assert f"`{name}`" in guide, name
