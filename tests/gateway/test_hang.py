"""An engine that hangs: another replica goes on, and no agent pays for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from faulty import chunk
from rig import RENDERING, ids, text_of, until
from tugline.chat.engines.generate import Embedded
from tugline.gateway.app import Gateway
from tugline.gateway.policy import CallSettings
from tugline.gateway.replicas import Upstream
from tugline.types import CallOutcome, Cause, PluginSpec, Session, Task
from tugline.web.engine_http import ModelCard

QUICK = CallSettings(
    silent_s=0.2, probe_every_s=0.05, probe_timeout_s=0.5, backoff_s=0.01, grace_s=0.01
)
ENGINE = """
import asyncio
from rig import RENDERING, says
from tugline.inference.server import create_app
from tugline.testing import ScriptedEngine
from tugline.web.serve import serve

async def main():
    play = says("one two three four five six seven eight", delay_s=0.01)
    engine = ScriptedEngine(play, vocab_size=RENDERING.tokenizer.size, max_model_len=20_000)
    async with serve(create_app(engine, model_name="scripted")) as url:
        print(url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
TASK = Task(id="t", instruction="", harness=PluginSpec("shell"), evaluator=PluginSpec("tests"))
BODY = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "Count."}]}


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[tuple[str, int]]:
    """A scripted engine in a process of its own: its URL and process id."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ENGINE, stdout=asyncio.subprocess.PIPE, env=env
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        yield line.decode().strip(), process.pid
    finally:
        process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def raw_engine(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A server that answers each connection so, and then keeps it open; yields its URL."""
    over, handlers = asyncio.Event(), set[asyncio.Task[None] | None]()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.current_task())
        with contextlib.closing(writer):
            with contextlib.suppress(asyncio.IncompleteReadError):  # the gateway has hung up
                await answer(reader, writer)
            await over.wait()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        over.set()
        await asyncio.gather(*(handler for handler in handlers if handler))


async def test_a_stopped_engine_costs_no_agent_anything(tmp_path: Path) -> None:
    """SIGSTOP: a second replica answers, the time is given back, and the first is probed."""
    lost: list[float] = []
    async with engine() as (one, first), engine() as (two, second):
        upstream = Upstream([one, two], Embedded(), settings=QUICK)
        processes = {one: first, two: second}
        async with (
            Gateway(upstream, RENDERING, tmp_path, settings=QUICK) as gateway,
            gateway.open(Session(id="s", task="t", sample=0), TASK, on_hang=lost.append) as opened,
            aiohttp.ClientSession(headers={"x-api-key": opened.key}) as http,
        ):
            url = f"{opened.base_url}/v1/messages"
            hung = upstream.choose("s")
            for stream in (False, True):
                lost.clear()
                os.kill(processes[hung.url], signal.SIGSTOP)
                async with http.post(url, json={**BODY, "stream": stream}) as response:
                    assert response.status == 200
                    text = await response.text()
                    assert "eight" in (text_of(text) if stream else text)
                assert hung.ejected
                assert sum(lost) > QUICK.silent_s
                assert upstream.choose("s") is not hung
                os.kill(processes[hung.url], signal.SIGCONT)
                await until(lambda: not hung.ejected)
            assert gateway.describe("s").failure is None


