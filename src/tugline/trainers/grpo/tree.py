"""Tree packing: ids that several traces begin with go through the model once.

The traces of a forward pass become a prefix tree over token ids, laid out as one sequence of the
tree's tokens. Sharing is decided by ids alone: a causal model computes the same state wherever the
ids before are the same, so each trace keeps loss terms of its own. A run is a stretch of tokens
that follow each other; its queries attend to the keys on the path from the root to the run's end,
gathered from all over the sequence (I1: the path is exactly the context that was sampled in).

The attention is registered with transformers under `TREE_ATTENTION` and chosen by the model's
config. Without paths it is transformers' own sdpa, so the model serves any other use as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from tugline.types import Ids, shared_prefix

TREE_ATTENTION = "tugline_tree"
"""Name of the attention in a model's config."""

Index = npt.NDArray[np.int64]


class TokenTree(NamedTuple):
    """The tokens of some rows, each prefix once; ``n`` tokens in all."""

    ids: Ids
    """Shape ``(n,)``."""
    positions: Index
    """Distance of each token from the root, shape ``(n,)``."""
    places: list[Index]
    """For each row, where each of its tokens is in `ids`."""
    runs: list[tuple[int, Index]]
    """Length of each run, in order, and its path: where the tokens from the root to its end are."""


@dataclass(frozen=True)
class TreePaths:
    """Paths of all runs, one after the other, as the attention takes them."""

    gather: torch.Tensor
    """Where the keys of all paths are, ``(k,)``."""
    queries: list[int]
    """Tokens of each run."""
    keys: list[int]
    """Tokens of each path."""

    @classmethod
    def of(cls, tree: TokenTree, device: torch.device) -> TreePaths:
        """The paths of `tree` on `device`."""
        queries, paths = zip(*tree.runs, strict=True)
        gather = torch.from_numpy(np.concatenate(paths)).to(device)
        return cls(gather, list(queries), [len(path) for path in paths])


def prefix_order(ids: Ids) -> bytes:
    """Sort key that puts rows with a common prefix side by side, the shorter first."""
    return ids.astype(">i4").tobytes()


def build_tree(rows: Sequence[Ids]) -> TokenTree:
    """Share what each row has in common with the row before it; sort rows by `prefix_order`."""
    places: list[Index] = []
    runs: list[tuple[int, Index]] = []
    pieces: list[Ids] = []
    count, last = 0, np.empty(0, np.int32)
    for ids in rows:
        shared = shared_prefix(ids, last)
        own = np.arange(count, count + len(ids) - shared)
        place = np.concatenate((places[-1][:shared], own)) if places else own
        if runs and shared == len(last):
            runs[-1] = (runs[-1][0] + len(own), place)
        elif len(own):
            runs.append((len(own), place))
        places.append(place)
        pieces.append(ids[shared:])
        count, last = count + len(own), ids
    depths = [np.arange(len(path) - length, len(path)) for length, path in runs]
    return TokenTree(np.concatenate(pieces), np.concatenate(depths), places, runs)


# --------------------------------------------------------------------------- attention
def tree_attention(  # noqa: PLR0913 - the signature that transformers calls
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree_paths: TreePaths | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from each run to its path; states have shape ``(1, heads, n, dim)``.

    Flash attention over ragged paths where the device and dtype have it, else sdpa run by run.
    """
    if tree_paths is None:
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return result
    if torch.is_autocast_enabled(query.device.type):  # which knows neither of the two below
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    keys, values = (states.index_select(2, tree_paths.gather) for states in (key, value))
    ragged = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    attend = _attend_ragged if ragged else _attend_by_run
    return attend((query, keys, values), tree_paths, scaling), None


_States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries of all tokens, and keys and values of all paths."""


def _attend_by_run(states: _States, paths: TreePaths, scaling: float | None) -> torch.Tensor:
    lengths = (paths.queries, paths.keys, paths.keys)
    by_run = (torch.split(*each, 2) for each in zip(states, lengths, strict=True))
    parts = []
    for q, k, v in zip(*by_run, strict=True):
        whole, grouped = q.shape[2] == k.shape[2], q.shape[1] != k.shape[1]
        mask = None if whole else causal_lower_right(q.shape[2], k.shape[2])
        part = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=whole, scale=scaling, enable_gqa=grouped
        )
        parts.append(part)
    return torch.cat(parts, 2).transpose(1, 2)


def _attend_ragged(states: _States, paths: TreePaths, scaling: float | None) -> torch.Tensor:
    q, k, v = (each[0].transpose(0, 1) for each in states)
    out = varlen_attn(
        q,
        k,
        v,
        _ends(paths.queries, q.device),
        _ends(paths.keys, q.device),
        max(paths.queries),
        max(paths.keys),
        scale=scaling,
        window_size=(-1, 0),  # causal; the last query of a run sees the whole path
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, torch.Tensor)  # noqa: S101 - a pair only if asked for
    return out[None]


def _ends(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device=device)


AttentionInterface.register(TREE_ATTENTION, tree_attention)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
