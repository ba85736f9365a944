"""Recorded logprobs are compared with the engine's, where both mean the same."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from inference.tiny_model import tiny
from recording.verify.recorded import Modelled, changed, modelled, one_changed, read_in, rewritten
from support.engine import reply_with
from support.gateway import open_session
from tugline.errors import EngineError
from tugline.recording.verify.engine import connect_scorer
from tugline.recording.verify.session import (
    SessionReport,
    VerifyVerdict,
    summarize,
    verify_logprobs,
    verify_session,
)
from tugline.recording.verify.text import TextVerifier
from tugline.types import Call, LogprobMeaning, Sampling

CLOSE = 1e-4


async def score(folder: Path, scored: Modelled) -> SessionReport:
    """Run all checks of the session in `folder`, the engine's included."""
    path, recording = read_in(folder)
    report = verify_session(path, recording, TextVerifier())
    async with connect_scorer(scored.url) as scorer:
        await verify_logprobs(report, recording, scorer)
    return report


async def change_and_score(
    folder: Path, change: Callable[[Call], Call], turns: int = 1
) -> SessionReport:
    """Record a session, change the recording, and run all checks."""
    async with modelled(folder) as scored:
        await scored.talk(turns)
        rewritten(*read_in(folder), change)
        return await score(folder, scored)


@pytest.mark.engine
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
async def test_logprobs_agree_within_rounding(temperature: float, tmp_path: Path) -> None:
    """Every sampled token of a chain is scored at the temperature of its call."""
    sampling = Sampling(temperature=temperature, top_p=1.0, top_k=0, seed=1)
    async with modelled(tmp_path, sampling) as scored:
        await scored.talk(3)
        report = await score(tmp_path, scored)
    assert report.checks["engine"].verdict is VerifyVerdict.PASS
    assert not report.failed, report.checks
    assert [turn.scored for turn in report.turns] == [turn.sampled for turn in report.turns]
    sums = summarize([report])
    assert sums.max_dlogprob < CLOSE
    assert 0 <= sums.kl < CLOSE


@pytest.mark.engine
async def test_a_wrong_context_fails(tmp_path: Path) -> None:
    """Changed prompt ids change the logprobs of that turn, and of no other."""
    change = one_changed(1, "prompt_ids", slice(-20, None), 65)
    report = await change_and_score(tmp_path, change, turns=2)
    first, second = report.turns
    assert first.max_dlogprob < CLOSE
    assert second.mean_dlogprob > 0.1
    assert report.checks["engine"].verdict is VerifyVerdict.FAIL
    assert "call 1" in report.checks["engine"].detail


@pytest.mark.engine
async def test_an_engine_of_another_version_is_unchecked(tmp_path: Path) -> None:
    """The difference is computed and the versions are noted, without a verdict."""
    async with modelled(tmp_path) as scored:
        await scored.talk(1)
        await scored.engine.swap(tiny(7).state_dict(), 5)
        report = await score(tmp_path, scored)
        await scored.talk(1)
        both = await score(tmp_path, scored)
    assert report.checks["engine"].verdict is VerifyVerdict.UNCHECKED
    reason = "sampled under weights of version 0, but the engine has version 5"
    assert reason in report.checks["engine"].detail
    assert report.turns[0].max_dlogprob > 0.1
    assert both.checks["engine"].verdict is VerifyVerdict.PASS
    assert any(reason in note for note in both.notes)


TRUNCATED = {"sampling": Sampling(temperature=1.0, top_p=0.9, top_k=0)}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed(0, **TRUNCATED), "top_p, top_k or min_p"),
        (changed(0, constrained=True), "a grammar or banned ids"),
        (changed(0, replayed=True), "another session"),
        (one_changed(0, "logprobs", 0, np.inf), "the recorded numbers are not valid"),
    ],
    ids=["truncated", "constrained", "replayed", "broken"],
)
async def test_incomparable_logprobs_are_unchecked(
    change: Callable[[Call], Call], reason: str, tmp_path: Path
) -> None:
    """The check has the reason and neither passes nor fails."""
    check = (await change_and_score(tmp_path, change)).checks["engine"]
    assert check.verdict is VerifyVerdict.UNCHECKED
    assert reason in check.detail


@pytest.mark.engine
@pytest.mark.parametrize("fields", [TRUNCATED, {"constrained": True}], ids=["truncated", "bound"])
async def test_raw_logprobs_are_always_comparable(
    fields: dict[str, object], tmp_path: Path
) -> None:
    """Raw logprobs are from before any truncation or constraint."""
    change = changed(0, logprob_meaning=LogprobMeaning.RAW, **fields)
    check = (await change_and_score(tmp_path, change)).checks["engine"]
    assert check.verdict is VerifyVerdict.PASS


@pytest.mark.engine
async def test_tokens_beyond_the_window_are_not_scored(tmp_path: Path) -> None:
    """An answer that fills the window is scored except for its last token."""
    async with modelled(tmp_path, window=530) as scored:
        await scored.session.ask([{"role": "user", "content": "x" * 20}], max_tokens=400)
        report = await score(tmp_path, scored)
    (turn,) = report.turns
    assert turn.prompt + turn.sampled == 530
    assert turn.scored == turn.sampled - 1
    assert report.checks["engine"].verdict is VerifyVerdict.PASS


async def test_an_engine_that_cannot_score_is_an_error(tmp_path: Path) -> None:
    """An engine that cannot score or does not answer is an error, not a passed check."""
    async with open_session(tmp_path, reply_with("Hi.")) as session:
        await session.ask()
        path, recording = read_in(tmp_path)
        report = verify_session(path, recording, TextVerifier())
        url = session.gateway._upstream.replicas[0].url
        async with connect_scorer(url) as scorer:
            with pytest.raises(EngineError, match="prompt_logprobs=0 is not supported"):
                await verify_logprobs(report, recording, scorer)
    with pytest.raises(EngineError, match="cannot reach the engine at"):
        async with connect_scorer("http://127.0.0.1:9"):
            pass
