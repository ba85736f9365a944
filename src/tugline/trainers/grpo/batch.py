"""From trajectories to samples, and from samples to the tensors of one forward pass.

`prepare` decides what is trained: it gives every token its advantage and keeps the books, so that
over a whole step sampled = trained + masked + dropped (I2). It needs trajectories alone, so those
built again from recordings give the same samples. `pack` decides how it is
computed: traces of like length share a forward pass, and where asked, the ids that all of them
begin with are laid out once.

Sequences are padded on the right. With causal attention no token can see the padding, so a
padded sequence computes exactly what it computes alone and needs no attention mask.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from tugline.errors import CaptureError
from tugline.trainers.grpo.advantage import SessionReward, baselines, has_signal, turn_shares
from tugline.trainers.grpo.config import GrpoConfig
from tugline.types import Ledger, Logprobs, Mask, Reason, Sample, Trace, Trajectory

LEAD = 32
"""Shortest beginning worth sharing, and the ids by which candidates are found."""


class Prepared(NamedTuple):
    """What a step learns from, and the books of all of its sessions."""

    samples: tuple[Sample, ...]
    ledger: Ledger


@dataclass
class _LedgerBuilder:
    """A ledger while it is being added up."""

    sampled: int = 0
    trained: int = 0
    masked: Counter[Reason] = field(default_factory=Counter)
    dropped: Counter[Reason] = field(default_factory=Counter)

    def take_over(self, trajectory: Trajectory) -> None:
        """Add a session's own ledger, after checking it against its traces."""
        ledger = trajectory.ledger
        held = sum(int(trace.mask.sum()) for trace in trajectory.traces)
        if not ledger.balanced or ledger.trained != held:
            msg = (
                f"session {trajectory.session}: its ledger {ledger} does not balance with the "
                f"{held} trained tokens in its traces"
            )
            raise CaptureError(msg)
        self.sampled += ledger.sampled
        self.trained += ledger.trained
        self.masked.update(ledger.masked)
        self.dropped.update(ledger.dropped)


def prepare(trajectories: Sequence[Trajectory], config: GrpoConfig, *, version: int) -> Prepared:
    """Give each token its advantage within its task; one sample per trace that trains anything.

    Sessions without a (finite) reward are dropped as SESSION_FAILED and count in no mean.
    `version` is the policy about to be updated; staleness is measured from it.
    """
    books = _LedgerBuilder()
    samples: list[Sample] = []
    by_task = sorted(trajectories, key=lambda one: (one.task, one.sample, one.session))
    for _, members in groupby(by_task, key=lambda one: one.task):
        group = list(members)
        earned = {one.session: rewards for one in group if (rewards := _rewards(one, config))}
        marks = [rewards.graded for rewards in earned.values()]
        against = baselines(marks, config.advantage, config.advantage_eps)
        measured = dict(zip(earned, against, strict=True))
        skipped = config.skip_zero_variance and not has_signal(marks)
        for one in group:
            books.take_over(one)
            if one.session in earned and not skipped:
                worth = [measured[one.session].advantage(r) for r in earned[one.session].by_trace]
                samples += _samples(one, worth, config, version, books)
                continue
            reason = Reason.NO_SIGNAL if one.session in earned else Reason.SESSION_FAILED
            books.trained -= one.ledger.trained
            books.dropped[reason] += one.ledger.trained
    ledger = Ledger(
        sampled=books.sampled,
        trained=books.trained,
        masked={reason: n for reason, n in books.masked.items() if n},
        dropped={reason: n for reason, n in books.dropped.items() if n},
    )
    return Prepared(tuple(samples), ledger)


class _Rewards(NamedTuple):
    """What a session earned, trace by trace and in sum."""

    by_trace: Sequence[float]
    graded: SessionReward


def _rewards(trajectory: Trajectory, config: GrpoConfig) -> _Rewards | None:
    """None without a finite outcome, which stands in for a trace that was not judged by itself."""
    reward, traces = trajectory.reward, trajectory.traces
    if reward is None or not math.isfinite(reward.value):
        return None
    by_trace = [reward.value] * len(traces)
    if config.reward == "per_trace" and reward.per_trace:
        if len(reward.per_trace) != len(traces):
            msg = (
                f"session {trajectory.session}: reward.per_trace has {len(reward.per_trace)} "
                f"numbers for {len(traces)} traces; there must be one for each trace, made by the "
                "builder that they were given under"
            )
            raise CaptureError(msg)
        by_trace = [one if math.isfinite(one) else reward.value for one in reward.per_trace]
    tokens = [int(trace.mask.sum()) for trace in traces]
    return _Rewards(by_trace, SessionReward.of(by_trace, tokens, otherwise=reward.value))


def _samples(
    trajectory: Trajectory,
    worth: Sequence[float],
    config: GrpoConfig,
    version: int,
    books: _LedgerBuilder,
) -> Iterator[Sample]:
    """`worth` is the advantage of each trace."""
    shares: Mapping[int, float] = {}
    if config.turn_discount is not None:
        spans = (span for trace in trajectory.traces for span in trace.spans)
        trained = [span.call for span in spans if span.masked is None]
        shares = turn_shares(trained, config.turn_discount)
    for trace, advantage in zip(trajectory.traces, worth, strict=True):
        versions = _versions(trace)
        mask = trace.mask
        if config.max_staleness is not None:
            stale = mask & (versions < version - config.max_staleness)
            mask = mask & ~stale
            books.trained -= int(stale.sum())
            books.masked[Reason.STALE] += int(stale.sum())
        if mask.any():
            yield Sample(
                input_ids=trace.ids,
                loss_mask=mask,
                logprobs=trace.logprobs,
                versions=versions,
                advantages=_advantages(trace, mask, advantage, shares),
                group=trajectory.task,
                session=trajectory.session,
            )


