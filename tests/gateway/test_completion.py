"""Answers survive lost engines, lost clients and new weights, and are sampled once (I2, I3)."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.engine import RENDERING, ids, reply_cut_once, reply_in_turn, reply_with
from support.garbage import count_cycles
from support.gateway import ASK, open_session, text_of
from support.polling import until
from tugline.errors import EngineError
from tugline.gateway.policy import CallSettings
from tugline.recording.file import read
from tugline.recording.records import RecordedEventKind
from tugline.testing import Reply
from tugline.traces.base import PrefixMerging
from tugline.traces.lineage import build_chains
from tugline.types import Branch, CallOutcome, Finish, Ids, Reason

LONG = " ".join(f"word{i}" for i in range(24))
QUICK = CallSettings(backoff_s=0.001, grace_s=0.01, probe_every_s=0.02)


# --------------------------------------------------------------------------- lost engines
async def test_an_answer_continues_on_another_replica(tmp_path: Path) -> None:
    """Though both replicas cut the connection, the client reads one unbroken stream.

    Events record where the stream broke, and tokens have the version of the replica that sampled
    them.

    The client's text, the call and the events must agree on the same two faults.
    """
    async with open_session(
        tmp_path, reply_cut_once(LONG, 40), reply_cut_once(LONG, 40), tuning=QUICK
    ) as session:
        session.engines[0].version, session.engines[1].version = 3, 4
        text = text_of(await session.read())
        (call,), faults = session.calls, session.recording.events
    assert text == LONG
    assert call.sampled_ids.tolist() == ids(LONG)
    assert (call.outcome, call.finish, call.branch) == (CallOutcome.COMPLETE, Finish.STOP, None)
    assert len(call.replicas) == 3
    assert call.replicas[0] == call.replicas[2] != call.replicas[1]
    assert [(e.kind, e.call) for e in faults] == [(RecordedEventKind.ENGINE_FAULT, 0)] * 2
    first, second, third = call.versions
    assert [(span.start, span.end) for span in call.versions[:2]] == [(0, 40), (40, 80)]
    assert {first.version, second.version} == {3, 4}
    assert third.version == first.version
    places = zip(call.replicas, (40, 80), strict=False)
    assert [e.detail for e in faults] == [f"{where} after {at} tokens" for where, at in places]


async def test_an_answer_without_a_replica_left_is_truncated(tmp_path: Path) -> None:
    """The client gets a complete reply; the sampled tokens are recorded and trained."""
    text = " ".join(f"w{i}" for i in range(40))

    def cut(prompt: Any, request: str) -> Any:
        reply = reply_with(text, cut_after=60)(prompt, request)
        return reply if request.endswith("-0") else reply_with(text, status=500)(prompt, request)

    async with open_session(tmp_path, cut, tuning=replace(QUICK, failovers=1)) as session:
        stream = await session.read()
        call = session.calls[0]
    assert '"stop_reason":"max_tokens"' in stream
    assert stream.rstrip().endswith('{"type":"message_stop"}')
    assert call.outcome is CallOutcome.ENGINE_LOST
    assert call.sampled_ids.tolist() == ids(text)[:60]


async def test_a_fault_before_the_first_token_is_retried_on_another_replica(tmp_path: Path) -> None:
    """The call is answered whichever replica the session is assigned to."""
    async with open_session(
        tmp_path, reply_with("a", status=500), reply_with("Done."), tuning=QUICK
    ) as session:
        for _ in range(3):
            reply = await session.ask()
            assert reply["content"] == [{"type": "text", "text": "Done."}]


async def test_a_single_replica_is_retried(tmp_path: Path) -> None:
    """The client does not see a few refusals before the first token; more are an engine failure."""
    faults: list[int | None] = [429, 503, None]

    def reply(prompt: Any, request: str) -> Reply:
        status = faults.pop(0) if faults else 503
        fault = Reply([0], status=status, retry_after_s=0.01)
        return fault if status else reply_with("Hi.")(prompt, request)

    async with open_session(tmp_path, reply, tuning=QUICK) as session:
        assert (await session.ask())["content"] == [{"type": "text", "text": "Hi."}]
        assert session.gateway.describe("s1").failure is None
        assert (await session.ask())["status"] == 529
        assert len(session.calls) == 1
        failure = session.gateway.describe("s1").failure
    assert failure.boundary == "engine"


async def test_a_failing_replica_is_ejected_and_comes_back(tmp_path: Path) -> None:
    """A replica with consecutive faults gets no requests until it answers a probe."""
    tuning = replace(QUICK, probe_every_s=0.5)
    async with open_session(
        tmp_path, reply_with("a", status=500), reply_with("Done."), tuning=tuning
    ) as session:
        replica = session.upstream.replicas[0]
        for _ in range(2):
            replica.count_fault()
        assert replica.ejected
        for _ in range(4):
            await session.ask()
        assert not session.engines[0].calls
        await until(lambda: not replica.ejected)


async def test_calls_of_a_session_stick_to_one_replica(tmp_path: Path) -> None:
    """All calls go to the replica whose KV cache has the session's prefix."""
    async with open_session(
        tmp_path, reply_with("Hi."), reply_with("Hi."), reply_with("Hi.")
    ) as session:
        for _ in range(6):
            await session.ask()
        assert sorted(len(engine.calls) for engine in session.engines) == [0, 0, 6]


