"""One GRPO step: rewarded sessions in, updated weights and a report out.

`Grpo.step` prepares samples, measures how exactly the weights reproduce the captured log
probabilities, shuffles sessions into updates, and makes the updates. A session is in one update
with all of its traces, so it counts once and the number of updates does not depend on the builder.
The report has the ledger of the whole step (I2) and the largest difference between a captured and
a recomputed log probability, the measure of exact conditioning (I1).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from tugline.errors import ConfigError
from tugline.trainers.grpo.batch import MicroBatch, Row, pack
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.forward import PolicyModel
from tugline.trainers.grpo.loss import token_terms, token_weights
from tugline.trainers.grpo.samples import prepare
from tugline.types import Ledger, Sample, Trajectory


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did. Means are over the trained tokens of all updates; 0 without any."""

    updates: int
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
    ratio_mean: float
    grad_norm: float
    """Mean over updates, before clipping."""
    learning_rate: float
    seconds: float
    max_abs_dlogprob: float | None
    """Largest difference between a captured log probability and the one recomputed by a plain
    forward pass before the update, over tokens of the current version; None without any."""
    ledger: Ledger
    """All sessions of the step, after what the trainer masked and dropped."""


@dataclass
class _Update:
    """Sums over the forward passes of one update; `tokens` counts trained ones."""

    tokens: int = 0
    forwarded: int = 0
    padding: int = 0
    loss: float = 0.0
    kl: float = 0.0
    clipped: float = 0.0
    ratio: float = 0.0
    logprob_gap: float | None = None
    grad_norm: float = 0.0


