"""Effect of one hostile agent on the other sessions of its node.

It runs a real server with node and gateway, a stub engine, ordinary sessions that hold
conversations, and one session whose agent attacks the gateway in spells. The latency of the
ordinary calls in each spell is compared with two idle spells, before and after. All programs share
the cores of this machine, the attacker included. `docs/benchmarks.md` explains each figure.

    python benchmarks/hostile/run.py [--json] [--quick]
"""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from agents import ATTACKS, GAP_S
from engine import MODEL
from rich.console import Console
from rich.table import Table

from tugline.client.api import Client
from tugline.types import Limits, PluginSpec, Status, Task

HERE = Path(__file__).parent
TUGLINE = Path(sys.executable).with_name("tugline")
SPELLS = ("idle", *ATTACKS, "idle_again")
WAIT_S = 120.0


@contextlib.contextmanager
def running(folder: Path, name: str, *argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program during the block, with its output in a file."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def until(condition: Any, message: str) -> None:
    """Wait until `condition()` is true; stop with `message` after `WAIT_S`."""
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"the benchmark stopped: {message} within {WAIT_S:.0f} s")
        await asyncio.sleep(0.1)


async def watch_memory(process: psutil.Process, start: float, spell_s: float) -> list[list[int]]:
    """Sample the resident memory of the server's process, in bytes by spell."""
    samples: list[list[int]] = [[] for _ in SPELLS]
    end = start + len(SPELLS) * (spell_s + GAP_S)
    while (now := time.monotonic()) < end:
        spell = int((now - start) // (spell_s + GAP_S))
        if spell >= 0:
            samples[spell].append(process.memory_info().rss)
        await asyncio.sleep(0.1)
    return samples


def make_task(name: str, role: str, samples: int, folder: Path, seconds: float) -> Task:
    """Make a task whose agents follow the plan."""
    return Task(
        id=name,
        instruction=".",
        harness=PluginSpec(
            "shell", {"command": f"{sys.executable} {HERE / 'agents.py'} {role} {folder}"}
        ),
        runtime=PluginSpec("local"),
        evaluator=PluginSpec("session_completed"),
        samples=samples,
        limits=Limits(init_s=120.0, agent_s=seconds + 300.0, total_s=seconds + 600.0),
    )


async def run(sessions: int, spell_s: float) -> dict[str, Any]:
    """Run the benchmark with so many ordinary sessions."""
    total_s = len(SPELLS) * (spell_s + GAP_S)
    with (
        tempfile.TemporaryDirectory(prefix="tugline-bench-") as name,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        stack.enter_context(
            running(folder, "engine", sys.executable, str(HERE / "engine.py"), str(port))
        )
        settings = {"node": {"slots": sessions + 1, "max_initializing": 8, "memory_floor_mb": 0}}
        (folder / "config.yaml").write_text(json.dumps(settings))
        up = [str(TUGLINE), "up", "--port", "0", "--config", "config.yaml", "--engine"]
        up += [f"http://127.0.0.1:{port}", "--renderer", "qwen3"]
        up += ["--tokenizer", str(MODEL / "tokenizer.json")]
        server = stack.enter_context(running(folder, "server", *up))
        await until((folder / "tugline-data" / "server.json").exists, "the server did not start")
        async with Client(folder=folder / "tugline-data") as client:
            tasks = [
                make_task("hostile", "hostile", 1, folder, total_s),
                make_task("ordinary", "ordinary", sessions, folder, total_s),
            ]
            await client.submit(tasks)
            await until(
                lambda: len(list(folder.glob("*.ready"))) == sessions + 1, "not all agents started"
            )
            start = time.monotonic() + 1.0
            plan = {"start": start, "spell_s": spell_s, "spells": SPELLS}
            (folder / "plan.json.new").write_text(json.dumps(plan))
            (folder / "plan.json.new").rename(folder / "plan.json")
            memory = await watch_memory(psutil.Process(server.pid), start, spell_s)
            ended = [view async for view in client.sessions(task="ordinary")]
            async with asyncio.timeout(WAIT_S):
                while any(view.status is not Status.COMPLETED for view in ended):
                    if any(view.status in {Status.FAILED, Status.TIMED_OUT} for view in ended):
                        break
                    await asyncio.sleep(0.5)
                    ended = [view async for view in client.sessions(task="ordinary")]
        return summarize(folder, memory) | {
            "completed": sum(view.status is Status.COMPLETED for view in ended),
            "attempts_spent": sum(view.attempt for view in ended),
            "sessions": sessions,
            "spell_s": spell_s,
            "machine": {"cpus": os.cpu_count(), "load_after": round(os.getloadavg()[0], 2)},
        }


def summarize(folder: Path, memory: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Compute the figures of each spell from the logs of requests."""
    read = {
        role: [
            json.loads(line)
            for file in folder.glob(f"{role}-*.jsonl")
            for line in file.read_text().splitlines()
        ]
        for role in ("ordinary", "hostile")
    }
    idle = [one["s"] for one in read["ordinary"] if one["spell"].startswith("idle")]
    idle_p99 = float(np.percentile(idle, 99))
    spells: dict[str, Any] = {}
    for spell, sizes in zip(SPELLS, memory, strict=True):
        calls = [one for one in read["ordinary"] if one["spell"] == spell]
        sent = [one for one in read["hostile"] if one["spell"] == spell]
        p99 = float(np.percentile([one["s"] for one in calls], 99))
        refused = [one["s"] for one in sent if one["status"] in {400, 413}]
        spells[spell] = {
            "calls": len(calls),
            "failed": sum(one["status"] != 200 for one in calls),
            "p99_ms": round(1000 * p99, 1),
            "p99_ratio": round(p99 / idle_p99, 2),
            "hostile": dict(Counter(str(one["status"]) for one in sent)),
            "refused_s": round(float(np.median(refused)), 3) if refused else None,
            "rss_mb": round(max(sizes) / 2**20),
        }
    return {
        "spells": spells,
        "idle_p99_ms": round(1000 * idle_p99, 1),
        "failed": sum(one["failed"] for one in spells.values()),
        "rss_before_mb": round(min(memory[0]) / 2**20),
        "rss_after_mb": round(memory[-1][-1] / 2**20),
    }


def print_table(report: dict[str, Any]) -> None:
    """Print the report as text."""
    table = Table(
        "spell", "calls", "failed", "p99 ms", "x idle", "answers to attacker", "400 s", "MB"
    )
    for name, one in report["spells"].items():
        answers = ", ".join(f"{count} x {status}" for status, count in one["hostile"].items())
        cells = (one["calls"], one["failed"], one["p99_ms"], one["p99_ratio"], answers)
        refused = one["refused_s"]
        table.add_row(
            name, *map(str, cells), "" if refused is None else str(refused), str(one["rss_mb"])
        )
    console = Console()
    console.print(table)
    console.print({name: value for name, value in report.items() if name != "spells"})


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a dozen sessions, spells of 3 s")
    options = parser.parse_args()
    report = asyncio.run(run(12, 3.0) if options.quick else run(50, 8.0))
    if options.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        print_table(report)


if __name__ == "__main__":
    main()