# --------------------------------------------------------------------------- clients that leave
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_lost_client_aborts_generation_and_keeps_its_tokens(
    tmp_path: Path,
    stream: bool,  # noqa: FBT001
) -> None:
    """No request is left running and the call is recorded, whether it was streamed or not."""
    async with open_session(tmp_path, reply_with(LONG, delay_s=0.02), tuning=QUICK) as session:
        asking = asyncio.create_task(session.read() if stream else session.ask())
        await until(lambda: session.sampled > 5)
        asking.cancel()
        await until(lambda: not session.running)
        await until(lambda: session.calls)
        (call,) = session.calls
    assert call.outcome is CallOutcome.CLIENT_GONE
    assert 0 < len(call.sampled_ids) < len(ids(LONG))


async def test_two_hundred_lost_clients_leave_nothing_running(tmp_path: Path) -> None:
    """Killing many clients in the middle of their streams frees the engine."""
    async with open_session(tmp_path, reply_with(LONG, delay_s=0.05), tuning=QUICK) as session:
        responses = await asyncio.gather(
            *(session.post(session.body(stream=True)) for _ in range(200))
        )
        await until(lambda: session.running == 200, 20)
        for response in responses:
            response.close()
        await until(lambda: not session.running)


@pytest.mark.parametrize("when", ["sampling", "before it sampled", "before it was admitted"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_waiting_clients_get_an_error_when_the_session_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,  # noqa: FBT001
    when: str,
) -> None:
    """Clients get an error of their API at once, and sampled tokens are recorded."""
    async with open_session(tmp_path, reply_with(LONG, delay_s=0.02), tuning=QUICK) as opened:
        session, sessions = opened.live, opened.gateway._sessions
        complete, closing = session.complete, list[Any]()

        async def close_first(*args: Any, **kwargs: Any) -> Any:
            closing.append(asyncio.create_task(sessions.close(session)))
            if when == "before it was admitted":
                await closing[0]
            return await complete(*args, **kwargs)

        if when != "sampling":
            monkeypatch.setattr(session, "complete", close_first)
        asking = asyncio.create_task(opened.read() if stream else opened.ask())
        if when == "sampling":
            await until(lambda: opened.sampled > 5)
            await sessions.close(session)
        answer = await asyncio.wait_for(asking, 5)
        calls = read(session.transcript.writer.path).calls
    assert "the session has ended" in str(answer)
    assert "authentication_error" in str(answer)
    assert [call.outcome for call in calls] == [CallOutcome.CLIENT_GONE] * (when == "sampling")


# --------------------------------------------------------------------------- repeated requests
async def test_a_broken_answer_is_resumed_once_by_the_same_api(tmp_path: Path) -> None:
    """The same request through another API, or for a third time, is sampled anew."""
    function = {"name": "read", "description": "Read", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    async with open_session(tmp_path, reply_with(LONG, delay_s=0.003), tuning=QUICK) as session:
        await session.hang_up(characters=20)
        await until(lambda: session.calls)
        async with session.post_openai(max_tokens=4000, tools=tools) as reply:
            assert reply.status == 200
        for _ in range(3):
            assert text_of(await session.read()) == LONG
        first, other, rest, *fresh = session.calls
    assert np.array_equal(other.prompt_ids, first.prompt_ids)
    assert len(rest.prompt_ids) > len(first.prompt_ids)
    assert [len(call.prompt_ids) for call in fresh] == [len(first.prompt_ids)] * 2


async def test_an_immediate_retry_joins_the_answer_in_flight(tmp_path: Path) -> None:
    """A client that comes back within the grace period follows the same answer from its start."""
    async with open_session(
        tmp_path, reply_with(LONG, delay_s=0.003), tuning=replace(QUICK, grace_s=30)
    ) as session:
        await session.hang_up()
        (completion,) = session.live.running
        await until(lambda: not completion.readers)
        text = text_of(await session.read())
        assert len(session.engines[0].calls) == 1
    assert text == LONG
    assert [call.outcome for call in session.calls] == [CallOutcome.COMPLETE]


async def test_the_same_turn_without_a_stream_is_not_sampled_again(tmp_path: Path) -> None:
    """An unstreamed request for a streamed turn, as from Claude Code, gets the same answer."""
    async with open_session(tmp_path, reply_with("Done.")) as session:
        streamed = text_of(await session.read())
        whole = await session.ask(stream=False)
        assert whole["content"] == [{"type": "text", "text": streamed}]
        assert len(session.engines[0].calls) == 1


async def test_sdk_retries_are_replayed_and_other_repetitions_sampled(tmp_path: Path) -> None:
    """A request with a retry header gets the same answer, an equal one without it a new one."""
    async with open_session(tmp_path, reply_in_turn("One.", "Two.", LONG)) as session:
        replies = []
        for retry in ("0", "1", "0"):
            async with session.post(
                session.body(), **{"x-stainless-retry-count": retry}
            ) as response:
                reply = await response.json()
                replies.append((reply["id"], reply["content"][0]["text"]))
        assert replies == [("msg_s1-0", "One."), ("msg_s1-0", "One."), ("msg_s1-1", "Two.")]
        (repeated,) = session.recording.events
        assert (repeated.kind, repeated.call) == (RecordedEventKind.REPEATED, 0)
        await asyncio.gather(*(session.ask() for _ in range(18)))
        assert len(session.engines[0].calls) == 20
    assert sorted(call.number for call in session.calls) == list(range(20))
    assert {(call.parent, call.branch) for call in session.calls} == {(None, None)}


# --------------------------------------------------------------------------- weights
async def test_paused_calls_wait_and_running_ones_finish(tmp_path: Path) -> None:
    """`pause` returns when nothing is in flight; a new call is answered after `resume`."""
    async with open_session(tmp_path, reply_with(LONG, delay_s=0.005)) as session:
        running = asyncio.create_task(session.ask())
        await until(lambda: session.running)
        await session.gateway.pause("wait", within_s=5)
        assert not session.running
        await running
        held = asyncio.create_task(session.ask([*ASK, *ASK]))
        await until(lambda: session.live.running)
        assert len(session.engines[0].calls) == 1
        await session.gateway.resume()
        assert (await held)["stop_reason"] == (await running)["stop_reason"] == "end_turn"


async def test_pause_can_abort_running_answers(tmp_path: Path) -> None:
    """The client gets a truncated answer, which is recorded as aborted."""
    async with open_session(tmp_path, reply_with(LONG, delay_s=0.02)) as session:
        reading = asyncio.create_task(session.read())
        await until(lambda: session.sampled > 5)
        await session.gateway.pause("abort", within_s=5)
        await session.gateway.resume()
        assert '"stop_reason":"max_tokens"' in await reading
        call = session.calls[0]
    assert (call.outcome, call.finish) == (CallOutcome.COMPLETE, Finish.ABORT)
    assert 0 < len(call.sampled_ids) < len(ids(LONG))


async def test_a_pause_that_takes_too_long_is_an_error(tmp_path: Path) -> None:
    """A pause that is not complete after `within_s` raises an error."""
    async with open_session(tmp_path, reply_with(LONG, delay_s=0.005)) as session:
        reading = asyncio.create_task(session.read())
        await until(lambda: session.running)
        with pytest.raises(EngineError, match="still in flight"):
            await session.gateway.pause("wait", within_s=0.01)
        await session.gateway.resume()
        await reading


# --------------------------------------------------------------------------- streams
async def test_a_stream_opens_at_its_first_token(tmp_path: Path) -> None:
    """Headers and first events are sent while the engine is still sampling."""
    async with (
        open_session(tmp_path, reply_with(LONG, delay_s=0.003)) as session,
        session.post(session.body(stream=True)) as response,
    ):
        first = await response.content.readany()
        assert session.running == 1
        assert not session.calls
        assert json.loads(first.split(b"data: ")[1].split(b"\n")[0])["type"] == "message_start"


async def test_a_silent_stream_is_kept_alive(tmp_path: Path) -> None:
    """Pings are sent before the first token, and while a tool call is buffered."""
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "' + "a" * 60 + '"}}\n</tool_call>'
    tuning = replace(QUICK, headers_within_s=0.0, keep_alive_s=0.05)
    async with open_session(tmp_path, reply_with(call, delay_s=0.01), tuning=tuning) as session:
        stream = await session.read()
    assert stream.count("event: ping") > 2
    assert '"stop_reason":"tool_use"' in stream


