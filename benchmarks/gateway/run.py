"""Cost of a model call through the gateway, compared with a proxy that only forwards bytes.

Engine, pass-through, gateway and load generator (this program) are one process each, on loopback.
Blocks of calls alternate between gateway and pass-through, and ratios are of medians, so that other
load on the machine affects both alike. `docs/benchmarks.md` explains each figure.

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
from load import UnexpectedResponse
from measures import SIZES, Size
from processes import ChildFailed
from rig import MODES, Mode, Rig, fail, launch, note, record_echoes

from tugline.web.serve import raise_file_limit

PARTS = ("results", "growth", "nodes", "open", "memory")
"""Measurements besides the modes."""
NOT_QUICK = ("growth", "nodes", "memory")
"""Parts that need many calls; `--quick` measures them only if they are named."""


async def measure(rig: Rig, mode: Mode, size: Size) -> tuple[dict[str, Any], list[float], float]:
    """Return the figures of a mode, the pass-through's blocks, and recording bytes per call."""
    note(f"{mode.name}: CPU time")
    gateway = rig.gateways[mode.gateway]
    blocks = await (measures.paced_cpu if mode.paced else measures.cpu)(rig, mode, size)
    bytes_per_call = measures.check(rig, mode, gateway.close())
    ours, baseline = (statistics.median(blocks[kind]) for kind in ("gateway", "passthrough"))
    result: dict[str, Any] = {
        "cpu_ms": round(ours, 3),
        "ratio_to_passthrough": round(ours / baseline, 2),
        "passthrough_cpu_ms": round(baseline, 3),
    }
    if mode.stream:
        result["first_byte_ms"] = round(await measures.first_byte(rig, mode, size), 2)
        gateway.close()
    if not mode.paced:
        result["opening_cpu_ms"] = round(await measures.openings(rig, mode, size), 3)
        for count in size.connections:
            note(f"{mode.name}: latency at {count} connections")
            _add(result, str(count), await measures.latency(rig, mode, count, size))
    if 64 in size.connections and not mode.paced:
        added, baseline_added = (
            result[f"{kind}added_p99_ms"]["64"] for kind in ("", "passthrough_")
        )
        result["p99_ratio_64"] = round(added / baseline_added, 2) if baseline_added > 0 else None
    return result, blocks["passthrough"], bytes_per_call


def _add(
    result: dict[str, Any], count: str, measured: dict[str, tuple[float, float, float]]
) -> None:
    for index, name in enumerate(("p50_ms", "p99_ms", "worst_ms")):
        direct = measured["direct"][index]
        result.setdefault(f"added_{name}", {})[count] = round(
            measured["gateway"][index] - direct, 2
        )
        result.setdefault(f"passthrough_added_{name}", {})[count] = round(
            measured["passthrough"][index] - direct, 2
        )
        result.setdefault(f"direct_{name}", {})[count] = round(direct, 2)


async def measure_long(like: script.Script, name: str, size: Size) -> dict[str, Any]:
    """Measure long tool results, or sessions of many calls, with their own processes."""
    mode, long = MODES[0], name == "growth"
    note(f"{name}: making its conversation")
    conversation = (
        script.write(like, turns=size.long_turns)
        if long
        else script.write(like, result_tokens=script.LONG_RESULT)
    )
    with tempfile.TemporaryDirectory(prefix="tugline-bench-") as folder, ExitStack() as stack:
        rig = launch(conversation, Path(folder), [mode], stack)
        await record_echoes(rig, rig.gateways[mode.gateway], mode)
        note(f"{name}: CPU time")
        if not long:
            result, _, _ = await measure(rig, mode, replace(size, connections=()))
            bodies = rig.target("gateway", mode, 0).bodies
            return {"long_results": result | {"conversation": conversation.sizes(bodies)}}
        taken = await measures.growth(rig, mode, size)
    ours, last = taken["gateway"], str(size.long_turns)
    return {
        "growth": round(ours[last] / ours["10"], 2),
        "growth_cpu_ms": ours,
        "growth_passthrough_cpu_ms": taken["passthrough"],
    }


async def measure_nodes(conversation: script.Script, size: Size) -> dict[str, Any]:
    """Compare one gateway with two, with their own engine and pass-through."""
    modes = (MODES[0], replace(MODES[0], name="second", gateway="second"))
    with tempfile.TemporaryDirectory(prefix="tugline-bench-") as folder, ExitStack() as stack:
        rig = launch(conversation, Path(folder), modes, stack)
        for mode in modes:
            await record_echoes(rig, rig.gateways[mode.gateway], mode)
        note("nodes: CPU time")
        return await measures.nodes(rig, modes, size)


