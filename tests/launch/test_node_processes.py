"""Several nodes on one machine: killed, paused, drained, refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from launch.engine import create_engine
from launch.processes import DATA, EXACT, World, task, write
from support.engine import RENDERING
from support.polling import until
from tugline.chat.engines.generate import Embedded
from tugline.errors import ServerError, UsageError
from tugline.gateway.replicas import Upstream
from tugline.launch.engine import EngineConnection
from tugline.launch.local import LocalServer, open_local
from tugline.launch.processes import count_nodes, divide
from tugline.launch.settings import GatewaySettings, Settings
from tugline.node.settings import NodeSettings
from tugline.protocol import PauseMode
from tugline.recording import file as recordings
from tugline.recording.records import RecordedEventKind
from tugline.types import Status, Task, Trajectory
from tugline.web.serve import serve

ANSWER = "so be it<|im_end|>"
START_S = 90.0
"""Time in which nodes start while the machine is busy."""


def make(name: str, **fields: object) -> Task:
    """A task whose agent needs no tools."""
    return msgspec.convert(task(name, **fields), Task)


@contextlib.asynccontextmanager
async def local(folder: Path, **node: object) -> AsyncIterator[LocalServer]:
    """Engine and server in this process, and two nodes that are processes."""
    settings = Settings(node=NodeSettings(name="n", **{"slots": 4, "processes": 2, **node}))
    async with serve(create_engine()) as url:
        connection = EngineConnection((url,), Upstream(url, Embedded()), RENDERING)
        async with open_local(settings, folder, connection) as cluster:
            yield cluster


def find_nodes(folder: Path) -> dict[str, psutil.Process]:
    """The processes of the nodes of a run, by name."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            for word in process.cmdline():
                if word.startswith(f"{folder}/nodes/") and word.endswith(".json"):
                    found[Path(word).stem] = process
    return found


def check_tokens(results: Sequence[Trajectory], turns: int) -> None:
    """Each session is one exact trace that has every answer once."""
    for result in results:
        (trace,) = result.traces
        assert [span.call for span in trace.spans] == list(range(turns))
        assert int(trace.mask.sum()) == result.ledger.trained == result.ledger.sampled
        trained = trace.ids[trace.mask].tolist()
        assert RENDERING.tokenizer.decode(trained) == ANSWER * turns


@pytest.mark.slow  # a hundred agents
async def test_a_node_is_killed_in_the_middle_of_100_sessions(tmp_path: Path) -> None:
    """The node is started again, and each result is there once, exact."""
    batch = [make(f"t{number}", samples=10, turns=2) for number in range(10)]
    killed = asyncio.Event()

    async with local(tmp_path, slots=8) as cluster:

        def on_done(done: int, _total: int) -> None:
            if done >= 30 and not killed.is_set():
                killed.set()
                find_nodes(tmp_path)["n-2"].kill()

        results = await cluster.run(batch, on_done)
        rows = await cluster.list_sessions([each.id for each in batch])
        found = await cluster.find_recordings([each.id for each in batch])
    assert killed.is_set()
    assert {row.status for row in rows} == {Status.COMPLETED}
    assert len({result.session for result in results}) == len(results) == 100
    assert any(row.epoch > 1 for row in rows)
    assert {path.parts[-3] for path in found.values()} == {"n-1", "n-2"}
    check_tokens(results, turns=2)
    assert not find_nodes(tmp_path)


