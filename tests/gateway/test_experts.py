"""Experts and kept sets of recorded calls: failover, stop strings, new weights, wrong reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.engine import ids
from support.gateway import open_session
from support.polling import until
from support.random_experts import LAYERS, TOP_K, choose
from tugline.chat.engines.generate import Embedded
from tugline.gateway.policy import CallSettings
from tugline.recording.records import RecordedEventKind
from tugline.testing import Reply
from tugline.traces.base import PrefixMerging
from tugline.types import Call, Experts, Ids, Kept, MaskedSpan, Reason, Sampling

TEXT = "Mended it well, and tested."


def make_wire() -> Embedded:
    """The format as a probe of an engine that reports both would set it."""
    wire = Embedded()
    wire.experts = (LAYERS, TOP_K)
    wire.kept = True
    return wire


def play(state: int = 0, **changes: Any) -> Any:
    """An engine that answers `TEXT`, or the rest of it, in a state."""

    def answer(prompt: Ids, _request: str) -> Reply:
        whole = ids(TEXT)
        sent = prompt.tolist()
        rest = next(n for n in range(len(whole), -1, -1) if sent[len(sent) - n :] == whole[:n])
        left = whole[rest:]
        rows = choose([*sent, *left], state)[:-1]
        return Reply(left, experts=rows, **changes)

    return answer


def get_experts(call: Call) -> Experts:
    """Return the experts of a call with any."""
    assert call.experts is not None
    return call.experts


def whole_ids(call: Call) -> list[int]:
    """Prompt and answer."""
    return [*call.prompt_ids.tolist(), *call.sampled_ids.tolist()]


async def test_a_turn_has_the_experts_of_its_prompt_and_its_answer(tmp_path: Path) -> None:
    """All tokens but the last, in the answer and in a second turn."""
    async with open_session(tmp_path, play(), wire=make_wire()) as session:
        reply = await session.ask()
        said = {"role": "assistant", "content": reply["content"]}
        await session.ask([*MESSAGES, said, {"role": "user", "content": "Go on."}])
        calls = session.recording.calls
    assert len(calls) == 2
    for call in calls:
        assert np.array_equal(get_experts(call), choose(whole_ids(call)[:-1], 0))
        assert call.masked == ()


MESSAGES = [{"role": "user", "content": "Mend it."}]


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("state", [0, 1])
async def test_a_failover_keeps_what_was_sampled_with_the_same_experts(
    tmp_path: Path,
    at_end: bool,  # noqa: FBT001 - a case
    state: int,
) -> None:
    """The part of the lost replica has its own experts, or none if it reports them at the end.

    If the other replica computes the context with other experts, the longer part is trained.
    """
    cut = 4
    plays = [play(cut_after=cut, experts_at_end=at_end), play(state, experts_at_end=at_end)]

    def next_play(prompt: Ids, request: str) -> Reply:
        reply: Reply = plays.pop(0)(prompt, request)
        return reply

    replicas = (next_play, next_play)
    async with open_session(tmp_path, *replicas, wire=make_wire(), tuning=FAST) as session:
        await session.ask()
        (call,) = session.recording.calls
    count = len(call.sampled_ids)
    assert count > 2 * cut
    expected: tuple[MaskedSpan, ...] = ()
    if at_end:
        expected = (MaskedSpan(Reason.NO_ROUTES, 0, cut),)
    elif state:
        expected = (MaskedSpan(Reason.ROUTES_CHANGED, 0, cut),)
    assert call.masked == expected
    assert np.array_equal(get_experts(call), choose(whole_ids(call)[:-1], state))


FAST = CallSettings(backoff_s=0.0)


@pytest.mark.parametrize("at_end", [False, True])
async def test_a_resumed_answer_has_the_experts_of_both_parts(
    tmp_path: Path,
    at_end: bool,  # noqa: FBT001 - a case
) -> None:
    """The call that completes it has those of all its context; together they are one trace.

    Where an engine reports at the end, the part whose client left has none.
    """
    one = play(delay_s=0.003, experts_at_end=at_end)
    quick = CallSettings(grace_s=0.02)
    async with open_session(tmp_path, one, wire=make_wire(), tuning=quick) as session:
        await session.hang_up(characters=4)
        await until(lambda: session.calls)
        await session.read()
        first, second = session.recording.calls
    assert second.resumed == len(first.sampled_ids) > 0
    assert np.array_equal(get_experts(second), choose(whole_ids(second)[:-1], 0))
    assert second.masked == ()
    lost = MaskedSpan(Reason.NO_ROUTES, 0, len(first.sampled_ids))
    assert first.masked == ((lost,) if at_end else ())
    (trace,), ledger, _ = PrefixMerging().build([first, second])
    assert trace.trained == ledger.trained == ledger.sampled - (lost.end if at_end else 0)


@pytest.mark.parametrize("at_end", [False, True])
async def test_a_stop_string_loses_no_experts(
    tmp_path: Path,
    at_end: bool,  # noqa: FBT001 - a case
) -> None:
    """An engine that reports at the end is aborted, and its last report is read."""
    one = play(experts_at_end=at_end, delay_s=0.001)
    async with open_session(tmp_path, one, wire=make_wire()) as session:
        reply = await session.ask(stop_sequences=["well"])
        (call,) = session.recording.calls
    assert reply["stop_reason"] == "stop_sequence"
    assert 0 < len(call.sampled_ids) < len(ids(TEXT))
    assert call.masked == ()
    assert np.array_equal(get_experts(call), choose(whole_ids(call)[:-1], 0))


ROWS: dict[str, Any] = {
    "zeros": np.zeros_like,
    "repeats": lambda rows: rows[:, :, [0, 0]],
    "layers": lambda rows: rows[:, :1],
    "short": lambda rows: rows[:-3],
    "floats": lambda rows: rows / 2,
}


@pytest.mark.parametrize("name", ROWS)
async def test_wrong_experts_are_named_and_never_trained(tmp_path: Path, name: str) -> None:
    """The answer is delivered as ever; an event of the recording has the fault."""

    def broken(prompt: Ids, request: str) -> Reply:
        reply = play(experts_at_end=True)(prompt, request)
        return Reply(reply.ids, experts=ROWS[name](reply.experts), experts_at_end=True)

    async with open_session(tmp_path, broken, wire=make_wire()) as session:
        reply = await session.ask()
        recording = session.recording
    assert reply["content"][0]["text"] == TEXT
    (call,) = recording.calls
    masked = sum(span.end - span.start for span in call.masked)
    assert {span.reason for span in call.masked} == {Reason.NO_ROUTES}
    if name == "short":
        assert masked == 3
        return
    assert masked == len(call.sampled_ids)
    (event,) = recording.events
    assert event.kind is RecordedEventKind.ENGINE_FAULT
    assert "expert" in event.detail


async def test_kept_sets_are_recorded_where_sampling_is_truncated(tmp_path: Path) -> None:
    """A set without its token is left out, and named; without truncation there are none."""
    text = ids(TEXT)
    sets = [sorted({token, 5, 7}) for token in text]
    sets[2] = [1199]
    truncated = Sampling(temperature=1.0, top_k=3)
    for sampling in (truncated, Sampling(temperature=1.0)):
        folder = tmp_path / f"{sampling.top_k}"
        async with open_session(
            folder, lambda *_: Reply(text, kept=sets), wire=make_wire(), sampling=sampling
        ) as session:
            await session.ask()
            recording = session.recording
        (call,) = recording.calls
        if sampling.top_k is None:
            assert call.kept is None
            continue
        expected = Kept.of([[] if at == 2 else kept for at, kept in enumerate(sets)])
        assert call.kept is not None
        assert call.kept.ids.tolist() == expected.ids.tolist()
        assert call.kept.offsets.tolist() == expected.offsets.tolist()
        details = [event.detail for event in recording.events]
        assert any("without the sampled id" in detail for detail in details)
