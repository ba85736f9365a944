"""One GRPO step: rewarded sessions in, updated weights and a report out.

`Grpo.step` prepares samples, measures how exactly the weights reproduce the captured log
probabilities (I1), shuffles sessions into updates, and makes the updates. A session is in one
update with all of its traces, so it counts once and the number of updates does not depend on the
builder. The report has the ledger of the whole step (I2).

An update that has no gradient, or one that is not finite, is not applied: it moves no weight, not
even by momentum or weight decay.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from tugline import log
from tugline.errors import ConfigError
from tugline.trainers.grpo.batch import MicroBatch, Row, collate, pack
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.distributed import add_up, clip_gradient, gather
from tugline.trainers.grpo.forward import PolicyModel, make_probe
from tugline.trainers.grpo.loss import token_terms, token_weights
from tugline.trainers.grpo.mismatch import MismatchReport, Recomputed, summarize
from tugline.trainers.grpo.samples import make_samples, prepare
from tugline.types import Ids, Ledger, Logprobs, Reason, Sample, Trajectory

_log = log.get("trainer")


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did. Means are over the trained tokens of its updates; 0 without any."""

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


@dataclass
class _Update:
    """Sums over the forward passes of one update; `tokens` counts trained ones."""

    sessions: frozenset[str]
    recomputed: list[Recomputed] = field(default_factory=list)
    culprits: tuple[str, ...] = ()
    """Sessions whose loss or gradient is not finite; the update was skipped if there are any."""
    tokens: int = 0
    forwarded: int = 0
    padding: int = 0
    loss: float = 0.0
    kl: float = 0.0
    clipped: float = 0.0
    bounded: float = 0.0
    ratio: float = 0.0
    grad_norm: float = 0.0

    def add_up(self, device: torch.device) -> None:
        """Add the sums of the other ranks."""
        names = ("tokens", "forwarded", "padding", "loss", "kl", "clipped", "bounded", "ratio")
        values = [getattr(self, name) for name in names]
        for name, value, total in zip(names, values, add_up(values, device), strict=True):
            setattr(self, name, type(value)(total))


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
        _check_dtypes(model)
        self.model = model
        self.config = config
        self.policy = PolicyModel(model, config)
        self.reference = PolicyModel(reference, config) if reference is not None else None
        self.optimizer = _optimizer(model, config)
        self.order = torch.Generator().manual_seed(config.seed)
        """Order of sessions in updates; part of every checkpoint."""
        self.updates = 0
        """Optimizer updates so far, over all steps."""

    def step(self, trajectories: Sequence[Trajectory], *, version: int) -> StepReport:
        """Learn from `trajectories`, of which those of one task are one group.

        `version` is the number of the weights as they are before this step. Under torchrun every
        rank calls it, with any part of the trajectories, and gets the same report.
        """
        began = time.perf_counter()
        samples, ledger = prepare(gather(trajectories), self.config, version=version)
        rows = [Row(sample) for sample in samples]
        recomputed: list[Recomputed] = []
        if self._needs_own_pass(samples):
            recomputed = self._recompute(rows)
        if self.config.importance is not None:
            rows = [Row(one.sample, old=one.logprobs) for one in recomputed]
        updates = [
            self._update(chosen)
            for _ in range(self.config.epochs)
            for chosen in self._shuffle(rows)
        ]
        if updates and not recomputed:
            recomputed = _collect(samples, updates[0].recomputed)
        seconds = time.perf_counter() - began
        return self._report(updates, samples, ledger, summarize(recomputed), seconds)

    @torch.no_grad()
    def score(self, ids: Ids) -> Logprobs:
        """Return the log probability of each id but the first, shape ``(n - 1,)``."""
        rows = [Row(make_probe(ids))]
        tree = self.config.tree_packing
        micro = collate(rows, tree=tree, device=self.policy.device)
        return self.policy.logprobs(micro).cpu().numpy()

    def measure_mismatch(self, trajectories: Sequence[Trajectory]) -> MismatchReport | None:
        """Compare captured log probabilities with those of the weights as they are.

        Right after a publication, sessions of the new version show whether it arrived and whether
        the engine computes what the trainer does, however stale the data of later steps will be.
        None without any token to compare.
        """
        samples = make_samples(gather(trajectories))
        return summarize(self._recompute([Row(sample) for sample in samples]))

    def _needs_own_pass(self, samples: Sequence[Sample]) -> bool:
        """Whether old log probabilities need a pass of their own.

        A single update starts with the same forward pass.
        """
        single = len({sample.session for sample in samples}) <= self.config.sessions_per_update
        return not single or self.config.importance is not None

    @torch.no_grad()
    def _recompute(self, rows: Sequence[Row]) -> list[Recomputed]:
        """Return log probabilities under the weights as they are."""
        recomputed: list[Recomputed] = []
        for micro in self._pack(rows):
            recomputed += _split(self.policy.logprobs(micro), micro)
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

    def _update(self, rows: Sequence[Row]) -> _Update:
        """One optimizer update, unless its gradient is zero or not finite."""
        figures = _Update(frozenset(row.sample.session for row in rows))
        if not self._accumulate(rows, figures):
            figures.culprits = self._find_culprits(rows)
            self.optimizer.zero_grad(set_to_none=True)
            _log.warning("update skipped, not finite", sessions=figures.culprits)
        elif figures.grad_norm > 0:
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate
            self.optimizer.step()
            self.updates += 1
        return figures

    def _accumulate(self, rows: Sequence[Row], figures: _Update) -> bool:
        """Add up the gradient of `rows` over forward passes, and clip it; whether it is finite."""
        self.optimizer.zero_grad(set_to_none=True)
        for micro in self._pack(rows):
            self._backward(micro, figures)
        figures.add_up(self.policy.device)
        figures.grad_norm = clip_gradient(self.model, self.config.max_grad_norm)
        return math.isfinite(figures.grad_norm) and math.isfinite(figures.loss)

    def _find_culprits(self, rows: Sequence[Row]) -> tuple[str, ...]:
        """Return the sessions whose own gradient is not finite; all, if only their sum is not."""
        sessions = sorted({row.sample.session for row in rows})
        alone = {name: [row for row in rows if row.sample.session == name] for name in sessions}
        found = [
            name for name, own in alone.items() if not self._accumulate(own, _Update(frozenset()))
        ]
        return tuple(found or sessions)

    def _backward(self, micro: MicroBatch, figures: _Update) -> None:
        """Accumulate the gradient and the figures of one forward pass."""
        new = self.policy.logprobs(micro)
        with torch.no_grad():
            reference = self.reference.logprobs(micro) if self.reference else None
        terms = token_terms(new, micro, reference, self.config)
        loss = (terms.loss * micro.weight).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        figures.recomputed += _split(new.detach(), micro)
        figures.tokens += len(new)
        figures.forwarded += micro.computed - micro.padding
        figures.padding += micro.padding
        figures.loss += float(loss.detach())
        figures.kl += float(terms.kl.sum())
        figures.clipped += float(terms.clipped.sum())
        figures.bounded += float(terms.bounded.sum())
        figures.ratio += float(terms.ratio.sum())

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update; a function of the config and of `updates` alone."""
        config, warmup = self.config, self.config.warmup_updates
        if self.updates < warmup:
            return config.lr * (self.updates + 1) / warmup
        if config.decay_updates is None:
            return config.lr
        left = max(0.0, 1 - (self.updates - warmup) / (config.decay_updates - warmup))
        if config.decay == "cosine":
            left = (1 - math.cos(math.pi * left)) / 2
        return config.lr * (config.final_lr + (1 - config.final_lr) * left)

    def _pack(self, rows: Sequence[Row]) -> Iterator[MicroBatch]:
        return pack(
            rows,
            micro_tokens=self.config.micro_tokens,
            tree=self.config.tree_packing,
            device=self.policy.device,
        )

    def _report(
        self,
        updates: Sequence[_Update],
        samples: Sequence[Sample],
        ledger: Ledger,
        mismatch: MismatchReport | None,
        seconds: float,
    ) -> StepReport:
        finite = [one for one in updates if not one.culprits]
        applied = [one for one in finite if one.grad_norm > 0]
        learned = frozenset[str]().union(*(one.sessions for one in finite))
        lost = sum(int(one.loss_mask.sum()) for one in samples if one.session not in learned)
        ledger = _drop(ledger, Reason.NON_FINITE, lost)
        tokens = max(1, sum(one.tokens for one in finite))
        count = max(1, len(finite))
        return StepReport(
            updates=len(applied),
            updates_skipped=len(updates) - len(finite),
            skipped_because_of=tuple(sorted({name for one in updates for name in one.culprits})),
            samples=len(samples),
            tokens_trained=ledger.trained,
            tokens_forwarded=sum(one.forwarded for one in updates),
            tokens_padding=sum(one.padding for one in updates),
            loss=sum(one.loss for one in finite) / count,
            kl=sum(one.kl for one in finite) / tokens if self.reference else None,
            clip_fraction=sum(one.clipped for one in finite) / tokens,
            importance_bounded=sum(one.bounded for one in finite) / tokens,
            ratio_mean=sum(one.ratio for one in finite) / tokens,
            grad_norm=sum(one.grad_norm for one in finite) / count,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            seconds=seconds,
            mismatch=mismatch,
            ledger=ledger,
        )


def _check_dtypes(model: torch.nn.Module) -> None:
    """Refuse trained weights of less than float32. Raises `ConfigError`."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in {torch.bfloat16, torch.float16}:
            msg = (
                f"parameter {name} is {parameter.dtype}: AdamW's small changes are lost to "
                "rounding; load the model with dtype=torch.float32, and let autocast be 'bfloat16' "
                "to compute in that"
            )
            raise ConfigError(msg)


def _split(new: torch.Tensor, micro: MicroBatch) -> list[Recomputed]:
    """Divide log probabilities of a forward pass among its samples."""
    counts = [int(row.sample.loss_mask.sum()) for row in micro.rows]
    parts = torch.split(new.cpu(), counts)
    return [
        Recomputed(row.sample, part.numpy()) for row, part in zip(micro.rows, parts, strict=True)
    ]


def _collect(samples: Sequence[Sample], recomputed: Sequence[Recomputed]) -> list[Recomputed]:
    """Return the log probabilities that all ranks computed, in the order of `samples`."""
    number = {id(sample): n for n, sample in enumerate(samples)}
    own = [(number[id(one.sample)], one.logprobs) for one in recomputed if id(one.sample) in number]
    return [Recomputed(samples[n], found) for n, found in sorted(gather(own), key=lambda it: it[0])]


def _drop(ledger: Ledger, reason: Reason, count: int) -> Ledger:
    """Count `count` trained tokens as dropped instead."""
    if not count:
        return ledger
    dropped = ledger.dropped | {reason: count}
    return msgspec.structs.replace(ledger, trained=ledger.trained - count, dropped=dropped)


def _optimizer(model: torch.nn.Module, config: GrpoConfig) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)