async def test_a_sub_agent_may_start_before_its_call_has_ended(tmp_path: Path) -> None:
    """Clients start a sub-agent once its tool call is complete; its turns are marked as such."""
    ask = '<tool_call>\n{"name": "agent", "arguments": {"prompt": "Find all the walruses."}}\n'
    asks = reply_with(f"{ask}</tool_call>\n{LONG * 20}", delay_s=0.01)

    def play(prompt: Ids, request: str) -> Reply:
        is_sub = "walruses" in RENDERING.tokenizer.decode(prompt.tolist())
        return reply_with("Found.")(prompt, request) if is_sub else asks(prompt, request)

    start = [{"role": "user", "content": "<reminder>No.</reminder>\nFind all the walruses."}]
    more = [{"role": "assistant", "content": "Found."}, {"role": "user", "content": "More?"}]
    async with open_session(tmp_path, play, tuning=QUICK) as session:
        async with session.post(session.body(stream=True)) as response:
            while b"walruses" not in await response.content.readline():
                pass
            await session.ask(start)
            await session.ask([*start, *more])
            assert [call.number for call in session.calls] == [1, 2]
        await until(lambda: len(session.calls) == 3)
        calls = sorted(session.calls, key=lambda call: call.number)
    assert [call.kind for call in calls] == ["main", "subagent", "subagent"]
    assert [call.thread for call in calls] == [None, "call_0_0", "call_0_0"]
    assert [call.branch for call in calls[1:]] == [None, None]
    main, sub = build_chains(calls)
    assert (main.kind, sub.kind, len(sub.calls), sub.forked_after) == ("main", "subagent", 2, 0)


