"""How far an engine's log probabilities are from the trainer's (numpy only).

Exact conditioning (I1) is measured here: the same weights must give a token the log probability
that was captured when it was sampled. The figures describe the whole distribution of the
difference, because a mean hides a few wrong contexts and a maximum hides a broad loss of precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tugline.types import Logprobs, Sample

LARGE = 0.05
"""Difference in nats from which a token counts in `Mismatch.share_large`."""


class Recomputed(NamedTuple):
    """A sample with the trainer's log probabilities of its trained tokens, shape ``(k,)``."""

    sample: Sample
    logprobs: Logprobs


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """Differences ``d = trainer - captured`` over some tokens, in nats."""

    tokens: int
    """Tokens with a finite difference; all other figures are over these, 0 without any."""
    non_finite: int
    """Tokens that one side gave a log probability that is not finite."""
    max_abs: float
    mean_abs: float
    p99_abs: float
    """99th percentile of ``|d|``."""
    k3: float
    """Mean of ``exp(d) - d - 1``: divergence of the trainer's distribution from the engine's."""
    share_large: float
    """Share of tokens with ``|d|`` above 0.05."""
    effective_sample_size: float
    """``(sum w)^2 / (n sum w^2)`` with ``w = exp(d)`` (Kong 1992); 1 if all are equal."""

    @classmethod
    def of(cls, difference: npt.NDArray[np.float64]) -> Mismatch:
        """Summarize differences, shape ``(n,)``."""
        d = difference[np.isfinite(difference)]
        n = len(d)
        absolute = np.abs(d) if n else np.zeros(1)
        weights = np.exp(d - d.max()) if n else np.ones(1)
        return cls(
            tokens=n,
            non_finite=len(difference) - n,
            max_abs=float(absolute.max()),
            mean_abs=float(absolute.mean()),
            p99_abs=float(np.quantile(absolute, 0.99)),
            k3=float(np.mean(np.expm1(d) - d)) if n else 0.0,
            share_large=float(np.mean(absolute > LARGE)),
            effective_sample_size=float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
        )


class MismatchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The mismatch of all tokens, and of those of each version, engine and harness."""

    total: Mismatch
    by_version: dict[int, Mismatch]
    """By the policy version that sampled them. Older versions than the one measured differ because
    the weights moved."""
    by_engine: dict[str, Mismatch]
    """Without tokens whose engine is not known."""
    by_harness: dict[str, Mismatch]
    """Without tokens whose harness is not known."""


def summarize(recomputed: Sequence[Recomputed]) -> MismatchReport | None:
    """Compare samples with recomputed log probabilities; None without any token."""
    if not recomputed:
        return None
    masks = [one.sample.loss_mask for one in recomputed]
    captured = [one.sample.logprobs[mask] for one, mask in zip(recomputed, masks, strict=True)]
    trainer = np.concatenate([one.logprobs for one in recomputed]).astype(np.float64)
    difference = trainer - np.concatenate(captured)
    versions = [one.sample.versions[mask] for one, mask in zip(recomputed, masks, strict=True)]
    counts = [len(one.logprobs) for one in recomputed]
    engines = np.repeat([one.sample.engine for one in recomputed], counts)
    harnesses = np.repeat([one.sample.harness for one in recomputed], counts)
    return MismatchReport(
        total=Mismatch.of(difference),
        by_version=_group(difference, np.concatenate(versions)),
        by_engine=_group(difference, engines),
        by_harness=_group(difference, harnesses),
    )


def _group(
    difference: npt.NDArray[np.float64], keys: npt.NDArray[np.generic]
) -> dict[Any, Mismatch]:
    """Summarize per key; without the empty one."""
    return {
        key: Mismatch.of(difference[keys == key]) for key in np.unique(keys).tolist() if key != ""
    }
