"""Whatever a call takes is given back, however the call ends: budgets, slots, tables."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine import reply_with
from support.gateway import ASK, OpenSession, open_session
from support.polling import until
from support.tasks import make_task
from tugline.errors import UsageError
from tugline.gateway.policy import CallSettings
from tugline.recording.file import Writer
from tugline.testing import Reply
from tugline.types import Ids, Limits, Policy, Sampling, Session

TUNING = CallSettings(
    backoff_s=0.001, grace_s=0.0, tries=2, failovers=1, several_sampled=2, session_answers=8
)
LIMITS = Limits(max_turns=1000, max_sampled_tokens=1_000_000)
CONTRACT = Sampling(temperature=1.0)
TEXT = "one two three four five six seven eight nine ten"


class Faulty:
    """An engine whose next answers have the faults in `faults`."""

    def __init__(self) -> None:
        self.faults: list[dict[str, Any]] = []

    def __call__(self, prompt: Ids, request: str) -> Reply:
        """Answer, with the next fault."""
        how = {"delay_s": 0.001} | (self.faults.pop(0) if self.faults else {})
        return reply_with(TEXT, **how)(prompt, request)


Step = Callable[[OpenSession, Faulty, list[Any]], Awaitable[None]]


async def refused(session: OpenSession, _engine: Faulty, messages: list[Any]) -> None:
    """Refused by the sampling policy."""
    assert (await session.ask(messages, temperature=0.3))["status"] == 400


async def invalid(session: OpenSession, _engine: Faulty, messages: list[Any]) -> None:
    """Refused by the dialect."""
    assert (await session.ask(messages, top_k=-5))["status"] == 400


async def too_many(session: OpenSession, _engine: Faulty, messages: list[Any]) -> None:
    """Refused for its number of choices."""
    async with session.post_openai(n=9, messages=messages) as response:
        assert response.status == 400


async def text_only(session: OpenSession, _engine: Faulty, messages: list[Any]) -> None:
    """A text completion, answered and refused."""
    for prompt, status in ((messages[0]["content"], 200), ([], 400)):
        async with session.post_openai("completions", prompt=prompt) as response:
            assert response.status == status


async def failed(session: OpenSession, engine: Faulty, messages: list[Any]) -> None:
    """Refused by the engine, twice."""
    engine.faults += [{"status": 503}, {"status": 503}]
    assert (await session.ask(messages))["status"] == 529


async def truncated(session: OpenSession, engine: Faulty, messages: list[Any]) -> None:
    """The engine is lost during the answer, twice."""
    engine.faults += [{"cut_after": 2}, {"cut_after": 2}, {"status": 400}]
    assert (await session.ask(messages))["status"] == 200


async def completed(session: OpenSession, _engine: Faulty, messages: list[Any]) -> None:
    """Answered, whole and streamed."""
    assert (await session.ask(messages))["status"] == 200
    assert "end_turn" in await session.read([*messages, *ASK])


async def replayed(session: OpenSession, _engine: Faulty, messages: list[Any]) -> None:
    """Answered twice, sampled once."""
    for number in range(2):
        header = {"x-stainless-retry-count": str(number)}
        async with session.post(session.body(messages), **header) as response:
            assert response.status == 200


async def several(session: OpenSession, engine: Faulty, messages: list[Any]) -> None:
    """Several choices, one of which fails."""
    engine.faults += [{"status": 400}]
    async with session.post_openai(n=4, messages=messages, stream=True) as response:
        assert response.status in {200, 400, 502}


async def cancelled(session: OpenSession, engine: Faulty, messages: list[Any]) -> None:
    """The client leaves, before the first token, and during the answer."""
    for fault in ({"first_s": 30.0}, {"delay_s": 0.05}):
        engine.faults.append(fault)
        asking = asyncio.create_task(session.ask(messages, stream="delay_s" in fault))
        await until(lambda: session.running and not engine.faults)  # so the next call has its own
        asking.cancel()
        await until(lambda: not session.live.running)


async def aborted(session: OpenSession, engine: Faulty, messages: list[Any]) -> None:
    """Aborted by a pause, before the first token."""
    engine.faults.append({"first_s": 30.0})
    asking = asyncio.create_task(session.ask(messages))
    await until(lambda: session.running and not engine.faults)
    await session.gateway.pause("abort", within_s=5)
    await session.gateway.resume()
    assert (await asking)["stop_reason"] == "max_tokens"


async def unrecorded(session: OpenSession, _engine: Faulty, messages: list[Any]) -> None:
    """The recording cannot be written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "append", lambda *_: 1 / 0)
        assert (await session.ask(messages))["status"] == 500


