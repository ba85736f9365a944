"""The clipped policy loss of single tokens; pure torch, no model.

Every token's loss carries a weight that was fixed for the whole update before it was cut into
forward passes, so the loss of an update is a plain sum and its gradient does not depend on how
the update was cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tugline.trainers.grpo.config import GrpoConfig
from tugline.types import Sample


class TokenTerms(NamedTuple):
    """One entry per trained token, shape ``(N,)``."""

    loss: torch.Tensor
    ratio: torch.Tensor
    """Probability under the weights being trained over that under the old ones."""
    clipped: torch.Tensor
    """True where the clip takes the policy's gradient away."""
    kl: torch.Tensor
    """Estimated divergence from the reference; zeros without one."""


def token_terms(
    new: torch.Tensor,
    *,
    old: torch.Tensor,
    behaviour: torch.Tensor,
    advantage: torch.Tensor,
    reference: torch.Tensor | None,
    config: GrpoConfig,
) -> TokenTerms:
    """Losses from log probabilities: `new` carries gradient, the others are constants.

    ``ratio = exp(new - old)``; ``loss = -min(ratio A, clip(ratio, 1 - low, 1 + high) A)`` (PPO,
    arXiv 1707.06347; two bounds as in DAPO, arXiv 2503.14476). With a cap it is multiplied by
    ``min(exp(old - behaviour), cap)``, truncated importance sampling (Ionides 2008) between the
    engine that sampled and the trainer. The KL term is ``exp(d) - d - 1`` with
    ``d = reference - new`` (Schulman's k3, used by GRPO, arXiv 2402.03300).
    """
    ratio = torch.exp(new - old)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if config.importance_cap is not None:
        loss = loss * torch.exp(old - behaviour).clamp(max=config.importance_cap)
    kl = torch.zeros_like(new)
    if reference is not None:
        log_ratio = reference - new
        kl = torch.expm1(log_ratio) - log_ratio
        loss = loss + config.kl * kl
    clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    return TokenTerms(loss, ratio.detach(), clipped, kl.detach())


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
