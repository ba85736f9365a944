"""Hanging engines: another replica takes over, and agents are credited the lost time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.engine import RENDERING, ids, reply_with
from support.failing_engine import chunk
from support.gateway import OpenSession, open_session, text_of
from support.polling import until
from support.sockets import Peer, listen
from tugline.gateway.answer import AT_ENGINE
from tugline.gateway.choice import Choice
from tugline.gateway.policy import CallSettings
from tugline.inference.server import create_app
from tugline.testing import ScriptedEngine
from tugline.types import CallOutcome, Cause
from tugline.web.engine_http import ModelCard
from tugline.web.serve import serve

QUICK = CallSettings(
    silent_s=0.2, probe_every_s=0.05, probe_timeout_s=0.5, backoff_s=0.01, grace_s=0.01
)
CARD = ModelCard("m", 4000)


class StoppableEngine:
    """A scripted engine that accepts connections and is silent while it is stopped."""

    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.running.set()
        play = reply_with("one two three four five six seven eight", delay_s=0.01)
        engine = ScriptedEngine(play, vocab_size=RENDERING.tokenizer.size, max_model_len=20_000)
        self._app = create_app(engine, model_name="scripted")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer once it is running."""
        await self.running.wait()
        await self._app(scope, receive, send)


async def test_time_lost_to_a_stopped_engine_is_credited(tmp_path: Path) -> None:
    """A second replica answers, and probes bring the first one back."""
    lost: list[float] = []
    engines = [StoppableEngine(), StoppableEngine()]
    async with (
        serve(engines[0]) as one,
        serve(engines[1]) as two,
        open_session(tmp_path, one, two, tuning=QUICK, on_hang=lost.append) as session,
    ):
        hung = session.upstream.choose("s1")
        engine = engines[[one, two].index(hung.url)]
        for stream in (False, True):
            lost.clear()
            engine.running.clear()
            text = (
                text_of(await session.read())
                if stream
                else (await session.ask())["content"][0]["text"]
            )
            assert "eight" in text
            assert hung.ejected
            assert sum(lost) > QUICK.silent_s
            assert session.upstream.choose("s1") is not hung
            engine.running.set()
            await until(lambda: not hung.ejected)
        assert session.gateway.describe("s1").failure is None


async def test_lost_time_is_credited_before_the_engine_is_ejected(tmp_path: Path) -> None:
    """The first failed probe credits the time, so an engine that resumes in time counts, too."""
    lost: list[float] = []
    returned = asyncio.Event()

    event = chunk(ids("An answer")[:2]) + chunk([], finish="stop")
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"

    def credit(seconds: float) -> None:
        lost.append(seconds)
        returned.set()

    async def hang(peer: Peer) -> None:
        if not (await peer.next_request()).startswith(b"GET"):
            await asyncio.wait_for(returned.wait(), 20)
            await peer.send(head % len(event) + event)
        await peer.reader.read()

    quick = replace(QUICK, eject_after=1000, probe_timeout_s=0.1)
    async with (
        listen(hang) as url,
        open_session(tmp_path, url, card=CARD, tuning=quick, on_hang=credit) as session,
    ):
        assert '"end_turn"' in await session.read()
        assert session.gateway.describe("s1").failure is None
    assert sum(lost) > quick.silent_s


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_timeout_during_a_hang_is_an_engine_failure(
    tmp_path: Path,
    stream: bool,  # noqa: FBT001
) -> None:
    """The client may time out before the hang is detected; the session is retried all the same."""
    asked = asyncio.Event()

    async def say_nothing(peer: Peer) -> None:
        asked.set()
        await peer.reader.read()

    slow = CallSettings(silent_s=0.05, probe_every_s=60, probe_timeout_s=0.1)
    async with (
        listen(say_nothing) as url,
        open_session(tmp_path, url, card=CARD, tuning=slow) as session,
    ):
        asking = asyncio.create_task(session.ask(stream=stream))
        await asyncio.wait_for(asked.wait(), 10)
        await asyncio.sleep(2 * slow.silent_s)
        asking.cancel()
    failure = session.gateway.describe("s1").failure
    assert failure.cause is Cause.ENGINE_LOST


