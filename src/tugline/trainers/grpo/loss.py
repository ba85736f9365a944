"""The loss of a GRPO update: the sum of ``weight * loss`` over its trained tokens.

`clip` is the default policy loss; the others are in `tugline.trainers.grpo.objectives`.
`token_terms` adds what is the same for each of them.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.tokens import TrainedTokens, combine

LossResult = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""The policy loss of each token, and figures by name: values per token, reported as their mean."""
Loss = Callable[[torch.Tensor, TrainedTokens, GrpoConfig], LossResult]
"""A policy loss; the first argument are log probabilities under the weights being trained."""


def clip(new: torch.Tensor, tokens: TrainedTokens, config: GrpoConfig) -> LossResult:
    """Return the clipped loss of PPO (arXiv 1707.06347).

    ``-min(ratio A, clip(ratio, 1 - low, 1 + high) A)``, with two bounds as in DAPO (2503.14476).
    With `ratio_level` ``trace`` the ratio is the geometric mean over a trace's trained tokens
    (GSPO, arXiv 2507.18071).
    """
    ratio = tokens.compute_ratio(new, config)
    advantage = tokens.advantage
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    return loss, {"ratio": ratio, "clipped": clipped}


class TokenTerms(NamedTuple):
    """Values per trained token, shape ``(N,)``."""

    loss: torch.Tensor
    """Sum of the terms."""
    terms: Mapping[str, torch.Tensor]
    """Terms of the loss by name, each with its coefficient."""
    figures: Mapping[str, torch.Tensor]
    """Figures of the policy loss; ``bounded``, see `TrainedTokens`; ``kl``, the estimated
    divergence from the reference; and ``off_policy``, true where `off_policy_threshold` removed the
    policy loss."""


def token_terms(
    new: torch.Tensor, tokens: TrainedTokens, config: GrpoConfig, loss: Loss = clip
) -> TokenTerms:
    """Return the loss terms of log probabilities; only `new` carries gradient.

    ``policy loss * importance weight + kl * divergence``. If the config `needs_whole_traces`,
    `tokens` must be all tokens of a pass.
    """
    policy, figures = loss(new, tokens, config)
    policy = policy * tokens.importance
    figures = {**figures, "bounded": tokens.bounded}
    if config.off_policy_threshold is not None:
        near = keep_near(new, tokens, config.off_policy_threshold)
        policy = policy * near
        figures["off_policy"] = ~near
    terms = {"policy": policy}
    total = policy
    if tokens.reference is not None:
        kl = estimate_kl(new, tokens.reference)
        corrected = config.kl_correction
        penalty = kl * torch.exp(new - tokens.old) * tokens.importance if corrected else kl
        terms["kl"] = config.kl * penalty
        total = total + terms["kl"]
        figures["kl"] = kl
    return TokenTerms(total, terms, figures)


def estimate_kl(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return ``exp(d) - d - 1`` with ``d = reference - new`` (Schulman's k3; GRPO, 2402.03300).

    Its gradient is unbiased only for tokens sampled from the policy being trained. `kl_correction`
    multiplies it by the probability under the weights being trained, divided by that under the
    weights that sampled the token (DeepSeek-V3.2, arXiv 2512.02556): the token's ratio, times its
    importance weight if the old log probabilities are recomputed ones.
    """
    distance = reference - new
    return torch.expm1(distance) - distance


def keep_near(new: torch.Tensor, tokens: TrainedTokens, threshold: float) -> torch.Tensor:
    """Return whether each token has an advantage of at least 0 or is in a trace near the policy.

    A trace is near if the mean of ``behaviour - new`` over its tokens is at most the threshold
    (off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556).
    """
    distance = combine(tokens.behaviour - new.detach(), tokens.lengths, "trace")
    return (tokens.advantage >= 0) | (distance <= threshold)


def cross_entropy(new: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted negative log likelihood of each token; see `GrpoConfig.cross_entropy`."""
    return -new * weights
