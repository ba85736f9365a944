"""Cost of the rollout server: sessions through a node, dispatch, a long queue, waiting.

Server, node and load generator (this program, with an engine that has no model) are one process
each, on loopback. `docs/benchmarks.md` explains each figure.

    python benchmarks/server/run.py [--json] [--quick] [--store sqlite|postgres]
"""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from long_polls import long_polls
from measures import SIZES, Size, dispatch, pipeline, queue
from rig import Server, note, postgres

STORES = ("sqlite", "postgres")


async def polls(server: Server, http: aiohttp.ClientSession, size: Size) -> dict[str, Any]:
    """Share of a core that open long polls take while nothing happens."""
    return await long_polls(server, http, size.polls, size.polls_s)


MEASURES = {"pipeline": pipeline, "dispatch": dispatch, "queue": queue, "long polls": polls}


async def run(store: str, size: str) -> dict[str, Any]:
    """Run every measurement, each with a new server."""
    began, load = time.time(), os.getloadavg()[0]
    report: dict[str, Any] = {"store": store}
    for name, measure in MEASURES.items():
        note(f"measuring: {name}")
        with tempfile.TemporaryDirectory(prefix="tugline-bench-") as path, ExitStack() as stack:
            folder = Path(path)
            pg = store == "postgres"
            url = stack.enter_context(postgres(folder / "pg")) if pg else None
            server = Server(folder, url)
            stack.callback(server.stop)
            await server.up()
            timeout, every = aiohttp.ClientTimeout(total=120), aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(timeout=timeout, connector=every) as http:
                report |= await measure(server, http, SIZES[size])
            await asyncio.sleep(0.1)
    report["size"] = size
    report["machine"] = {
        "cpus": os.cpu_count(),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "seconds": round(time.time() - began),
    }
    return report


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--quick",
        action="store_const",
        const="quick",
        dest="size",
        help="fewer sessions and tasks, rougher figures",
    )
    parser.add_argument("--size", choices=SIZES, help=argparse.SUPPRESS)
    parser.add_argument("--store", choices=STORES, default="sqlite", help="database of the server")
    parser.set_defaults(size="full")
    options = parser.parse_args()
    report = uvloop.run(run(options.store, options.size))
    rows = (f"{key:<28}{value}" for key, value in report.items())
    sys.stdout.write((json.dumps(report) if options.json else "\n".join(rows)) + "\n")


if __name__ == "__main__":
    main()
