"""Each figure of the benchmark: CPU time, latency, first byte, bytes kept, memory."""

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
from load import Seat, closed_loop, open_loop
from processes import cpu_of
from script import Bodies

from rig import Mode, Rig, fail, note
from tugline.recording import file as recordings

SLICES = 5
AT_ONCE = 4
"""Calls that are under way while many sessions are open."""
BUSY = 16
"""Connections that keep one process, or two, from ever waiting for the load generator."""
Spread = tuple[float, float, float]
"""Median, 99th percentile and worst."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    """Blocks of 40 calls a target, for CPU time."""
    calls: int
    """Calls a target and number of connections, for latency."""
    rate: float
    """Calls a second in all, for latency; streams get a third."""
    memory_calls: int
    growth_rounds: int
    """Sessions of `long_turns` calls."""
    open_sessions: int
    """Sessions of 40 calls that are open at the same time."""
    openings: int
    """Sessions whose first prompt nobody asked for before."""
    long_turns: int = 300
    paced_turns: int = 8
    """Calls of each of the spaced streams in a block."""
    connections: tuple[int, ...] = (1, 16, 64)
    at_once: int = 16
    """Spaced streams, and sessions while memory is watched."""


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
        calls=180,
        rate=90,
        memory_calls=1_920,
        growth_rounds=2,
        open_sessions=100,
        openings=12,
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
"""``smoke`` shows that all of it runs; its figures mean nothing."""


async def cpu(rig: Rig, mode: Mode, size: Size) -> dict[str, list[float]]:
    """CPU ms a call of gateway and pass-through, block by block, one session a block."""
    gateway = rig.gateways[mode.gateway]
    blocks: dict[str, list[float]] = {"passthrough": [], "gateway": []}
    for _ in range(size.rounds):
        for kind, found in blocks.items():
            child = rig.floor if kind == "passthrough" else gateway.child
            if kind == "gateway":
                gateway.open(1)
            (seat,) = rig.seats(mode, kind, 1)
            await seat.connect()
            before = child.cpu()
            await closed_loop([seat], rig.script.turns)
            found.append((child.cpu() - before) / rig.script.turns * 1000)
            seat.close()
    return blocks


async def openings(rig: Rig, mode: Mode, size: Size) -> float:
    """Median CPU ms of a session's first call, whose prompt no session had before."""
    gateway = rig.gateways[mode.gateway]
    gateway.open(size.openings)
    (seat,) = rig.seats(mode, "gateway", 1)
    await seat.connect()
    found = []
    for number in range(size.openings):
        told = replace(rig.script, user=f"Task {number}. {rig.script.user}")
        seat.target = replace(seat.target, bodies=Bodies(told, (), stream=mode.stream), turns=1)
        seat.turn = 1
        before = gateway.child.cpu()
        await seat.call()
        found.append((gateway.child.cpu() - before) * 1000)
    seat.close()
    gateway.close()
    return statistics.median(found)


async def growth(rig: Rig, mode: Mode, size: Size) -> dict[str, dict[str, float]]:
    """CPU ms a call of gateway and pass-through by the turn, the mean of the ten that end there."""
    gateway = rig.gateways[mode.gateway]
    found: dict[str, dict[str, list[float]]] = {"gateway": {}, "passthrough": {}}
    for _ in range(size.growth_rounds):
        for kind, taken in found.items():
            child = rig.floor if kind == "passthrough" else gateway.child
            if kind == "gateway":
                gateway.open(1)
            (seat,) = rig.seats(mode, kind, 1)
            await seat.connect()
            for end in range(10, rig.script.turns + 1, 10):
                before = child.cpu()
                await closed_loop([seat], 10)
                taken.setdefault(str(end), []).append((child.cpu() - before) * 100)
            seat.close()
        check(rig, mode, gateway.close())
    shown = {"10", "100", "200", str(size.long_turns)}
    return {
        kind: {at: round(statistics.median(taken[at]), 3) for at in taken if at in shown}
        for kind, taken in found.items()
    }


