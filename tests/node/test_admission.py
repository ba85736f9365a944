"""Admission of agents by the load of the engines."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tugline.node.admission import Admission, EngineLoad

VLLM = """\
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
"""
SGLANG = "# HELP sglang:num_queue_reqs x\nsglang:num_queue_reqs 2\nsglang:token_usage 0.9\n"


@pytest.mark.parametrize(
    ("page", "waiting", "kv"),
    [
        (VLLM, 7, 0.25),
        (SGLANG, 2, 0.9),
        ('tugline:num_requests_waiting{model_name="m"} 1\n', 1, None),
        ("nothing 1\n", None, None),
    ],
)
def test_queue_and_kv_memory_are_read(page: str, waiting: float | None, kv: float) -> None:
    """Values are summed over data-parallel engines; unknown pages report nothing."""
    load = EngineLoad()
    load.update(page, 0.0)
    assert (load.waiting, load.kv) == (waiting, kv)


@pytest.mark.parametrize(
    ("pages", "seconds"),
    [
        ([(0, 'vllm:num_requests_running{a="b"} 2.0'), (2, "vllm:num_requests_running{} 1")], 2),
        ([(0, "sglang:num_running_reqs 0"), (2, "sglang:num_running_reqs 0.0")], 0),
        ([(0, "vllm:num_requests_running 1"), (60, "vllm:num_requests_running 1")], 4),
        ([(0, "tugline:forward_seconds_total 5"), (2, "tugline:forward_seconds_total 6.5")], 1.5),
        ([(0, "tugline:forward_seconds_total 5"), (2, "tugline:forward_seconds_total 1")], 1),
    ],
)
def test_busy_time_is_measured_between_polls(
    pages: list[tuple[float, str]], seconds: float
) -> None:
    """Time between polls with running requests is busy; an engine's own counter has precedence."""
    load = EngineLoad()
    for at, text in pages:
        load.update(text, at)
    assert load.busy_s == pytest.approx(seconds)


async def start_agents(gate: Admission, count: int) -> list[asyncio.Task[None]]:
    """Start agents, and let each of them try to enter."""

    async def enter() -> None:
        async with gate.admit():
            pass

    tasks = [asyncio.create_task(enter()) for _ in range(count)]
    for _ in range(5 * count):
        await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize(
    ("engines", "admitted"),
    [
        ([EngineLoad(0, 0.0)], 9),
        ([EngineLoad(0, 0.5)], 5),
        ([EngineLoad(9, 0.5)], 0),
        ([EngineLoad(0, 0.99)], 0),
        ([EngineLoad(3, 0.5)], 2),
        ([EngineLoad(9, 0.0), EngineLoad(0, 0.0)], 9),
        ([EngineLoad(9, 0.5), EngineLoad(0, 0.94)], 1),
        ([EngineLoad(9, 0.5), EngineLoad(0, 0.97)], 0),
        ([], 9),
    ],
)
async def test_admission_by_engine_load(engines: list[EngineLoad], admitted: int) -> None:
    """As many agents are admitted as fit any engine's queue and KV memory; all, if none reports."""
    polls: list[float] = []

    async def poll() -> list[EngineLoad]:
        polls.append(0.0)
        return engines

    gate = Admission(poll, waiting=4)
    gate.clock = lambda: 0.0
    gate.running = 6
    tasks = await start_agents(gate, 9)
    assert sum(task.done() for task in tasks) == admitted
    assert (len(polls), gate.running, gate.waiting) == (1, 6, 9 - admitted)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_waiting_agents_are_admitted_later() -> None:
    """A poll that shows room admits waiting agents, and their waiting time is counted."""
    load = EngineLoad(9, 0.0)

    async def poll() -> list[EngineLoad]:
        return [load]

    gate = Admission(poll, waiting=4)
    gate.clock = map(float, itertools.count()).__next__
    [task] = await start_agents(gate, 1)
    assert gate.waiting == 1
    load.waiting = 0
    await asyncio.wait_for(task, 20)
    assert gate.waiting == 0
    assert gate.waited_s > 0