async def test_pauses_and_weights_reach_every_node(tmp_path: Path) -> None:
    """No call is answered while the server pauses, and running sessions see the new version."""
    names = [f"t{number}" for number in range(4)]
    async with local(tmp_path, slots=2) as cluster:
        await cluster.run([make("first", samples=4)])
        paused = await cluster.control.pause(PauseMode.WAIT, within_s=START_S)
        assert not paused.missing
        running = asyncio.create_task(cluster.run([make(name, samples=1) for name in names]))
        folders = [tmp_path / "nodes" / name / "recordings" for name in ("n-1", "n-2")]
        await until(lambda: all(list(each.glob("t*.rec")) for each in folders), START_S)
        assert not (await cluster.control.announce(7)).missing
        assert not running.done()
        await cluster.control.resume()
        check_tokens(await running, turns=1)
        found = await cluster.find_recordings(names)
    assert {path.parts[-3] for path in found.values()} == {"n-1", "n-2"}
    for folder in folders:
        events = [recordings.read(path).events for path in sorted(folder.glob("t*.rec"))]
        first = [(event.kind, event.detail) for event in events[0]]
        weights, resumed = (RecordedEventKind.WEIGHTS, "7"), (RecordedEventKind.RESUMED, "")
        assert first.index(weights) < first.index(resumed)


async def test_settings_that_a_node_refuses_end_the_run(tmp_path: Path) -> None:
    """The node prints the reason on stderr; the other node ends, too."""
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes/n-2").write_text("a file where the node's folder should be")
    async with local(tmp_path) as cluster:
        with pytest.raises(ServerError, match="the node has stopped") as raised:
            await cluster.run([make("a", samples=1, turns=99, pause_s=1.0)])
    assert "node n-2 cannot be started" in str(raised.value.__cause__)
    assert not find_nodes(tmp_path)


def test_up_starts_drains_and_ends_nodes(world: World) -> None:
    """SIGTERM lets the running sessions finish; ``kill -9`` ends the nodes at once."""
    up = ("up", "--port", "0", "--slots", "3", "--name", "n", "--nodes", "2")
    up += ("--engine", world.engine(), *EXACT)
    world.tugline("up", *up)
    for name, slots in (("n-1", 2), ("n-2", 1)):
        world.wait_for_log("up", f"node {name} is up: {slots} slots")
    world.ask("submit", write(world.folder / "t.jsonl", [task("t", samples=6)]), "--wait")
    assert [view["reward"] for view in world.ask("results")] == [1.0] * 6
    assert world.end("up") == 0
    assert world.read_log("up").count("draining") == 2
    world.tugline("up", *up)
    world.wait_for_log("up", "node n-2 is up", times=2)
    nodes = find_nodes(Path(DATA))
    assert nodes.keys() == {"n-1", "n-2"}
    world.end("up", signal.SIGKILL)
    gone, alive = psutil.wait_procs(list(nodes.values()), timeout=20)
    assert len(gone) == 2
    assert not alive


def test_settings_are_divided() -> None:
    """Slots, disk and ports of the nodes add up to the configured ones."""
    node = NodeSettings(slots=5, processes=2, quota_gb=10.0, metrics_port=9000)
    settings = Settings(node=node, gateway=GatewaySettings(port=8000))
    first, second = divide(settings, "m")
    assert (first.node.name, first.node.slots, first.node.quota_gb) == ("m-1", 3, 5.0)
    assert (second.node.name, second.node.slots, second.node.quota_gb) == ("m-2", 2, 5.0)
    assert (first.gateway.port, second.gateway.port) == (8000, 8001)
    assert (first.node.metrics_port, second.node.metrics_port) == (9000, 9001)
    assert first.node.processes is None
    assert [each.gateway.port for each in divide(Settings(node=node), "m")] == [0, 0]


def test_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` is one node for 16 processors, with at least one slot each."""

    def count(processes: int | str, cores: int, slots: int = 64) -> int:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
        return count_nodes(Settings(node=NodeSettings(slots=slots, processes=processes)))

    assert [count("auto", cores) for cores in (2, 16, 64)] == [1, 1, 4]
    assert count("auto", 128, slots=3) == 3
    assert count(3, 2) == 3
    with pytest.raises(
        UsageError, match=r"node\.slots is 2, must be at least node\.processes \(3\)"
    ):
        count(3, 2, slots=2)