@pytest.mark.parametrize(
    "ask",
    [
        "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.",
        "First, reason in your <analysis> block. Then, produce the <state_snapshot> XML.",
        "First, reason in your scratchpad. Then, generate the updated <state_snapshot>.",
        "Critically evaluate the <state_snapshot> you just generated.",
    ],
    ids=["claude_code", "qwen_code", "gemini_cli", "gemini_cli, again"],
)
async def test_compactions_and_commit_messages_are_recognized_by_prompt(
    tmp_path: Path, ask: str
) -> None:
    """Neither request has a header of its own; a request after a summary branches as compacted."""
    grown = [
        *ASK,
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Go on."},
    ]
    summary = [*grown, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": ask}]
    after = [{"role": "user", "content": "In short: hello."}, *grown[1:]]
    commit = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "diff"}]}
    commit["system"] = "You generate concise, one-line Git commit messages."
    async with open_session(tmp_path, reply_with("Hello.")) as session:
        for messages in (ASK, grown, summary, after):
            await session.ask(messages, tools=[])
        async with session.post(commit) as response:
            assert response.status == 200
        calls = session.calls
    assert [call.kind for call in calls] == ["main", "main", "compaction", "main", "side"]
    assert [call.branch for call in calls[:4]] == [None, None, None, Branch.COMPACTED]
    assert [chain.kind for chain in build_chains(calls)] == ["main", "compaction", "side"]


