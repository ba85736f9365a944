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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec
import torch

from tugline.errors import ConfigError
from tugline.traces.base import leave_out
from tugline.trainers.grpo.batch import MicroBatch, Row, collate
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.distributed import gather
from tugline.trainers.grpo.forward import PolicyModel, TokenLoss, make_probe
from tugline.trainers.grpo.hub import get_base_model
from tugline.trainers.grpo.loss import token_terms, token_weights
from tugline.trainers.grpo.routes import check_replay
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
    packing: float
    """Positions that the same traces would need without shared prefixes, divided by
    `tokens_forwarded`; 1 if nothing is shared."""
    loss: float
    """Mean over updates."""
    kl: float | None
    """Mean k3 divergence from the reference; None without a reference."""
    load_balancing: float
    """Load-balancing loss of a model with experts, before its weight; 0 if that is 0. Mean over
    updates."""
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
    """Trains `model` in place; the KL penalty is relative to `reference`.

    Without `reference`, it is relative to the model without its adapter.
    """

    config: GrpoConfig

    def __init__(
        self,
        model: torch.nn.Module,
        config: GrpoConfig,
        reference: torch.nn.Module | None = None,
        source: Path | None = None,
    ) -> None:
        """See `Updater`. Raises `ConfigError`."""
        adapted = hasattr(model, "peft_config")
        if config.kl > 0 and reference is None and not adapted:
            msg = f"kl is {config.kl}, which requires a reference model; give one, or set kl to 0"
            raise ConfigError(msg)
        super().__init__(model, config, source)
        name = type(get_base_model(model)).__name__
        self._replays = check_replay(self.policy.routes, name, wanted=config.replay_experts)
        self._adapter_off = adapted and config.kl > 0 and reference is None
        self._has_kl = self._adapter_off or reference is not None
        self.reference = PolicyModel(reference, self.config) if reference is not None else None

    def step(self, trajectories: Sequence[Trajectory], *, version: int) -> StepReport:
        """Train on `trajectories`; those of the same task are a group.

        `version` is the policy version before this step. Under torchrun every rank must call this
        method, with any part of the trajectories, and gets the same report.
        """
        began = time.perf_counter()
        routes = self.policy.routes
        routes.forget()
        samples, ledger = prepare(
            gather(trajectories),
            self.config,
            version=version,
            routers=routes.shape if self._replays else None,
        )
        rows = [Row(sample) for sample in samples]
        without_replay = self._compute_without_replay(rows) if self._replays else []
        corrected = self.config.importance is not None
        single = len({sample.session for sample in samples}) <= self.config.sessions_per_update
        # The first pass of a single update gives the old log probabilities.
        recomputed = self._recompute(rows) if corrected or not single else []
        changed = routes.take_shares(self.policy.device) if recomputed else None
        if corrected:
            rows = [Row(sample, old=logprobs) for sample, logprobs in recomputed]
        updates = list[Update]()
        for _ in range(self.config.epochs):
            for chosen in self._shuffle(rows):
                updates.append(self.apply(chosen))
                changed = changed or routes.take_shares(self.policy.device)
        if updates and not recomputed:
            recomputed = _collect(samples, updates[0].recomputed)
        mismatch = summarize_mismatch(recomputed, without_replay, changed)
        seconds = time.perf_counter() - began
        return self._report(updates, samples, ledger, mismatch, seconds)

    @torch.no_grad()
    def score(self, ids: Ids) -> Logprobs:
        """Return the log probability of each id but the first, shape ``(n - 1,)``."""
        rows = [Row(make_probe(ids))]
        tree = bool(self.config.tree_packing)
        micro = collate(rows, tree=tree, device=self.policy.device)
        return self.policy.logprobs(micro).cpu().numpy()

    @torch.no_grad()
    def _recompute(self, rows: Sequence[Row]) -> list[Recomputed]:
        """Return the log probabilities of rows under the current weights."""
        recomputed: list[Recomputed] = []
        for micro in self.pack(rows):
            recomputed += split_by_sample(self.policy.logprobs(micro), micro)
            self.policy.routes.compare(micro.experts)
        return _collect([row.sample for row in rows], recomputed)

    @torch.no_grad()
    def _compute_without_replay(self, rows: Sequence[Row]) -> list[Recomputed]:
        """Return the log probabilities of each rank's first pass under the routers' own choice."""
        recomputed: list[Recomputed] = []
        for micro in islice(self.pack(rows), 1):
            own = replace(micro, experts=None)
            recomputed += split_by_sample(self.policy.logprobs(own), own)
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

    def make_loss(self, micro: MicroBatch, figures: Update) -> TokenLoss:
        """Return the clipped policy loss of a pass's tokens."""
        reference = self._compute_reference(micro)

        def compute(new: torch.Tensor, tokens: slice) -> torch.Tensor:
            terms = token_terms(new, micro, reference, self.config, tokens)
            for name in ("kl", "clipped", "bounded", "ratio"):
                figures.add(name, getattr(terms, name))
            return terms.loss

        return compute

    @property
    def needs_whole_traces(self) -> bool:
        """Whether the ratio of a token is the mean over its trace."""
        return self.config.ratio_level == "trace"

    @torch.no_grad()
    def _compute_reference(self, micro: MicroBatch) -> torch.Tensor | None:
        """Return the reference's log probabilities, shape ``(N,)``; None without a reference."""
        if self._adapter_off:
            with self.policy.without_adapter() as reference:
                return reference.logprobs(micro)
        return self.reference.logprobs(micro) if self.reference else None

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
        lost = sum(s.trained for s in samples if s.session not in learned)
        ledger = leave_out(ledger, masked={}, dropped={Reason.NON_FINITE: lost})
        tokens = max(1, sum(update.sums["tokens"] for update in finite))
        count = max(1, len(finite))
        forwarded = sum(update.sums["forwarded"] for update in updates)
        return StepReport(
            updates=len(applied),
            updates_skipped=len(updates) - len(finite),
            skipped_because_of=tuple(sorted({name for u in updates for name in u.culprits})),
            samples=len(samples),
            tokens_trained=ledger.trained,
            tokens_forwarded=int(forwarded),
            tokens_padding=int(sum(update.sums["padding"] for update in updates)),
            packing=sum(update.sums["separate"] for update in updates) / max(1.0, forwarded),
            loss=sum(update.sums["loss"] for update in finite) / count,
            kl=sum(update.sums["kl"] for update in finite) / tokens if self._has_kl else None,
            load_balancing=sum(update.sums["load_balancing"] for update in finite) / count,
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
