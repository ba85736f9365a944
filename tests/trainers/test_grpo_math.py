"""Advantages and losses, compared with numbers computed by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch

from trainers.sessions import sample
from tugline.config import from_mapping
from tugline.errors import ConfigError
from tugline.schema import read_jsonl
from tugline.trainers.grpo.advantage import SessionReward, baselines
from tugline.trainers.grpo.batch import Row
from tugline.trainers.grpo.config import Deviation, Estimator, GrpoConfig
from tugline.trainers.grpo.loss import TokenTerms, token_terms
from tugline.trainers.grpo.packing import Costs, pack
from tugline.trainers.grpo.tokens import TrainedTokens, token_weights
from tugline.trainers.grpo.train import StepReport
from tugline.types import Sample

LOSSES = [row for _, row in read_jsonl(Path(__file__).with_name("losses.jsonl"))]
"""Arguments and results of `terms`."""
REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 3.0])
"""Mean 1, deviations 0 -1 -1 0 2, population variance 6/5."""


def group_advantages(
    rewards: npt.ArrayLike, estimator: Estimator, eps: float, deviation: Deviation = "population"
) -> np.ndarray:
    """Advantages in a group of sessions with one reward each."""
    each = [float(reward) for reward in np.asarray(rewards, np.float64)]
    group = [SessionReward.of([reward], [7], otherwise=9.0) for reward in each]
    pairs = zip(baselines(group, estimator, eps, deviation), each, strict=True)
    return np.array([baseline.advantage(reward) for baseline, reward in pairs])


@pytest.mark.parametrize(
    ("estimator", "eps", "rewards", "expected"),
    [
        ("grpo", 0.0, REWARDS, np.array([0, -1, -1, 0, 2]) / math.sqrt(1.2)),
        ("grpo", 1.0, [0.0, 2.0], [-0.5, 0.5]),  # eps is added to the standard deviation of 1
        ("dr_grpo", 1e-6, REWARDS, [0, -1, -1, 0, 2]),  # centred, not scaled
        ("rloo", 1e-6, REWARDS, [0, -1.25, -1.25, 0, 2.5]),  # 3 less the others' mean of 0.5
    ],
)
def test_advantages_are_those_of_their_papers(
    estimator: Estimator, eps: float, rewards: npt.ArrayLike, expected: Sequence[float]
) -> None:
    """Groups of known mean and deviation have the advantages that the papers define."""
    assert group_advantages(rewards, estimator, eps) == pytest.approx(expected)


@pytest.mark.parametrize("rewards", [REWARDS, [0.0, 2.0], [0.0, 0.25, 1.0, 1.0]])
def test_the_default_deviation_is_that_of_a_sample(rewards: Sequence[float]) -> None:
    """The deviation divides by one less than the number of rewards, as `torch.std` does."""
    expected = torch.tensor(rewards, dtype=torch.float64)
    expected = (expected - expected.mean()) / (expected.std() + 1e-4)
    config = GrpoConfig()
    got = group_advantages(rewards, "grpo", config.advantage_eps, config.advantage_std)
    assert got == pytest.approx(expected.numpy())


def test_noise_in_rewards_is_not_amplified() -> None:
    """Rewards that differ by 1e-5 have advantages below 0.1."""
    noise = np.array([1.0, 1.0 + 1e-5, 1.0, 1.0 + 1e-5])
    got = group_advantages(noise, "grpo", GrpoConfig().advantage_eps)
    assert 0 < np.abs(got).max() < 0.1


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("rewards", [[], [1.0], [0.1, 0.1, 0.1], [0.3, 0.1 + 0.2]])
def test_equal_rewards_have_no_advantage(estimator: str, rewards: list[float]) -> None:
    """Advantages are exact zeros, without rounding errors or division by zero."""
    got = group_advantages(np.array(rewards), estimator, 0.0)  # type: ignore[arg-type]
    assert got.tolist() == [0.0] * len(rewards)


def test_several_rewards_of_a_session_are_weighted_by_tokens() -> None:
    """Rewards 1 (1 token) and 0 (3 tokens) against a session of 0.5 have means 1/4 and 1/2.

    The baseline is the other session's mean, and half of the difference to it is the advantage.
    The centre is 3/8; the variance of a token's reward is the mean of (1/4 (5/8)^2 + 3/4 (3/8)^2)
    and (1/8)^2, which is 7/64.
    """
    several = SessionReward.of([1.0, 0.0, 1.0], [1, 3, 0], otherwise=9.0)
    group = [several, SessionReward.of([0.5], [2], otherwise=9.0)]
    assert [each.mean for each in group] == [0.25, 0.5]
    centred = baselines(group, "dr_grpo", 0.0)
    assert [b.advantage(1.0) for b in centred] == [0.25, 0.375]
    scaled = baselines(group, "grpo", 0.0, "population")
    assert scaled[0].advantage(1.0) == pytest.approx(0.25 / math.sqrt(7 / 64))
    scaled = baselines(group, "grpo", 0.0)  # times 2 / (2 - 1)
    assert scaled[0].advantage(1.0) == pytest.approx(0.25 / math.sqrt(7 / 32))
    others = baselines(group, "rloo", 0.0)
    assert [b.advantage(1.0) for b in others] == [0.5, 0.75]


def test_a_session_without_trained_tokens_has_its_outcome() -> None:
    """Rewards of traces without trained tokens do not count; the session's outcome does."""
    assert SessionReward.of([5.0], [0], otherwise=2.0).mean == 2.0
    assert SessionReward.of([], [], otherwise=2.0).mean == 2.0


