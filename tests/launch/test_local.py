"""Tasks in this process, without a server: ``tugline.run`` and `LocalServer`."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

import tugline
from launch.engine import create_engine
from launch.processes import AGENT, task
from support.tokenizer import make_rendering
from tugline.chat.engines.generate import Embedded
from tugline.client.streams import Result
from tugline.errors import ServerError
from tugline.gateway.replicas import Upstream
from tugline.launch.engine import EngineConnection
from tugline.launch.local import LocalServer, open_local
from tugline.launch.naming import name_run
from tugline.launch.server import open_control_plane
from tugline.launch.settings import Settings
from tugline.node.settings import NodeSettings
from tugline.protocol import ResultView, RunKind, SessionQuery
from tugline.recording.trajectories import read_folder
from tugline.server.settings import ServerSettings
from tugline.server.store import nodes, runs, sessions, stats
from tugline.types import Boundary, Failure, PluginSpec, Status, Task
from tugline.web.serve import serve

RENDERING = make_rendering()
TOKENIZER = RENDERING.tokenizer
PAGE = Path(__file__).parents[2] / "docs/client.md"


def make(name: str, **fields: Any) -> Task:
    """A task whose agent needs no tools."""
    return msgspec.convert(task(name, **fields), Task)


TASK = make("a")


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    """Settings for an engine that takes token ids; logging is not configured."""
    structlog.reset_defaults()
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.to_json(), encoding="utf-8")
    path = tmp_path / "settings.yaml"
    path.write_text("engine: {tokenizer: tokenizer.json, renderer: qwen3}\n")
    yield path
    structlog.reset_defaults()


async def test_the_documented_example_runs(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example works in any thread, prints results by sample, and resumes in its folder."""
    (block,) = re.findall(r"```python\n(import tugline\n.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(config.parent)
    async with serve(create_engine()) as url:
        ours = f'"{url}", config="{config.name}"'
        code = compile(block.replace('"http://localhost:8000"', ours), str(PAGE), "exec")
        for _ in range(2):
            await asyncio.to_thread(exec, code, {"task": TASK})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("Ledger")[0] for line in lines] == ["a-0 1.0 ", "a-1 1.0 "] * 2
    assert [each.session for each in read_folder(config.parent / "runs/fix-add/trajectories")]


