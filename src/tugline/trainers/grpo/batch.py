"""Conversion of samples to the tensors of forward passes.

There are two layouts. ``tree`` stores a prefix tree over the token ids of several traces as one
sequence, so a shared prefix is computed once. Sharing depends on ids alone, because a causal model
computes equal states after equal ids; each trace keeps its own loss terms. ``plain`` batches traces
of similar length, padded on the right. With causal attention no token attends to the padding, so
the result for a trace is exactly that of the trace alone, without an attention mask.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from tugline.types import Ids, Logprobs, Mask, Sample, shared_prefix

Index = npt.NDArray[np.int64]
_KEYS_PER_TOKEN = 4


# --------------------------------------------------------------------------- the tree
class Branch(NamedTuple):
    """Consecutive tokens of a tree without a fork among them."""

    begin: int
    end: int
    parent: int
    """Number of the branch that it continues, which comes before it; -1 at the root."""


class TokenTree(NamedTuple):
    """The tokens of several rows, with each shared prefix once; ``n`` tokens in total."""

    ids: Ids
    """Shape ``(n,)``."""
    positions: Index
    """Distance of each token from the root, shape ``(n,)``."""
    places: list[Index]
    """Indices in `ids` of the tokens of each row."""
    runs: list[tuple[int, Index]]
    """Length of each run, in order, and its path: indices of the tokens from the root to its end.
    """
    forks: set[int]
    """Ends of the prefixes at which another run begins."""

    def list_branches(self) -> list[Branch]:
        """Return the runs divided at forks."""
        branches: list[Branch] = []
        ending: dict[int, int] = {}
        forks = sorted(self.forks)
        start = 0
        for length, path in self.runs:
            stop = start + length
            parent = ending[int(path[-length - 1]) + 1] if len(path) > length else -1
            cuts = [*forks[bisect_right(forks, start) : bisect_left(forks, stop)], stop]
            for begin, end in zip([start, *cuts], cuts, strict=False):
                branches.append(Branch(begin, end, parent))
                parent = ending[end] = len(branches) - 1
            start = stop
        return branches


@dataclass(frozen=True)
class PathGroup:
    """Consecutive runs whose keys are gathered together."""

    gather: torch.Tensor
    """Positions of the keys of all paths, ``(k,)``."""
    queries: list[int]
    """Number of tokens of each run."""
    keys: list[int]
    """Number of tokens of each path."""


@dataclass(frozen=True)
class TreePaths:
    """The paths of all runs, as inputs of the attention."""

    groups: list[PathGroup]
    branches: list[Branch]
    """Runs divided at forks, for layers with a state."""

    @classmethod
    def of(cls, tree: TokenTree, device: torch.device) -> Self:
        """Return the paths of `tree` on `device`.

        Runs are grouped so that a group has at most `_KEYS_PER_TOKEN` times as many keys as the
        tree has tokens: together, the paths of forty turns have about twenty times as many.
        """
        most = _KEYS_PER_TOKEN * len(tree.ids)
        groups: list[list[tuple[int, Index]]] = []
        size = most
        for run in tree.runs:
            size += len(run[1])
            if size > most:
                groups.append([])
                size = len(run[1])
            groups[-1].append(run)
        return cls([_join_paths(group, device) for group in groups], tree.list_branches())


def _join_paths(runs: Sequence[tuple[int, Index]], device: torch.device) -> PathGroup:
    queries, paths = zip(*runs, strict=True)
    gather = torch.from_numpy(np.concatenate(paths)).to(device)
    return PathGroup(gather, list(queries), [len(path) for path in paths])


def prefix_order(ids: Ids) -> bytes:
    """Return a sort key that puts rows with a common prefix side by side, the shorter first."""
    return ids.astype(">i4").tobytes()


def build_tree(rows: Sequence[Ids]) -> TokenTree:
    """Build the prefix tree of rows, which must be sorted by `prefix_order`."""
    places: list[Index] = []
    runs: list[tuple[int, Index]] = []
    pieces: list[Ids] = []
    forks: set[int] = set()
    count = 0
    last = np.empty(0, np.int32)
    for ids in rows:
        shared = shared_prefix(ids, last)
        own = np.arange(count, count + len(ids) - shared)
        place = np.concatenate((places[-1][:shared], own)) if places else own
        if runs and shared == len(last):
            runs[-1] = (runs[-1][0] + len(own), place)
        elif len(own):
            runs.append((len(own), place))
            if shared:
                forks.add(int(place[shared - 1]) + 1)
        places.append(place)
        pieces.append(ids[shared:])
        count += len(own)
        last = ids
    depths = [np.arange(len(path) - length, len(path)) for length, path in runs]
    return TokenTree(np.concatenate(pieces), np.concatenate(depths), places, runs, forks)


# --------------------------------------------------------------------------- passes
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
    """Inputs of a forward pass: `ids` of shape ``(B, L)``, and values per trained token, ``(N,)``.

    Trained tokens are in the order of `rows`.
    """

    rows: tuple[Row, ...]
    ids: torch.Tensor
    positions: torch.Tensor | None
    """Positions ``(1, L)`` of a tree's tokens; None for the plain layout."""
    paths: TreePaths | None
    """Keys that each token of a tree attends to; None for the plain layout."""
    padding: int
    """Positions of `ids` that belong to no trace."""
    source: torch.Tensor
    """Index in the flattened `ids` of the token before each trained token."""
    target: torch.Tensor
    """Id of each trained token."""
    temperature: torch.Tensor
    behaviour: torch.Tensor
    old: torch.Tensor
    advantage: torch.Tensor
    weight: torch.Tensor

    @property
    def counts(self) -> list[int]:
        """Number of trained tokens of each row."""
        return [row.sample.trained for row in self.rows]

    @property
    def computed(self) -> int:
        """Positions computed by the model, padding included."""
        return self.ids.numel()


