"""Optimizer updates of a model from rows of samples, with any loss.

The gradient of an update is the sum over its forward passes, and over ranks. An update with a zero
or non-finite gradient is not applied: no weight changes, not even by momentum or weight decay.

The difference between the log probabilities of engine and trainer is measured here as well (I1):
equal weights must give a token the log probability captured when it was sampled. `Mismatch`
describes the whole distribution of the difference, because a mean hides a few wrong contexts and a
maximum hides a broad loss of precision.
"""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from tugline import log
from tugline.errors import ConfigError
from tugline.trainers.grpo.batch import MicroBatch, Row
from tugline.trainers.grpo.config import UpdateConfig
from tugline.trainers.grpo.distributed import add_up, clip_gradient, gather
from tugline.trainers.grpo.forward import PolicyModel, TokenLoss
from tugline.trainers.grpo.hub import check_names, get_base_model
from tugline.trainers.grpo.loss import cross_entropy
from tugline.trainers.grpo.packing import pack
from tugline.trainers.lora import find_trained
from tugline.types import Logprobs, Sample

_log = log.get("trainer")


class Recomputed(NamedTuple):
    """A sample with the trainer's log probabilities of its trained tokens, shape ``(k,)``."""

    sample: Sample
    logprobs: Logprobs


@dataclass
class Update:
    """Report of an update."""

    sessions: frozenset[str]
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Sums over forward passes: ``tokens`` trained, ``forwarded`` positions without padding,
    ``padding``, ``separate`` (positions if traces shared none), ``loss``, and the figures added by
    `Updater.make_loss`."""
    recomputed: list[Recomputed] = field(default_factory=list)
    culprits: tuple[str, ...] = ()
    """Sessions whose loss or gradient is not finite; the update was skipped if there are any."""
    grad_norm: float = 0.0
    """Norm of the gradient before clipping."""
    _pending: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, values: torch.Tensor) -> None:
        """Add the sum of `values` to a figure at the next `collect`, without waiting for it."""
        total = values.detach().sum(dtype=torch.float64)
        self._pending[name] = self._pending.get(name, 0.0) + total

    def collect(self) -> None:
        """Add what is pending to `sums`, which waits for the device."""
        for name, total in self._pending.items():
            self.sums[name] += float(total)
        self._pending.clear()


Chosen = Mapping[str, Sequence[Row]]
"""Rows with a cross entropy, by the name of their term of the loss."""
NONE_CHOSEN: Chosen = MappingProxyType({})


class Updater(ABC):
    """Trains `model` in place; a subclass defines the loss of a token."""

    def __init__(
        self, model: torch.nn.Module, config: UpdateConfig, source: Path | None = None
    ) -> None:
        """`source` is the folder that the model was loaded from.

        Weights are written in its names and files, with what is not trained. Raises `ConfigError`
        for a model that cannot be trained, or not be written so.
        """
        _check_dtypes(model)
        if source is not None:
            check_names(get_base_model(model), find_trained(model).items(), source)
        self.model = model
        self.source = source
        self.policy = PolicyModel(model, config)
        self.config = self.policy.config
        self.optimizer: torch.optim.Optimizer = _make_adamw(model, config)
        """A parameter group's ``initial_lr``, if set, replaces the learning rate of `config`."""
        self.order = torch.Generator().manual_seed(config.seed)
        """Random generator of the order of sessions; part of every checkpoint."""
        self.updates = 0
        """Number of optimizer updates so far."""

    @abstractmethod
    def make_loss(self, micro: MicroBatch, figures: Update) -> TokenLoss:
        """Return the function that computes the losses of a pass's tokens, without their weights.

        It adds its statistics to `figures`. See `needs_whole_traces` for the tokens that it gets.
        """

    def make_bonus(self, micro: MicroBatch, figures: Update) -> TokenLoss | None:
        """Return the function that computes losses of the entropies of a pass's tokens, if any.

        Their divisor is the number of trained tokens of the update.
        """
        return None

    @property
    def has_own_figures(self) -> bool:
        """Whether the loss is a function of the user, whose figures are not known beforehand."""
        return False

    @property
    def needs_whole_traces(self) -> bool:
        """Whether the loss of a token depends on other tokens: then it gets all at once."""
        return False

    @property
    def learning_rate_share(self) -> float:
        """Learning rate of the next update, as a share of `lr`."""
        config = self.config
        warmup = config.warmup_updates
        if self.updates < warmup:
            return (self.updates + 1) / warmup
        if config.decay_updates is None:
            return 1.0
        left = max(0.0, 1 - (self.updates - warmup) / (config.decay_updates - warmup))
        if config.decay == "cosine":
            left = (1 - math.cos(math.pi * left)) / 2
        return config.final_lr + (1 - config.final_lr) * left

    def apply(self, rows: Sequence[Row], chosen: Chosen = NONE_CHOSEN) -> Update:
        """Make one optimizer update, unless its gradient is zero or not finite.

        The loss of the rows in `chosen` is the cross entropy.
        """
        figures = Update(frozenset(row.sample.session for row in rows))
        if not self._accumulate(rows, figures, chosen):
            figures.culprits = self._find_culprits(rows, chosen)
            self.optimizer.zero_grad(set_to_none=True)
            _log.warning("update skipped, not finite", sessions=figures.culprits)
        elif figures.grad_norm > 0:
            for group in self.optimizer.param_groups:
                group["lr"] = group.get("initial_lr", self.config.lr) * self.learning_rate_share
            self.optimizer.step()
            self.updates += 1
        return figures

    def _accumulate(self, rows: Sequence[Row], figures: Update, chosen: Chosen) -> bool:
        """Accumulate and clip the gradient of rows; return whether it is finite."""
        self.optimizer.zero_grad(set_to_none=True)
        trained = sum(row.sample.trained for row in rows)
        for micro in self.pack(rows):
            self._backward(micro, figures, len(micro.target) / max(1, trained))
        for term, others in chosen.items():
            for micro in self.pack(others):
                self._imitate(micro, figures, term)
        names = [*figures.sums]
        if self.has_own_figures:  # which a rank without rows does not have
            names = sorted({*gather(names)})
        totals = add_up([figures.sums[name] for name in names], self.policy.device)
        figures.sums.update(zip(names, totals, strict=True))
        figures.grad_norm = clip_gradient(self.model, self.config.max_grad_norm)
        return math.isfinite(figures.grad_norm) and math.isfinite(figures.sums["loss"])

    def _find_culprits(self, rows: Sequence[Row], chosen: Chosen) -> tuple[str, ...]:
        """Return the sessions whose own gradient is not finite; all if only the sum is not."""
        every = [*rows, *(row for others in chosen.values() for row in others)]
        sessions = sorted({row.sample.session for row in every})

        def is_finite(name: str) -> bool:
            def select(some: Sequence[Row]) -> list[Row]:
                return [row for row in some if row.sample.session == name]

            others = {term: select(some) for term, some in chosen.items()}
            return self._accumulate(select(rows), Update(frozenset()), others)

        culprits = [name for name in sessions if not is_finite(name)]
        return tuple(culprits or sessions)

    def _backward(self, micro: MicroBatch, figures: Update, share: float) -> None:
        """Accumulate the gradient and the figures of one forward pass.

        `share` is that of its trained tokens in those of the update.
        """
        make_losses = self.make_loss(micro, figures)

        def compute_loss(new: torch.Tensor, tokens: slice) -> torch.Tensor:
            losses = make_losses(new, tokens) * micro.weight[tokens]
            figures.add("loss", losses)
            return losses

        bonus = self.make_bonus(micro, figures)

        def compute_bonus(entropy: torch.Tensor, tokens: slice) -> torch.Tensor:
            assert bonus is not None  # noqa: S101 - it is not called otherwise
            losses = bonus(entropy, tokens) * (share / max(1, len(micro.target)))
            figures.add("loss", losses)
            figures.add("term/entropy", losses)
            return losses

        def balance() -> torch.Tensor:
            loss = share * self.policy.routes.balance(micro.real)
            figures.add("load_balancing", loss)
            return self.config.load_balancing * loss

        new = self.policy.backward(
            micro,
            compute_loss,
            whole=self.needs_whole_traces,
            bonus=compute_bonus if bonus is not None else None,
            further=balance if self.config.load_balancing > 0 else None,
        )
        self.policy.routes.compare(micro.experts)
        figures.recomputed += split_by_sample(new, micro)
        figures.sums["tokens"] += len(new)
        self._count_positions(micro, figures)

    def _imitate(self, micro: MicroBatch, figures: Update, term: str) -> None:
        """Accumulate the gradient and the figures of the cross entropy of one forward pass."""

        def compute_loss(new: torch.Tensor, tokens: slice) -> torch.Tensor:
            losses = cross_entropy(new, micro.weight[tokens])
            figures.add("loss", losses)
            figures.add(f"term/{term}", losses)
            return losses

        self.policy.backward(micro, compute_loss)
        self._count_positions(micro, figures)

    def _count_positions(self, micro: MicroBatch, figures: Update) -> None:
        """Add the positions of a pass to the figures, and what is pending."""
        figures.sums["forwarded"] += micro.computed - micro.padding
        figures.sums["padding"] += micro.padding
        figures.collect()
        figures.sums["separate"] += sum(row.length for row in micro.rows)

    def pack(self, rows: Sequence[Row]) -> Iterator[MicroBatch]:
        """Yield the forward passes of `rows`."""
        return pack(rows, self.config, self.policy.device, self.policy.costs)


