"""The trained tokens of a forward pass, and the weight of each token in an update."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from tugline.trainers.grpo.batch import MicroBatch, Row
from tugline.trainers.grpo.config import GrpoConfig, WeightLevel
from tugline.types import Sample


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


def combine(log_ratio: torch.Tensor, lengths: Sequence[int], level: WeightLevel) -> torch.Tensor:
    """Return log ratios of tokens, or for each token the mean or sum over those of its trace."""
    if level == "token":
        return log_ratio
    parts = torch.split(log_ratio, list(lengths))
    if level == "trace":
        return torch.cat([part.mean().expand(len(part)) for part in parts])
    return torch.cat([part.sum().expand(len(part)) for part in parts])


# --------------------------------------------------------------------------- of an update
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


def find_largest_weight(rows: Sequence[Row]) -> float:
    """Return the largest summed weight of a session's tokens, as a multiple of the mean."""
    sums: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        sums[row.sample.session] += row.weight * row.sample.trained
    return max(sums.values()) * len(sums) / sum(sums.values())
