"""Sampling policy, budgets and recorded events of a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.engine import reply_with
from support.gateway import ASK, open_session
from tugline.gateway.policy import CallSettings
from tugline.recording.records import RecordedEventKind
from tugline.types import Finish, Limits, PluginSpec, Policy, Sampling, Session, SpentLimit, Task


# --------------------------------------------------------------------------- sampling and budgets
@pytest.mark.parametrize(
    ("policy", "used"), [(Policy.ENFORCE, 1.0), (Policy.ALLOW, 0.5)], ids=["enforce", "allow"]
)
async def test_the_policy_decides_between_contract_and_request(
    tmp_path: Path, policy: Policy, used: float
) -> None:
    """The call has the sampling that the policy selects, and the record also the requested one."""
    contract = Sampling(temperature=1.0, top_p=1.0)
    async with open_session(
        tmp_path, reply_with("Hi."), sampling=contract, policy=policy
    ) as session:
        await session.ask(temperature=0.5)
        call = session.calls[0]
    assert (call.sampling.temperature, call.requested.temperature) == (used, 0.5)


async def test_the_policy_can_refuse(tmp_path: Path) -> None:
    """Other sampling than that of the task is an error that names field and value."""
    contract = Sampling(temperature=1.0)
    async with open_session(
        tmp_path, reply_with("Hi."), sampling=contract, policy=Policy.REFUSE
    ) as session:
        reply = await session.ask(temperature=0.5)
    assert reply["status"] == 400
    assert "temperature=0.5 violates the task's sampling contract" in reply["error"]["message"]


async def test_the_contract_reaches_the_engine(tmp_path: Path) -> None:
    """The smaller length wins; every call has a seed of its own."""
    contract = Sampling(temperature=1.0, top_p=1.0, max_tokens=5, seed=7)
    async with open_session(tmp_path, reply_with("word " * 9), sampling=contract) as session:
        answer = await session.ask(temperature=0.2, max_tokens=900)
        await session.ask(max_tokens=2)
        first, second = session.engines[0].calls
        assert answer["stop_reason"] == "max_tokens"
        assert (first.temperature, first.max_tokens, second.max_tokens) == (1.0, 5, 2)
        assert len({first.seed, second.seed, 7}) == 3
        assert session.calls[0].finish is Finish.LENGTH


@pytest.mark.parametrize(
    ("limits", "expected", "spent"),
    [
        (Limits(max_turns=1), "1 model calls", SpentLimit.MAX_TURNS),
        (Limits(max_sampled_tokens=3), "3 sampled tokens", SpentLimit.MAX_SAMPLED_TOKENS),
        (Limits(calls_s=60.0), "60 seconds", SpentLimit.CALLS_S),
    ],
    ids=["turns", "tokens", "time"],
)
async def test_a_spent_budget_has_the_status_its_harness_stops_on(
    tmp_path: Path, limits: Limits, expected: str, spent: SpentLimit
) -> None:
    """Nothing more is sampled, and the message names the spent budget."""
    now = [100.0]
    async with open_session(
        tmp_path, reply_with("Hello."), limits=limits, spent_status=404, clock=lambda: now[0]
    ) as session:
        now[0] += 70.0  # the time before the first call does not count
        assert (await session.ask())["status"] == 200
        cut = spent is SpentLimit.MAX_SAMPLED_TOKENS  # the last answer, before any call is refused
        assert session.gateway.describe("s1").spent is (spent if cut else None)
        now[0] += 61.0
        reply = await session.ask([*ASK, *ASK])
        assert reply["status"] == 404
        assert expected in reply["error"]["message"]
        assert len(session.calls) == len(session.engines[0].calls) == 1
        assert session.gateway.describe("s1").spent is spent
    assert session.gateway.describe("s1").spent is spent  # also once it is closed


async def test_only_the_last_closed_sessions_are_kept(tmp_path: Path) -> None:
    """Memory is bounded, and live sessions are always kept."""
    task = Task(id="t", instruction="", harness=PluginSpec("shell"), evaluator=PluginSpec("tests"))
    async with open_session(
        tmp_path, reply_with("Hello."), tuning=CallSettings(closed_sessions=3)
    ) as session:
        await session.ask()
        for number in range(9):
            async with session.gateway.open(Session(id=f"o{number}", task="t", sample=0), task):
                pass
        assert len(session.gateway.read_calls("s1")) == 1
        for number in (6, 7, 8):
            assert session.gateway.read_calls(f"o{number}") == ()
        for number in (0, 5):
            with pytest.raises(KeyError):
                session.gateway.read_calls(f"o{number}")
            with pytest.raises(KeyError):
                session.gateway.describe(f"o{number}")


# --------------------------------------------------------------------------- events
async def test_a_refused_request_is_recorded_without_its_content(tmp_path: Path) -> None:
    """The event has status, error and field, and nothing of the prompt; no call is recorded."""
    async with open_session(tmp_path, reply_with("ok")) as session:
        assert (await session.ask(top_k=-5))["status"] == 400
        assert (await session.ask(messages="Mend"))["status"] == 400
        recording = session.recording
    assert [event.kind for event in recording.events] == [RecordedEventKind.REFUSED] * 2
    assert recording.calls == ()
    for event in recording.events:
        assert event.detail.startswith("400 ")
        assert "Mend" not in event.detail
    assert recording.events[1].detail == "400 RequestError messages[0]"


async def test_pauses_and_weights_are_events_of_live_sessions(tmp_path: Path) -> None:
    """The events are recorded in their order, with the mode and the version."""
    async with open_session(tmp_path, reply_with("ok")) as session:
        await session.gateway.pause("abort")
        await session.gateway.set_weights_version(7)
        await session.gateway.resume()
        events = session.recording.events
    assert [(event.kind, event.detail) for event in events] == [
        (RecordedEventKind.PAUSED, "abort"),
        (RecordedEventKind.WEIGHTS, "7"),
        (RecordedEventKind.RESUMED, ""),
    ]
    assert events[0].at <= events[1].at <= events[2].at
