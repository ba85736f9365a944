"""Conversion of samples to the tensors of forward passes.

There are two layouts. ``tree`` stores a prefix tree over the token ids of several traces as one
sequence, so a shared prefix is computed once. Sharing depends on the ids and the replayed experts
alone, because a causal model computes equal states after equal ones; each trace keeps its own loss
terms. ``plain`` batches traces of similar length, padded on the right. With causal attention no
token attends to the padding, so the result for a trace is exactly that of the trace alone, without
an attention mask.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from tugline.recording.experts import hash_rows
from tugline.types import Ids, Kept, Logprobs, Mask, Sample, shared_prefix

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


def build_tree(rows: Sequence["Row"]) -> TokenTree:
    """Build the prefix tree of rows, which must be sorted by `Row.order`."""
    places: list[Index] = []
    runs: list[tuple[int, Index]] = []
    pieces: list[Ids] = []
    forks: set[int] = set()
    count = 0
    last: Row | None = None
    for row in rows:
        shared = row.count_shared(last)
        own = np.arange(count, count + row.length - shared)
        place = np.concatenate((places[-1][:shared], own)) if places else own
        if last is not None and shared == last.length:
            runs[-1] = (runs[-1][0] + len(own), place)
        elif len(own):
            runs.append((len(own), place))
            if shared:
                forks.add(int(place[shared - 1]) + 1)
        places.append(place)
        pieces.append(row.ids[shared:])
        count += len(own)
        last = row
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
    def ids(self) -> Ids:
        """The ids to compute: those with experts, if experts are replayed, else all.

        No token after the others is trained.
        """
        experts = self.sample.experts
        return self.sample.input_ids if experts is None else self.sample.input_ids[: len(experts)]

    @property
    def length(self) -> int:
        """Number of tokens to compute."""
        return len(self.ids)

    @property
    def order(self) -> tuple[bool, bytes]:
        """Sort key that puts rows with a common prefix side by side, the shorter first.

        Rows that replay experts are sorted by a hash of each token's id and experts.
        """
        experts = self.sample.experts
        keys: npt.NDArray[Any] = self.ids
        if experts is not None:
            keys = hash_rows(experts) + self.ids
        return experts is not None, keys.astype(keys.dtype.newbyteorder(">")).tobytes()

    def count_shared(self, other: "Row | None") -> int:
        """Return the number of leading tokens that are computed alike in another row."""
        if other is None:
            return 0
        count = shared_prefix(self.ids, other.ids)
        experts = self.sample.experts
        others = other.sample.experts
        if experts is None or others is None:
            return count if experts is others else 0
        return shared_prefix(experts[:count], others[:count])


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
    kept: Kept | None
    """Set that each trained token was chosen from, ``N`` in total; None if all sets are empty."""
    experts: torch.Tensor | None
    """Experts to take at each position, shape ``(B * L, layers, top_k)``, -1 at positions that
    leave the choice to the routers; None if all do."""
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

    def get_kept(self, tokens: slice) -> Kept | None:
        """Return the sets of some trained tokens; None if all sets of the pass are empty."""
        return None if self.kept is None else self.kept[tokens]

    @property
    def real(self) -> torch.Tensor:
        """Whether each position belongs to a trace, shape ``(B * L,)``."""
        real = torch.ones_like(self.ids, dtype=torch.bool)
        if self.padding:
            for line, row in zip(real, self.rows, strict=True):
                line[row.length :] = False
        return real.flatten()


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
    """Return rows as tensors of a forward pass; for a tree, sort them by `Row.order` before."""
    trained = [np.flatnonzero(row.sample.loss_mask) for row in rows]

    def tensor(values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype).to(device)

    def gather(of: Callable[[Sample], np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        parts = [of(row.sample)[at] for row, at in zip(rows, trained, strict=True)]
        return tensor(np.concatenate(parts), dtype)

    positions = paths = None
    if tree:
        layout = build_tree(rows)
        ids = layout.ids[None]
        places = layout.places
        positions = tensor(layout.positions[None], torch.long)
        paths = TreePaths.of(layout, device)
        padding = 0
    else:
        ids, places = _pad([row.ids for row in rows])
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
        kept=_join_kept(rows, trained),
        experts=_place_experts(rows, places, ids.size, device),
        temperature=gather(lambda sample: sample.temperatures, torch.float32),
        behaviour=gather(lambda sample: sample.logprobs, torch.float32),
        old=tensor(np.concatenate(old), torch.float32),
        advantage=gather(lambda sample: sample.advantages, torch.float32),
        weight=tensor(np.repeat([row.weight for row in rows], counts), torch.float32),
    )


def _join_kept(rows: Sequence[Row], trained: Sequence[Index]) -> Kept | None:
    """Return the sets of trained tokens; None if all are empty."""
    sizes: list[npt.NDArray[Any]] = [np.zeros(1, np.int64)]
    ids = [np.empty(0, np.int32)]
    for row, at in zip(rows, trained, strict=True):
        kept = row.sample.kept
        if kept is None:
            sizes.append(np.zeros(len(at), np.int64))
            continue
        sizes.append(kept.sizes[at])
        ids.append(kept.ids[np.repeat(row.sample.loss_mask, kept.sizes)])
    joined = Kept(np.cumsum(np.concatenate(sizes)).astype(np.int32), np.concatenate(ids))
    return joined if len(joined.ids) else None


def _place_experts(
    rows: Sequence[Row], places: Sequence[Index], size: int, device: torch.device
) -> torch.Tensor | None:
    """Return the experts of `size` positions; `places` has those of each row."""
    known = [row.sample.experts for row in rows if row.sample.experts is not None]
    if not known:
        return None
    placed = np.full((size, *known[0].shape[1:]), -1, np.int32)
    for row, place in zip(rows, places, strict=True):
        if row.sample.experts is not None:
            placed[place] = row.sample.experts
    return torch.from_numpy(placed).to(device)


def _pad(sequences: Sequence[Ids]) -> tuple[Ids, list[Index]]:
    """Return sequences as rows of a matrix, and the indices of their tokens in it, flattened."""
    width = max(len(ids) for ids in sequences)
    matrix = np.zeros((len(sequences), width), np.int32)
    for line, ids in zip(matrix, sequences, strict=True):
        line[: len(ids)] = ids
    return matrix, [number * width + np.arange(len(ids)) for number, ids in enumerate(sequences)]