async def many_open(rig: Rig, mode: Mode, size: Size) -> dict[str, Any]:
    """Longest stall of the gateway's event loop, and memory a call, with all sessions open."""
    gateway = rig.gateways[mode.gateway]
    gateway.open(size.open_sessions)
    seats = rig.seats(mode, "gateway", size.open_sessions)
    for seat in seats:
        await seat.connect()
    seen: list[tuple[int, int]] = []

    async def play(some: Sequence[Seat]) -> None:
        for seat in some:
            await seat.call()

    gateway.child.ask("watch")
    for turn in range(rig.script.turns):
        await asyncio.gather(*(play(seats[k::AT_ONCE]) for k in range(AT_ONCE)))
        seen.append(((turn + 1) * len(seats), gateway.child.rss()))
    stalls = gateway.child.ask("stalls")
    _close(seats)
    gateway.close()
    return {
        "open_sessions": len(seats),
        "stall_ms": round(stalls["wall"], 1),
        "stall_cpu_ms": round(stalls["cpu"], 1),
        "rss_open_bytes_per_call": _slope(seen),
    }


async def workers(rig: Rig, modes: Sequence[Mode], size: Size) -> dict[str, Any]:
    """CPU ms and calls a second of one process and of several, each as busy as it can be."""
    found: dict[str, tuple[list[float], list[float]]] = {mode.gateway: ([], []) for mode in modes}
    for _ in range(size.rounds):
        for mode in modes:
            gateway = rig.gateways[mode.gateway]
            gateway.open(BUSY)
            seats = rig.seats(mode, "gateway", BUSY)
            for seat in seats:
                await seat.connect()
            pids = gateway.child.ask("pids")
            before, began = sum(map(cpu_of, pids)), time.monotonic()
            await closed_loop(seats, rig.script.turns)
            calls, seconds = BUSY * rig.script.turns, time.monotonic() - began
            found[mode.gateway][0].append((sum(map(cpu_of, pids)) - before) / calls * 1000)
            found[mode.gateway][1].append(calls / seconds)
            _close(seats)
            check(rig, mode, gateway.close())
    cpu_ms = {name: statistics.median(each) for name, (each, _) in found.items()}
    rates = {name: statistics.median(each) for name, (_, each) in found.items()}
    return {
        "workers_cpu_ratio": round(cpu_ms["workers"] / cpu_ms["exact"], 3),
        "workers_ratio": round(rates["workers"] / rates["exact"], 2),
        "workers_cpu_ms": {name: round(value, 3) for name, value in cpu_ms.items()},
        "workers_calls_per_s": {name: round(value, 1) for name, value in rates.items()},
    }


async def paced_cpu(rig: Rig, mode: Mode, size: Size) -> dict[str, list[float]]:
    """The same for spaced streams, of which many are open at a time."""
    gateway = rig.gateways[mode.gateway]
    blocks: dict[str, list[float]] = {"passthrough": [], "gateway": []}
    gateway.open(size.at_once * (1 + size.rounds))
    seats = {kind: rig.seats(mode, kind, size.at_once) for kind in blocks}
    for each in seats.values():
        await _stagger(each)
    for _ in range(size.rounds):
        for kind, found in blocks.items():
            child = rig.floor if kind == "passthrough" else gateway.child
            before = child.cpu()
            await closed_loop(seats[kind], size.paced_turns)
            found.append((child.cpu() - before) / (size.paced_turns * size.at_once) * 1000)
    for each in seats.values():
        _close(each)
    return blocks


