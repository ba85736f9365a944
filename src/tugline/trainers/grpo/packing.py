"""Packing: the rows of an update are divided into forward passes, and the passes among ranks.

Passes are made first, of the rows of all ranks, and then dealt out by their estimated cost. The
ranks of a sharded model gather each layer together, so their first passes run at the same time, and
so do their second passes: a rank with a cheap pass waits for the others. Therefore the passes are
sorted, and each rank gets one of the `world` most expensive passes that are left.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from tugline.errors import CaptureError
from tugline.trainers.grpo.batch import EMPTY, MicroBatch, Row, collate
from tugline.trainers.grpo.config import UpdateConfig
from tugline.trainers.grpo.distributed import rank_and_world

DEFAULT_TOKENS = 16_384
"""`micro_tokens` if neither it nor the context window of the run is set."""


class Costs(NamedTuple):
    """Floating-point operations of a forward pass; see `forward.count_operations`."""

    token: float = 1.0
    """Operations for each token, in all layers."""
    pair: float = 0.0
    """Operations for each query and each key that it attends to."""
    trained: float = 0.0
    """Operations of the output layer for each trained token."""

    def estimate(self, rows: Sequence[Row], *, tree: bool) -> float:
        """Return the operations of a pass of `rows`, which are in the order of the pass."""
        lengths = [row.length for row in rows]
        shared = [0] * len(rows)
        if tree:
            shared[1:] = [row.count_shared(before) for before, row in pairwise(rows)]
        else:
            lengths = [max(lengths)] * len(rows)  # padded
        tokens = sum(lengths) - sum(shared)
        pairs = sum(n**2 - known**2 for n, known in zip(lengths, shared, strict=True)) / 2
        trained = sum(row.sample.trained for row in rows)
        return self.token * tokens + self.pair * pairs + self.trained * trained


def pack(
    rows: Sequence[Row], config: UpdateConfig, device: torch.device, costs: Costs
) -> Iterator[MicroBatch]:
    """Yield this rank's forward passes, of at most `micro_tokens` positions; see `divide`.

    A longer trace has a pass of its own. With `tree_packing` ``auto`` passes are trees;
    `PolicyModel.config` has the decision for a model. Every rank yields the same number of passes.
    Raises `CaptureError` for a trace whose first token is trained, because it has no context.
    """
    for row in rows:
        if row.sample.loss_mask[0]:
            msg = (
                f"session {row.sample.session}: loss_mask[0] is True, but the first token has "
                "no context to be predicted from"
            )
            raise CaptureError(msg)
    rank, world = rank_and_world()
    for turn in divide(rows, config, costs, world):
        yield collate(turn[rank], tree=bool(config.tree_packing), device=device)


def divide(
    rows: Sequence[Row], config: UpdateConfig, costs: Costs, world: int
) -> list[list[list[Row]]]:
    """Return, for each turn, the rows of each rank's forward pass; none has no rows."""
    tree = bool(config.tree_packing)
    passes = [
        (costs.estimate(part, tree=tree), part)
        for part in _split(rows, config.micro_tokens or DEFAULT_TOKENS, tree=tree)
    ]
    passes.sort(key=lambda item: -item[0])
    done = [0.0] * world
    turns = []
    for begin in range(0, len(passes), world):
        turn = [[Row(EMPTY)]] * world
        # without lockstep the sums count: the rank with the least so far gets the most expensive
        ranks = sorted(range(world), key=done.__getitem__)
        for rank, (cost, part) in zip(ranks, passes[begin : begin + world], strict=False):
            turn[rank] = part
            done[rank] += cost
        turns.append(turn)
    return turns


def _split(rows: Sequence[Row], micro_tokens: int, *, tree: bool) -> Iterator[list[Row]]:
    """Split rows before a forward pass would exceed `micro_tokens` positions.

    Rows of a tree are in `Row.order`; other rows are sorted, the shortest first.
    """
    if tree:
        ordered = sorted(rows, key=lambda row: row.order)
    else:
        ordered = sorted(rows, key=lambda row: row.length)
    chunk: list[Row] = []
    size = 0
    for row in ordered:
        if tree and chunk:
            size += row.length - row.count_shared(chunk[-1])
        else:
            size = (len(chunk) + 1) * row.length
        if chunk and size > micro_tokens:
            yield chunk
            chunk = []
            size = row.length
        chunk.append(row)
    if chunk:
        yield chunk
