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
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import torch

from tugline.errors import ConfigError
from tugline.traces.base import leave_out
from tugline.trainers.grpo.batch import MicroBatch, Row, collate
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.distributed import gather
from tugline.trainers.grpo.forward import PolicyModel, TokenLoss, make_probe
from tugline.trainers.grpo.hub import get_base_model
from tugline.trainers.grpo.loss import token_terms
from tugline.trainers.grpo.objectives import CustomLoss, find_loss
from tugline.trainers.grpo.routes import check_replay
from tugline.trainers.grpo.samples import RouterShape, list_samples, list_tool_tokens, prepare
from tugline.trainers.grpo.shaping import sum_terms
from tugline.trainers.grpo.tokens import TrainedTokens, find_largest_weight, token_weights
from tugline.trainers.grpo.update import (
    Chosen,
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
    terms: dict[str, float]
    """Terms of the loss, each with its coefficient and its divisor: ``policy``, ``kl``,
    ``entropy``, ``cross_entropy``, ``supervised``. Mean over updates."""
    figures: dict[str, float]
    """Figures of the loss by name, and ``entropy`` of the tokens' distributions if there is a bonus
    for it."""
    shaping: dict[str, float]
    """Sum over the sessions of what each term added to rewards, negative for penalties:
    ``kl_reward``, ``overlong``, ``efficiency``, ``malformed``, ``truncated``, ``repeated``."""
    kl: float | None
    """Mean k3 divergence from the reference; None without a reference."""
    load_balancing: float
    """Load-balancing loss of a model with experts, before its weight; 0 if that is 0. Mean over
    updates."""
    largest_session: float
    """Largest weight of a session in an update, as a multiple of the mean over its sessions."""
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
        wanted = config.needs_reference
        if wanted and reference is None and not adapted:
            msg = f"kl is {config.kl}, which requires a reference model; give one, or set kl to 0"
            if config.kl == 0:
                msg = "kl_reward and reference require a reference model; give one"
            raise ConfigError(msg)
        super().__init__(model, config, source)
        name = type(get_base_model(model)).__name__
        self._replays = check_replay(self.policy.routes, name, wanted=config.replay_experts)
        self._adapter_off = adapted and wanted and reference is None
        self._has_kl = self._adapter_off or reference is not None
        self.reference = PolicyModel(reference, self.config) if reference is not None else None
        self._loss = find_loss(config.loss)

    def step(
        self, trajectories: Sequence[Trajectory], *, version: int, supervised: Sequence[Sample] = ()
    ) -> StepReport:
        """Train on `trajectories`; those of the same task are a group.

        `version` is the policy version before this step. The cross entropy of `supervised` is a
        term of its own; these rows are divided among the updates. Under torchrun every rank
        must call this method, with any part of both, and gets the same report.
        """
        began = time.perf_counter()
        routes = self.policy.routes
        routes.forget()
        trajectories = gather(trajectories)
        supervised = gather(supervised)
        routers = routes.shape if self._replays else None
        penalties = self._compute_penalties(trajectories, version, routers)
        samples, ledger = prepare(
            trajectories, self.config, version=version, routers=routers, penalties=penalties
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
        largest = 0.0
        for _ in range(self.config.epochs):
            chosen = list(self._shuffle(rows))
            for number, minibatch in enumerate(chosen):
                largest = max(largest, find_largest_weight(minibatch))
                given = supervised[number :: len(chosen)]
                updates.append(self.apply(minibatch, self._choose_rows(minibatch, given)))
                changed = changed or routes.take_shares(self.policy.device)
        if updates and not recomputed:
            recomputed = _collect(samples, updates[0].recomputed)
        mismatch = summarize_mismatch(recomputed, without_replay, changed)
        seconds = time.perf_counter() - began
        report = self._report(updates, samples, ledger, mismatch, seconds)
        shaping = sum_terms(trajectories, self.config, penalties)
        return msgspec.structs.replace(report, largest_session=largest, shaping=shaping)

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

    def _choose_rows(self, rows: Sequence[Row], given: Sequence[Sample]) -> Chosen:
        """Return the rows of an update's cross entropies, with the weight of each token."""
        coefficient = self.config.cross_entropy
        terms = {"supervised": given}
        if self.config.tool_tokens:
            terms["cross_entropy"] = list_tool_tokens([row.sample for row in rows])
        chosen = dict[str, list[Row]]()
        for term, samples in terms.items():
            if coefficient and samples:
                weight = coefficient / max(1, sum(each.trained for each in samples))
                chosen[term] = [Row(each, weight=weight) for each in samples]
        return chosen

    def make_loss(self, micro: MicroBatch, figures: Update) -> TokenLoss:
        """Return the policy loss of a pass's tokens with its penalty."""
        whole = TrainedTokens.of(micro, self._compute_reference(micro), self.config)

        def compute(new: torch.Tensor, tokens: slice) -> torch.Tensor:
            chosen = whole if self.needs_whole_traces else whole.select(tokens)
            terms = token_terms(new, chosen, self.config, self._loss)
            for name, values in terms.terms.items():
                figures.add(f"term/{name}", values * chosen.weights)
            for name, values in terms.figures.items():
                figures.add(f"figure/{name}", values)
            return terms.loss

        return compute

    def make_bonus(self, micro: MicroBatch, figures: Update) -> TokenLoss | None:
        """Return the negative entropies, with their weight; None if there is no bonus."""
        if self.config.entropy == 0:
            return None

        def compute(entropy: torch.Tensor, _: slice) -> torch.Tensor:
            figures.add("figure/entropy", entropy)
            return -self.config.entropy * entropy

        return compute

    @property
    def has_own_figures(self) -> bool:
        """See `Updater`."""
        return isinstance(self._loss, CustomLoss)

    @property
    def needs_whole_traces(self) -> bool:
        """Whether the loss of a token depends on the other tokens of its trace."""
        return self.config.needs_whole_traces

    @torch.no_grad()
    def _compute_penalties(
        self, trajectories: Sequence[Trajectory], version: int, routers: RouterShape | None
    ) -> Mapping[str, float]:
        """Return what `kl_reward` subtracts from the reward of each session."""
        if self.config.kl_reward == 0:
            return {}
        samples = list_samples(trajectories, self.config, version=version, routers=routers)
        rows = [Row(sample) for sample in samples]
        if self.config.importance is not None:
            rows = [Row(sample, old=logprobs) for sample, logprobs in self._recompute(rows)]
        ratios: list[Recomputed] = []
        for micro in self.pack(rows):
            reference = self._compute_reference(micro)
            assert reference is not None  # noqa: S101 - required by the constructor
            ratios += split_by_sample(micro.old - reference, micro)
        return sum_by_session(_collect(samples, ratios), self.config.kl_reward)

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
        figures = _divide(finite, "figure/", tokens)
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
            terms=_divide(finite, "term/", count),
            figures=figures,
            kl=figures.get("kl") if self._has_kl else None,
            load_balancing=sum(update.sums["load_balancing"] for update in finite) / count,
            largest_session=0.0,
            shaping={},
            clip_fraction=figures.get("clipped", 0.0),
            importance_bounded=figures.get("bounded", 0.0),
            ratio_mean=figures.get("ratio", 0.0),
            grad_norm=sum(update.grad_norm for update in finite) / count,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            seconds=seconds,
            mismatch=mismatch,
            ledger=ledger,
        )


def _divide(updates: Sequence[Update], prefix: str, divisor: float) -> dict[str, float]:
    """Return the sums over updates whose names begin with `prefix`, divided."""
    names = {name for update in updates for name in update.sums if name.startswith(prefix)}
    return {
        name.removeprefix(prefix): sum(update.sums[name] for update in updates) / divisor
        for name in sorted(names)
    }


def sum_by_session(ratios: Sequence[Recomputed], weight: float) -> dict[str, float]:
    """Return the sum of the log ratios of each session's tokens, multiplied by `weight`."""
    sums: defaultdict[str, float] = defaultdict(float)
    for sample, values in ratios:
        sums[sample.session] += weight * float(values.sum(dtype=np.float64))
    return dict(sums)


def _collect(samples: Sequence[Sample], recomputed: Sequence[Recomputed]) -> list[Recomputed]:
    """Return the log probabilities that all ranks computed, in the order of `samples`."""
    number = {id(sample): n for n, sample in enumerate(samples)}
    own = [(number[id(s)], logprobs) for s, logprobs in recomputed if id(s) in number]
    ordered = sorted(gather(own), key=lambda part: part[0])
    return [Recomputed(samples[n], logprobs) for n, logprobs in ordered]