async def _stagger(seats: Sequence[Seat]) -> None:
    """Connect, and bring the seats to turns spread evenly over a session."""
    for index, seat in enumerate(seats):
        await seat.connect()
        await seat.advance(index * seat.target.turns // len(seats))


def _close(seats: Sequence[Seat]) -> None:
    for seat in seats:
        seat.close()


async def latency(rig: Rig, mode: Mode, count: int, size: Size) -> dict[str, Spread]:
    """Median, 99th percentile and worst, ms, of direct, pass-through and gateway calls."""
    gateway = rig.gateways[mode.gateway]
    gateway.open(2 * count + size.calls // rig.script.turns + 1)
    rate = size.rate / 3 if mode.stream else size.rate
    calls = size.calls // 3 if mode.stream else size.calls
    kinds = ("direct", "passthrough", "gateway")
    seats = {kind: rig.seats(mode, kind, count) for kind in kinds}
    found: dict[str, list[Spread]] = {kind: [] for kind in kinds}
    for kind in kinds:
        await _stagger(seats[kind])
    for part in range(SLICES):
        for kind in kinds:
            taken = await open_loop(seats[kind], calls // SLICES, rate, seed=part)
            found[kind].append(_percentiles(taken))
    for kind in kinds:
        _close(seats[kind])
    gateway.close()
    return {kind: _median(slices) for kind, slices in found.items()}


def _percentiles(values: Sequence[float]) -> Spread:
    middle, high, worst = np.percentile(np.array(values) * 1000, [50, 99, 100])
    return float(middle), float(high), float(worst)


def _median(slices: Sequence[Spread]) -> Spread:
    """Slice by slice, so that a machine that stalls once spoils one of them; the worst of all."""
    middle, high, worst = zip(*slices, strict=True)
    return statistics.median(middle), statistics.median(high), max(worst)


async def first_byte(rig: Rig, mode: Mode, size: Size) -> float:
    """Median ms from the engine's first visible token to the client's first content."""
    gateway = rig.gateways[mode.gateway]
    gateway.open(1)
    (seat,) = rig.seats(mode, "gateway", 1)
    await seat.connect()
    url = f"http://127.0.0.1:{rig.engine.port}/times"
    await asyncio.to_thread(_fetch, url)
    answers = await closed_loop([seat], 4 * size.paced_turns if mode.paced else rig.script.turns)
    written = await asyncio.to_thread(_fetch, url)
    seat.close()
    waits = [answer.first - at for answer, at in zip(answers, written, strict=True)]
    return float(statistics.median(waits)) * 1000


def _fetch(url: str) -> Any:
    with urlopen(url, timeout=10) as answer:  # noqa: S310 - our own process
        return json.load(answer)


def check(rig: Rig, mode: Mode, begun: Sequence[Path]) -> float:
    """Bytes kept a call; fails unless the longest session is continued exactly at every call."""
    sessions = [(recordings.read(path).calls, path.stat().st_size) for path in begun]
    calls, size = max(sessions, key=lambda session: len(session[0]))
    if len(calls) != rig.script.turns and not mode.paced:
        fail(f"{mode.name}: a session of {rig.script.turns} calls recorded {len(calls)}")
    for turn, call in enumerate(calls):
        said = rig.script.answers[turn]
        exact = call.branch is None and call.parent == (turn - 1 if turn else None)
        if not exact or not np.array_equal(call.prompt_ids, rig.script.prompts[turn]):
            fail(f"{mode.name}: call {turn} does not continue exactly (branch: {call.branch})")
        same = np.array_equal(call.sampled_ids, said.ids)
        if not same or not np.array_equal(call.logprobs, said.logprobs):
            fail(f"{mode.name}: call {turn} recorded other tokens than were sampled")
    return size / len(calls)


async def memory(rig: Rig, mode: Mode, size: Size) -> float:
    """Bytes of resident memory gained a call, by least squares, the first tenth left out."""
    gateway = rig.gateways[mode.gateway]
    seen: list[tuple[int, int]] = []
    made = 0
    while made < size.memory_calls:
        gateway.open(size.at_once)
        seats = rig.seats(mode, "gateway", size.at_once)
        await asyncio.gather(*(seat.connect() for seat in seats))
        await closed_loop(seats, rig.script.turns)
        _close(seats)
        for recording in gateway.close():
            recording.unlink()
        made += size.at_once * rig.script.turns
        seen.append((made, gateway.child.rss()))
        if len(seen) % 8 == 0:
            note(f"memory: {made} calls, {seen[-1][1] / 1e6:.1f} MB")
    return _slope(seen)


def _slope(seen: Sequence[tuple[int, int]]) -> float:
    late = np.array(seen[len(seen) // 10 :], dtype=float)
    return round(float(np.polyfit(late[:, 0], late[:, 1], 1)[0]), 1)