STEPS: list[Step] = [
    refused, invalid, text_only, too_many, failed, truncated, completed, replayed, several,
    cancelled, aborted, unrecorded,
]  # fmt: skip


def check_counters(session: OpenSession) -> None:
    """Check that nothing is held, and that the budgets equal the totals of the recorded calls."""
    live, engine = session.live, session.gateway._engine
    calls, transcript = session.calls, session.live.transcript
    sampled = sum(len(call.sampled_ids) + call.unreported_tokens for call in calls)
    assert not live.running
    assert live.bytes_in_flight.used == engine.bytes_in_flight.used == 0
    assert live._answers_in_flight.used == engine.answers_in_flight.used == 0
    assert (transcript.calls, transcript.sampled_tokens) == (len(calls), sampled)
    assert live.turns_left == LIMITS.max_turns - len(calls)
    assert live.tokens_left == LIMITS.max_sampled_tokens - sampled
    assert engine.traffic.calls.total() == len(calls)
    assert engine.traffic.sampled_tokens == sampled
    assert not transcript.turns.unfinished
    assert not transcript.parse_cache._nearest[0]
    assert transcript.several._value == TUNING.several_sampled
    assert not session.upstream._waits
    assert not session.running


@settings(max_examples=8, deadline=None)
@given(steps=st.lists(st.sampled_from(STEPS), min_size=3, max_size=8))
async def test_counters_are_at_what_the_recorded_calls_say(steps: list[Step]) -> None:
    """Counters fit any mix of calls that end in different ways, in turn and at once."""
    engine = Faulty()
    with tempfile.TemporaryDirectory() as folder:
        async with open_session(
            Path(folder),
            engine,
            tuning=TUNING,
            limits=LIMITS,
            sampling=CONTRACT,
            policy=Policy.REFUSE,
        ) as session:
            for number, step in enumerate(steps):
                await step(session, engine, [{"role": "user", "content": f"Task {number}."}])
                engine.faults.clear()
            await until(lambda: not session.live.running and not session.running)
            check_counters(session)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
async def test_each_way_to_end_gives_everything_back(tmp_path: Path, step: Step) -> None:
    """Three calls that end the same way leave all counters equal to the recording's totals."""
    engine = Faulty()
    how: dict[str, Any] = {"tuning": TUNING, "limits": LIMITS, "sampling": CONTRACT}
    async with open_session(tmp_path, engine, policy=Policy.REFUSE, **how) as session:
        for number in range(3):
            await step(session, engine, [{"role": "user", "content": f"Task {number}."}])
            engine.faults.clear()
        await until(lambda: not session.live.running and not session.running)
        check_counters(session)


@pytest.mark.parametrize("stream", [True, False])
async def test_refusals_do_not_end_a_session(
    tmp_path: Path,
    stream: bool,  # noqa: FBT001
) -> None:
    """A session may have more refusals than its limits of answers and turns."""
    limits = Limits(max_turns=2)
    how: dict[str, Any] = {"limits": limits, "sampling": CONTRACT, "policy": Policy.REFUSE}
    async with open_session(
        tmp_path, reply_with("Hi."), tuning=CallSettings(session_answers=3), **how
    ) as session:
        for _ in range(10):
            assert (await session.ask(temperature=0.5, stream=stream))["status"] == 400
        assert session.gateway.describe("s1").spent is None
        for _ in range(2):
            assert (await session.ask())["status"] == 200
        assert "2 model calls" in (await session.ask())["error"]["message"]


async def test_a_turn_of_a_failed_call_can_be_used_again(tmp_path: Path) -> None:
    """A call that waits for the last turn gets it if the call before fails."""
    engine = Faulty()
    engine.faults += [{"status": 503}, {"status": 503}]
    limits = Limits(max_turns=1)
    async with open_session(tmp_path, engine, tuning=TUNING, limits=limits) as session:
        first, second = await asyncio.gather(session.ask(), session.ask([*ASK, *ASK]))
        assert (first["status"], second["status"]) == (529, 200)
        assert session.gateway.describe("s1").spent is None
        assert (await session.ask())["status"] == 400


async def test_a_session_that_is_live_is_not_opened_again(tmp_path: Path) -> None:
    """A second attempt to open a live session is an error and leaves its recording unchanged."""
    async with open_session(tmp_path, reply_with("Hi.")) as session:
        await session.ask()
        with pytest.raises(UsageError, match="already open"):
            async with session.gateway.open(Session(id="s1", task="t", sample=0), make_task("t")):
                pass
        await session.ask()
        assert len(session.recording.calls) == 2