def split_by_sample(new: torch.Tensor, micro: MicroBatch) -> list[Recomputed]:
    """Split the log probabilities of a forward pass by sample."""
    parts = torch.split(new.cpu(), micro.counts)
    return [
        Recomputed(row.sample, part.numpy()) for row, part in zip(micro.rows, parts, strict=True)
    ]


def _check_dtypes(model: torch.nn.Module) -> None:
    """Raise `ConfigError` for trained weights with less precision than float32."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in {torch.bfloat16, torch.float16}:
            raise ConfigError(
                f"parameter {name} is {parameter.dtype}: AdamW's small changes are lost to "
                "rounding; load the model with dtype=torch.float32, and set autocast to 'bfloat16' "
                "to compute in that type"
            )


def _make_adamw(model: torch.nn.Module, config: UpdateConfig) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)


# --------------------------------------------------------------------------- mismatch
LARGE = 0.05
"""Difference in nats from which a token counts in `Mismatch.share_large`."""


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """Differences ``d = trainer - captured`` over some tokens, in nats."""

    tokens: int
    """Tokens with a finite difference; the other figures are over these, 0 without any."""
    non_finite: int
    """Tokens for which either log probability is not finite."""
    max_abs: float
    mean_abs: float
    p99_abs: float
    """99th percentile of ``|d|``."""
    k3: float
    """Mean of ``exp(d) - d - 1``, the divergence of the trainer's distribution from the engine's.
    """
    share_large: float
    """Share of tokens with ``|d|`` above 0.05."""
    effective_sample_size: float
    """``(sum w)^2 / (n sum w^2)`` with ``w = exp(d)`` (Kong 1992); 1 if all are equal."""

    @classmethod
    def of(cls, difference: npt.NDArray[np.float64]) -> Self:
        """Summarize differences, shape ``(n,)``."""
        d = difference[np.isfinite(difference)]
        n = len(d)
        absolute = np.abs(d) if n else np.zeros(1)
        weights = np.exp(d - d.max()) if n else np.ones(1)
        return cls(
            tokens=n,
            non_finite=len(difference) - n,
            max_abs=float(absolute.max()),
            mean_abs=float(absolute.mean()),
            p99_abs=float(np.quantile(absolute, 0.99)),
            k3=float(np.mean(np.expm1(d) - d)) if n else 0.0,
            share_large=float(np.mean(absolute > LARGE)),
            effective_sample_size=float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
        )


class MismatchReport(msgspec.Struct, frozen=True, kw_only=True):
    """Mismatch of all tokens, and by policy version, engine and harness."""

    total: Mismatch
    by_version: dict[int, Mismatch]
    """By the policy version that sampled the tokens. Versions older than the measured one differ
    because the weights have changed."""
    by_engine: dict[str, Mismatch]
    """By engine; tokens of an unknown engine are left out."""
    by_harness: dict[str, Mismatch]
    """By harness; tokens of an unknown harness are left out."""
    without_replay: Mismatch | None = None
    """That of some of the tokens if the trainer's routers choose the experts; None if `total` is
    not with replayed experts."""
    experts_changed: dict[int, float] = {}
    """Share of the tokens, contexts included, for which a layer's router would have chosen other
    experts than those that are replayed, by layer with a router."""


def summarize_mismatch(
    recomputed: Sequence[Recomputed],
    without_replay: Sequence[Recomputed] = (),
    experts_changed: Sequence[float] | None = None,
) -> MismatchReport | None:
    """Compare samples with recomputed log probabilities; None without any token."""
    if not recomputed:
        return None
    samples = [sample for sample, _ in recomputed]
    difference = _subtract_captured(recomputed)
    versions = [sample.versions[sample.loss_mask] for sample in samples]
    counts = [len(logprobs) for _, logprobs in recomputed]
    engines = np.repeat([sample.engine for sample in samples], counts)
    harnesses = np.repeat([sample.harness for sample in samples], counts)
    return MismatchReport(
        total=Mismatch.of(difference),
        by_version=_group(difference, np.concatenate(versions)),
        by_engine=_group(difference, engines),
        by_harness=_group(difference, harnesses),
        without_replay=Mismatch.of(_subtract_captured(without_replay)) if without_replay else None,
        experts_changed=dict(enumerate(experts_changed or ())),
    )


def _subtract_captured(recomputed: Sequence[Recomputed]) -> npt.NDArray[np.float64]:
    """Return the differences between recomputed and captured log probabilities."""
    captured = [sample.logprobs[sample.loss_mask] for sample, _ in recomputed]
    trainer = np.concatenate([logprobs for _, logprobs in recomputed]).astype(np.float64)
    return trainer - np.concatenate(captured)


def _group(
    difference: npt.NDArray[np.float64], keys: npt.NDArray[np.generic]
) -> dict[Any, Mismatch]:
    """Summarize differences by key, without the empty key."""
    return {
        key: Mismatch.of(difference[keys == key]) for key in np.unique(keys).tolist() if key != ""
    }
