"""A GRPO step: from rewarded sessions to updated weights and a report.

`Grpo.step` prepares samples, measures how exactly the weights reproduce the captured log
probabilities (I1), shuffles sessions into updates, and makes the updates. A session is in one
update with all of its traces, so it counts once and the number of updates does not depend on the
builder. The report has the ledger of the whole step (I2).

Every token's loss carries a weight that was fixed for the whole update before it was cut into
forward passes, so the loss of an update is a plain sum and its gradient does not depend on how
the update was cut.
"""

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch

from tugline.errors import ConfigError
from tugline.traces.base import leave_out
from tugline.trainers.grpo.batch import MicroBatch, Row, collate
from tugline.trainers.grpo.config import GrpoConfig, Level
from tugline.trainers.grpo.distributed import gather
from tugline.trainers.grpo.forward import PolicyModel, make_probe
from tugline.trainers.grpo.samples import prepare
from tugline.trainers.grpo.update import (
    MismatchReport,
    Recomputed,
    Update,
    Updater,
    split_by_sample,
    summarize_mismatch,
)
from tugline.types import Ids, Ledger, Logprobs, Reason, Sample, Trajectory


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a step. Means are over the trained tokens of its updates; 0 without any."""

    updates: int
    """Updates that were applied."""
    updates_skipped: int
    """Updates that were not, because loss or gradient was not finite; in no mean."""
    skipped_because_of: tuple[str, ...]
    """Sessions that such a loss or gradient came from."""
    samples: int
    tokens_trained: int
    """Tokens that carry loss, counted once whatever `epochs` is."""
    tokens_forwarded: int
    """Positions computed with gradient, without padding."""
    tokens_padding: int
    """Padding positions computed with them."""
    loss: float
    """Mean over updates."""
    kl: float | None
    """Mean k3 divergence from the reference; None without a reference."""
    clip_fraction: float
    importance_bounded: float
    """Share of tokens whose importance weight was out of its bounds."""
    ratio_mean: float
    grad_norm: float
    """Mean over updates, before clipping."""
    learning_rate: float
    seconds: float
    mismatch: MismatchReport | None
    """Captured log probabilities against those of a forward pass before the first update,
    over all trained tokens; None without any."""
    ledger: Ledger
    """All sessions of the step, after what the trainer masked and dropped."""


class Grpo(Updater):
    """Trains `model` in place; `reference` is what the KL term is measured against."""

    config: GrpoConfig

    def __init__(
        self, model: torch.nn.Module, config: GrpoConfig, reference: torch.nn.Module | None = None
    ) -> None:
        if config.kl > 0 and reference is None:
            msg = f"kl is {config.kl}, so a reference model is needed; give one or set kl to 0"
            raise ConfigError(msg)
        super().__init__(model, config)
        self.reference = PolicyModel(reference, config) if reference is not None else None

    def step(self, trajectories: Sequence[Trajectory], *, version: int) -> StepReport:
        """Learn from `trajectories`, of which those of one task are one group.

        `version` is the number of the weights as they are before this step. Under torchrun every
        rank calls it, with any part of the trajectories, and gets the same report.
        """
        began = time.perf_counter()
        samples, ledger = prepare(gather(trajectories), self.config, version=version)
        rows = [Row(sample) for sample in samples]
        corrected = self.config.importance is not None
        single = len({sample.session for sample in samples}) <= self.config.sessions_per_update
        # A single update starts with the pass that gives the old log probabilities.
        recomputed = self._recompute(rows) if corrected or not single else []
        if corrected:
            rows = [Row(one.sample, old=one.logprobs) for one in recomputed]
        updates = [
            self.apply(chosen) for _ in range(self.config.epochs) for chosen in self._shuffle(rows)
        ]
        if updates and not recomputed:
            recomputed = _collect(samples, updates[0].recomputed)
        seconds = time.perf_counter() - began
        return self._report(updates, samples, ledger, summarize_mismatch(recomputed), seconds)

    @torch.no_grad()
    def score(self, ids: Ids) -> Logprobs:
        """Return the log probability of each id but the first, shape ``(n - 1,)``."""
        rows = [Row(make_probe(ids))]
        tree = self.config.tree_packing
        micro = collate(rows, tree=tree, device=self.policy.device)
        return self.policy.logprobs(micro).cpu().numpy()

    @torch.no_grad()
    def _recompute(self, rows: Sequence[Row]) -> list[Recomputed]:
        """Return log probabilities under the weights as they are."""
        recomputed: list[Recomputed] = []
        for micro in self.pack(rows):
            recomputed += split_by_sample(self.policy.logprobs(micro), micro)
        return _collect([row.sample for row in rows], recomputed)

    def _shuffle(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Split sessions at random into updates of even size; weight the tokens of each."""
        if not rows:
            return
        sessions: dict[str, list[Row]] = {}
        for row in rows:
            sessions.setdefault(row.sample.session, []).append(row)
        whole = list(sessions.values())
        shuffled = torch.randperm(len(whole), generator=self.order)
        updates = math.ceil(len(whole) / self.config.sessions_per_update)
        for minibatch in shuffled.tensor_split(updates):
            chosen = [row for i in minibatch.tolist() for row in whole[i]]
            weights = token_weights([row.sample for row in chosen], self.config)
            yield [row._replace(weight=w) for row, w in zip(chosen, weights, strict=True)]

    def token_losses(self, new: torch.Tensor, micro: MicroBatch, figures: Update) -> torch.Tensor:
        """Return the clipped policy loss of each token."""
        with torch.no_grad():
            reference = self.reference.logprobs(micro) if self.reference else None
        terms = token_terms(new, micro, reference, self.config)
        for name in ("kl", "clipped", "bounded", "ratio"):
            figures.sums[name] += float(getattr(terms, name).sum())
        return terms.loss

    def _report(
        self,
        updates: Sequence[Update],
        samples: Sequence[Sample],
        ledger: Ledger,
        mismatch: MismatchReport | None,
        seconds: float,
    ) -> StepReport:
        finite = [one for one in updates if not one.culprits]
        applied = [one for one in finite if one.grad_norm > 0]
        learned = frozenset[str]().union(*(one.sessions for one in finite))
        lost = sum(int(one.loss_mask.sum()) for one in samples if one.session not in learned)
        ledger = leave_out(ledger, masked={}, dropped={Reason.NON_FINITE: lost})
        tokens = max(1, sum(one.sums["tokens"] for one in finite))
        count = max(1, len(finite))
        return StepReport(
            updates=len(applied),
            updates_skipped=len(updates) - len(finite),
            skipped_because_of=tuple(sorted({name for one in updates for name in one.culprits})),
            samples=len(samples),
            tokens_trained=ledger.trained,
            tokens_forwarded=int(sum(one.sums["forwarded"] for one in updates)),
            tokens_padding=int(sum(one.sums["padding"] for one in updates)),
            loss=sum(one.sums["loss"] for one in finite) / count,
            kl=sum(one.sums["kl"] for one in finite) / tokens if self.reference else None,
            clip_fraction=sum(one.sums["clipped"] for one in finite) / tokens,
            importance_bounded=sum(one.sums["bounded"] for one in finite) / tokens,
            ratio_mean=sum(one.sums["ratio"] for one in finite) / tokens,
            grad_norm=sum(one.grad_norm for one in finite) / count,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            seconds=seconds,
            mismatch=mismatch,
            ledger=ledger,
        )


def _collect(samples: Sequence[Sample], recomputed: Sequence[Recomputed]) -> list[Recomputed]:
    """Return the log probabilities that all ranks computed, in the order of `samples`."""
    number = {id(sample): n for n, sample in enumerate(samples)}
    own = [(number[id(one.sample)], one.logprobs) for one in recomputed if id(one.sample) in number]
    return [Recomputed(samples[n], found) for n, found in sorted(gather(own), key=lambda it: it[0])]


# --------------------------------------------------------------------------- the loss
class TokenTerms(NamedTuple):
    """Values by trained token, shape ``(N,)``."""

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
