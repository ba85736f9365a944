"""From samples to the tensors of one forward pass.

`pack` puts traces of similar length into one forward pass and, if asked, lays out the ids that all
of them begin with only once.

Sequences are padded on the right. With causal attention no token can attend to the padding, so a
padded sequence gives exactly what it gives alone and needs no attention mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tugline.types import Logprobs, Sample, shared_prefix

MIN_SHARED = 32
"""Shortest prefix worth sharing, and the number of ids by which candidates are grouped."""


class Row(NamedTuple):
    """A sample with its weight in an update."""

    sample: Sample
    weight: float = 0.0
    """Factor of each trained token's loss."""
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
    """Number of leading ids that all rows share; none is trained or predicts a trained id."""
    row: torch.Tensor
    column: torch.Tensor
    behaviour: torch.Tensor
    old: torch.Tensor
    advantage: torch.Tensor
    weight: torch.Tensor
    temperature: torch.Tensor

    @property
    def computed(self) -> int:
        """Positions computed by the model, padding included."""
        return self.prefix + self.ids.shape[0] * (self.ids.shape[1] - self.prefix)

    @property
    def padding(self) -> int:
        """Positions of padding among them."""
        return self.ids.numel() - sum(row.length for row in self.rows)


def pack(
    rows: Sequence[Row], *, micro_tokens: int, share: bool, device: torch.device
) -> Iterator[MicroBatch]:
    """Yield forward passes of at most `micro_tokens` positions; a longer trace gets its own."""
    for group in _group_by_start(rows) if share else [list(rows)]:
        prefix = _shared_prefix(group) if share else 0
        for chunk in _chunks(sorted(group, key=lambda row: row.length), prefix, micro_tokens):
            yield collate(chunk, prefix if len(chunk) > 1 else 0, device)


def _group_by_start(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[bytes, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.sample.input_ids[:MIN_SHARED].tobytes(), []).append(row)
    return list(groups.values())


def _shared_prefix(rows: Sequence[Row]) -> int:
    """Number of leading ids that all rows may share; 0 if fewer than `MIN_SHARED`."""
    first = rows[0].sample.input_ids
    shared = min(int(row.sample.loss_mask.argmax()) - 1 for row in rows)
    for row in rows[1:]:
        shared = min(shared, shared_prefix(row.sample.input_ids, first))
    return shared if shared >= MIN_SHARED else 0


def _chunks(rows: list[Row], prefix: int, micro_tokens: int) -> Iterator[list[Row]]:
    """Split rows, shortest first, where the next one would exceed `micro_tokens`."""
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

    temperatures = [row.sample.temperatures[at] for row, at in zip(rows, where, strict=True)]
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
        temperature=tensor(np.concatenate(temperatures), torch.float32),
    )
