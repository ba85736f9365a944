"""The loss of a GRPO update: a value for each trained token, and the token's weight.

The loss of an update is the sum of ``weight * loss`` over its tokens. `clip` is the default policy
loss; the others are in `tugline.trainers.grpo.objectives`. `token_terms` adds what is independent
of it: importance weights, masks, and the KL penalty.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from tugline.trainers.grpo.batch import MicroBatch, Row
from tugline.trainers.grpo.config import GrpoConfig, WeightLevel
from tugline.types import Sample


def clip(new: torch.Tensor, tokens: "TrainedTokens", config: GrpoConfig) -> "LossResult":
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


class TrainedTokens(NamedTuple):
    """Trained tokens of a forward pass, trace by trace; tensors of shape ``(N,)``, no gradient.

    Log probabilities are natural logarithms. A pass has whole traces, but maybe not all traces of
    a session.
    """

    old: torch.Tensor
    """Log probabilities under the weights before the update."""
    behaviour: torch.Tensor
    """Log probabilities of the engine that sampled the tokens."""
    reference: torch.Tensor | None
    """Log probabilities under the reference; None without a reference."""
    advantage: torch.Tensor
    mask: torch.Tensor
    """False where `importance: mask` removes the policy loss."""
    weights: torch.Tensor
    """Weight of each token's loss in the update, which the trainer multiplies it by."""
    importance: torch.Tensor
    """Importance weight, which the trainer multiplies the policy loss by; 1 without."""
    bounded: torch.Tensor
    """True where the importance weight was out of its bounds."""
    session: torch.Tensor
    """Index of each token's session in the pass, int64."""
    trace: torch.Tensor
    """Index of each token's trace in the pass, int64."""
    lengths: Sequence[int]
    """Number of tokens of each trace."""
    sessions: Sequence[str]
    """Names of the sessions of the pass."""

    @classmethod
    def of(cls, micro: MicroBatch, reference: torch.Tensor | None, config: GrpoConfig) -> Self:
        """Return the trained tokens of a pass."""
        importance, bounded = importance_weights(micro, config)
        names = [row.sample.session for row in micro.rows]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        sessions = np.repeat([numbers[name] for name in names], micro.counts)
        traces = np.repeat(np.arange(len(names)), micro.counts)
        return cls(
            old=micro.old,
            behaviour=micro.behaviour,
            reference=reference,
            advantage=micro.advantage,
            mask=~bounded if config.importance == "mask" else torch.ones_like(bounded),
            weights=micro.weight,
            importance=importance,
            bounded=bounded,
            session=torch.from_numpy(sessions).to(micro.old.device),
            trace=torch.from_numpy(traces).to(micro.old.device),
            lengths=micro.counts,
            sessions=tuple(numbers),
        )

    def select(self, part: slice) -> "TrainedTokens":
        """Return consecutive tokens, of which `lengths` are unknown."""
        known = self._asdict().items()
        chosen: dict[str, Any] = {n: v[part] for n, v in known if isinstance(v, torch.Tensor)}
        return self._replace(**chosen, lengths=())

    def compute_ratio(self, new: torch.Tensor, config: GrpoConfig) -> torch.Tensor:
        """Return ``exp(new - old)``, of each token or as the geometric mean over its trace."""
        return torch.exp(combine(new - self.old, self.lengths, config.ratio_level))


LossResult = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""The policy loss of each token, and figures by name: values per token, reported as their mean."""
Loss = Callable[[torch.Tensor, TrainedTokens, GrpoConfig], LossResult]
"""A policy loss; the first argument are log probabilities under the weights being trained."""


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


def importance_weights(micro: MicroBatch, config: GrpoConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight of each token's loss, and whether it was out of bounds; shape ``(N,)``.

    ``exp(old - behaviour)`` corrects for the difference between the engine's and the trainer's
    distributions, per token, or as the geometric mean or the product over a trace. Without bounds
    its variance is unbounded. ``truncate`` clamps it to the bounds (Ionides 2008); ``mask`` removes
    the loss instead, because such tokens are often wrong rather than rare (IcePop, 2510.18855).
    """
    if config.importance is None:
        ones = torch.ones_like(micro.old)
        return ones, ones < 1
    gap = micro.old - micro.behaviour
    weights = torch.exp(combine(gap, micro.counts, config.importance_level))
    low, high = config.importance_low, config.importance_high
    bounded = (weights < low) | (weights > high)
    if config.importance == "mask":
        return weights.masked_fill(bounded, 0.0), bounded
    return weights.clamp(low, high), bounded


def keep_near(new: torch.Tensor, tokens: TrainedTokens, threshold: float) -> torch.Tensor:
    """Return whether each token has an advantage of at least 0 or is in a trace near the policy.

    A trace is near if the mean of ``behaviour - new`` over its tokens is at most the threshold
    (off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556).
    """
    distance = combine(tokens.behaviour - new.detach(), tokens.lengths, "trace")
    return (tokens.advantage >= 0) | (distance <= threshold)


def estimate_kl(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return ``exp(d) - d - 1`` with ``d = reference - new`` (Schulman's k3; GRPO, 2402.03300).

    Its gradient is unbiased only for tokens sampled from the policy being trained. `kl_correction`
    multiplies it by the probability under the weights being trained, divided by that under the
    weights that sampled the token (DeepSeek-V3.2, arXiv 2512.02556): the token's ratio, times its
    importance weight if the old log probabilities are recomputed ones.
    """
    distance = reference - new
    return torch.expm1(distance) - distance


def cross_entropy(new: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted negative log likelihood of each token; see `GrpoConfig.cross_entropy`."""
    return -new * weights


def combine(log_ratio: torch.Tensor, lengths: Sequence[int], level: WeightLevel) -> torch.Tensor:
    """Return log ratios of tokens, or for each token the mean or sum over those of its trace."""
    if level == "token":
        return log_ratio
    parts = torch.split(log_ratio, list(lengths))
    if level == "trace":
        return torch.cat([part.mean().expand(len(part)) for part in parts])
    return torch.cat([part.sum().expand(len(part)) for part in parts])


def find_largest_weight(rows: Sequence[Row]) -> float:
    """Return the largest summed weight of a session's tokens, as a multiple of the mean."""
    sums: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        sums[row.sample.session] += row.weight * row.sample.trained
    return max(sums.values()) * len(sums) / sum(sums.values())


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
