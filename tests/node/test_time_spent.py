"""Where the time of sessions goes, with a real node, gateway, sandbox and evaluator."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import asdict, replace

from support.deployment import CALL, Deployment, deploy, script_task
from support.engine import reply_with
from support.polling import until
from tugline.node.admission import EngineLoad
from tugline.node.app import Node
from tugline.node.telemetry import LoadSampler
from tugline.protocol import NodeSample, TelemetryQuery, TimeParts, TimeQuery
from tugline.recording import file as recordings
from tugline.rollout.parts import Parts
from tugline.sandbox.base import Runtime, Sandbox, SandboxSpec
from tugline.server.store import results, telemetry, time_spent
from tugline.types import PluginSpec, Task

SLOW_S = 4.0
"""More than all the rest of a session takes on a busy machine."""
MODEL_CALLS = CALL.partition("r.urlopen")[0] + (
    "import threading\n"
    "call = lambda: r.urlopen(r.Request(url, body, head)).read()\n"
    "threads = [threading.Thread(target=call) for _ in range(3)]\n"
    "[thread.start() for thread in threads]\n"
    "[thread.join() for thread in threads]\n"
)
"""An agent with three model calls at the same time."""


class SlowSandboxes(Parts):
    """Plug-ins of which the first sandbox, that of the agent, takes long to open."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = [SLOW_S]

    def runtime(self, spec: PluginSpec) -> Runtime:
        """The runtime."""
        runtime = super().runtime(spec)
        opened = runtime.open

        @contextlib.asynccontextmanager
        async def slow(directory: Path, given: SandboxSpec | None = None) -> AsyncIterator[Sandbox]:
            if self.waits:
                await asyncio.sleep(self.waits.pop())
            async with opened(directory, given) as sandbox:
                yield sandbox

        runtime.open = slow  # type: ignore[method-assign]
        return runtime


async def spend(deployment: Deployment, task: Task) -> TimeParts:
    """Run a task; where its time went."""
    await deployment.run(task)
    return (await deployment.control.database.read(time_spent.read, TimeQuery())).total


def find_bottleneck(total: TimeParts) -> str:
    """The part with most seconds."""
    parts = {name: value for name, value in asdict(total).items() if name != "sessions"}
    return max(parts, key=lambda name: parts[name])


async def test_a_slow_evaluator_is_the_bottleneck(tmp_path: Path) -> None:
    """Its seconds are those of the stage EVAL."""
    slow = {"test_it.py": f"import time\ndef test_it():\n    time.sleep({SLOW_S})\n"}
    async with deploy(tmp_path) as deployment:
        total = await spend(deployment, replace(script_task("t"), files=slow))
    assert find_bottleneck(total) == "evaluation_s"
    assert total.evaluation_s >= SLOW_S


async def test_a_slow_engine_is_the_bottleneck(tmp_path: Path) -> None:
    """Three calls at the same time count once; the rest of the stage is the agent's."""
    async with deploy(tmp_path, reply_with("Hello.", first_s=SLOW_S)) as deployment:
        total = await spend(deployment, script_task("t", MODEL_CALLS))
        result = await deployment.control.database.read(results.get, "t-0")
        [path] = (tmp_path / "recordings").glob("*.rec")
        recording = await asyncio.to_thread(recordings.read, path)
    assert find_bottleneck(total) == "engine_s"
    assert len(recording.calls) == 3
    assert SLOW_S <= total.engine_s < 2 * SLOW_S
    assert total.agent_s == pytest.approx(result.seconds["run"] - total.engine_s)
    assert recording.result is not None
    assert recording.result.engine_s == result.engine_s == total.engine_s
    assert result.prompt_tokens == sum(len(call.prompt_ids) for call in recording.calls)


async def test_a_slow_sandbox_is_the_bottleneck(tmp_path: Path) -> None:
    """Its seconds are those of the stage INIT."""
    async with deploy(tmp_path, parts=SlowSandboxes()) as deployment:
        total = await spend(deployment, script_task("t"))
    assert find_bottleneck(total) == "sandbox_s"
    assert total.sandbox_s >= SLOW_S


async def test_an_agent_without_model_calls_was_never_at_the_engine(tmp_path: Path) -> None:
    """Also a session that failed has its times; 0 seconds at the engine are not unknown."""
    async with deploy(tmp_path) as deployment:
        total = await spend(deployment, script_task("t", "exit(3)"))
    assert (total.sessions, total.engine_s, total.unsplit_s) == (1, 0.0, 0.0)
    assert total.agent_s > 0


# --------------------------------------------------------------------------- the load
async def test_a_node_sends_its_load_with_renewals(tmp_path: Path) -> None:
    """The server has a series of the node and one of its engine."""
    async with deploy(tmp_path, lease_s=3.0) as deployment:

        async def has_arrived() -> bool:
            found = await deployment.control.database.read(telemetry.read, TelemetryQuery())
            return len(found.series) == 2

        await until(has_arrived)
        found = await deployment.control.database.read(telemetry.read, TelemetryQuery())
    engine, node = found.series
    assert (node.node, node.engine, engine.node) == ("here", "", "")
    assert engine.engine.startswith("http://127.0.0.1")
    assert {"cpu", "memory", "sessions", "agents"} == set(node.values)


def sample(sampler: LoadSampler) -> NodeSample:
    """A sample that is due."""
    taken = sampler.take()
    assert taken is not None
    return taken


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """A node at work."""
    async with deploy(tmp_path) as deployment:
        yield deployment.node


async def test_samples_are_at_least_ten_seconds_apart(node: Node) -> None:
    """Rates are those of the counters between two samples; a restarted engine counts from 0."""
    times = [100.0]
    load = EngineLoad()
    sampler = LoadSampler(node.pools, {"http://e": load}, clock=lambda: times[-1])
    load.update("vllm:generation_tokens_total 50\n", 0.0)
    assert sample(sampler).engines[0].sampled_tps is None
    times.append(109.9)
    assert sampler.take() is None
    times.append(110.0)
    load.update("vllm:generation_tokens_total 250\nvllm:prompt_tokens_total 9\n", 0.0)
    [first] = sample(sampler).engines
    assert (first.sampled_tps, first.prompt_tps) == (20.0, None)
    times.append(130.0)
    load.update("vllm:generation_tokens_total 40\nvllm:prompt_tokens_total 29\n", 0.0)
    [second] = sample(sampler).engines
    assert (second.sampled_tps, second.prompt_tps) == (2.0, 1.0)


async def test_an_engine_that_does_not_answer_reports_nothing(node: Node) -> None:
    """Its values are unknown, not 0; neither is a value that is no number."""
    times = [0.0]
    load = EngineLoad()
    sampler = LoadSampler(node.pools, {"http://e": load}, clock=lambda: times[-1])
    load.update("", 0.0)
    assert asdict(sample(sampler).engines[0]) == {
        "engine": "http://e", "running": None, "waiting": None, "kv": None,
        "prompt_tps": None, "sampled_tps": None,
    }  # fmt: skip
    times.append(10.0)
    load.update("vllm:kv_cache_usage_perc NaN\nvllm:num_requests_running 2\n", 0.0)
    [known] = sample(sampler).engines
    assert (known.kv, known.running) == (None, 2.0)
    times.append(20.0)
    load.update("vllm:kv_cache_usage_perc 1.02\n", 0.0)
    assert sample(sampler).engines[0].kv == 1.0
