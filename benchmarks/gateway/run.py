"""What a model call through the gateway costs, next to a proxy that forwards bytes unseen.

Engine, pass-through, gateway and load generator (this program) are one process each, on loopback.
Blocks of calls alternate between gateway and pass-through, and ratios are of medians, so a busy
machine disturbs both alike. `docs/benchmarks.md` says what each figure means.

    python benchmarks/gateway/run.py [--json] [--quick] [--only MODE...]
"""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn
from urllib.request import urlopen

import msgspec
import numpy as np
import replies
import script
import uvloop
from engine import SPACING_S
from load import Place, Seat, Target, WrongAnswer, closed_loop, open_loop
from processes import Child, Refused
from script import TURNS, Script, Told

from tugline.capture import segments

SLICES = 5
PACED_STREAMS = 16
WAVE = 16
"""Sessions at a time while memory is watched."""


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
    paced_turns: int = 8
    """Calls of each of the spaced streams in a block."""
    connections: tuple[int, ...] = (1, 16, 64)


SIZES = {
    "full": Size(rounds=12, calls=1200, rate=90, memory_calls=20_000),
    "quick": Size(rounds=3, calls=180, rate=90, memory_calls=1_920),
    "smoke": Size(
        rounds=2, calls=36, rate=60, memory_calls=1_280, paced_turns=1, connections=(1, 4)
    ),
}
"""``smoke`` shows that all of it runs; its figures mean nothing."""


@dataclass(frozen=True)
class Mode:
    """One way in which the gateway is asked and asks."""

    name: str
    gateway: str
    """How the launched gateway talks to the engine."""
    route: str
    """The engine's route, which the pass-through is asked for by name."""
    stream: bool = False
    paced: bool = False


MODES = (
    Mode("exact", "exact", replies.GENERATE),
    Mode("observed", "observed", replies.CHAT),
    Mode("stream", "exact", replies.GENERATE, stream=True),
    Mode("stream_paced", "exact", replies.GENERATE, stream=True, paced=True),
)


# --------------------------------------------------------------------------- what is up
@dataclass
class Gateway:
    """A launched gateway, its open sessions, and how it tells the answers."""

    child: Child
    told: list[Told] = field(default_factory=list)
    waiting: deque[tuple[Place, Path]] = field(default_factory=deque)
    segments: list[Path] = field(default_factory=list)
    """Of sessions that were begun since the last `close`."""

    def open(self, sessions: int) -> None:
        """Have so many more sessions ready."""
        for path, key, segment in self.child.ask(f"open {sessions}"):
            self.waiting.append((Place(f"{path}/v1/chat/completions", key), Path(segment)))

    def fresh(self) -> Place:
        """A session nobody used yet."""
        place, segment = self.waiting.popleft()
        self.segments.append(segment)
        return place

    def close(self) -> list[Path]:
        """End every session; the segments of those that were begun."""
        self.child.ask("close")
        begun, self.segments = self.segments, []
        self.waiting.clear()
        return begun


@dataclass(frozen=True)
class Rig:
    """All processes, and the conversation they play."""

    script: Script
    engine: Child
    floor: Child
    gateways: dict[str, Gateway]

    def target(self, name: str, mode: Mode, port: int) -> Target:
        """What is asked of one of them."""
        bodies = self.script.bodies(self.gateways[mode.gateway].told, stream=mode.stream)
        return Target(name, port, bodies, mode.stream, mode.paced)

    def seats(self, mode: Mode, kind: str, count: int) -> list[Seat]:
        """Connections to the engine itself, to the pass-through or to the gateway."""
        gateway = self.gateways[mode.gateway]
        child = {"direct": self.engine, "passthrough": self.floor, "gateway": gateway.child}[kind]
        target = self.target(kind, mode, child.port)
        fresh: Callable[[], Place] = lambda: Place(mode.route)  # noqa: E731
        return [
            Seat(target, number, gateway.fresh if kind == "gateway" else fresh)
            for number in range(count)
        ]