@pytest.mark.parametrize("stream", [False, True])
async def test_the_retry_of_a_session_that_ended_in_silence_gets_another_replica(
    tmp_path: Path,
    stream: bool,  # noqa: FBT001
) -> None:
    """The silent replica is ejected even if no one but the ended session noticed the hang."""
    engines = [StoppableEngine(), StoppableEngine()]
    slow = CallSettings(silent_s=60, probe_every_s=0.05, probe_timeout_s=0.1, grace_s=0.01)
    async with serve(engines[0]) as one, serve(engines[1]) as two:
        async with open_session(tmp_path / "first", one, two, tuning=slow) as session:
            hung = session.upstream.choose("s1")
            engine = engines[[one, two].index(hung.url)]
            engine.running.clear()
            asking = asyncio.create_task(session.ask(stream=stream))
            [life] = [c.life for c in await _wait_for_choices(session)]
            await until(lambda: life.silent_s > 1.0)
            asking.cancel()
            await until(lambda: hung.ejected)
            assert session.upstream.choose("s1") is not hung
            engine.running.set()
            await until(lambda: not hung.ejected)
        failure = session.gateway.describe("s1").failure
    assert failure is not None
    assert failure.cause is Cause.ENGINE_LOST


async def _wait_for_choices(session: OpenSession) -> list[Choice]:
    """The answers of the call, once its replica was asked."""

    def list_choices() -> list[Choice]:
        running = session.gateway._sessions.get("s1").running
        return [c for call in running for c in call.choices if c.state in AT_ENGINE]

    await until(list_choices)
    return list_choices()


async def test_time_until_the_idle_timeout_is_credited(tmp_path: Path) -> None:
    """The idle timeout credits the lost time, also where no probe was made before."""
    lost: list[float] = []
    slow = replace(QUICK, silent_s=60, probe_every_s=60, tries=1)

    async def say_nothing(peer: Peer) -> None:
        await peer.reader.read()

    async with (
        listen(say_nothing) as url,
        open_session(
            tmp_path, url, card=CARD, tuning=slow, idle_s=0.1, on_hang=lost.append
        ) as session,
    ):
        assert (await session.ask())["status"] == 529
    assert sum(lost) >= 0.1


@pytest.mark.parametrize("rest", [b"zz\r\nbroken", b"ff\r\ndata: {}\n\n", b""])
async def test_a_stream_with_broken_framing_ends_as_truncated(tmp_path: Path, rest: bytes) -> None:
    """The replica answers probes and keeps the connection open; the answer ends as truncated."""

    async def serve_broken(peer: Peer) -> None:
        while (await peer.next_request()).startswith(b"GET"):
            body = b'{"data": [{"id": "m"}]}'
            await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        event = chunk(ids("Half an answer")[:5])
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n%s" % (len(event), event, rest)
        await peer.send(head + chunked)
        await peer.reader.read()

    quick = replace(QUICK, stalled_s=0.3, failovers=0, probe_timeout_s=10.0)
    async with (
        listen(serve_broken) as url,
        open_session(tmp_path, url, card=CARD, tuning=quick) as session,
    ):
        text = await session.read()
        calls, failure = session.calls, session.gateway.describe("s1").failure
    if failure is None:
        assert '"stop_reason":"max_tokens"' in text
    else:  # tokens in one piece with broken framing are not read
        assert failure.cause is Cause.ENGINE_LOST
    for call in calls:
        assert (call.outcome, len(call.sampled_ids)) == (CallOutcome.ENGINE_LOST, 5)


async def test_time_lost_by_parallel_calls_is_credited_once(tmp_path: Path) -> None:
    """A call credits only time that no other call was credited for already."""
    now = [100.0]
    lost: list[float] = []
    options = {"card": CARD, "clock": lambda: now[0], "on_hang": lost.append}
    async with open_session(tmp_path, "http://127.0.0.1:9", **options) as session:
        now[0] = 110.0
        session.upstream.on_hang("s1", 8.0)
        session.upstream.on_hang("s1", 7.0)
        now[0] = 112.0
        session.upstream.on_hang("s1", 3.0)
        session.upstream.on_hang("unknown", 3.0)
    assert lost == [8.0, 0.0, 2.0]
