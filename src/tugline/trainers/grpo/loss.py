"""The clipped policy loss of single tokens; pure torch, no model.

Every token's loss carries a weight that was fixed for the whole update before it was cut into
forward passes, so the loss of an update is a plain sum and its gradient does not depend on how
the update was cut.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tugline.trainers.grpo.batch import MicroBatch
from tugline.trainers.grpo.config import GrpoConfig, Level
from tugline.types import Sample


class TokenTerms(NamedTuple):
    """One entry per trained token, shape ``(N,)``."""

    loss: torch.Tensor
    ratio: torch.Tensor
    """Probability under the weights being trained over that under the old ones."""
    clipped: torch.Tensor
    """True where the clip takes the policy's gradient away."""
    bounded: torch.Tensor
    """True where the importance weight was out of its bounds."""
    kl: torch.Tensor
    """Estimated divergence from the reference; zeros without one."""


def token_terms(
    new: torch.Tensor, micro: MicroBatch, reference: torch.Tensor | None, config: GrpoConfig
) -> TokenTerms:
    """Losses from log probabilities: `new` carries gradient, all others are constants.

    ``ratio = exp(new - old)``; ``loss = -min(ratio A, clip(ratio, 1 - low, 1 + high) A)`` (PPO,
    arXiv 1707.06347; two bounds as in DAPO, arXiv 2503.14476). With `ratio_level` ``trace`` the
    ratio is the geometric mean over a trace's trained tokens (GSPO, arXiv 2507.18071). The loss is
    multiplied by `importance_weights`. The KL term is ``exp(d) - d - 1`` with
    ``d = reference - new`` (Schulman's k3, used by GRPO, arXiv 2402.03300). Its gradient has the
    right mean only where tokens come from the policy being trained; `kl_correction` weights it by
    the token's ratio, which mends that for older tokens (DeepSeek-V3.2, arXiv 2512.02556).
    """
    advantage, log_ratio = micro.advantage, new - micro.old
    ratio = torch.exp(_level(log_ratio, micro, config.ratio_level))
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    weights, bounded = importance_weights(micro, config)
    loss = loss * weights
    kl = torch.zeros_like(new)
    if reference is not None:
        distance = reference - new
        kl = torch.expm1(distance) - distance
        loss = loss + config.kl * (kl * torch.exp(log_ratio) if config.kl_correction else kl)
    clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    return TokenTerms(loss, ratio.detach(), clipped, bounded, kl.detach())


def importance_weights(micro: MicroBatch, config: GrpoConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight of each token's loss, and whether it was out of bounds; shape ``(N,)``.

    ``exp(old - behaviour)`` corrects for an engine that sampled from another distribution than the
    trainer computes, per token or as the geometric mean over a trace. Unbounded it has unbounded
    variance. ``truncate`` moves it to the nearest bound (Ionides 2008); ``mask`` takes the loss
    out instead, since such tokens are often wrong rather than rare (IcePop, arXiv 2510.18855).
    """
    if config.importance is None:
        ones = torch.ones_like(micro.old)
        return ones, ones < 1
    weights = torch.exp(_level(micro.old - micro.behaviour, micro, config.importance_level))
    low, high = config.importance_low, config.importance_high
    bounded = (weights < low) | (weights > high)
    if config.importance == "mask":
        return weights.masked_fill(bounded, 0.0), bounded
    return weights.clamp(low, high), bounded


def _level(log_ratio: torch.Tensor, micro: MicroBatch, level: Level) -> torch.Tensor:
    """Return the ratios themselves, or for each token the mean over the tokens of its trace."""
    if level == "token":
        return log_ratio
    counts = [int(row.sample.loss_mask.sum()) for row in micro.rows]
    means = [part.mean().expand(len(part)) for part in torch.split(log_ratio, counts)]
    return torch.cat(means)


def token_weights(samples: Sequence[Sample], config: GrpoConfig) -> list[float]:
    """Return the weight of one token of each sample in an update made of `samples`.

    - ``token``: 1 / all trained tokens of the update (DAPO)
    - ``sequence``: the mean over a session's tokens, then over sessions (original GRPO)
    - ``constant``: 1 / (sessions x `constant_length`) (Dr. GRPO, arXiv 2503.20783)
    """
    tokens: Counter[str] = Counter()
    for sample in samples:
        tokens[sample.session] += int(sample.loss_mask.sum())
    if config.normalisation == "token":
        return [1 / tokens.total()] * len(samples)
    if config.normalisation == "sequence":
        return [1 / (len(tokens) * tokens[sample.session]) for sample in samples]
    return [1 / (len(tokens) * config.constant_length)] * len(samples)
