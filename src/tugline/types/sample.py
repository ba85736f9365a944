"""Flat arrays for a trainer."""

from __future__ import annotations

import msgspec

from tugline.types.arrays import Ids, Logprobs, Mask


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Flat arrays for a trainer, one per trace; shapes ``(n,)``.

    `advantages` is 0 where nothing is trained, `versions` -1 where nothing was sampled.
    """

    input_ids: Ids
    loss_mask: Mask
    logprobs: Logprobs
    versions: Ids
    advantages: Logprobs
    group: str
    session: str