async def run(name: str, only: Sequence[str]) -> dict[str, Any]:
    """Run the modes and parts in `only`, in order."""
    size, modes = SIZES[name], [mode for mode in MODES if mode.name in only]
    began, load = time.time(), os.getloadavg()[0]
    if name == "quick":
        note("this takes about 45 s on two idle processors, 75 s on busy ones")
    note("making the conversation")
    conversation = script.write()
    result: dict[str, Any] = {mode.name: None for mode in MODES}
    noise: dict[str, float] = {}
    bytes_per_call: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="tugline-bench-") as folder, ExitStack() as stack:
        rig = launch(conversation, Path(folder), modes or MODES[:1], stack)
        for mode in modes:
            gateway = rig.gateways[mode.gateway]
            if not gateway.echoes:
                await record_echoes(rig, gateway, replace(mode, stream=False, paced=False))
                gc.freeze()
            result[mode.name], baseline, bytes_per_call[mode.name] = await measure(rig, mode, size)
            noise[mode.name] = _spread(baseline)
            note(f"{mode.name}: {_summarize(result[mode.name])}, after {time.time() - began:.0f} s")
        result["kept_bytes_per_call"] = round(bytes_per_call.get("exact", 0)) or None
        result["kept_bytes_per_call_by_mode"] = {
            name: round(count) for name, count in bytes_per_call.items()
        }
        first = (modes or MODES)[0]
        if not rig.gateways[first.gateway].echoes:
            await record_echoes(rig, rig.gateways[first.gateway], first)
        if "open" in only:
            note("many sessions open")
            result |= await measures.many_open(rig, first, size)
        if "memory" in only:
            result["rss_growth_bytes_per_call"] = await measures.memory(rig, first, size)
        result["conversation"] = conversation.sizes(rig.target("gateway", first, 0).bodies)
    for part in ("results", "growth"):
        if part in only:
            result |= await measure_long(conversation, part, size)
    if "nodes" in only:
        result |= await measure_nodes(conversation, size)
    result["method"] = {"size": name, **msgspec.to_builtins(size), "spacing_s": SPACING_S}
    result["machine"] = {
        "cpus": os.cpu_count(),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "noise": noise,
        "seconds": round(time.time() - began),
    }
    return result


def _summarize(figures: dict[str, Any]) -> str:
    """Format the main figures of a mode, which are printed as soon as they are known."""
    baseline = f"{figures['passthrough_cpu_ms']:.2f} ms of the pass-through"
    return f"{figures['cpu_ms']:.2f} CPU ms per call, {baseline}"


def _spread(values: Sequence[float]) -> float:
    """Interquartile range over median."""
    low, middle, high = statistics.quantiles(values, n=4)
    return round((high - low) / middle, 3)


REST = (
    "rss_growth_bytes_per_call", "rss_open_bytes_per_call", "stall_ms", "stall_cpu_ms", "growth",
    "growth_cpu_ms", "growth_passthrough_cpu_ms", "nodes_ratio", "nodes_cpu_ratio",
    "nodes_cpu_ms", "nodes_calls_per_s", "long_results", "conversation", "method", "machine",
)  # fmt: skip
"""Keys that the table has below its rows, one per line."""


def table(result: dict[str, Any]) -> str:
    """Format the result as text."""
    head = f"{'':<14}{'CPU ms':>9}{'pass-through':>14}{'ratio':>7}"
    rows = [f"{head}   added p50 / p99 ms (of the pass-through)"]
    for mode in MODES:
        figures = result[mode.name]
        if figures is None:
            rows.append(f"{mode.name:<14} not measured")
            continue
        row = f"{mode.name:<14}{figures['cpu_ms']:>9.2f}{figures['passthrough_cpu_ms']:>14.2f}"
        row += f"{figures['ratio_to_passthrough']:>7.1f}"
        for count in figures.get("added_p50_ms", ()):
            p50, p99 = figures["added_p50_ms"][count], figures["added_p99_ms"][count]
            base = (
                figures["passthrough_added_p50_ms"][count],
                figures["passthrough_added_p99_ms"][count],
            )
            row += f"   c={count}: {p50:.1f} / {p99:.1f} ({base[0]:.1f} / {base[1]:.1f})"
        if "first_byte_ms" in figures:
            row += f"   first byte {figures['first_byte_ms']:.1f}"
        rows.append(row)
    rows.append(f"recordings: {result['kept_bytes_per_call']} bytes a call")
    rows += [f"{name}: {result[name]}" for name in REST if name in result]
    return "\n".join(rows)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--quick",
        action="store_const",
        const="quick",
        dest="size",
        help="fewer calls, rougher figures, within a minute",
    )
    parser.add_argument("--size", choices=SIZES, help=argparse.SUPPRESS)
    names = [*(mode.name for mode in MODES), *PARTS]
    parser.add_argument("--only", nargs="+", choices=names, help="only these modes and parts")
    parser.set_defaults(size="full")
    options = parser.parse_args()
    if options.only is None:
        quick = options.size == "quick"
        options.only = [name for name in names if not (quick and name in NOT_QUICK)]
    raise_file_limit()
    try:
        result = uvloop.run(run(options.size, options.only))
    except (UnexpectedResponse, ChildFailed) as error:
        fail(str(error))
    sys.stdout.write((json.dumps(result) if options.json else table(result)) + "\n")


if __name__ == "__main__":
    main()
