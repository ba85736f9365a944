"""The measurements: CPU time, latency, first byte, size of recordings, memory."""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
from load import SessionClient, closed_loop, open_loop
from processes import cpu_of
from rig import Mode, Rig, fail, note
from script import Bodies

from tugline.recording import file as recordings

SLICES = 5
AT_ONCE = 4
"""Concurrent calls while many sessions are open."""
BUSY = 16
"""Connections that keep one or two gateway processes busy all the time."""
Percentiles = tuple[float, float, float]
"""Median, 99th percentile and maximum."""


@dataclass(frozen=True)
class Size:
    """Numbers of repetitions, calls and sessions."""

    rounds: int
    """Blocks of 40 calls for each target, for CPU time."""
    calls: int
    """Calls for each target and number of connections, for latency."""
    rate: float
    """Total calls per second, for latency; streams get a third."""
    memory_calls: int
    growth_rounds: int
    """Sessions of `long_turns` calls."""
    open_sessions: int
    """Concurrently open sessions of 40 calls."""
    openings: int
    """Sessions with a first prompt that no earlier session had."""
    long_turns: int = 300
    paced_turns: int = 8
    """Calls of each paced stream in a block."""
    connections: tuple[int, ...] = (1, 16, 64)
    at_once: int = 16
    """Concurrent paced streams, and sessions while memory is measured."""


SIZES = {
    "full": Size(
        rounds=12,
        calls=1200,
        rate=90,
        memory_calls=20_000,
        growth_rounds=6,
        open_sessions=500,
        openings=40,
    ),
    "quick": Size(
        rounds=3,
        calls=60,
        rate=90,
        memory_calls=1_920,
        growth_rounds=2,
        open_sessions=40,
        openings=6,
        paced_turns=1,
        connections=(16,),
    ),
    "smoke": Size(
        rounds=2,
        calls=36,
        rate=60,
        memory_calls=160,
        growth_rounds=1,
        open_sessions=4,
        openings=2,
        long_turns=30,
        paced_turns=1,
        connections=(1, 2),
        at_once=2,
    ),
}
"""``smoke`` only checks that everything runs; its figures mean nothing."""


async def cpu(rig: Rig, mode: Mode, size: Size) -> dict[str, list[float]]:
    """CPU ms per call of gateway and pass-through, in alternating blocks of one session."""
    gateway = rig.gateways[mode.gateway]
    blocks: dict[str, list[float]] = {"passthrough": [], "gateway": []}
    for _ in range(size.rounds):
        for kind, measured in blocks.items():
            child = rig.passthrough if kind == "passthrough" else gateway.child
            if kind == "gateway":
                gateway.open(1)
            (client,) = rig.clients(mode, kind, 1)
            await client.connect()
            before = child.cpu()
            await closed_loop([client], rig.script.turns)
            measured.append((child.cpu() - before) / rig.script.turns * 1000)
            client.close()
    return blocks


async def openings(rig: Rig, mode: Mode, size: Size) -> float:
    """Median CPU ms of a session's first call with a prompt that no earlier session had."""
    gateway = rig.gateways[mode.gateway]
    gateway.open(size.openings)
    (client,) = rig.clients(mode, "gateway", 1)
    await client.connect()
    measured = []
    for number in range(size.openings):
        script = replace(rig.script, user=f"Task {number}. {rig.script.user}")
        client.target = replace(
            client.target, bodies=Bodies(script, (), stream=mode.stream), turns=1
        )
        client.turn = 1
        before = gateway.child.cpu()
        await client.call()
        measured.append((gateway.child.cpu() - before) * 1000)
    client.close()
    gateway.close()
    return statistics.median(measured)


async def growth(rig: Rig, mode: Mode, size: Size) -> dict[str, dict[str, float]]:
    """CPU ms per call of gateway and pass-through by turn, each the mean of the ten last turns."""
    gateway = rig.gateways[mode.gateway]
    measured: dict[str, dict[str, list[float]]] = {"gateway": {}, "passthrough": {}}
    for _ in range(size.growth_rounds):
        for kind, taken in measured.items():
            child = rig.passthrough if kind == "passthrough" else gateway.child
            if kind == "gateway":
                gateway.open(1)
            (client,) = rig.clients(mode, kind, 1)
            await client.connect()
            for end in range(10, rig.script.turns + 1, 10):
                before = child.cpu()
                await closed_loop([client], 10)
                taken.setdefault(str(end), []).append((child.cpu() - before) * 100)
            client.close()
        check(rig, mode, gateway.close())
    reported_turns = {"10", "100", "200", str(size.long_turns)}
    return {
        kind: {at: round(statistics.median(taken[at]), 3) for at in taken if at in reported_turns}
        for kind, taken in measured.items()
    }


