"""A GRPO step: update the weights from rewarded sessions, and report.

`Grpo.step` prepares samples, compares recomputed with captured log probabilities (I1), shuffles
sessions into updates, and makes the updates. A session is in one update with all of its traces, so
it counts once and the number of updates does not depend on the builder. The report has the ledger
of the whole step (I2).

The weight of each token's loss is fixed for the whole update before it is split into forward
passes. The loss of an update is therefore a plain sum, and its gradient does not depend on the
split.
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
    """Updates skipped because the loss or gradient was not finite; they are in no mean."""
    skipped_because_of: tuple[str, ...]
    """Sessions that caused skipped updates."""
    samples: int
    tokens_trained: int
    """Tokens with a loss, counted once for all `epochs`."""
    tokens_forwarded: int
    """Positions computed with gradient, without padding."""
    tokens_padding: int
    """Padding positions of the same passes."""
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
    """Ledger of all sessions of the step, including tokens that the trainer masked or dropped."""


class Grpo(Updater):
    """Trains `model` in place; the KL penalty is relative to `reference`."""

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
        """Train on `trajectories`; those of the same task are a group.

        `version` is the policy version before this step. Under torchrun every rank must call this
        method, with any part of the trajectories, and gets the same report.
        """
        began = time.perf_counter()
        samples, ledger = prepare(gather(trajectories), self.config, version=version)
        rows = [Row(sample) for sample in samples]
        corrected = self.config.importance is not None
        single = len({sample.session for sample in samples}) <= self.config.sessions_per_update
        # The first pass of a single update gives the old log probabilities.
        recomputed = self._recompute(rows) if corrected or not single else []
        if corrected:
            rows = [Row(sample, old=logprobs) for sample, logprobs in recomputed]
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
        """Return the log probabilities of rows under the current weights."""
        recomputed: list[Recomputed] = []
        for micro in self.pack(rows):
            recomputed += split_by_sample(self.policy.logprobs(micro), micro)
        return _collect([row.sample for row in rows], recomputed)

    def _shuffle(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Split sessions at random into updates of equal size, and weight the tokens of each."""
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
        finite = [update for update in updates if not update.culprits]
        applied = [update for update in finite if update.grad_norm > 0]
        learned = frozenset[str]().union(*(update.sessions for update in finite))
        lost = sum(int(s.loss_mask.sum()) for s in samples if s.session not in learned)
        ledger = leave_out(ledger, masked={}, dropped={Reason.NON_FINITE: lost})
        tokens = max(1, sum(update.sums["tokens"] for update in finite))
        count = max(1, len(finite))
        return StepReport(
            updates=len(applied),
            updates_skipped=len(updates) - len(finite),
            skipped_because_of=tuple(sorted({name for u in updates for name in u.culprits})),
            samples=len(samples),
            tokens_trained=ledger.trained,
            tokens_forwarded=int(sum(update.sums["forwarded"] for update in updates)),
            tokens_padding=int(sum(update.sums["padding"] for update in updates)),
            loss=sum(update.sums["loss"] for update in finite) / count,
            kl=sum(update.sums["kl"] for update in finite) / tokens if self.reference else None,
            clip_fraction=sum(update.sums["clipped"] for update in finite) / tokens,
            importance_bounded=sum(update.sums["bounded"] for update in finite) / tokens,
            ratio_mean=sum(update.sums["ratio"] for update in finite) / tokens,
            grad_norm=sum(update.grad_norm for update in finite) / count,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            seconds=seconds,
            mismatch=mismatch,
            ledger=ledger,
        )


def _collect(samples: Sequence[Sample], recomputed: Sequence[Recomputed]) -> list[Recomputed]:
    """Return the log probabilities that all ranks computed, in the order of `samples`."""
    number = {id(sample): n for n, sample in enumerate(samples)}
    own = [(number[id(s)], logprobs) for s, logprobs in recomputed if id(s) in number]
    ordered = sorted(gather(own), key=lambda part: part[0])
    return [Recomputed(samples[n], logprobs) for n, logprobs in ordered]


# --------------------------------------------------------------------------- the loss
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
    new: torch.Tensor, micro: MicroBatch, reference: torch.Tensor | None, config: GrpoConfig
) -> TokenTerms:
    """Return the loss terms of log probabilities; only `new` carries gradient.

    ``ratio = exp(new - old)``; ``loss = -min(ratio A, clip(ratio, 1 - low, 1 + high) A)`` (PPO,
    arXiv 1707.06347; two bounds as in DAPO, arXiv 2503.14476). With `ratio_level` ``trace`` the
    ratio is the geometric mean over a trace's trained tokens (GSPO, arXiv 2507.18071). The loss is
    multiplied by `importance_weights`. The KL term is ``exp(d) - d - 1`` with
    ``d = reference - new`` (Schulman's k3, used by GRPO, arXiv 2402.03300). Its gradient is
    unbiased only for tokens sampled from the policy being trained; `kl_correction` multiplies it
    by the probability under the weights being trained, divided by that under the weights that
    sampled the token (DeepSeek-V3.2, arXiv 2512.02556): the token's ratio, times its importance
    weight if the old log probabilities are recomputed ones.
    """
    advantage = micro.advantage
    log_ratio = new - micro.old
    ratio = torch.exp(_level(log_ratio, micro, config.ratio_level))
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    weights, bounded = importance_weights(micro, config)
    loss = loss * weights
    kl = torch.zeros_like(new)
    if reference is not None:
        distance = reference - new
        kl = torch.expm1(distance) - distance
        loss = loss + config.kl * (
            kl * torch.exp(log_ratio) * weights if config.kl_correction else kl
        )
    clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    return TokenTerms(loss, ratio.detach(), clipped, bounded, kl.detach())


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


def _level(log_ratio: torch.Tensor, micro: MicroBatch, level: Level) -> torch.Tensor:
    """Return the log ratios, or for each token the mean over the tokens of its trace."""
    if level == "token":
        return log_ratio
    counts = [int(row.sample.loss_mask.sum()) for row in micro.rows]
    means = [part.mean().expand(len(part)) for part in torch.split(log_ratio, counts)]
    return torch.cat(means)


def token_weights(samples: Sequence[Sample], config: GrpoConfig) -> list[float]:
    """Return the weight of each sample's tokens in an update with `samples`.

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
