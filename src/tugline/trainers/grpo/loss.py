"""The loss of a GRPO update: a value for each trained token, and the token's weight.

The loss of an update is the sum of ``weight * loss`` over its tokens. `token_terms` computes the
loss from log probabilities: those under the weights being trained (`new`), under the weights before
the update (`old`), of the engine that sampled the token (`behaviour`), and under the reference.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tugline.trainers.grpo.batch import MicroBatch
from tugline.trainers.grpo.config import GrpoConfig, Level
from tugline.types import Sample


class TokenTerms(NamedTuple):
    """Values per trained token, shape ``(N,)``."""

    loss: torch.Tensor
    ratio: torch.Tensor
    """Probability under the weights being trained, divided by that under the old weights."""
    clipped: torch.Tensor
    """True where clipping removes the policy's gradient."""
    bounded: torch.Tensor
    """True where the importance weight was out of its bounds."""
    kl: torch.Tensor
    """Estimated divergence from the reference; zeros without a reference."""


def token_terms(
    new: torch.Tensor,
    micro: MicroBatch,
    reference: torch.Tensor | None,
    config: GrpoConfig,
    tokens: slice = slice(None),
) -> TokenTerms:
    """Return the loss terms of log probabilities; only `new` carries gradient.

    ``loss = clipped loss * importance weight + kl * divergence``. With `ratio_level` ``trace`` the
    ratio is the geometric mean over a trace's trained tokens (GSPO, arXiv 2507.18071), and `new`
    has all tokens of the pass; otherwise those in the range `tokens`.
    """
    log_ratio = new - micro.old[tokens]
    ratio = torch.exp(_level(log_ratio, micro, config.ratio_level))
    policy_loss, clipped = clip_loss(ratio, micro.advantage[tokens], config)
    weights, bounded = (each[tokens] for each in importance_weights(micro, config))
    loss = policy_loss * weights
    kl = torch.zeros_like(new)
    if reference is not None:
        kl = estimate_kl(new, reference[tokens])
        penalty = kl * torch.exp(log_ratio) * weights if config.kl_correction else kl
        loss = loss + config.kl * penalty
    return TokenTerms(loss, ratio.detach(), clipped, bounded, kl.detach())


def clip_loss(
    ratio: torch.Tensor, advantage: torch.Tensor, config: GrpoConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the policy loss of each token, and whether its gradient is clipped.

    ``-min(ratio A, clip(ratio, 1 - low, 1 + high) A)`` (PPO, arXiv 1707.06347; two bounds as in
    DAPO, arXiv 2503.14476).
    """
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    return loss, clipped


def importance_weights(micro: MicroBatch, config: GrpoConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight of each token's loss, and whether it was out of bounds; shape ``(N,)``.

    ``exp(old - behaviour)`` corrects for the difference between the engine's and the trainer's
    distributions, per token or as the geometric mean over a trace. Without bounds its variance is
    unbounded. ``truncate`` clamps it to the bounds (Ionides 2008); ``mask`` removes the loss
    instead, because such tokens are often wrong rather than rare (IcePop, arXiv 2510.18855).
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


def estimate_kl(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return ``exp(d) - d - 1`` with ``d = reference - new`` (Schulman's k3; GRPO, 2402.03300).

    Its gradient is unbiased only for tokens sampled from the policy being trained. `kl_correction`
    multiplies it by the probability under the weights being trained, divided by that under the
    weights that sampled the token (DeepSeek-V3.2, arXiv 2512.02556): the token's ratio, times its
    importance weight if the old log probabilities are recomputed ones.
    """
    distance = reference - new
    return torch.expm1(distance) - distance


def _level(log_ratio: torch.Tensor, micro: MicroBatch, level: Level) -> torch.Tensor:
    """Return the log ratios, or for each token the mean over the tokens of its trace."""
    if level == "token":
        return log_ratio
    means = [part.mean().expand(len(part)) for part in torch.split(log_ratio, micro.counts)]
    return torch.cat(means)


def token_weights(samples: Sequence[Sample], config: GrpoConfig) -> list[float]:
    """Return the weight of each sample's tokens in an update with `samples`.

    - ``token``: 1 / all trained tokens of the update (DAPO)
    - ``sequence``: the mean over a session's tokens, then over sessions (original GRPO)
    - ``constant``: 1 / (sessions x `constant_length`) (Dr. GRPO, arXiv 2503.20783)
    """
    tokens: Counter[str] = Counter()
    for sample in samples:
        tokens[sample.session] += sample.trained
    if config.normalisation == "token":
        return [1 / tokens.total()] * len(samples)
    if config.normalisation == "sequence":
        return [1 / (len(tokens) * tokens[sample.session]) for sample in samples]
    return [1 / (len(tokens) * config.constant_length)] * len(samples)