async def many_open(rig: Rig, mode: Mode, size: Size) -> dict[str, Any]:
    """Longest stall of the gateway's event loop, and memory per call, with all sessions open."""
    gateway = rig.gateways[mode.gateway]
    gateway.open(size.open_sessions)
    clients = rig.clients(mode, "gateway", size.open_sessions)
    for client in clients:
        await client.connect()
    samples: list[tuple[int, int]] = []

    async def play(part: Sequence[SessionClient]) -> None:
        for client in part:
            await client.call()

    gateway.child.ask("watch")
    for turn in range(rig.script.turns):
        await asyncio.gather(*(play(clients[k::AT_ONCE]) for k in range(AT_ONCE)))
        samples.append(((turn + 1) * len(clients), gateway.child.rss()))
    stalls = gateway.child.ask("stalls")
    _close(clients)
    gateway.close()
    return {
        "open_sessions": len(clients),
        "stall_ms": round(stalls["wall"], 1),
        "stall_cpu_ms": round(stalls["cpu"], 1),
        "rss_open_bytes_per_call": _slope(samples),
    }


async def nodes(rig: Rig, modes: Sequence[Mode], size: Size) -> dict[str, Any]:
    """CPU ms per call and calls per second of one gateway and of two, under full load."""
    cpu_ms: dict[int, list[float]] = {1: [], 2: []}
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(size.rounds):
        for count in (1, 2):
            used = modes[:count]
            clients = []
            pids = []
            for mode in used:
                gateway = rig.gateways[mode.gateway]
                gateway.open(BUSY // count)
                clients += rig.clients(mode, "gateway", BUSY // count)
                pids += gateway.child.ask("pids")
            for client in clients:
                await client.connect()
            before = sum(map(cpu_of, pids))
            began = time.monotonic()
            await closed_loop(clients, rig.script.turns)
            calls = BUSY * rig.script.turns
            rates[count].append(calls / (time.monotonic() - began))
            cpu_ms[count].append((sum(map(cpu_of, pids)) - before) / calls * 1000)
            _close(clients)
            for mode in used:
                check(rig, mode, rig.gateways[mode.gateway].close())
    cpu = {count: statistics.median(values) for count, values in cpu_ms.items()}
    rate = {count: statistics.median(values) for count, values in rates.items()}
    return {
        "nodes_cpu_ratio": round(cpu[2] / cpu[1], 3),
        "nodes_ratio": round(rate[2] / rate[1], 2),
        "nodes_cpu_ms": {str(count): round(value, 3) for count, value in cpu.items()},
        "nodes_calls_per_s": {str(count): round(value, 1) for count, value in rate.items()},
    }


async def paced_cpu(rig: Rig, mode: Mode, size: Size) -> dict[str, list[float]]:
    """The same as `cpu` for paced streams, many of them at once."""
    gateway = rig.gateways[mode.gateway]
    blocks: dict[str, list[float]] = {"passthrough": [], "gateway": []}
    gateway.open(size.at_once * (1 + size.rounds))
    clients = {kind: rig.clients(mode, kind, size.at_once) for kind in blocks}
    for each in clients.values():
        await _stagger(each)
    for _ in range(size.rounds):
        for kind, measured in blocks.items():
            child = rig.passthrough if kind == "passthrough" else gateway.child
            before = child.cpu()
            await closed_loop(clients[kind], size.paced_turns)
            measured.append((child.cpu() - before) / (size.paced_turns * size.at_once) * 1000)
    for each in clients.values():
        _close(each)
    return blocks


async def _stagger(clients: Sequence[SessionClient]) -> None:
    """Connect, and advance the clients to turns spread evenly over a session."""
    for index, client in enumerate(clients):
        await client.connect()
        await client.advance(index * client.target.turns // len(clients))


def _close(clients: Sequence[SessionClient]) -> None:
    for client in clients:
        client.close()


async def latency(rig: Rig, mode: Mode, count: int, size: Size) -> dict[str, Percentiles]:
    """Median, 99th percentile and maximum, ms, of direct, pass-through and gateway calls."""
    gateway = rig.gateways[mode.gateway]
    gateway.open(2 * count + size.calls // rig.script.turns + 1)
    rate = size.rate / 3 if mode.stream else size.rate
    calls = size.calls // 3 if mode.stream else size.calls
    kinds = ("direct", "passthrough", "gateway")
    clients = {kind: rig.clients(mode, kind, count) for kind in kinds}
    measured: dict[str, list[Percentiles]] = {kind: [] for kind in kinds}
    for kind in kinds:
        await _stagger(clients[kind])
    for part in range(SLICES):
        for kind in kinds:
            taken = await open_loop(clients[kind], calls // SLICES, rate, seed=part)
            measured[kind].append(_percentiles(taken))
    for kind in kinds:
        _close(clients[kind])
    gateway.close()
    return {kind: _median(slices) for kind, slices in measured.items()}


def _percentiles(values: Sequence[float]) -> Percentiles:
    middle, high, worst = np.percentile(np.array(values) * 1000, [50, 99, 100])
    return float(middle), float(high), float(worst)


def _median(slices: Sequence[Percentiles]) -> Percentiles:
    """Medians over slices, so that one stall affects one slice only, and the overall maximum."""
    middle, high, worst = zip(*slices, strict=True)
    return statistics.median(middle), statistics.median(high), max(worst)


async def first_byte(rig: Rig, mode: Mode, size: Size) -> float:
    """Median ms from the engine's first visible token to the client's first content."""
    gateway = rig.gateways[mode.gateway]
    gateway.open(1)
    (client,) = rig.clients(mode, "gateway", 1)
    await client.connect()
    url = f"http://127.0.0.1:{rig.engine.port}/times"
    await asyncio.to_thread(_fetch, url)
    answers = await closed_loop([client], 4 * size.paced_turns if mode.paced else rig.script.turns)
    written = await asyncio.to_thread(_fetch, url)
    client.close()
    waits = [answer.first - at for answer, at in zip(answers, written, strict=True)]
    return float(statistics.median(waits)) * 1000


def _fetch(url: str) -> Any:
    with urlopen(url, timeout=10) as response:  # noqa: S310 - our own process
        return json.load(response)


def check(rig: Rig, mode: Mode, used: Sequence[Path]) -> float:
    """Recording bytes per call; fails unless every call of the longest session is exact."""
    sessions = [(recordings.read(path).calls, path.stat().st_size) for path in used]
    calls, size = max(sessions, key=lambda session: len(session[0]))
    if len(calls) != rig.script.turns and not mode.paced:
        fail(f"{mode.name}: a session of {rig.script.turns} calls recorded {len(calls)}")
    for turn, call in enumerate(calls):
        expected = rig.script.answers[turn]
        exact = call.branch is None and call.parent == (turn - 1 if turn else None)
        if not exact or not np.array_equal(call.prompt_ids, rig.script.prompts[turn]):
            fail(f"{mode.name}: call {turn} does not continue exactly (branch: {call.branch})")
        same = np.array_equal(call.sampled_ids, expected.ids)
        if not same or not np.array_equal(call.logprobs, expected.logprobs):
            fail(f"{mode.name}: call {turn} has other tokens in its recording than were sampled")
    return size / len(calls)


async def memory(rig: Rig, mode: Mode, size: Size) -> float:
    """Growth of resident memory in bytes per call, by least squares, without the first tenth."""
    gateway = rig.gateways[mode.gateway]
    samples: list[tuple[int, int]] = []
    made = 0
    while made < size.memory_calls:
        gateway.open(size.at_once)
        clients = rig.clients(mode, "gateway", size.at_once)
        await asyncio.gather(*(client.connect() for client in clients))
        await closed_loop(clients, rig.script.turns)
        _close(clients)
        for recording in gateway.close():
            recording.unlink()
        made += size.at_once * rig.script.turns
        samples.append((made, gateway.child.rss()))
        if len(samples) % 8 == 0:
            note(f"memory: {made} calls, {samples[-1][1] / 1e6:.1f} MB")
    return _slope(samples)


def _slope(samples: Sequence[tuple[int, int]]) -> float:
    late = np.array(samples[len(samples) // 10 :], dtype=float)
    return round(float(np.polyfit(late[:, 0], late[:, 1], 1)[0]), 1)
