"""Pauses: what is sampling ends at once, nothing begins, and an engine's silence is no fault."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from support.engine import ids, reply_with
from support.failing_engine import DIALECTS, chunk, open_client
from support.gateway import open_session, text_of
from support.polling import until
from support.sockets import Peer, listen
from tugline.chat.engines.generate import Embedded
from tugline.gateway.answer import AT_ENGINE, ENDED, TERMINAL, TRANSITIONS, AnswerState
from tugline.gateway.gate import Gate
from tugline.gateway.policy import CallSettings
from tugline.testing import Reply
from tugline.types import CallOutcome, Finish
from tugline.web.engine_http import ModelCard

LONG = " ".join(f"word{i}" for i in range(24))
QUICK = CallSettings(backoff_s=0.001, grace_s=0.01, probe_every_s=0.02)
each_way = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


class Unabortable(Embedded):
    """An engine format without a route that aborts requests."""

    abort_path = ""


# --------------------------------------------------------------------------- abort
@each_way
@pytest.mark.parametrize("wire", [Embedded, Unabortable], ids=["by id", "by disconnection"])
@pytest.mark.parametrize("when", ["prefill", "sampling"])
async def test_an_abort_ends_every_call_at_once(
    tmp_path: Path,
    stream: bool,  # noqa: FBT001
    wire: type[Embedded],
    when: str,
) -> None:
    """Clients get what was sampled, as truncated, also if there was no token yet."""
    slow = {"first_s": 60.0} if when == "prefill" else {"delay_s": 0.02}
    async with open_session(
        tmp_path, reply_with(LONG, **slow), tuning=QUICK, wire=wire()
    ) as session:
        asking = asyncio.create_task(session.read() if stream else session.ask())
        await until(lambda: session.running == 1 and (when == "prefill" or session.sampled > 5))
        began = time.monotonic()
        await session.gateway.pause("abort", within_s=5)
        assert time.monotonic() - began < 2
        await until(lambda: not session.running)
        answer = await asyncio.wait_for(asking, 5)
        await session.gateway.resume()
        (call,) = session.calls
    assert "max_tokens" in str(answer)
    assert (call.outcome, call.finish) == (CallOutcome.COMPLETE, Finish.ABORT)
    assert (len(call.sampled_ids) > 0) == (when == "sampling")
    assert len(call.sampled_ids) < len(ids(LONG))


async def test_an_abort_that_overtakes_its_request_is_repeated(tmp_path: Path) -> None:
    """An engine that does not know the request yet ignores the first abort."""
    aborts = 0
    aborted = asyncio.Event()

    async def serve_one(peer: Peer) -> None:
        nonlocal aborts
        head = await peer.next_request()
        if b"/abort_requests" in head:
            aborts += 1
            await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            if aborts == 3:
                aborted.set()
            return
        await aborted.wait()
        event = chunk([], finish="abort")
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        await peer.send(b"content-length: %d\r\n\r\n" % len(event) + event)

    card = ModelCard("m", 4000)
    async with (
        listen(serve_one) as url,
        open_session(tmp_path, url, card=card, tuning=QUICK) as session,
    ):
        asking = asyncio.create_task(session.read())
        await until(lambda: session.live.running)
        (completion,) = session.live.running
        await until(lambda: completion.choices[0].life.state is AnswerState.SENT)
        await session.gateway.pause("abort", within_s=5)
        assert "max_tokens" in await asyncio.wait_for(asking, 5)
    assert aborts == 3


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_queued_choices_do_not_begin_during_a_pause(tmp_path: Path, mode: str) -> None:
    """The choices that wait for those before them are sampled after the pause."""
    tuning = replace(QUICK, several_sampled=1)
    play = reply_with("word " * 5, delay_s=0.01)
    async with open_session(tmp_path, play, tuning=tuning) as session:
        asking = asyncio.create_task(session.post_openai(n=3).__aenter__())
        await until(lambda: session.sampled > 2)
        await session.gateway.pause(mode, within_s=5)
        await until(lambda: not session.running)
        assert len(session.engines[0].calls) == 1
        await session.gateway.resume()
        response = await asking
        assert len((await response.json())["choices"]) == 3
        assert len(session.engines[0].calls) == 3


@pytest.mark.parametrize("fault", [{"status": 503}, {"cut_after": 10}], ids=["retry", "failover"])
async def test_another_attempt_waits_for_the_end_of_a_pause(
    tmp_path: Path, fault: dict[str, Any]
) -> None:
    """A refused or lost request is not sent again while calls are held."""
    faults = [fault]

    def play(prompt: Any, request: str) -> Reply:
        return reply_with(LONG, delay_s=0.001, **(faults.pop() if faults else {}))(prompt, request)

    async with open_session(tmp_path, play, tuning=replace(QUICK, backoff_s=0.2)) as session:
        if "cut_after" in fault:
            session.gateway._engine.settings = replace(QUICK, backoff_s=0.0)
        reading = asyncio.create_task(session.read())
        await until(lambda: not faults)
        await session.gateway.pause("keep")
        await until(lambda: not session.running)
        await asyncio.sleep(0)
        requests = len(session.engines[0].calls)
        (completion,) = session.live.running
        await until(lambda: completion.choices[0].life.state is AnswerState.QUEUED)
        assert len(session.engines[0].calls) == requests == 1
        await session.gateway.resume()
        assert text_of(await reading) == LONG


# --------------------------------------------------------------------------- silence
async def silent(stream: AsyncIterator[bytes]) -> Response:
    """A stream that is sent as its events come."""
    return StreamingResponse(stream, media_type="text/event-stream")


@pytest.mark.parametrize("begun", [True, False], ids=["after a token", "before the first"])
async def test_a_paused_engine_may_be_silent_for_as_long_as_the_pause_lasts(
    tmp_path: Path,
    begun: bool,  # noqa: FBT001
) -> None:
    """Neither the bound for started streams nor that for first tokens counts the pause."""
    resumed = asyncio.Event()
    tokens = ids("Done.")

    async def answer(_: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            if begun:
                yield chunk(tokens[:1])
            await resumed.wait()
            rest = tokens[1:] if begun else tokens
            yield chunk(rest, "stop", at=len(tokens) - len(rest))

        return await silent(events())

    short = {"silent_s": 0.05, "stalled_s": 0.1, "probe_every_s": 0.01}
    async with open_client(tmp_path, answer, idle_s=0.2, failovers=0, tries=1, **short) as client:
        reading = asyncio.create_task(client.stream(DIALECTS[0]))
        await until(lambda: client.engine.requests == 1)
        await client.gateway.pause("keep")
        gate = client.upstream.gate
        at = gate.now()
        deadline = asyncio.get_running_loop().time() + 0.3
        await until(lambda: asyncio.get_running_loop().time() > deadline)
        assert gate.now() == at
        assert not reading.done()
        await client.gateway.resume()
        resumed.set()
        assert text_of((await reading)[1]) == "Done."
        assert client.gateway.describe("s1").failure is None
        assert not client.upstream.replicas[0].ejected


async def test_silence_without_a_pause_ends_the_reply_still(tmp_path: Path) -> None:
    """A stalled stream is ended, though a pause began and ended during the silence."""

    async def answer(_: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield chunk(ids("Done.")[:1])
            await asyncio.Event().wait()

        return await silent(events())

    short = {"silent_s": 0.05, "stalled_s": 0.1, "probe_every_s": 0.01}
    async with open_client(tmp_path, answer, failovers=0, tries=1, **short) as client:
        reading = asyncio.create_task(client.stream(DIALECTS[0]))
        await until(lambda: client.engine.requests == 1)
        await client.gateway.pause("keep")
        await client.gateway.resume()
        assert "max_tokens" in (await asyncio.wait_for(reading, 10))[1]
        assert client.gateway.read_calls("s1")[0].outcome is CallOutcome.ENGINE_LOST


async def test_the_clock_of_a_gate_stands_still_while_it_is_closed() -> None:
    """A call that waits at the gate does not pass if it is closed again before it runs."""
    gate = Gate()
    gate.close()
    waiting = asyncio.create_task(gate.wait(10))
    await asyncio.sleep(0)
    at = gate.now()
    gate.open()
    gate.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert gate.now() - at < 0.1
    gate.open()
    await asyncio.wait_for(waiting, 5)


def test_every_state_of_an_answer_can_be_left_or_is_terminal() -> None:
    """The table has every state, and only states that can be reached."""
    reached = {AnswerState.QUEUED}.union(*TRANSITIONS.values())
    assert set(TRANSITIONS) == reached == set(AnswerState)
    assert TERMINAL < ENDED
    assert not AT_ENGINE & ENDED
