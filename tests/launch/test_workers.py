"""A gateway of several worker processes: killed, paused and orphaned."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from leased import a_task
from rig import RENDERING, ids, until
from served import flip_bit
from tugline.chat.engines.generate import Embedded
from tugline.errors import CaptureError, EngineError
from tugline.gateway.replicas import Upstream
from tugline.inference.server import create_app
from tugline.launch.engine import EngineConnection
from tugline.launch.workers import Workers, count_workers
from tugline.protocol import PauseMode
from tugline.recording.file import read
from tugline.recording.records import RecordedEventKind
from tugline.testing import Reply, ScriptedEngine
from tugline.traces.base import PrefixMerging
from tugline.types import CallOutcome, Ids, Limits, Session, SpentLimit, Task
from tugline.web.serve import serve

TURNS = 5


def task(**limits: Any) -> Task:
    """A task with these limits."""
    return a_task("t", limits=Limits(**limits))


def answer(_prompt: Ids, request: str) -> Reply:
    """A distinct answer to each call."""
    return Reply(ids(f"This is answer {request.rpartition('-')[2]}."))


@contextlib.asynccontextmanager
async def workers(folder: Path, play: Any = answer) -> AsyncIterator[Workers]:
    """A gateway of two processes, and a scripted engine in this one."""
    engine = ScriptedEngine(play, vocab_size=RENDERING.tokenizer.size, max_model_len=20_000)
    async with serve(create_app(engine, model_name="scripted")) as url:
        connection = EngineConnection((url,), Upstream([url], Embedded()), RENDERING)
        async with Workers(connection, folder, host="127.0.0.1", port=0, count=2) as gateway:
            yield gateway


class Agent:
    """A conversation that retries broken connections, as agents do."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str) -> None:
        self.http, self.url, self.key = http, url, key
        self.messages: list[dict[str, Any]] = []
        self.acknowledged: list[int] = []
        """Numbers of the calls whose answers have arrived."""

    async def ask(self) -> int:
        """Send the next question; returns the status."""
        request = {"role": "user", "content": f"Question {len(self.messages)}"}
        body = {"model": "m", "max_tokens": 100, "messages": [*self.messages, request]}
        headers = {"x-api-key": self.key, "anthropic-version": "2023-06-01"}
        async with asyncio.timeout(60):
            while True:
                try:
                    async with self.http.post(
                        f"{self.url}/v1/messages", json=body, headers=headers
                    ) as response:
                        reply = await response.json()
                        break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.05)
        if response.status == 200:
            self.acknowledged.append(int(reply["id"].rpartition("-")[2]))
            message = {"role": "assistant", "content": reply["content"]}
            self.messages = [*body["messages"], message]
        return response.status


async def test_a_killed_process_loses_no_acknowledged_call(tmp_path: Path) -> None:
    """One of two processes is killed during a hundred sessions, which all go on."""
    reached, killed = [0], asyncio.Event()
    async with workers(tmp_path) as gateway, aiohttp.ClientSession() as http:

        async def run(number: int) -> list[int]:
            session = Session(id=f"s{number}", task="t", sample=number)
            async with gateway.open(session, task()) as opened:
                agent = Agent(http, opened.base_url, opened.key)
                for turn in range(TURNS):
                    if turn == 2:
                        reached[0] += 1
                        await killed.wait()
                    assert await agent.ask() == 200
            return agent.acknowledged

        running = [asyncio.create_task(run(number)) for number in range(100)]
        await until(lambda: reached[0] >= 95, within_s=120)
        victim = gateway.workers[1]
        address, pid = victim.url, victim.pid
        os.kill(pid, signal.SIGKILL)
        killed.set()
        acknowledged = await asyncio.gather(*running)
        assert victim.pid != pid
        assert victim.url == address
        assert {worker.load for worker in gateway.workers} == {0}
        for number, numbers in enumerate(acknowledged):
            calls = gateway.read_calls(f"s{number}")
            known = {call.number: call for call in calls}
            assert len(numbers) == TURNS
            assert all(known[each].outcome is CallOutcome.COMPLETE for each in numbers)
            parents = [known[each].parent for each in numbers]
            assert parents == [None, *numbers[:-1]]
            assert all(known[each].branch is None for each in numbers)
            ledger = PrefixMerging().build(calls).ledger
            assert ledger.sampled == ledger.trained + sum(ledger.dropped.values())
        # Counts of the last second before the kill are lost.
        assert gateway.traffic.calls[CallOutcome.COMPLETE] >= 100 * TURNS - 300