async def test_the_agents_clock_stands_still_before_its_engine_is_ejected(tmp_path: Path) -> None:
    """With the first probe that fails, so also where the engine goes on in time."""
    lost: list[float] = []
    returned = asyncio.Event()

    def credit(seconds: float) -> None:
        lost.append(seconds)
        returned.set()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
            return
        await asyncio.wait_for(returned.wait(), 20)
        event = chunk(ids("An answer")[:2]) + chunk([], finish="stop")
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(event) + event)
        await writer.drain()

    quick = replace(QUICK, eject_after=1000, probe_timeout_s=0.1)
    async with raw_engine(hang) as url:
        upstream = Upstream(url, Embedded(), card=ModelCard("m", 4000), settings=quick)
        async with (
            Gateway(upstream, RENDERING, tmp_path, settings=quick) as gateway,
            gateway.open(Session(id="s", task="t", sample=0), TASK, on_hang=credit) as opened,
            aiohttp.ClientSession(headers={"x-api-key": opened.key}) as http,
        ):
            messages = f"{opened.base_url}/v1/messages"
            async with http.post(messages, json={**BODY, "stream": True}) as response:
                assert '"end_turn"' in await asyncio.wait_for(response.text(), 20)
            assert gateway.describe("s").failure is None
    assert sum(lost) > quick.silent_s


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_gave_up_on_a_hanging_engine_is_the_engines_failure(
    tmp_path: Path,
    stream: bool,  # noqa: FBT001
) -> None:
    """Its time may be over before the hang is noticed: the failure is retried all the same."""
    asked = asyncio.Event()

    async def say_nothing(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        asked.set()

    slow = CallSettings(silent_s=0.05, probe_every_s=60, probe_timeout_s=0.1, partial_answer_s=0.01)
    async with raw_engine(say_nothing) as url:
        upstream = Upstream(url, Embedded(), card=ModelCard("m", 4000), settings=slow)
        async with Gateway(upstream, RENDERING, tmp_path, settings=slow) as gateway:
            async with (
                gateway.open(Session(id="s", task="t", sample=0), TASK) as opened,
                aiohttp.ClientSession(headers={"x-api-key": opened.key}) as http,
            ):
                messages = f"{opened.base_url}/v1/messages"
                asking = asyncio.create_task(http.post(messages, json={**BODY, "stream": stream}))
                await asyncio.wait_for(asked.wait(), 10)
                await asyncio.sleep(2 * slow.silent_s)
                asking.cancel()
            failure = gateway.describe("s").failure
    assert failure is not None
    assert failure.cause is Cause.ENGINE_LOST


@pytest.mark.parametrize("rest", [b"zz\r\nbroken", b"ff\r\ndata: {}\n\n", b""])
async def test_a_stream_with_broken_framing_is_lost_in_time(tmp_path: Path, rest: bytes) -> None:
    """The replica answers probes and keeps the connection open; the answer ends as truncated."""

    async def serve_broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
            body = b'{"data": [{"id": "m"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        event = chunk(ids("Half an answer")[:5])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%s\r\n%s" % (len(event), event, rest))
        await writer.drain()

    quick = replace(QUICK, stalled_s=0.3, failovers=0, probe_timeout_s=10.0)
    async with raw_engine(serve_broken) as url:
        upstream = Upstream(url, Embedded(), card=ModelCard("m", 4000), settings=quick)
        async with (
            Gateway(upstream, RENDERING, tmp_path, settings=quick) as gateway,
            gateway.open(Session(id="s", task="t", sample=0), TASK) as opened,
            aiohttp.ClientSession(headers={"x-api-key": opened.key}) as http,
        ):
            messages = f"{opened.base_url}/v1/messages"
            async with http.post(messages, json={**BODY, "stream": True}) as response:
                text = await asyncio.wait_for(response.text(), 20)
            calls, failure = gateway.read_calls("s"), gateway.describe("s").failure
    if failure is None:
        assert '"stop_reason":"max_tokens"' in text
    else:  # what came in one piece with broken framing is not read
        assert failure.cause is Cause.ENGINE_LOST
    for call in calls:
        assert (call.outcome, len(call.sampled_ids)) == (CallOutcome.ENGINE_LOST, 5)


async def test_time_lost_by_parallel_calls_is_given_back_once(tmp_path: Path) -> None:
    """Only what no other call has given back already."""
    now = [100.0]
    lost: list[float] = []
    upstream = Upstream("http://127.0.0.1:9", Embedded(), card=ModelCard("m", 4000))
    async with (
        Gateway(upstream, RENDERING, tmp_path, clock=lambda: now[0]) as gateway,
        gateway.open(Session(id="s", task="t", sample=0), TASK, on_hang=lost.append),
    ):
        now[0] = 110.0
        upstream.on_hang("s", 8.0)
        upstream.on_hang("s", 7.0)
        now[0] = 112.0
        upstream.on_hang("s", 3.0)
        upstream.on_hang("unknown", 3.0)
    assert lost == [8.0, 0.0, 2.0]