def launch(story: Script, folder: Path, modes: Sequence[Mode], stack: ExitStack) -> Rig:
    """Start engine, pass-through and, in each of its modes, the gateway."""
    here = Path(__file__).parent
    file = folder / "replies.msgpack"
    file.write_bytes(msgspec.msgpack.encode(replies.write(story)))
    story.tokenizer.save(folder)

    def start(program: str, *arguments: str) -> Child:
        child = Child(here / program, *arguments)
        stack.callback(child.stop)
        return child

    engine = start("engine.py", str(file))
    url = f"http://127.0.0.1:{engine.port}"
    floor = start("passthrough.py", url)
    gateways = {
        name: Gateway(start("launcher.py", name, url, str(folder), str(folder / name)))
        for name in dict.fromkeys(mode.gateway for mode in modes)
    }
    return Rig(story, engine, floor, gateways)


async def learn(rig: Rig, gateway: Gateway, mode: Mode) -> None:
    """Play two sessions as a client would, to learn what prebuilt bodies must repeat."""
    gateway.open(2)
    for _ in range(2):
        before, gateway.told = gateway.told, []
        (seat,) = rig.seats(mode, "gateway", 1)
        await seat.connect()
        for turn in range(TURNS):
            answer = await seat.call()
            gateway.told.append(_told(answer.data, rig.script, turn))
            seat.target = rig.target("gateway", mode, gateway.child.port)
        seat.close()
        if before and before != gateway.told:
            fail("answers differ between sessions; prebuilt bodies are not what clients would send")
    gateway.close()


def _told(data: bytes, story: Script, turn: int) -> Told:
    said = story.answers[turn]
    message = json.loads(data[data.index(b"\r\n\r\n") + 4 :])["choices"][0]["message"]
    (call,) = message["tool_calls"]
    text, reasoning = message["content"], message["reasoning_content"]
    arguments = json.loads(call["function"]["arguments"])
    if (text.strip(), reasoning.strip(), arguments) != (said.text, said.reasoning, said.arguments):
        fail(f"turn {turn} was answered with {message!r:.600}")
    return Told(text, reasoning, str(call["id"]))


# --------------------------------------------------------------------------- measuring
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
            await closed_loop([seat], TURNS)
            found.append((child.cpu() - before) / TURNS * 1000)
            seat.close()
    return blocks


async def paced_cpu(rig: Rig, mode: Mode, size: Size) -> dict[str, list[float]]:
    """The same for spaced streams, of which many are open at a time."""
    gateway = rig.gateways[mode.gateway]
    blocks: dict[str, list[float]] = {"passthrough": [], "gateway": []}
    gateway.open(PACED_STREAMS * (1 + size.rounds))
    seats = {kind: rig.seats(mode, kind, PACED_STREAMS) for kind in blocks}
    for each in seats.values():
        await _stagger(each)
    for _ in range(size.rounds):
        for kind, found in blocks.items():
            child = rig.floor if kind == "passthrough" else gateway.child
            before = child.cpu()
            await closed_loop(seats[kind], size.paced_turns)
            found.append((child.cpu() - before) / (size.paced_turns * PACED_STREAMS) * 1000)
    for each in seats.values():
        _close(each)
    return blocks


