"""Sample one token per row from a batch of logits, reproducibly; score given tokens.

A token is sampled by inverting the cumulative distribution at a uniform number that depends only on
the request's seed and the position in its answer. There is no generator state, so a seeded request
samples the same tokens in any batch (up to float noise in the logits).

Invariant I1: the returned log probability is that of the token in the distribution that it was
sampled from, after temperature, min-p, top-k and top-p. Rows with temperature 0 take the most
likely token and report its log probability at temperature 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel

from tugline.types import Ids, Logprobs

SCORED_TOGETHER = 512
"""Positions scored in one forward pass; bounds the memory of their logits."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) per row: splitmix64 (Steele et al., 2014) of seed and position."""
    bits = _hash(_hash(seeds) + positions.astype(np.uint64) * _GOLDEN)
    return bits.astype(np.float64) * 2.0**-48


def _hash(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = state + _GOLDEN
    for shift, factor in _MIX:
        state = (state ^ (state >> shift)) * factor
    # With 48 bits, the product with a float64 sum near 1 stays below that sum.
    return (state ^ (state >> np.uint64(31))) >> np.uint64(16)


class Drawn(NamedTuple):
    """A token for each row."""

    tokens: npt.NDArray[np.int32]
    """Shape ``(rows,)``."""
    logprobs: npt.NDArray[np.float32]
    """Shape ``(rows,)``."""
    kept: Sequence[Ids | None]
    """Ids that each token was chosen from; None for rows whose sampling is not truncated."""


def sample(
    logits: torch.Tensor, rows: npt.NDArray[np.void], uniform: npt.NDArray[np.float64]
) -> Drawn:
    """Sample a token for each row of logits ``(rows, vocab)``.

    `rows` has the fields ``temperature``, ``min_p``, ``top_k`` and ``top_p``.
    """
    device = logits.device
    greedy = rows["temperature"] == 0
    scale = torch.from_numpy(np.where(greedy, np.float32(1), rows["temperature"])).to(device)
    logprobs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    kept: Sequence[Ids | None] = [None] * len(rows)
    truncated = ((rows["min_p"] > 0) | (rows["top_k"] > 0) | (rows["top_p"] < 1)) & ~greedy
    if truncated.any():
        left = _truncate(logprobs, rows, truncated)
        kept = _list_kept(left, truncated)
        logprobs = torch.log_softmax(left, dim=-1)
    cumulative = logprobs.double().exp().cumsum(-1)
    point = torch.from_numpy(uniform).to(device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, point, right=True)[:, 0]
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy).to(device), logprobs.argmax(-1), tokens)
    drawn = logprobs.gather(1, tokens[:, None])[:, 0]
    return Drawn(tokens.to("cpu", torch.int32).numpy(), drawn.cpu().numpy(), kept)


def _truncate(
    logprobs: torch.Tensor, rows: npt.NDArray[np.void], truncated: npt.NDArray[np.bool_]
) -> torch.Tensor:
    """Set values to -inf: below min-p, outside the top-k, outside the smallest set with mass top-p.

    The order is vLLM's; the mass is that of what min-p and top-k leave. Other rows stay as they
    are.
    """
    device = logprobs.device
    vocab = logprobs.shape[-1]
    keep = torch.from_numpy(np.where(truncated & (rows["top_k"] > 0), rows["top_k"], vocab))
    mass = torch.from_numpy(np.where(truncated, rows["top_p"], np.float32(2))).to(device)
    least = torch.from_numpy(np.where(truncated, rows["min_p"], np.float32(0))).to(device).log()
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=device)[None]
    outside = (rank >= keep.to(device)[:, None]) | (ordered < ordered[:, :1] + least[:, None])
    ordered = ordered.masked_fill(outside, -torch.inf)
    probabilities = torch.softmax(ordered, dim=-1)
    before = probabilities.cumsum(-1) - probabilities
    # A mass of 1 keeps every token, also if the sum exceeds 1 by rounding. The first token is kept
    # also if the mass is 0 in float32.
    outside = (before >= mass[:, None]) & (mass < 1)[:, None] & (rank > 0)
    ordered = ordered.masked_fill(outside, -torch.inf)
    return torch.empty_like(ordered).scatter_(1, order, ordered)


def _list_kept(left: torch.Tensor, truncated: npt.NDArray[np.bool_]) -> list[Ids | None]:
    finite = left.isfinite().cpu().numpy()
    return [
        row.nonzero()[0].astype(np.int32) if cut else None
        for row, cut in zip(finite, truncated.tolist(), strict=True)
    ]


@torch.inference_mode()
def score(model: PreTrainedModel, ids: Ids, temperature: float) -> Logprobs:
    """Return the log probability of each id but the first, given earlier ids; shape ``(n - 1,)``.

    It is that at `temperature`, or at 1 if `temperature` is 0. The forward pass neither reads nor
    writes the engine's KV cache, so the result does not depend on earlier requests.
    """
    whole = torch.from_numpy(ids.astype(np.int64)).to(model.device)
    cache = DynamicCache(config=model.config.get_text_config())
    parts = []
    for start in range(0, len(ids) - 1, SCORED_TOGETHER):
        piece = whole[start : min(start + SCORED_TOGETHER, len(ids) - 1)]
        logits = model(input_ids=piece[None], cache=cache, use_cache=True).logits[0]
        rows = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
        following = whole[start + 1 : start + 1 + len(piece)]
        parts.append(rows.gather(1, following[:, None])[:, 0].cpu().numpy())
    return np.concatenate(parts) if parts else np.empty(0, np.float32)
