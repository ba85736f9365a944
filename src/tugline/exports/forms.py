"""Experts and kept sets in the forms of other trainers.

Trainers number experts by all layers of the decoder and by all tokens, or all but the last; our
arrays have the layers with a router and the leading tokens. A trainer without a form for a kept set
normalises over the whole vocabulary, so the tokens sampled from one are left untrained or refused.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tugline.errors import UsageError
from tugline.types import Experts, Mask, Reason, Sample, Trace


# --------------------------------------------------------------------------- experts
def place_experts(
    experts: Experts, length: int, dense_layers: Sequence[int] = (), *, distinct: bool = False
) -> npt.NDArray[Any]:
    """Return experts of `length` tokens over all layers, shape ``(length, all layers, top_k)``.

    `dense_layers` are the numbers of the layers without a router, whose experts are 0; `experts`
    may have them already. Rows that
    are not known, which no trained token has in its context, are 0; with `distinct`, they are the
    first experts. Raises `UsageError` if `dense_layers` are not numbers of layers.
    """
    if _has_all_layers(experts, dense_layers):
        dense_layers = ()
    rows, routed, top_k = experts.shape
    layers = routed + len(dense_layers)
    at = [layer for layer in range(layers) if layer not in dense_layers]
    if len(at) != routed:
        msg = f"dense_layers is {list(dense_layers)}, must be different numbers below {layers}"
        raise UsageError(msg)
    spread = np.zeros((length, layers, top_k), experts.dtype)
    spread[:rows, at] = experts[:length]
    if distinct:
        spread[rows:, at] = np.arange(top_k)
    return spread


def _has_all_layers(experts: Experts, dense_layers: Sequence[int]) -> bool:
    """Whether some layers have zeros only: those without a router."""
    inside = all(0 <= layer < experts.shape[1] for layer in dense_layers)
    return bool(dense_layers) and inside and len(experts) > 0 and not experts[:, dense_layers].any()


# --------------------------------------------------------------------------- kept sets
def find_truncated(trace: Trace) -> Mask:
    """Return whether each token is trained and its logprob depends on a kept set."""
    truncated = np.zeros(len(trace.ids), np.bool_)
    for span in trace.spans:
        truncated[span.start : span.end] = span.distribution.needs_kept
    return truncated & trace.mask


# --------------------------------------------------------------------------- samples
def drop_experts(sample: Sample, *, refuse: str | None) -> Sample:
    """Return a sample for a trainer that does not replay experts.

    Raises `UsageError` if it has some, with `refuse`, which says how to go on; None removes them.
    """
    if sample.experts is None:
        return sample
    if refuse is not None:
        msg = f"session {sample.session} was sampled with experts that are not replayed: {refuse}"
        raise UsageError(msg)
    return replace(sample, experts=None)


def drop_sets(sample: Sample, *, refuse: str | None) -> Sample:
    """Return a sample for a trainer that normalises over the whole vocabulary.

    Raises `UsageError` if a trained token was sampled from a kept set, with `refuse`, which says
    how to go on; None leaves such tokens untrained.
    """
    if sample.kept is None:
        return sample
    sampled = leave_untrained(sample, sample.kept.sizes > 0, refuse=refuse)
    return replace(sampled, kept=None)


def leave_untrained(sample: Sample, tokens: Mask, *, refuse: str | None) -> Sample:
    """Return a sample without training `tokens`, whose logprobs a trainer would not reproduce.

    Raises `UsageError` if one is trained, with `refuse`; None goes on.
    """
    lost = sample.loss_mask & tokens
    count = int(lost.sum())
    if not count:
        return sample
    if refuse is not None:
        msg = (
            f"session {sample.session} has {count} tokens whose logprobs are not those of the ids "
            f"that the trainer would normalise over (top-p, top-k, min-p): {refuse}"
        )
        raise UsageError(msg)
    mask = sample.loss_mask & ~lost
    advantages = np.where(mask, sample.advantages, np.float32(0))
    masked = dict(sample.masked)
    masked[Reason.UNREPRODUCIBLE] = masked.get(Reason.UNREPRODUCIBLE, 0) + count
    return replace(sample, loss_mask=mask, advantages=advantages, masked=masked)