# --------------------------------------------------------------------------- loss
def trained(session: str, count: int) -> Sample:
    """A sample with this number of trained tokens."""
    return sample([0] * (count + 3), [False] * 3 + [True] * count, session=session)


def terms(
    ratios: list[float],
    advantages: list[float],
    *,
    behaviour: list[float] | None = None,
    traces: int = 1,
    **options: Any,
) -> TokenTerms:
    """TokenTerms where new / old has the given ratios and old is 0.5 everywhere.

    `behaviour` has probabilities. The tokens are those of `traces` equal traces.
    """
    count = len(ratios) // traces
    old = np.full(len(ratios), math.log(0.5), np.float32)
    captured = old if behaviour is None else np.log(np.array(behaviour, np.float32))
    rows = []
    for i in range(traces):
        part = slice(i * count, (i + 1) * count)
        row = trained(str(i), count)
        row.logprobs[3:], row.advantages[3:] = captured[part], advantages[part]
        rows.append(Row(row, old=old[part]))
    new = (torch.from_numpy(old) + torch.tensor(ratios).log()).requires_grad_()
    (micro,) = pack(rows, GrpoConfig(tree_packing=False), torch.device("cpu"), Costs())
    config = GrpoConfig(**options)
    return token_terms(new, TrainedTokens.of(micro, None, config), config)


@pytest.mark.parametrize("importance", [None, "truncate"])
def test_the_corrected_penalty_has_the_gradient_of_the_divergence(
    importance: Literal["truncate"] | None,
) -> None:
    """The expected gradients agree for tokens of another policy, with either old logprobs."""
    generator = torch.Generator().manual_seed(0)
    sampler, old, now, reference = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    if importance is None:
        old = sampler  # the captured logprobs
    logits = now.requires_grad_()
    new, fixed = logits.log_softmax(-1), reference.log_softmax(-1)
    (expected,) = torch.autograd.grad((new.exp() * (new - fixed)).sum(), logits, retain_graph=True)
    row = trained("a", len(new))
    row.logprobs[3:] = sampler.log_softmax(-1).numpy()
    rows = [Row(row, old=old.log_softmax(-1).float().numpy())]
    (micro,) = pack(rows, GrpoConfig(tree_packing=False), torch.device("cpu"), Costs())
    config = GrpoConfig(kl=1.0, kl_correction=True, importance=importance, importance_high=1e9)
    loss = token_terms(
        new, TrainedTokens.of(micro, fixed, config), config
    ).loss  # without advantages: the penalty alone
    (got,) = torch.autograd.grad((sampler.softmax(-1) * loss).sum(), logits)
    assert torch.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("row", LOSSES, ids=lambda row: row["shows"])
def test_the_loss_is_clipped_and_weighted(row: dict[str, Any]) -> None:
    """The clip is one-sided and asymmetric; importance scales the loss, not the ratio.

    Old over behaviour is 1.25 and 5, then 0.2 and 1; geometric means over the two traces: 2.5 and
    the root of 0.2, which is below 0.5.
    """
    got = terms(**row["given"])
    for name, expected in row["gives"].items():
        values = {"loss": got.loss, **got.figures}[name]
        assert values.tolist() == pytest.approx(expected), name


@pytest.mark.parametrize(
    ("normalisation", "expected"),
    [
        ("token", [1 / 10, 1 / 10, 1 / 10]),
        ("sequence", [1 / 2 / 2, 1 / 2 / 8, 1 / 2 / 2]),
        ("constant", [1 / 2 / 100, 1 / 2 / 100, 1 / 2 / 100]),
    ],
)
def test_weights_of_tokens_by_normalisation(normalisation: str, expected: list[float]) -> None:
    """Two traces of 1 token of one session, and one of 8 of another, have the defined weights."""
    config = GrpoConfig(normalisation=normalisation, constant_length=100)  # type: ignore[arg-type]
    got = token_weights([trained("a", 1), trained("b", 8), trained("a", 1)], config)
    assert got == pytest.approx(expected)


# --------------------------------------------------------------------------- config
def test_a_decay_within_the_warm_up_is_refused() -> None:
    """The error has the field, its value and what is allowed."""
    message = "decay_updates is 5, must be greater than warmup_updates, which is 5"
    with pytest.raises(ConfigError, match=message):
        from_mapping({"warmup_updates": 5, "decay_updates": 5}, GrpoConfig)


def test_fields_of_the_report_are_documented() -> None:
    """Each field of the report is in docs/grpo.md."""
    guide = (Path(__file__).parents[2] / "docs" / "grpo.md").read_text()
    assert [name for name in StepReport.__struct_fields__ if f"`{name}`" not in guide] == []
