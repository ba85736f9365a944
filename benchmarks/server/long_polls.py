"""Cost of waiting: many long polls, each on its own connection, while nothing happens.

Half of them wait for work, as nodes do, and half for results, as trainers do. At the end a task is
submitted and cancelled, to check that every poll for results still gets an answer.

    python benchmarks/server/long_polls.py [--polls 1000] [--seconds 10] [--json]
"""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from measures import task
from rig import Api, Server, note

from tugline.protocol import LeaseRequest, NodeRegistration

_WAIT_S = 60


async def long_polls(
    server: Server, http: aiohttp.ClientSession, polls: int, seconds: float
) -> dict[str, Any]:
    """Share of one core that `polls` open requests take; `http` must not limit connections."""
    api = server.api(http)
    before_mb = server.rss_mb()
    joined = await server.api(http, "join").post(
        "/v1/nodes", NodeRegistration(name="idle", slots=1, capacity=1)
    )
    node = Api(http, api.url, joined["token"])
    lease = f"/v1/nodes/{joined['node']}/lease"
    requests = [
        asyncio.create_task(
            api.get(f"/v1/results?wait_s={_WAIT_S}")
            if number % 2
            else node.post(lease, LeaseRequest(capacity=0, wait_s=_WAIT_S))
        )
        for number in range(polls)
    ]
    note(f"{polls} long-polls are open; measuring for {seconds:g} s")
    await asyncio.sleep(3)
    began, cpu = time.monotonic(), server.cpu()
    await asyncio.sleep(seconds)
    share = (server.cpu() - cpu) / (time.monotonic() - began)
    rss_mb = server.rss_mb() - before_mb
    open_still = sum(not request.done() for request in requests)
    await api.post("/v1/tasks", task("t"))
    began = time.monotonic()
    await api.post("/v1/tasks/t/cancel", {})
    answers = await asyncio.wait_for(asyncio.gather(*requests[1::2]), 30)
    woken_s = time.monotonic() - began
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    return {
        "long_polls": polls,
        "long_polls_open": open_still,
        "long_polls_cpu": round(share, 4),
        "long_polls_mb": round(rss_mb, 1),
        "long_polls_woken": sum(len(one["items"]) for one in answers),
        "long_polls_woken_s": round(woken_s, 3),
    }


async def measure(polls: int, seconds: float) -> dict[str, Any]:
    """Run `long_polls` on a new server."""
    with tempfile.TemporaryDirectory(prefix="tugline-bench-") as folder:
        server = Server(Path(folder), None)
        try:
            await server.up()
            timeout, every = aiohttp.ClientTimeout(total=120), aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(timeout=timeout, connector=every) as http:
                return await long_polls(server, http, polls, seconds)
        finally:
            server.stop()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--polls", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = asyncio.run(measure(options.polls, options.seconds))
    if options.json:
        sys.stdout.write(json.dumps(report) + "\n")
        return
    for name, value in report.items():
        sys.stdout.write(f"{name:20} {value}\n")


if __name__ == "__main__":
    main()
