"""Sessions from lease to result in one process, with a real agent script and a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tiny import rendering
from tugline.chat.engines.generate import Embedded
from tugline.errors import ServerError
from tugline.gateway.replicas import Upstream
from tugline.inference.server import create_app
from tugline.launch.engine import EngineConnection
from tugline.launch.local import LocalServer, open_local
from tugline.launch.settings import GatewaySettings, Settings
from tugline.launch.workers import Workers
from tugline.node.settings import NodeSettings
from tugline.server.store import stats
from tugline.testing import Reply, ScriptedEngine
from tugline.types import Ids, Limits, PluginSpec, Status, Task
from tugline.web.serve import serve

RENDERING = rendering()
AGENT = Path(__file__).parents[2] / "examples/agents/openai_loop.py"
FILES = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "conftest.py": "",
    "tests/test_calc.py": "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n",
}
EDIT = '{"path": "calc.py", "edits": [{"oldText": "a - b", "newText": "a + b"}]}'
TURNS = (
    '<tool_call>\n{"name": "read", "arguments": {"path": "calc.py"}}\n</tool_call>',
    f'<tool_call>\n{{"name": "edit", "arguments": {EDIT}}}\n</tool_call>',
    "Fixed.",
)


def task(name: str, *, samples: int = 2, command: str = f"{sys.executable} {AGENT}") -> Task:
    """Mend calc.py with the example agent."""
    return Task(
        id=name,
        instruction="Mend add in calc.py.",
        harness=PluginSpec("shell", {"command": command}),
        evaluator=PluginSpec("tests"),
        files=FILES,
        samples=samples,
        limits=Limits(agent_s=20),
    )


def expert(_prompt: Ids, request_id: str) -> Reply:
    """Look, change, stop."""
    number = int(request_id.rpartition("-")[2])
    return Reply(RENDERING.tokenizer.encode(TURNS[number] + "<|im_end|>"))


@contextlib.asynccontextmanager
async def local(folder: Path, workers: int = 1) -> AsyncIterator[LocalServer]:
    """Engine, server, gateway (of so many processes) and node."""
    engine = ScriptedEngine(expert, vocab_size=RENDERING.tokenizer.size)
    gateway = GatewaySettings(workers=workers)
    settings = Settings(node=NodeSettings(name="n", slots=4), gateway=gateway)
    async with serve(create_app(engine, model_name="m")) as url:
        reached = EngineConnection((url,), Upstream(url, Embedded()), RENDERING)
        async with open_local(settings, folder, reached) as cluster:
            yield cluster


async def status(cluster: LocalServer) -> dict[str, int]:
    """Sessions by status."""
    return (await cluster.control.database.read(stats.counts)).sessions


@pytest.mark.parametrize("workers", [1, 2])
async def test_an_agent_solves_its_task_and_every_token_is_trained(
    tmp_path: Path, workers: int
) -> None:
    """The example agent mends the file; three turns become one exact trace with reward 1."""
    async with local(tmp_path, workers) as cluster:
        assert isinstance(cluster.gateway, Workers) is (workers > 1)
        seen: list[tuple[int, int]] = []
        results = await cluster.run([task("a")], lambda done, total: seen.append((done, total)))
        assert await status(cluster) == {Status.COMPLETED: 2}
    assert seen[-1] == (2, 2)
    for one in results:
        assert one.reward.value == 1.0
        (trace,) = one.traces
        assert [span.call for span in trace.spans] == [0, 1, 2]
        assert int(trace.mask.sum()) == one.ledger.trained == one.ledger.sampled
        output = RENDERING.tokenizer.decode(trace.ids[trace.mask].tolist())
        assert output == "".join(f"{turn}<|im_end|>" for turn in TURNS)


async def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """A session that was cut off is leased again under a new epoch and counted once."""
    gate = tmp_path / "gate"
    late = task("a", samples=1, command=f"test -e {gate} || sleep 30; {sys.executable} {AGENT}")
    async with local(tmp_path) as cluster:
        running = asyncio.create_task(cluster.run([late, task("b", samples=1)]))
        async with asyncio.timeout(20):
            while Status.COMPLETED not in await status(cluster):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.wait({running}, timeout=10)
        assert running.cancelled()
        before = [one.epoch for one in await cluster.list_sessions(["a", "b"])]
    gate.touch()
    async with local(tmp_path) as cluster:
        results = await cluster.run([late, task("b", samples=1)])
        epochs = [one.epoch for one in await cluster.list_sessions(["a", "b"])]
    assert [one.session for one in results] == ["a-0", "b-0"]
    assert (epochs[0] > before[0], epochs[1]) == (True, before[1])


async def test_a_node_that_dies_ends_the_run(tmp_path: Path) -> None:
    """Whoever waits for results gets an error when nobody works on them any more."""
    async with local(tmp_path) as cluster:
        running = asyncio.create_task(cluster.run([task("a", samples=1, command="sleep 30")]))
        await asyncio.sleep(0.2)
        cluster._node.cancel()
        done, _ = await asyncio.wait({running}, timeout=20)
        assert done
        assert isinstance(running.exception(), ServerError)
