"""Attention over a tree of traces.

A run is a span of consecutive tokens. Its queries attend to the keys on the path from the root to
the run's end, gathered from the whole sequence (I1: the path is exactly the context at sampling).
This attention is registered with transformers as `TREE_ATTENTION` and selected in the model's
config. Without paths it is transformers' own sdpa, so other uses of the model are not affected.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from tugline.trainers.grpo.batch import PathGroup, TreePaths

TREE_ATTENTION = "tugline_tree"
"""Name of the attention in a model's config."""


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
    """Compute the attention of each run to its path; states have shape ``(1, heads, n, dim)``.

    It is flash attention over ragged paths if the device and dtype support that, else sdpa by run.
    """
    if tree_paths is None:
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return result
    if torch.is_autocast_enabled(query.device.type):  # covers neither attention below
        dtype = torch.get_autocast_dtype(query.device.type)
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    parts = []
    queries = torch.split(query, [sum(group.queries) for group in tree_paths.groups], 2)
    for part, group in zip(queries, tree_paths.groups, strict=True):
        if len(queries) == 1:
            parts.append(_attend(part, key, value, group, scaling))
        else:  # gathered again in the backward pass, so that one group is in memory at a time
            parts.append(checkpoint(_attend, part, key, value, group, scaling, use_reentrant=False))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    paths: PathGroup,
    scaling: float | None,
) -> torch.Tensor:
    """Compute the attention of a group of runs; the result has shape ``(1, n, heads, dim)``."""
    keys, values = (states.index_select(2, paths.gather) for states in (key, value))
    ragged = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    attend = _attend_ragged if ragged else _attend_by_run
    return attend((query, keys, values), paths, scaling)


_States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries of a group of runs, and keys and values of their paths."""


def _attend_by_run(states: _States, paths: PathGroup, scaling: float | None) -> torch.Tensor:
    lengths = (paths.queries, paths.keys, paths.keys)
    by_run = (torch.split(*each, 2) for each in zip(states, lengths, strict=True))
    parts = []
    for q, k, v in zip(*by_run, strict=True):
        whole = q.shape[2] == k.shape[2]
        grouped = q.shape[1] != k.shape[1]
        mask = None if whole else causal_lower_right(q.shape[2], k.shape[2])
        part = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=whole, scale=scaling, enable_gqa=grouped
        )
        parts.append(part)
    return torch.cat(parts, 2).transpose(1, 2)


def _attend_ragged(states: _States, paths: PathGroup, scaling: float | None) -> torch.Tensor:
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
    assert isinstance(out, torch.Tensor)  # noqa: S101 - a pair only if requested
    return out[None]


def _ends(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device=device)


AttentionInterface.register(TREE_ATTENTION, tree_attention)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
