"""Prove by log probabilities that a replica serves the weights that the trainer published.

Engines report success for weights that did not arrive: SGLang skips tensors whose names it does not
know, and a prefix cache that was not dropped still has the context of the old weights. So a replica
scores a sequence that the trainer has scored, and its values must be as close to the trainer's as
they were before the update. The limit is thus the engine's own precision: in float32 it is 1e-4
nats, in bfloat16 more. Then it continues the sequence with its prefix cache, and computes the same
tokens without it. This module does not import torch.
"""

from typing import NamedTuple

import numpy as np

from tugline.errors import EngineError
from tugline.recording.verify.engine import Scorer
from tugline.types import Ids, Logprobs

_ARRIVED = 0.5
"""Smallest share of an update that is accepted as the new weights."""
_NOISE = 0.1
"""Standard error of that share from which the share is ignored."""
_EXACT = 1e-4
"""Mean difference from the trainer that is always accepted, nats."""
_OWN = 3.0
"""Mean difference that is accepted, as a multiple of that before the update."""
_UNLIKE = 0.3
"""Mean difference that is never accepted, nats; in bfloat16 it is below 0.1."""
_SAMPLED = 16
"""Tokens that are sampled with the prefix cache."""


class Probe(NamedTuple):
    """Token ids whose log probabilities show which weights an engine serves."""

    ids: Ids
    """Shape ``(n,)``."""
    before: Logprobs
    """Trainer's values for ``ids[1:]`` under the weights published last, shape ``(n - 1,)``."""
    after: Logprobs
    """Trainer's values under the weights to publish."""

    def swap(self) -> "Probe":
        """Return the probe of the reverse update."""
        return Probe(self.ids, self.after, self.before)


class Proof(NamedTuple):
    """Comparison of a replica with the trainer after an update."""

    max_abs: float
    """Largest difference of log probabilities, nats."""
    share: float | None
    """Share of the update that the replica shows; see `measure_arrival`."""


async def measure_precision(scorer: Scorer, probe: Probe) -> float:
    """Return the mean difference of a replica from the trainer before the update, nats."""
    scored = await scorer.score(probe.ids, 1)
    known = np.isfinite(scored)
    return float(np.abs(scored - probe.before)[known].mean()) if known.any() else np.nan


async def prove(scorer: Scorer, version: int, probe: Probe, own: float | None) -> Proof:
    """Compare a replica with the trainer after an update to `version`.

    `own` is the result of `measure_precision` before the update, None if unknown. Raises
    `EngineError` if the replica has other weights, or context of other weights in its cache.
    """
    ids = probe.ids[: scorer.max_ids and scorer.max_ids - _SAMPLED]
    # first, because scoring would fill the cache anew
    sampled = await scorer.sample(ids, _SAMPLED)
    scored = await scorer.score(ids if sampled is None else np.append(ids, sampled.ids), 1)
    count = len(ids) - 1
    before, after = probe.before[:count], probe.after[:count]
    claim = f"the replica {scorer.engine.url} reports version {version}, but"
    share = measure_arrival(before, after, scored[:count])
    if share is not None and share < _ARRIVED:
        raise EngineError(
            f"{claim} its logprobs show only {share:.0%} of the update; check that it reads the"
            " folder that the trainer writes"
        )
    limit = _get_limit(own)
    gaps = np.abs(scored[:count] - after)
    if not gaps.mean() <= limit:  # also if it is not a number
        known = "unknown" if own is None else f"{own:.1e}"
        raise EngineError(
            f"{claim} its logprobs differ from the trainer's by {gaps.mean():.1e} nats on average,"
            f" must be at most {limit:.1e} (before the update: {known}): it has not loaded all"
            " weights, or computes in another type than that of `publish_dtype`"
        )
    if sampled is not None:
        stale = float(np.median(np.abs(scored[count:] - sampled.logprobs)))
        limit = _get_limit(float(gaps.mean()))
        if not stale <= limit:
            raise EngineError(
                f"{claim} with its prefix cache its logprobs differ by {stale:.1e} nats (median of"
                f" {len(sampled.ids)}), must be at most {limit:.1e}: the cache has context of other"
                " weights"
            )
    return Proof(float(gaps.max()), share)


def _get_limit(own: float | None) -> float:
    return _UNLIKE if own is None else max(_EXACT, min(_OWN * own, _UNLIKE))


def measure_arrival(before: Logprobs, after: Logprobs, scored: Logprobs) -> float | None:
    """Return the share of the change from `before` to `after` that `scored` shows.

    It is the slope of a regression through the origin, or None if its standard error is 0.1 or
    more: engine and trainer then differ by more than the update. Arrays of shape ``(n,)``, n > 1.
    """
    change = (after - before).astype(np.float64)
    shown = (scored - before).astype(np.float64)
    norm = float(change @ change)
    if len(change) < 2 or norm == 0.0:
        return None
    share = float(shown @ change) / norm
    rest = shown - share * change
    error = float(rest @ rest) / (len(change) - 1) / norm
    return share if error < _NOISE**2 else None
