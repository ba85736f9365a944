"""Tasks in this process, without a server: ``tugline.run``, and what training runs batches with."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

import tugline
from launch.engine import create_engine
from launch.processes import AGENT, task
from tiny import rendering
from tugline.chat.engines.generate import Embedded
from tugline.client.streams import Result
from tugline.errors import ServerError
from tugline.gateway.replicas import Upstream
from tugline.launch.engine import EngineConnection
from tugline.launch.local import LocalServer, open_local
from tugline.launch.settings import GatewaySettings, Settings
from tugline.launch.workers import Workers
from tugline.node.settings import NodeSettings
from tugline.protocol import ResultView
from tugline.recording.trajectories import read_folder
from tugline.server.store import stats
from tugline.types import Boundary, Failure, PluginSpec, Status, Task
from tugline.web.serve import serve

RENDERING = rendering()
TOKENIZER = RENDERING.tokenizer
PAGE = Path(__file__).parents[2] / "docs/client.md"


def make(name: str, **fields: Any) -> Task:
    """One with an agent that needs no tools."""
    return msgspec.convert(task(name, **fields), Task)


TASK = make("a")


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    """Settings for an engine that takes ids; logging is as in a program that never set it up."""
    structlog.reset_defaults()
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.to_json(), encoding="utf-8")
    path = tmp_path / "settings.yaml"
    path.write_text("engine: {tokenizer: tokenizer.json, renderer: qwen3}\n")
    yield path
    structlog.reset_defaults()


async def test_the_example_of_the_docs_runs(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From any thread, with results by sample and the run in its folder, where it resumes."""
    (block,) = re.findall(r"```python\n(import tugline\n.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(config.parent)
    async with serve(create_engine()) as url:
        ours = f'"{url}", config="{config.name}"'
        code = compile(block.replace('"http://localhost:8000"', ours), str(PAGE), "exec")
        for _ in range(2):
            await asyncio.to_thread(exec, code, {"task": TASK})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("Ledger")[0] for line in lines] == ["a-0 1.0 ", "a-1 1.0 "] * 2
    assert [one.session for one in read_folder(config.parent / "runs/fix-add/trajectories")]


async def test_several_tasks_in_their_order(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their trajectories, in a loop that runs already, and nothing left behind."""
    monkeypatch.chdir(config.parent)
    monkeypatch.setattr("tempfile.tempdir", str(config.parent))
    tasks = [make(name, samples=1) for name in ("b", "a")]
    async with serve(create_engine()) as url:
        results = await tugline.run_async(tasks, engine=url, slots=1, config=config)
    assert [result.view.session for result in results] == ["b-0", "a-0"]
    for result in results:
        (trace,) = result.trajectory.traces
        assert TOKENIZER.decode(trace.ids[trace.mask].tolist()) == "so be it<|im_end|>"
    assert not list(config.parent.glob("tugline-*"))


async def test_a_wrong_option_is_named() -> None:
    """As the configuration names it."""
    with pytest.raises(tugline.UsageError, match=r"node\.slots is 0, must be"):
        await tugline.run_async(TASK, engine="http://localhost:1", slots=0)
    with pytest.raises(tugline.UsageError, match="--engine, or a model folder with --model"):
        await tugline.run_async(TASK)


def test_a_notebook_shows_a_result_without_markup_of_an_agent() -> None:
    """What a program said is text."""
    view = ResultView(
        position=1, session="a-0", task="a", tenant="t", sample=0, attempt=0, status=Status.FAILED,
        reward=None, failure=Failure(Boundary.HARNESS, "<script>alert(1)</script>"), sampled=5,
        trained=0, bytes=0, seconds={}, created=0.0,
    )  # fmt: skip
    shown = Result(view, b"")._repr_html_()
    assert "a-0<td>failed<td>reward None<td>0 of 5 sampled tokens are trained" in shown
    assert "<script" not in shown


@contextlib.asynccontextmanager
async def local(folder: Path, workers: int = 1) -> AsyncIterator[LocalServer]:
    """Engine, server, gateway (of so many processes) and node."""
    gateway = GatewaySettings(workers=workers)
    settings = Settings(node=NodeSettings(name="n", slots=4), gateway=gateway)
    async with serve(create_engine()) as url:
        reached = EngineConnection((url,), Upstream(url, Embedded()), RENDERING)
        async with open_local(settings, folder, reached) as cluster:
            yield cluster


async def status(cluster: LocalServer) -> dict[str, int]:
    """Sessions by status."""
    return (await cluster.control.database.read(stats.counts)).sessions


def waiting(command: str) -> Task:
    """A task of one sample that does something before it asks its model."""
    options = {"command": f"{command}; exec {sys.executable} {AGENT}"}
    return msgspec.structs.replace(make("a", samples=1), harness=PluginSpec("shell", options))


@pytest.mark.parametrize("workers", [1, 2])
async def test_every_token_of_a_batch_is_trained(tmp_path: Path, workers: int) -> None:
    """Three turns become one exact trace; who waits is told how many are done."""
    async with local(tmp_path, workers) as cluster:
        assert isinstance(cluster.gateway, Workers) is (workers > 1)
        seen: list[tuple[int, int]] = []
        batch = [make("a", turns=3)]
        results = await cluster.run(batch, lambda done, total: seen.append((done, total)))
        assert await status(cluster) == {Status.COMPLETED: 2}
    assert seen == [(0, 2), (1, 2), (2, 2)]
    for one in results:
        assert one.reward.value == 1.0
        (trace,) = one.traces
        assert [span.call for span in trace.spans] == [0, 1, 2]
        assert int(trace.mask.sum()) == one.ledger.trained == one.ledger.sampled
        assert TOKENIZER.decode(trace.ids[trace.mask].tolist()) == "so be it<|im_end|>" * 3


async def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """A session that was cut off is leased again under a new epoch and counted once."""
    gate = tmp_path / "gate"
    tasks = [waiting(f"test -e {gate} || sleep 30"), make("b", samples=1)]
    async with local(tmp_path) as cluster:
        running = asyncio.create_task(cluster.run(tasks))
        async with asyncio.timeout(20):
            while Status.COMPLETED not in await status(cluster):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.wait({running}, timeout=10)
        assert running.cancelled()
        before = [one.epoch for one in await cluster.list_sessions(["a", "b"])]
    gate.touch()
    async with local(tmp_path) as cluster:
        results = await cluster.run(tasks)
        epochs = [one.epoch for one in await cluster.list_sessions(["a", "b"])]
    assert [one.session for one in results] == ["a-0", "b-0"]
    assert (epochs[0] > before[0], epochs[1]) == (True, before[1])


async def test_a_node_that_dies_ends_the_run(tmp_path: Path) -> None:
    """Whoever waits for results gets an error when nobody works on them any more."""
    async with local(tmp_path) as cluster:
        running = asyncio.create_task(cluster.run([waiting("sleep 30")]))
        await asyncio.sleep(0.2)
        cluster._node.cancel()
        done, _ = await asyncio.wait({running}, timeout=20)
        assert done
        assert isinstance(running.exception(), ServerError)
