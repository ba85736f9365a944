"""Memory of a node over the sessions that it has run.

A real server and a real node run in separate processes, with a stub engine. Each session is of a
task of its own, with tests of its own: its agent makes one model call in a bubblewrap sandbox, and
the tests run in a second one. The node always has sessions to run, so it is never idle. The memory
is that of the node's process. `docs/benchmarks.md` explains each figure.

    python benchmarks/sessions/run.py [--json] [--quick] [--sessions 5000]
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
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil

from tugline.client.api import Client
from tugline.types import Limits, PluginSpec, Task

MODEL = Path(str(files("tugline.demo"))) / "warm_start_model"
ENGINE = Path(__file__).parents[1] / "hostile" / "engine.py"
TUGLINE = Path(sys.executable).with_name("tugline")
FIRST = 500
"""Sessions after which the memory is measured for the first time."""
AHEAD = 40
"""Tasks that are submitted beyond those that have ended."""
SLOTS = 4
TEST_BYTES = 20_000
AGENT = ENGINE.with_name("ask.sh").read_text()
"""Agent that makes one model call."""


@contextlib.contextmanager
def running(folder: Path, name: str, *argv: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program during the block, with its output in a file."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
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


def make_task(number: int) -> Task:
    """Make a task with tests of its own."""
    test = f"# {number}\n" + "# padding\n" * (TEST_BYTES // 10)
    script = "grep -q '200 OK' answer.txt && echo 'ok 1 - answered'; echo 1..1"
    options = {"command": ["sh", "-c", script], "format": "tap", "files": {"test.txt": test}}
    return Task(
        id=f"t{number}",
        instruction="Ask once.",
        harness=PluginSpec("shell", {"command": ["bash", "-c", f"({AGENT}) >answer.txt"]}),
        evaluator=PluginSpec("tests", options),
        limits=Limits(init_s=120.0, agent_s=120.0, eval_s=120.0),
    )


async def run(sessions: int) -> dict[str, Any]:
    """Run so many sessions; return the node's memory as they end."""
    with (
        tempfile.TemporaryDirectory(prefix="tugline-bench-") as name,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        stack.enter_context(running(folder, "engine", sys.executable, str(ENGINE), str(port)))
        settings = {"node": {"slots": SLOTS, "memory_floor_mb": 0}}
        (folder / "config.yaml").write_text(json.dumps(settings))
        data = folder / "server"
        up = (str(TUGLINE), "up", "--no-node", "--port", "0", "--dir", str(data))
        stack.enter_context(running(folder, "server", *up))
        await wait_for((data / "server.json").exists)
        url = json.loads((data / "server.json").read_text())["url"]
        join = json.loads((data / "tokens.json").read_text())["join"]
        node = [str(TUGLINE), "node", "--server", url, "--config", "config.yaml", "--dir", "node"]
        node += ["--engine", f"http://127.0.0.1:{port}", "--renderer", "qwen3"]
        node += ["--tokenizer", str(MODEL / "tokenizer.json")]
        process = stack.enter_context(running(folder, "node", *node, TUGLINE_JOIN_TOKEN=join))
        async with Client(folder=data) as client:
            report = await measure(client, psutil.Process(process.pid), sessions)
        log = (folder / "node.log").read_text(errors="replace")
        return report | {"log_lines": len(log.splitlines())}


async def measure(client: Client, node: psutil.Process, sessions: int) -> dict[str, Any]:
    """Keep the node busy, and sample its memory until so many sessions have ended."""
    submitted, ended, began = 0, 0, time.monotonic()
    samples: list[tuple[int, float]] = []
    while ended < sessions:
        if submitted < sessions + AHEAD and submitted < ended + AHEAD:
            batch = [make_task(submitted + number) for number in range(AHEAD)]
            await client.submit(batch)
            submitted += len(batch)
        counts = (await client.status()).sessions
        ended = sum(counts.get(state, 0) for state in ("completed", "failed", "timed_out"))
        samples.append((ended, node.memory_info().rss / 2**20))
        if len(samples) % 60 == 0:
            sys.stderr.write(f"{ended} sessions, {samples[-1][1]:.1f} MB\n")
        await asyncio.sleep(0.5)
    seconds = time.monotonic() - began
    early = [mb for count, mb in samples if 0.8 * FIRST <= count <= 1.2 * FIRST]
    late = [mb for count, mb in samples if count >= sessions - 0.4 * FIRST]
    before, after = (sum(part) / max(1, len(part)) for part in (early, late))
    return {
        "sessions": ended,
        "completed": counts.get("completed", 0),
        "mb_after_500": round(before, 1),
        "mb_at_the_end": round(after, 1),
        "growth_mb": round(after - before, 1),
        "sessions_per_s": round(ended / seconds, 1),
    }


async def wait_for(condition: Any, within_s: float = 60.0) -> None:
    """Wait until `condition()` is true. Raises `TimeoutError`."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - a file of another process
            await asyncio.sleep(0.1)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="700 sessions")
    parser.add_argument("--sessions", type=int, default=5000)
    options = parser.parse_args()
    report = asyncio.run(run(700 if options.quick else options.sessions))
    text = json.dumps(report) if options.json else json.dumps(report, indent=2)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