async def test_control_and_budgets_reach_every_process_and_its_replacement(tmp_path: Path) -> None:
    """A restarted process has the pause, the weights version and the spent budget of the old."""
    async with workers(tmp_path) as gateway, aiohttp.ClientSession() as http:
        await gateway.set_weights_version(7)
        async with (
            gateway.open(Session(id="a", task="t", sample=0), task(max_turns=3)) as first,
            gateway.open(Session(id="b", task="t", sample=1), task()) as second,
        ):
            assert first.base_url.rpartition("/s/")[0] != second.base_url.rpartition("/s/")[0]
            agent, other = (Agent(http, each.base_url, each.key) for each in (first, second))
            assert await agent.ask() == 200
            await gateway.pause(PauseMode.WAIT, within_s=5)
            waiting = [asyncio.create_task(each.ask()) for each in (agent, other)]
            os.kill(gateway.workers[0].pid, signal.SIGKILL)
            await gateway.set_weights_version(8)
            assert not any(each.done() for each in waiting)
            await gateway.resume()
            assert await asyncio.gather(*waiting) == [200, 200]
            assert await agent.ask() == 200
            assert await agent.ask() == 400
        assert gateway.describe("a").spent is SpentLimit.MAX_TURNS
        assert gateway.describe("b").spent is None
        assert gateway.describe("b").failure is None
        for name in ("a", "b"):
            events = read(tmp_path / f"{name}.0.rec").events
            notes = [(event.kind, event.detail) for event in events]
            weights, resumed = (RecordedEventKind.WEIGHTS, "8"), (RecordedEventKind.RESUMED, "")
            assert notes.index(weights) < notes.index(resumed)
        with pytest.raises(KeyError):
            gateway.describe("c")


async def test_errors_come_back_from_the_process(tmp_path: Path) -> None:
    """A pause that times out raises; an engine's refusal is the session's failure."""

    def play(_prompt: Ids, request: str) -> Reply:
        return Reply(status=401) if request.endswith("-1") else Reply(ids("late"), first_s=2.0)

    async with workers(tmp_path, play) as gateway, aiohttp.ClientSession() as http:
        async with gateway.open(Session(id="a", task="t", sample=0), task()) as opened:
            agent = Agent(http, opened.base_url, opened.key)
            asking = asyncio.create_task(agent.ask())
            await until((tmp_path / "a.0.rec").exists)
            await asyncio.sleep(0.5)  # real processes: until the engine has been asked
            with pytest.raises(EngineError, match="still in flight"):
                await gateway.pause(PauseMode.WAIT, within_s=0.05)
            await gateway.resume()
            assert await asking == 200
            assert await agent.ask() != 200
        failure = gateway.describe("a").failure
        assert "401" in failure.message


async def test_a_damaged_recording_ends_only_its_session(tmp_path: Path) -> None:
    """Reopening it after a restart fails, which closing it reports; other sessions go on."""

    async def run(gateway: Workers, http: aiohttp.ClientSession) -> None:
        damaged, sound = (Session(id=name, task="t", sample=0) for name in ("a", "b"))
        async with gateway.open(damaged, task()) as first, gateway.open(sound, task()) as second:
            agent, other = (Agent(http, each.base_url, each.key) for each in (first, second))
            assert [await agent.ask(), await other.ask()] == [200, 200]
            flip_bit(gateway.recording_path(damaged))
            for worker in gateway.workers:
                os.kill(worker.pid, signal.SIGKILL)
            assert await other.ask() == 200
            assert await agent.ask() == 401

    async with workers(tmp_path) as gateway, aiohttp.ClientSession() as http:
        with pytest.raises(CaptureError, match="could not be opened again"):
            await run(gateway, http)
        assert len(gateway.read_calls("b")) == 2


async def test_a_session_that_fails_to_open_leaves_no_state(tmp_path: Path) -> None:
    """The worker's error is raised; the same session opens once the cause is gone."""
    session = Session(id="a", task="t", sample=0)
    async with workers(tmp_path) as gateway:
        obstacle = gateway.recording_path(session)
        obstacle.mkdir()
        with pytest.raises(OSError, match=r"a\.0\.rec"):
            async with gateway.open(session, task()):
                pass
        assert {worker.load for worker in gateway.workers} == {0}
        opening = asyncio.create_task(gateway.open(session, task()).__aenter__())
        await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait({opening})
        obstacle.rmdir()
        async with gateway.open(session, task()) as opened:
            assert opened.key
        assert {worker.load for worker in gateway.workers} == {0}


async def test_processes_end_with_their_node(tmp_path: Path) -> None:
    """They ignore SIGTERM to the whole group, and end when the node closes their sockets."""
    async with workers(tmp_path) as gateway:
        pids = [worker.pid for worker in gateway.workers]
        for worker in gateway.workers:
            os.kill(worker.pid, signal.SIGTERM)  # of the whole group: the node says when to end
        async with gateway.open(Session(id="a", task="t", sample=0), task()):
            assert [worker.pid for worker in gateway.workers] == pids
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_number_of_workers() -> None:
    """`auto` is one worker for 16 processors."""
    assert [count_workers("auto", cores) for cores in (2, 16, 64)] == [1, 1, 4]
    assert count_workers(3, 2) == 3