async def _stagger(seats: Sequence[Seat]) -> None:
    """Connect, and bring the seats to turns spread evenly over a session."""
    for index, seat in enumerate(seats):
        await seat.connect()
        await seat.advance(index * TURNS // len(seats))


def _close(seats: Sequence[Seat]) -> None:
    for seat in seats:
        seat.close()


async def latency(rig: Rig, mode: Mode, count: int, size: Size) -> dict[str, tuple[float, float]]:
    """Median and 99th percentile, ms, of direct, pass-through and gateway calls."""
    gateway = rig.gateways[mode.gateway]
    gateway.open(2 * count + size.calls // TURNS + 1)
    rate = size.rate / 3 if mode.stream else size.rate
    calls = size.calls // 3 if mode.stream else size.calls
    kinds = ("direct", "passthrough", "gateway")
    seats = {kind: rig.seats(mode, kind, count) for kind in kinds}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
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


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    middle, high = np.percentile(np.array(values) * 1000, [50, 99])
    return float(middle), float(high)


def _median(slices: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slice by slice, so that a machine that stalls once spoils one of them."""
    middle, high = zip(*slices, strict=True)
    return statistics.median(middle), statistics.median(high)


async def first_byte(rig: Rig, mode: Mode, size: Size) -> float:
    """Median ms from the engine's first visible token to the client's first content."""
    gateway = rig.gateways[mode.gateway]
    gateway.open(1)
    (seat,) = rig.seats(mode, "gateway", 1)
    await seat.connect()
    url = f"http://127.0.0.1:{rig.engine.port}/times"
    await asyncio.to_thread(_fetch, url)
    answers = await closed_loop([seat], 4 * size.paced_turns if mode.paced else TURNS)
    written = await asyncio.to_thread(_fetch, url)
    seat.close()
    waits = [answer.first - at for answer, at in zip(answers, written, strict=True)]
    return float(statistics.median(waits)) * 1000


def _fetch(url: str) -> Any:
    with urlopen(url, timeout=10) as answer:  # noqa: S310 - our own process
        return json.load(answer)


def check(rig: Rig, mode: Mode, begun: Sequence[Path]) -> float:
    """Bytes kept a call; fails unless the longest session is continued exactly at every call."""
    sessions = [(segments.read(path).calls, path.stat().st_size) for path in begun]
    calls, size = max(sessions, key=lambda session: len(session[0]))
    if len(calls) != TURNS and not mode.paced:
        fail(f"{mode.name}: a session of {TURNS} calls recorded {len(calls)}")
    for turn, call in enumerate(calls):
        said = rig.script.answers[turn]
        exact = call.branch is None and call.parent == (turn - 1 if turn else None)
        if not exact or not np.array_equal(call.prompt_ids, rig.script.prompts[turn]):
            fail(f"{mode.name}: call {turn} does not continue exactly (branch: {call.branch})")
        same = np.array_equal(call.sampled_ids, said.ids)
        if not same or not np.array_equal(call.logprobs, said.logprobs):
            fail(f"{mode.name}: call {turn} recorded other tokens than were sampled")
    return size / len(calls)


async def memory(rig: Rig, mode: Mode, calls: int) -> float:
    """Bytes of resident memory gained a call, by least squares, the first tenth left out."""
    gateway = rig.gateways[mode.gateway]
    seen: list[tuple[int, int]] = []
    made = 0
    while made < calls:
        gateway.open(WAVE)
        seats = rig.seats(mode, "gateway", WAVE)
        await asyncio.gather(*(seat.connect() for seat in seats))
        await closed_loop(seats, TURNS)
        _close(seats)
        for segment in gateway.close():
            segment.unlink()
        made += WAVE * TURNS
        seen.append((made, gateway.child.rss()))
        if len(seen) % 8 == 0:
            note(f"memory: {made} calls, {seen[-1][1] / 1e6:.1f} MB")
    late = np.array(seen[len(seen) // 10 :], dtype=float)
    return round(float(np.polyfit(late[:, 0], late[:, 1], 1)[0]), 1)


# --------------------------------------------------------------------------- the whole run
async def measure(rig: Rig, mode: Mode, size: Size) -> tuple[dict[str, Any], list[float], float]:
    """One mode's figures, the pass-through's blocks, and the bytes kept a call."""
    note(f"{mode.name}: CPU time")
    gateway = rig.gateways[mode.gateway]
    blocks = await (paced_cpu if mode.paced else cpu)(rig, mode, size)
    kept = check(rig, mode, gateway.close())
    ours, floor = (statistics.median(blocks[kind]) for kind in ("gateway", "passthrough"))
    told: dict[str, Any] = {
        "cpu_ms": round(ours, 3),
        "ratio_to_passthrough": round(ours / floor, 2),
        "passthrough_cpu_ms": round(floor, 3),
    }
    if mode.stream:
        told["first_byte_ms"] = round(await first_byte(rig, mode, size), 2)
        gateway.close()
    if not mode.paced:
        for count in size.connections:
            note(f"{mode.name}: latency at {count} connections")
            _add(told, str(count), await latency(rig, mode, count, size))
    return told, blocks["passthrough"], kept


def _add(told: dict[str, Any], count: str, found: dict[str, tuple[float, float]]) -> None:
    for index, name in enumerate(("p50_ms", "p99_ms")):
        direct = found["direct"][index]
        told.setdefault(f"added_{name}", {})[count] = round(found["gateway"][index] - direct, 2)
        told.setdefault(f"passthrough_added_{name}", {})[count] = round(
            found["passthrough"][index] - direct, 2
        )
        told.setdefault(f"direct_{name}", {})[count] = round(direct, 2)


async def run(name: str, only: Sequence[str]) -> dict[str, Any]:
    """Everything, in order."""
    size, modes = SIZES[name], [mode for mode in MODES if mode.name in only]
    began, load = time.time(), os.getloadavg()[0]
    note("writing the conversation")
    story = script.write()
    told: dict[str, Any] = {mode.name: None for mode in MODES}
    noise: dict[str, float] = {}
    kept: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="tugline-bench-") as folder, ExitStack() as stack:
        rig = launch(story, Path(folder), modes, stack)
        for mode in modes:
            gateway = rig.gateways[mode.gateway]
            if not gateway.told:
                await learn(rig, gateway, replace(mode, stream=False, paced=False))
                gc.freeze()
            told[mode.name], floor, kept[mode.name] = await measure(rig, mode, size)
            noise[mode.name] = _spread(floor)
        told["kept_bytes_per_call"] = round(kept.get("exact", 0)) or None
        told["kept_bytes_per_call_by_mode"] = {name: round(size) for name, size in kept.items()}
        told["rss_growth_bytes_per_call"] = await memory(rig, modes[0], size.memory_calls)
        repeated = rig.gateways[modes[0].gateway].told
    told["conversation"] = story.sizes(story.bodies(repeated, stream=False))
    told["method"] = {"size": name, **msgspec.to_builtins(size), "spacing_s": SPACING_S}
    told["machine"] = {
        "cpus": os.cpu_count(),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "noise": noise,
        "seconds": round(time.time() - began),
    }
    return told


def _spread(values: Sequence[float]) -> float:
    """Interquartile range over median."""
    low, middle, high = statistics.quantiles(values, n=4)
    return round((high - low) / middle, 3)


def table(told: dict[str, Any]) -> str:
    """The result for people."""
    rows = [f"{'':<14}{'CPU ms':>9}{'floor':>8}{'ratio':>7}   added p50 / p99 ms (pass-through's)"]
    for mode in MODES:
        one = told[mode.name]
        if one is None:
            rows.append(f"{mode.name:<14} not measured")
            continue
        row = f"{mode.name:<14}{one['cpu_ms']:>9.2f}{one['passthrough_cpu_ms']:>8.2f}"
        row += f"{one['ratio_to_passthrough']:>7.1f}"
        for count in one.get("added_p50_ms", ()):
            p50, p99 = one["added_p50_ms"][count], one["added_p99_ms"][count]
            floor = one["passthrough_added_p50_ms"][count], one["passthrough_added_p99_ms"][count]
            row += f"   c={count}: {p50:.1f} / {p99:.1f} ({floor[0]:.1f} / {floor[1]:.1f})"
        if "first_byte_ms" in one:
            row += f"   first byte {one['first_byte_ms']:.1f}"
        rows.append(row)
    rows.append(f"kept on disk {told['kept_bytes_per_call']} bytes a call")
    rows.append(f"memory growth {told['rss_growth_bytes_per_call']} bytes a call")
    rows += [f"{name}: {told[name]}" for name in ("conversation", "method", "machine")]
    return "\n".join(rows)


def note(text: str) -> None:
    """Progress, beside the result."""
    sys.stderr.write(f"{text}\n")


def fail(text: str) -> NoReturn:
    """A benchmark of a broken path is worth nothing."""
    sys.exit(f"the benchmark stopped: {text}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--quick",
        action="store_const",
        const="quick",
        dest="size",
        help="fewer calls, rougher figures",
    )
    parser.add_argument("--size", choices=SIZES, help=argparse.SUPPRESS)
    names = [mode.name for mode in MODES]
    parser.add_argument("--only", nargs="+", choices=names, help="these modes")
    parser.set_defaults(size="full", only=names)
    options = parser.parse_args()
    try:
        told = uvloop.run(run(options.size, options.only))
    except (WrongAnswer, Refused) as error:
        fail(str(error))
    sys.stdout.write((json.dumps(told) if options.json else table(told)) + "\n")


if __name__ == "__main__":
    main()