async def test_results_are_in_task_order(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results have their trajectories in a running event loop, and no temporary file is left."""
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


async def test_the_function_runs_in_a_running_event_loop(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a notebook: the call blocks, returns the results and shows progress as lines."""
    async with serve(create_engine()) as url:

        async def run_cell() -> list[Result]:
            changes = {"node.slots": 1}
            return tugline.run(make("a", samples=2), engine=url, config=config, changes=changes)

        results = await asyncio.to_thread(asyncio.run, run_cell())
    assert [(each.view.session, each.view.reward) for each in results] == [("a-0", 1), ("a-1", 1)]
    assert re.search(r"2 of 2 sessions, (\d+ s, )?mean reward 1", capsys.readouterr().err)


def test_an_interrupt_stops_a_run_beside_an_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the stop button of a notebook does; the call ends with the interrupt."""
    stopped = []
    waiting = threading.get_ident()

    async def hang(_tasks: object, **_options: object) -> list[Result]:
        try:
            signal.pthread_kill(waiting, signal.SIGINT)
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            stopped.append("cancelled")
            raise
        return []

    async def run_cell() -> None:
        with pytest.raises(KeyboardInterrupt):
            tugline.run([])

    monkeypatch.setattr("tugline.launch.run.run_async", hang)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        event_loop = asyncio.new_event_loop()
        event_loop.run_until_complete(run_cell())
        event_loop.close()
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped == ["cancelled"]


async def test_a_run_is_in_the_store_of_its_folder(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its kind, configuration and sessions, and continues under its name."""
    monkeypatch.chdir(config.parent)
    folder = config.parent / "out"
    async with serve(create_engine()) as url:
        for name in ("a", "b"):
            await tugline.run_async(make(name, samples=1), engine=url, config=config, out=folder)
    async with open_control_plane(ServerSettings(), folder) as control:
        [view] = await control.database.read(runs.list_views)
        view = await control.database.read(runs.get, view.name)
        page = await control.database.read(sessions.page, SessionQuery(run=view.name))
    assert (view.name, view.kind) == (name_run(folder), RunKind.RUN)
    assert view.configuration["engine"]["urls"] == [url]
    assert view.ended is not None
    assert [session.id for session in page.sessions] == ["a-0", "b-0"]


async def test_a_wrong_option_is_named() -> None:
    """The error has the option's name in the configuration or on the command line."""
    with pytest.raises(tugline.UsageError, match=r"node\.slots is 0, must be"):
        await tugline.run_async(TASK, engine="http://localhost:1", slots=0)
    with pytest.raises(tugline.UsageError, match="--engine, or a model folder with --model"):
        await tugline.run_async(TASK)


def test_html_of_a_result_is_escaped() -> None:
    """A failure's message cannot inject markup into a notebook."""
    view = ResultView(
        position=1, session="a-0", task="a", tenant="t", sample=0, attempt=0, status=Status.FAILED,
        reward=None, failure=Failure(Boundary.HARNESS, "<script>alert(1)</script>"), sampled=5,
        trained=0, bytes=0, seconds={}, created=0.0,
    )  # fmt: skip
    html = Result(view, b"")._repr_html_()
    assert "a-0<td>failed<td>reward None<td>0 of 5 sampled tokens are trained" in html
    assert "<script" not in html


@contextlib.asynccontextmanager
async def local(folder: Path) -> AsyncIterator[LocalServer]:
    """Engine, server and node."""
    settings = Settings(node=NodeSettings(name="n", slots=4))
    async with serve(create_engine()) as url:
        connection = EngineConnection((url,), Upstream(url, Embedded()), RENDERING)
        async with open_local(settings, folder, connection) as cluster:
            yield cluster


async def status(cluster: LocalServer) -> dict[str, int]:
    """The number of sessions by status."""
    return (await cluster.control.database.read(stats.counts)).sessions


def delayed(command: str) -> Task:
    """A task of one sample that runs a command before it calls its model."""
    options = {"command": f"{command}; exec {sys.executable} {AGENT}"}
    return msgspec.structs.replace(make("a", samples=1), harness=PluginSpec("shell", options))


async def test_every_token_of_a_batch_is_trained(tmp_path: Path) -> None:
    """Three turns become one exact trace; progress is reported."""
    async with local(tmp_path) as cluster:
        progress: list[tuple[int, int]] = []
        batch = [make("a", turns=3)]
        results = await cluster.run(batch, lambda done, total: progress.append((done, total)))
        assert await status(cluster) == {Status.COMPLETED: 2}
    assert progress == [(0, 2), (1, 2), (2, 2)]
    for result in results:
        assert result.reward.value == 1.0
        (trace,) = result.traces
        assert [span.call for span in trace.spans] == [0, 1, 2]
        assert int(trace.mask.sum()) == result.ledger.trained == result.ledger.sampled
        assert TOKENIZER.decode(trace.ids[trace.mask].tolist()) == "so be it<|im_end|>" * 3


async def test_a_cancelled_run_resumes(tmp_path: Path) -> None:
    """An interrupted session is leased again under a new epoch and counted once."""
    gate = tmp_path / "gate"
    tasks = [delayed(f"test -e {gate} || sleep 30"), make("b", samples=1)]
    async with local(tmp_path) as cluster:
        running = asyncio.create_task(cluster.run(tasks))
        async with asyncio.timeout(20):
            while Status.COMPLETED not in await status(cluster):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.wait({running}, timeout=10)
        assert running.cancelled()
        before = [each.epoch for each in await cluster.list_sessions(["a", "b"])]
    gate.touch()
    async with local(tmp_path) as cluster:
        results = await cluster.run(tasks)
        epochs = [each.epoch for each in await cluster.list_sessions(["a", "b"])]
    assert [result.session for result in results] == ["a-0", "b-0"]
    assert (epochs[0] > before[0], epochs[1]) == (True, before[1])


@pytest.mark.parametrize("worked", [False, True])
async def test_a_node_that_cannot_run_sessions_ends_the_run(
    tmp_path: Path,
    worked: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """At once if it never could, else after `patience_s`; the reason is in the error."""
    lines: list[str] = []
    async with local(tmp_path) as cluster:
        cluster.watch.report = lines.append
        if worked:
            await cluster.run([make("a", samples=1)])
        async with asyncio.timeout(20):
            while not (known := await cluster.control.database.read(nodes.list_views)):  # noqa: ASYNC110 - nothing notifies
                await asyncio.sleep(0.05)
        [node] = known
        await cluster.control.database.write(nodes.set_problem, node.id, "disk: it is full")
        running = asyncio.create_task(cluster.run([make("b", samples=1)]))
        if worked:
            async with asyncio.timeout(20):
                while not lines:  # noqa: ASYNC110 - nothing notifies
                    await asyncio.sleep(0.05)
            assert not running.done()
            cluster.watch.patience_s = 0.0
        with pytest.raises(ServerError, match="no session can run on this machine: disk: it is f"):
            await asyncio.wait_for(running, 20)
    assert len(lines) == int(worked)


async def test_a_dead_node_ends_the_run(tmp_path: Path) -> None:
    """Waiting for results raises an error when the node is gone."""
    async with local(tmp_path) as cluster:
        running = asyncio.create_task(cluster.run([delayed("sleep 30")]))
        await asyncio.sleep(0.2)
        cluster._running.cancel()
        done, _ = await asyncio.wait({running}, timeout=20)
        assert done
        assert isinstance(running.exception(), ServerError)