def plain_sample(ids: Ids, mask: Mask, *, session: str = "", task: str = "") -> Sample:
    """Return a sample of text that was not sampled; both arrays have shape ``(n,)``."""
    zeros = np.zeros(len(ids), np.float32)
    return Sample(
        input_ids=ids,
        loss_mask=mask,
        logprobs=zeros,
        versions=np.full(len(ids), -1, np.int32),
        advantages=zeros,
        temperatures=np.ones(len(ids), np.float32),
        group=task,
        session=session,
    )


EMPTY = plain_sample(np.zeros(1, np.int32), np.zeros(1, np.bool_))
"""Sample for a rank without rows, so that it takes part in collective operations."""


def collate(rows: Sequence[Row], *, tree: bool, device: torch.device) -> MicroBatch:
    """Return rows as tensors of a forward pass; for a tree, sort them by `prefix_order` before."""
    sequences = [row.sample.input_ids for row in rows]
    trained = [np.flatnonzero(row.sample.loss_mask) for row in rows]

    def tensor(values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype).to(device)

    def gather(of: Callable[[Sample], np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        parts = [of(row.sample)[at] for row, at in zip(rows, trained, strict=True)]
        return tensor(np.concatenate(parts), dtype)

    positions = paths = None
    if tree:
        layout = build_tree(sequences)
        ids = layout.ids[None]
        places = layout.places
        positions = tensor(layout.positions[None], torch.long)
        paths = TreePaths.of(layout, device)
        padding = 0
    else:
        ids, places = _pad(sequences)
        padding = ids.size - sum(row.length for row in rows)
    before = [place[at - 1] for place, at in zip(places, trained, strict=True)]
    old = [
        row.sample.logprobs[at] if row.old is None else row.old
        for row, at in zip(rows, trained, strict=True)
    ]
    counts = [len(at) for at in trained]
    return MicroBatch(
        rows=tuple(rows),
        ids=tensor(ids, torch.long),
        positions=positions,
        paths=paths,
        padding=padding,
        source=tensor(np.concatenate(before), torch.long),
        target=gather(lambda sample: sample.input_ids, torch.long),
        temperature=gather(lambda sample: sample.temperatures, torch.float32),
        behaviour=gather(lambda sample: sample.logprobs, torch.float32),
        old=tensor(np.concatenate(old), torch.float32),
        advantage=gather(lambda sample: sample.advantages, torch.float32),
        weight=tensor(np.repeat([row.weight for row in rows], counts), torch.float32),
    )


def _pad(sequences: Sequence[Ids]) -> tuple[Ids, list[Index]]:
    """Return sequences as rows of a matrix, and the indices of their tokens in it, flattened."""
    width = max(len(ids) for ids in sequences)
    matrix = np.zeros((len(sequences), width), np.int32)
    for line, ids in zip(matrix, sequences, strict=True):
        line[: len(ids)] = ids
    return matrix, [number * width + np.arange(len(ids)) for number, ids in enumerate(sequences)]
