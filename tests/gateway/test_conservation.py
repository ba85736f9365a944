"""Wherever connections are cut, one answer is told, recorded and counted once (I1, I2)."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rig import Rig, ids, rig, says, text_of
from tugline.gateway.sessions import LiveSession
from tugline.testing.scripted_engine import Reply
from tugline.traces.prefix_merging import PrefixMerging
from tugline.types import Call, CallOutcome, Ids

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1).map(
    lambda text: f"<{text}> wörter 界 " + " ".join(text) + " end."
)


def cut_at(text: str, cuts: list[int]) -> Any:
    """An engine whose connections drop after these numbers of tokens, one after the other."""
    rest = list(cuts)

    def reply(prompt: Ids, request: str) -> Reply:
        whole = says(text, delay_s=0.001)(prompt, request)
        if rest and rest[0] < len(whole.ids):
            return says(text, delay_s=0.001, cut_after=rest.pop(0))(prompt, request)
        return whole

    return reply


def calls_of(it: Rig) -> list[CallOutcome]:
    """How the calls that were recorded so far ended."""
    return [call.outcome for call in it.calls]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=TEXT,
    cuts=st.lists(st.integers(1, 30), max_size=3),
    leave_after=st.none() | st.integers(0, 100),
)
async def test_an_answer_is_whole_wherever_it_is_cut(
    monkeypatch: pytest.MonkeyPatch, text: str, cuts: list[int], leave_after: int | None
) -> None:
    """Lost engines and a client that leaves and comes back: the same text, each id sampled once."""
    monkeypatch.setattr("tugline.gateway.completion._BACKOFF_S", 0.001)
    monkeypatch.setattr("tugline.gateway.replicas._BACKOFF_S", 0.001)
    monkeypatch.setattr("tugline.gateway.proxy.GRACE_S", 0.0)
    with tempfile.TemporaryDirectory() as folder:
        async with rig(Path(folder), cut_at(text, cuts), cut_at(text, [])) as it:
            if leave_after is not None:
                response = await it.post(it.body(stream=True))
                await response.content.readany()
                await asyncio.sleep(leave_after / 10_000)
                response.close()
                assert not calls_of(it), "it left in the middle"
            async with it.post(it.body(stream=True)) as response:
                told = text_of(await response.text())
            calls = it.calls
    assert told == text.strip()
    answer = np.concatenate([call.sampled_ids for call in calls])
    assert answer.tolist() == ids(text)
    assert calls[-1].outcome is CallOutcome.COMPLETE
    for call in calls:
        covered = [(span.start, span.end) for span in call.versions]
        assert sum(end - start for start, end in covered) == len(call.sampled_ids)
    ledger = PrefixMerging().build(calls).ledger
    assert ledger.balanced
    assert ledger.trained == ledger.sampled == len(ids(text))


async def test_a_client_that_comes_back_while_its_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It waits until what there is of it is recorded, and gets that and the rest."""
    monkeypatch.setattr("tugline.gateway.proxy.GRACE_S", 0.0)
    keep, writing = LiveSession.append, asyncio.Event()

    async def slowly(self: LiveSession, call: Call) -> None:
        writing.set()
        await asyncio.sleep(0.2)
        await keep(self, call)

    monkeypatch.setattr(LiveSession, "append", slowly)
    text = "one two three four five six seven eight nine ten " * 4 + "end."
    async with rig(tmp_path, cut_at(text, []), cut_at(text, [])) as it:
        response = await it.post(it.body(stream=True))
        await response.content.readany()
        response.close()
        async with asyncio.timeout(5):
            await writing.wait()
        async with it.post(it.body(stream=True)) as response:
            told = text_of(await response.text())
        calls = it.calls
    assert told == text
    assert [call.outcome for call in calls] == [CallOutcome.CLIENT_GONE, CallOutcome.COMPLETE]
    assert np.concatenate([call.sampled_ids for call in calls]).tolist() == ids(text)
