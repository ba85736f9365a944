"""An engine is believed only if its log probabilities are as close as before to the trainer's."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from tugline.errors import EngineError
from tugline.recording.verify.engine import Sampled
from tugline.trainers.proof import Probe, Proof, measure_precision, prove
from tugline.types import Ids, Logprobs

RNG = np.random.default_rng(0)
IDS = np.arange(300, dtype=np.int32)
BEFORE = -RNG.exponential(2.0, 299).astype(np.float32)
AFTER = BEFORE + RNG.normal(0, 0.2, 299).astype(np.float32)
PROBE = Probe(IDS, BEFORE, AFTER)


@dataclass
class ScriptedScorer:
    """A scorer of scripted values; those of sampled tokens are -1."""

    values: Logprobs
    cached: float = -1.0
    """Values of sampled tokens in the context of the prefix cache."""
    max_ids: int | None = None
    engine = SimpleNamespace(url="http://replica")

    async def score(self, ids: Ids, start: int) -> Logprobs:
        """Return the scripted values."""
        sampled = np.full(max(len(ids) - len(IDS), 0), -1, np.float32)
        return np.append(self.values, sampled)[start - 1 : len(ids) - 1]

    async def sample(self, ids: Ids, count: int) -> Sampled | None:
        """Sample after all ids, else not."""
        if len(ids) < len(IDS):
            return None
        return Sampled(np.zeros(count, np.int32), np.full(count, self.cached, np.float32))


async def check(scorer: ScriptedScorer, own: float | None) -> Proof:
    """Prove a version against `PROBE`."""
    return await prove(scorer, 7, PROBE, own)  # type: ignore[arg-type]


def noise(nats: float) -> Logprobs:
    """Errors of an engine whose mean size is `nats`."""
    return (RNG.laplace(0, nats, 299)).astype(np.float32)


@pytest.mark.parametrize("own", [1e-6, 0.02])
async def test_an_engine_is_as_exact_as_before(own: float) -> None:
    """Weights that arrived are accepted in float32 and in bfloat16, with the measured figures."""
    before = ScriptedScorer(BEFORE + noise(own))
    measured = await measure_precision(before, PROBE)  # type: ignore[arg-type]
    assert measured == pytest.approx(own, rel=0.3)
    proof = await check(ScriptedScorer(AFTER + noise(own)), measured)
    assert proof.share == pytest.approx(1, abs=0.05)
    assert own < proof.max_abs < 20 * own


@pytest.mark.parametrize("own", [1e-6, 0.02])
async def test_weights_that_arrived_in_part_are_refused(own: float) -> None:
    """A share of 60 % of the update is beyond the engine's own precision, which the error gives."""
    partial = BEFORE + 0.6 * (AFTER - BEFORE) + noise(own)
    error = (
        r"replica http://replica reports version 7, but its logprobs differ from the trainer's by "
        rf"\S+ nats on average, must be at most {max(1e-4, 3 * own):.1e} "
    )
    with pytest.raises(EngineError, match=error):
        await check(ScriptedScorer(partial), own)


@pytest.mark.parametrize("own", [None, 5.0])
async def test_a_bad_engine_before_the_update_is_no_excuse(own: float | None) -> None:
    """Broken weights are refused, however broken they were before."""
    with pytest.raises(EngineError, match=r"must be at most 3\.0e-01"):
        await check(ScriptedScorer(-RNG.exponential(5, 299).astype(np.float32)), own)


async def test_logprobs_that_are_no_numbers_are_refused() -> None:
    """One NaN is enough."""
    values = AFTER.copy()
    values[5] = np.nan
    with pytest.raises(EngineError, match="by nan nats"):
        await check(ScriptedScorer(values), 0.02)


async def test_a_stale_cache_is_refused() -> None:
    """Tokens sampled with the cache must have the values that they have without it."""
    assert await check(ScriptedScorer(AFTER, cached=-1.00005), 1e-6)
    error = r"replica http://replica .* with its prefix cache its logprobs differ by 1\.0e-02 nats"
    with pytest.raises(EngineError, match=error):
        await check(ScriptedScorer(AFTER, cached=-1.01), 1e-6)
    with pytest.raises(EngineError, match=error):  # it was less exact under the old weights
        await check(ScriptedScorer(AFTER, cached=-1.01), 0.02)


async def test_a_probe_fits_into_the_window() -> None:
    """The sequence is cut so that sampled tokens follow it."""
    assert (await check(ScriptedScorer(AFTER, max_ids=200), 1e-6)).max_abs == 0
