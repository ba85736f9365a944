"""What a model call through the gateway costs, next to a proxy that forwards bytes unseen.

Engine, pass-through, gateway and load generator (this program) are one process each, on loopback.
Blocks of calls alternate between gateway and pass-through, and ratios are of medians, so a busy
machine disturbs both alike. `docs/benchmarks.md` says what each figure means.

    python benchmarks/gateway/run.py [--json] [--quick] [--only MODE_OR_PART...]
"""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import measures
import msgspec
import script
import uvloop
from engine import SPACING_S
from load import WrongAnswer
from measures import SIZES, Size
from processes import Refused

from rig import MODES, Mode, Rig, fail, launch, learn, note
from tugline.web.serve import raise_file_limit

PARTS = ("results", "growth", "workers", "open", "memory")
"""What is measured beside the modes."""


async def measure(rig: Rig, mode: Mode, size: Size) -> tuple[dict[str, Any], list[float], float]:
    """One mode's figures, the pass-through's blocks, and the bytes kept a call."""
    note(f"{mode.name}: CPU time")
    gateway = rig.gateways[mode.gateway]
    blocks = await (measures.paced_cpu if mode.paced else measures.cpu)(rig, mode, size)
    kept = measures.check(rig, mode, gateway.close())
    ours, floor = (statistics.median(blocks[kind]) for kind in ("gateway", "passthrough"))
    told: dict[str, Any] = {
        "cpu_ms": round(ours, 3),
        "ratio_to_passthrough": round(ours / floor, 2),
        "passthrough_cpu_ms": round(floor, 3),
    }
    if mode.stream:
        told["first_byte_ms"] = round(await measures.first_byte(rig, mode, size), 2)
        gateway.close()
    if not mode.paced:
        told["opening_cpu_ms"] = round(await measures.openings(rig, mode, size), 3)
        for count in size.connections:
            note(f"{mode.name}: latency at {count} connections")
            _add(told, str(count), await measures.latency(rig, mode, count, size))
    if 64 in size.connections and not mode.paced:
        added, floor_added = (told[f"{kind}added_p99_ms"]["64"] for kind in ("", "passthrough_"))
        told["p99_ratio_64"] = round(added / floor_added, 2) if floor_added > 0 else None
    return told, blocks["passthrough"], kept


def _add(told: dict[str, Any], count: str, found: dict[str, tuple[float, float]]) -> None:
    for index, name in enumerate(("p50_ms", "p99_ms", "worst_ms")):
        direct = found["direct"][index]
        told.setdefault(f"added_{name}", {})[count] = round(found["gateway"][index] - direct, 2)
        told.setdefault(f"passthrough_added_{name}", {})[count] = round(
            found["passthrough"][index] - direct, 2
        )
        told.setdefault(f"direct_{name}", {})[count] = round(direct, 2)


async def measure_long(like: script.Script, name: str, size: Size) -> dict[str, Any]:
    """The second profile, or sessions of many calls: processes and a conversation of their own."""
    mode, long = MODES[0], name == "growth"
    note(f"{name}: writing its conversation")
    story = (
        script.write(like, turns=size.long_turns)
        if long
        else script.write(like, result_tokens=script.LONG_RESULT)
    )
    with tempfile.TemporaryDirectory(prefix="tugline-bench-") as folder, ExitStack() as stack:
        rig = launch(story, Path(folder), [mode], stack)
        await learn(rig, rig.gateways[mode.gateway], mode)
        note(f"{name}: CPU time")
        if not long:
            told, _, _ = await measure(rig, mode, replace(size, connections=()))
            bodies = rig.target("gateway", mode, 0).bodies
            return {"long_results": told | {"conversation": story.sizes(bodies)}}
        taken = await measures.growth(rig, mode, size)
    ours, last = taken["gateway"], str(size.long_turns)
    return {
        "growth": round(ours[last] / ours["10"], 2),
        "growth_cpu_ms": ours,
        "growth_passthrough_cpu_ms": taken["passthrough"],
    }


async def measure_workers(story: script.Script, size: Size) -> dict[str, Any]:
    """A gateway of one process beside one of two, on processes of their own."""
    modes = (MODES[0], replace(MODES[0], name="workers", gateway="workers"))
    with tempfile.TemporaryDirectory(prefix="tugline-bench-") as folder, ExitStack() as stack:
        rig = launch(story, Path(folder), modes, stack)
        for mode in modes:
            await learn(rig, rig.gateways[mode.gateway], mode)
        note("workers: CPU time")
        return await measures.workers(rig, modes, size)


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
        rig = launch(story, Path(folder), modes or MODES[:1], stack)
        for mode in modes:
            gateway = rig.gateways[mode.gateway]
            if not gateway.told:
                await learn(rig, gateway, replace(mode, stream=False, paced=False))
                gc.freeze()
            told[mode.name], floor, kept[mode.name] = await measure(rig, mode, size)
            noise[mode.name] = _spread(floor)
        told["kept_bytes_per_call"] = round(kept.get("exact", 0)) or None
        told["kept_bytes_per_call_by_mode"] = {name: round(size) for name, size in kept.items()}
        first = (modes or MODES)[0]
        if not rig.gateways[first.gateway].told:
            await learn(rig, rig.gateways[first.gateway], first)
        if "open" in only:
            note("many sessions open")
            told |= await measures.many_open(rig, first, size)
        if "memory" in only:
            told["rss_growth_bytes_per_call"] = await measures.memory(rig, first, size)
        told["conversation"] = story.sizes(rig.target("gateway", first, 0).bodies)
    for part in ("results", "growth"):
        if part in only:
            told |= await measure_long(story, part, size)
    if "workers" in only:
        told |= await measure_workers(story, size)
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


REST = (
    "rss_growth_bytes_per_call", "rss_open_bytes_per_call", "stall_ms", "stall_cpu_ms", "growth",
    "growth_cpu_ms", "growth_passthrough_cpu_ms", "workers_ratio", "workers_cpu_ratio",
    "workers_cpu_ms", "workers_calls_per_s", "long_results", "conversation", "method", "machine",
)  # fmt: skip
"""What the table has below its rows, a line each."""


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
    rows += [f"{name}: {told[name]}" for name in REST if name in told]
    return "\n".join(rows)


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
    names = [*(mode.name for mode in MODES), *PARTS]
    parser.add_argument("--only", nargs="+", choices=names, help="these modes and parts")
    parser.set_defaults(size="full", only=names)
    options = parser.parse_args()
    raise_file_limit()
    try:
        told = uvloop.run(run(options.size, options.only))
    except (WrongAnswer, Refused) as error:
        fail(str(error))
    sys.stdout.write((json.dumps(told) if options.json else table(told)) + "\n")


if __name__ == "__main__":
    main()