class Grpo:
    """Trains `model` in place; `reference` is what the KL term is measured against."""

    def __init__(
        self,
        model: torch.nn.Module,
        config: GrpoConfig,
        reference: torch.nn.Module | None = None,
    ) -> None:
        if config.kl > 0 and reference is None:
            msg = f"kl is {config.kl}, so a reference model is needed; give one or set kl to 0"
            raise ConfigError(msg)
        self.model = model
        self.config = config
        self.policy = PolicyModel(model, config.temperature)
        self.reference = (
            PolicyModel(reference, config.temperature) if reference is not None else None
        )
        self.optimizer = _optimizer(model, config)
        self.order = torch.Generator().manual_seed(config.seed)
        """Order of sessions in updates; part of every checkpoint."""
        self.updates = 0
        """Optimizer updates so far, over all steps."""

    def step(self, trajectories: Sequence[Trajectory], *, version: int) -> StepReport:
        """Learn from `trajectories`, of which those of one task are one group.

        `version` is the number of the weights as they are before this step.
        """
        began = time.perf_counter()
        samples, ledger = prepare(trajectories, self.config, version=version)
        rows, gap = self._measure_gap(samples, version)
        updates = [
            self._update(chosen, version)
            for _ in range(self.config.epochs)
            for chosen in self._shuffle(rows)
        ]
        if gap is None and updates:
            gap = updates[0].logprob_gap
        return self._report(updates, samples, ledger, gap, time.perf_counter() - began)

    def _measure_gap(
        self, samples: Sequence[Sample], version: int
    ) -> tuple[list[Row], float | None]:
        """Return rows with old log probabilities, and the gap; skip it where the update gives them.

        A single update without prefix sharing starts with the same forward pass.
        """
        rows = [Row(sample) for sample in samples]
        sessions = {sample.session for sample in samples}
        single = len(sessions) <= self.config.sessions_per_update
        if single and not self.config.share_prefix and self.config.importance_cap is None:
            return rows, None
        gap: float | None = None
        recomputed: list[Row] = []
        with torch.no_grad():
            for micro in self._pack(rows, share=False):
                new = self.policy.logprobs(micro)
                gap = _largest(gap, _logprob_gap(new, micro, version))
                if self.config.importance_cap is None:
                    recomputed += micro.rows
                    continue
                counts = [int(row.sample.loss_mask.sum()) for row in micro.rows]
                parts = torch.split(new.cpu(), counts)
                recomputed += [
                    row._replace(old=part.numpy())
                    for row, part in zip(micro.rows, parts, strict=True)
                ]
        return recomputed, gap

    def _shuffle(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Split sessions at random into updates of even size; weight the tokens of each."""
        if not rows:
            return
        sessions: dict[str, list[Row]] = {}
        for row in rows:
            sessions.setdefault(row.sample.session, []).append(row)
        whole = list(sessions.values())
        shuffled = torch.randperm(len(whole), generator=self.order)
        for minibatch in shuffled.chunk(math.ceil(len(whole) / self.config.sessions_per_update)):
            chosen = [row for i in minibatch.tolist() for row in whole[i]]
            weights = token_weights([row.sample for row in chosen], self.config)
            yield [row._replace(weight=w) for row, w in zip(chosen, weights, strict=True)]

    def _update(self, rows: Sequence[Row], version: int) -> _Update:
        """One optimizer update; gradients add up over its forward passes."""
        figures = _Update()
        self.optimizer.zero_grad(set_to_none=True)
        for micro in self._pack(rows, share=self.config.share_prefix):
            self._backward(micro, version, figures)
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.config.max_grad_norm, error_if_nonfinite=True
        )
        figures.grad_norm = float(norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        self.optimizer.step()
        self.updates += 1
        return figures

    def _backward(self, micro: MicroBatch, version: int, figures: _Update) -> None:
        """Accumulate the gradient and the figures of one forward pass."""
        new = self.policy.logprobs(micro)
        with torch.no_grad():
            reference = self.reference.logprobs(micro) if self.reference else None
        terms = token_terms(
            new,
            old=micro.old,
            behaviour=micro.behaviour,
            advantage=micro.advantage,
            reference=reference,
            config=self.config,
        )
        loss = (terms.loss * micro.weight).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        figures.tokens += len(new)
        figures.forwarded += micro.computed - micro.padding
        figures.padding += micro.padding
        figures.loss += float(loss.detach())
        figures.kl += float(terms.kl.sum())
        figures.clipped += float(terms.clipped.sum())
        figures.ratio += float(terms.ratio.sum())
        figures.logprob_gap = _largest(
            figures.logprob_gap, _logprob_gap(new.detach(), micro, version)
        )

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        ramp = (self.updates + 1) / max(1, self.config.warmup_updates)
        return self.config.lr * min(1.0, ramp)

    def _pack(self, rows: Sequence[Row], *, share: bool) -> Iterator[MicroBatch]:
        return pack(
            rows, micro_tokens=self.config.micro_tokens, share=share, device=self.policy.device
        )

    def _report(
        self,
        updates: Sequence[_Update],
        samples: Sequence[Sample],
        ledger: Ledger,
        gap: float | None,
        seconds: float,
    ) -> StepReport:
        tokens = max(1, sum(one.tokens for one in updates))
        count = max(1, len(updates))
        return StepReport(
            updates=len(updates),
            samples=len(samples),
            tokens_trained=ledger.trained,
            tokens_forwarded=sum(one.forwarded for one in updates),
            tokens_padding=sum(one.padding for one in updates),
            loss=sum(one.loss for one in updates) / count,
            kl=sum(one.kl for one in updates) / tokens if self.reference else None,
            clip_fraction=sum(one.clipped for one in updates) / tokens,
            ratio_mean=sum(one.ratio for one in updates) / tokens,
            grad_norm=sum(one.grad_norm for one in updates) / count,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            seconds=seconds,
            max_abs_dlogprob=gap,
            ledger=ledger,
        )


def _optimizer(model: torch.nn.Module, config: GrpoConfig) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)


def _logprob_gap(new: torch.Tensor, micro: MicroBatch, version: int) -> float | None:
    """Largest deviation from the captured log probabilities of this version's tokens."""
    difference = (new - micro.behaviour).abs()[micro.version == version]
    return float(difference.max()) if len(difference) else None


def _largest(first: float | None, other: float | None) -> float | None:
    known = [value for value in (first, other) if value is not None]
    return max(known, default=None)