async def test_a_title_request_is_a_side_call(tmp_path: Path) -> None:
    """A request for a title has no tools, and starts a thread of its own."""
    async with open_session(tmp_path, reply_with("Hello.")) as session:
        await session.ask()
        title = [{"role": "user", "content": "Write a title."}]
        body = {"model": "m", "max_tokens": 50, "system": "You title.", "messages": title}
        async with session.post(body) as response:
            assert response.status == 200
    assert [call.kind for call in session.calls] == ["main", "side"]
    assert session.calls[1].branch is Branch.NEW_THREAD


async def test_a_greeting_before_the_task_is_a_side_call(tmp_path: Path) -> None:
    """A first call without tools that nothing continues is a side trace if the task has tools."""
    hello = {
        "model": "m",
        "max_tokens": 50,
        "messages": [{"role": "user", "content": "Say hello."}],
    }
    go_on = [*ASK, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "On."}]
    async with open_session(tmp_path, reply_with("Hello.")) as session:
        async with session.post(hello) as response:
            assert response.status == 200
        for messages in (ASK, go_on):
            await session.ask(messages)
        calls = session.calls
    assert [call.kind for call in calls] == ["main"] * 3
    traces, ledger, _ = PrefixMerging().build(calls)
    assert [(trace.kind, trace.parent) for trace in traces] == [("side", None), ("main", None)]
    assert ledger.masked == {Reason.SIDE_CALL: len(calls[0].sampled_ids)}


# --------------------------------------------------------------------------- memory
@pytest.mark.parametrize("end", ["complete", "client gone", "cancelled", "engine failed"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_ended_calls_leave_no_cycles(
    tmp_path: Path,
    end: str,
    stream: bool,  # noqa: FBT001
) -> None:
    """Calls are freed without the garbage collector, which hardly looks at a busy gateway."""
    status = 500 if end == "engine failed" else None
    play = reply_with(LONG, delay_s=0.0 if end == "complete" else 0.02, status=status)
    tuning = replace(QUICK, recent_calls=1)
    async with open_session(tmp_path, play, tuning=tuning) as session:

        async def call(question: str) -> None:
            sampled = session.sampled
            ask = [{"role": "user", "content": question}]
            asking = asyncio.create_task(session.read(ask) if stream else session.ask(ask))
            if end in {"client gone", "cancelled"}:
                await until(lambda: session.sampled > sampled + 5)
                if end == "client gone":
                    asking.cancel()
                else:
                    for each in session.live.running:
                        each.cancel()
            await asyncio.wait({asking})
            await until(lambda: not session.running and not session.live.running)
            await asyncio.sleep(0.1)  # connections are closed, threads drop their last function

        await call("First?")
        with count_cycles() as cycles:
            await call("Second?")
            await call("Third?")
    assert not cycles