def _advantages(
    trace: Trace, mask: Mask, advantage: float, shares: Mapping[int, float]
) -> Logprobs:
    """Per token; `shares` are those of the calls, 1 for a call that is not among them."""
    spread = np.full(len(trace.ids), advantage, np.float32)
    for span in trace.spans:
        spread[span.start : span.end] = advantage * shares.get(span.call, 1.0)
    return np.where(mask, spread, np.float32(0))


def _versions(trace: Trace) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    versions = np.full(len(trace.ids), -1, np.int32)
    for span in trace.spans:
        versions[span.start : span.end] = span.version
    return versions


# --------------------------------------------------------------------------- tensors
class Row(NamedTuple):
    """A sample on its way through the model."""

    sample: Sample
    weight: float = 0.0
    """What each of its trained tokens' losses counts for in the update."""
    old: Logprobs | None = None
    """Log probabilities of its trained tokens under the weights before the update."""

    @property
    def length(self) -> int:
        """Tokens in the sequence."""
        return len(self.sample.input_ids)


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. `ids` is ``(B, L)``; the rest is one entry per trained token, ``(N,)``."""

    rows: tuple[Row, ...]
    ids: torch.Tensor
    prefix: int
    """All rows begin with the same `prefix` ids, none of which are trained or predict any that
    are; 0 for the plain way."""
    row: torch.Tensor
    column: torch.Tensor
    behaviour: torch.Tensor
    old: torch.Tensor
    advantage: torch.Tensor
    weight: torch.Tensor
    version: torch.Tensor

    @property
    def computed(self) -> int:
        """Positions that go through the model, padding included."""
        return self.prefix + self.ids.shape[0] * (self.ids.shape[1] - self.prefix)

    @property
    def padding(self) -> int:
        """How many of them are padding."""
        return self.ids.numel() - sum(row.length for row in self.rows)


def pack(
    rows: Sequence[Row], *, micro_tokens: int, share: bool, device: torch.device
) -> Iterator[MicroBatch]:
    """Forward passes of at most `micro_tokens` positions each; a longer trace goes alone."""
    for family in _families(rows) if share else [list(rows)]:
        prefix = shared_prefix(family) if share else 0
        for chunk in _chunks(sorted(family, key=lambda row: row.length), prefix, micro_tokens):
            yield collate(chunk, prefix if len(chunk) > 1 else 0, device)


def _families(rows: Sequence[Row]) -> list[list[Row]]:
    families: dict[bytes, list[Row]] = {}
    for row in rows:
        families.setdefault(row.sample.input_ids[:LEAD].tobytes(), []).append(row)
    return list(families.values())


def shared_prefix(rows: Sequence[Row]) -> int:
    """How many ids all rows begin with and may share; 0 where that is not worth it."""
    first = rows[0].sample.input_ids
    shared = min(int(row.sample.loss_mask.argmax()) - 1 for row in rows)
    for row in rows[1:]:
        shared = max(0, shared)
        differ = np.flatnonzero(row.sample.input_ids[:shared] != first[:shared])
        shared = int(differ[0]) if len(differ) else shared
    return shared if shared >= LEAD else 0


def _chunks(rows: list[Row], prefix: int, micro_tokens: int) -> Iterator[list[Row]]:
    """Cut rows, shortest first, where the next would no longer fit."""
    chunk: list[Row] = []
    for row in rows:
        if chunk and prefix + (len(chunk) + 1) * (row.length - prefix) > micro_tokens:
            yield chunk
            chunk = []
        chunk.append(row)
    if chunk:
        yield chunk


def collate(rows: Sequence[Row], prefix: int, device: torch.device) -> MicroBatch:
    """Lay rows out as tensors, padded on the right with id 0."""
    ids = np.zeros((len(rows), max(row.length for row in rows)), np.int64)
    for line, row in zip(ids, rows, strict=True):
        line[: row.length] = row.sample.input_ids
    where = [np.flatnonzero(row.sample.loss_mask) for row in rows]
    counts = [len(columns) for columns in where]
    captured = [row.sample.logprobs[at] for row, at in zip(rows, where, strict=True)]
    old = [c if row.old is None else row.old for row, c in zip(rows, captured, strict=True)]

    def tensor(values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype).to(device)

    versions = [row.sample.versions[at] for row, at in zip(rows, where, strict=True)]
    advantages = [row.sample.advantages[at] for row, at in zip(rows, where, strict=True)]
    return MicroBatch(
        rows=tuple(rows),
        ids=tensor(ids, torch.long),
        prefix=prefix,
        row=tensor(np.repeat(np.arange(len(rows)), counts), torch.long),
        column=tensor(np.concatenate(where), torch.long),
        behaviour=tensor(np.concatenate(captured), torch.float32),
        old=tensor(np.concatenate(old), torch.float32),
        advantage=tensor(np.concatenate(advantages), torch.float32),
        weight=tensor(np.repeat([row.weight for row in rows], counts), torch.float32),
        version=tensor(np.concatenate(versions), torch.long),
    )
