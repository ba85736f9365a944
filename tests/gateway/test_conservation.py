"""An answer is sent, recorded and counted once wherever connections break (I1, I2)."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine import Play, ids, reply_with
from support.gateway import open_session, text_of
from support.polling import until
from tugline.chat.engines.base import Delta
from tugline.gateway.answer import AnswerState
from tugline.gateway.policy import CallSettings
from tugline.recording.verify.session import VerifyVerdict, verify_session
from tugline.recording.verify.text import TextVerifier
from tugline.testing import Reply
from tugline.traces.base import PrefixMerging
from tugline.types import CallOutcome, Ids

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1).map(
    lambda text: f"<{text}> wörter 界 " + " ".join(text) + " end."
)
AT_ONCE = CallSettings(backoff_s=0.001, grace_s=0.0)


def cut_at(text: str, cuts: list[int], slow: list[float]) -> Play:
    """An engine whose connections drop after these numbers of tokens, one after the other.

    `slow` are the delays between the tokens of the first replies.
    """
    rest = list(cuts)

    def reply(prompt: Ids, request: str) -> Reply:
        delay_s = slow.pop(0) if slow else 0.001
        whole = reply_with(text, delay_s=delay_s)(prompt, request)
        if rest and rest[0] < len(whole.ids):
            return reply_with(text, delay_s=delay_s, cut_after=rest.pop(0))(prompt, request)
        return whole

    return reply


@settings(max_examples=15)
@given(
    text=TEXT,
    cuts=st.lists(st.integers(1, 30), max_size=3),
    leave_after=st.none() | st.integers(1, 12),
)
async def test_an_answer_is_complete_wherever_connections_break(
    text: str, cuts: list[int], leave_after: int | None
) -> None:
    """Lost engines and a client that reconnects change no text, and each id is sampled once."""
    slow = [] if leave_after is None else [0.008]
    plays = cut_at(text, cuts, slow), cut_at(text, [], slow)
    with tempfile.TemporaryDirectory() as folder:
        async with open_session(Path(folder), *plays, tuning=AT_ONCE) as session:
            if leave_after is not None:
                await session.hang_up(characters=leave_after)
            answer = text_of(await session.read())
            calls = session.calls
    assert answer == text.strip()
    sampled = np.concatenate([call.sampled_ids for call in calls])
    assert sampled.tolist() == ids(text)
    assert calls[-1].outcome is CallOutcome.COMPLETE
    for call in calls:
        covered = [(span.start, span.end) for span in call.versions]
        assert sum(end - start for start, end in covered) == len(call.sampled_ids)
    ledger = PrefixMerging().build(calls).ledger
    assert ledger.balanced
    assert ledger.trained == ledger.sampled == len(ids(text))


async def test_a_client_that_returns_early_waits_for_its_partial_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The client waits until the sampled part is recorded, then gets that part and the rest."""
    text = "one two three four five six seven eight nine ten " * 4 + "end."
    async with open_session(tmp_path, cut_at(text, [], [0.008]), tuning=AT_ONCE) as session:
        sample, back = session.upstream.sample, asyncio.Event()

        async def close_later(*args: Any) -> AsyncGenerator[Delta]:
            try:
                async with contextlib.aclosing(sample(*args)) as deltas:
                    async for delta in deltas:
                        yield delta
            finally:
                await back.wait()

        monkeypatch.setattr(session.upstream, "sample", close_later)
        await session.hang_up()
        (completion,) = session.live.running
        await until(lambda: completion.state is AnswerState.ABANDONED)
        reading = asyncio.create_task(session.read())
        done, _ = await asyncio.wait({reading}, timeout=0.04)
        assert not done
        back.set()
        answer = text_of(await reading)
        first, second = session.calls
    assert answer == text
    assert (first.outcome, second.outcome) == (CallOutcome.CLIENT_GONE, CallOutcome.COMPLETE)
    assert [*first.sampled_ids, *second.sampled_ids] == ids(text)
    assert np.array_equal(second.prompt_ids, [*first.prompt_ids, *first.sampled_ids])
    assert (second.parent, second.branch) == (0, None)


async def test_an_answer_interrupted_twice_is_verified(tmp_path: Path) -> None:
    """The prompt of the second part ends with the first; `verify` compares the text of both."""
    text = "one two three four five six seven eight nine ten " * 4 + "end."
    async with open_session(tmp_path, cut_at(text, [], [0.02, 0.02]), tuning=AT_ONCE) as session:
        await session.hang_up(characters=10)
        await until(lambda: not session.live.running)
        await session.hang_up(characters=60)
        await until(lambda: not session.live.running)
    recording = session.recording
    assert [call.outcome for call in recording.calls] == [CallOutcome.CLIENT_GONE] * 2
    assert recording.calls[1].resumed == len(recording.calls[0].sampled_ids) > 0
    report = verify_session(tmp_path / "s1.0.rec", recording, TextVerifier())
    assert report.checks["text"].verdict is VerifyVerdict.PASS, report.checks
