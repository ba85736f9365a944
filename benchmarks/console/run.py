"""What the console costs, in a real Chromium on a server of its own with many finished sessions.

`docs/console.md` says what the figures mean. Chromium must be on the PATH: `make test-browser`
installs one. Drawing 250,000 tokens is measured there, too.

    python benchmarks/console/run.py [--json] [--sessions 100000]
"""

# ruff: noqa: INP001 - a program, not a package
from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks" / "server"), str(ROOT / "tests" / "browser")]

from chromium import Tab, chromium  # noqa: E402 - the folders above
from measures import task  # noqa: E402

from rig import Api, Server, note  # noqa: E402
from tugline.server.store import results, sessions, tasks  # noqa: E402
from tugline.server.store.base import Tx  # noqa: E402
from tugline.server.store.database import open_database  # noqa: E402
from tugline.server.store.results import End  # noqa: E402
from tugline.types import Boundary, Cause, Failure, Status  # noqa: E402

ASSETS = ROOT / "src" / "tugline" / "server" / "console"
SAMPLES, BATCH = 50, 20
"""Sessions of a task, and tasks of a transaction."""
VISITS, LISTS, LAGS, TABS, IDLE_S = 7, 40, 10, 20, 20.0
LISTED = {
    "the newest": "newest=true",
    "failed": "newest=true&status=failed",
    "a status that none has": "newest=true&status=timed_out",
    "a part of an id": "newest=true&q=77",
    "an id that none has": "newest=true&q=t_none",
    "a number that none has": "newest=true&q=9999",
    "a word of every task": "newest=true&q=nothing",
    "a word of an error": "newest=true&q=gave+up",
    "a word of an old task": "newest=true&q=word0",
    "a word that none has": "newest=true&q=absent",
    "a task": "newest=true&task=t7",
    "from the middle": "newest=true&after={middle}",
}
"""What the page of sessions asks for, by what it shows."""
BUDGETS = {
    "first_paint_ms": 300,
    "list_p95_ms": 100,
    "live_lag_max_ms": 1000,
    "tabs_cpu_percent": 2,
    "first_javascript_kb": 120,
    "assets_kb": 1000,
}
_FAILED = Failure(Boundary.AGENT, "the agent gave up", Cause.ENGINE)
_SEEN = """(() => { window.seen = {}; new MutationObserver(() => {
  for (const row of document.querySelectorAll('tbody tr')) {
    const id = row.innerText.match(/lag\\d+-0/)?.[0];
    if (id) window.seen[id] ??= Date.now();
  } }).observe(document.body, {childList: true, subtree: true, characterData: true}); })()"""


class Rig(NamedTuple):
    """A server with many sessions, and a browser."""

    server: Server
    http: aiohttp.ClientSession
    tab: Tab
    sessions: int

    @property
    def api(self) -> Api:
        """Who may submit."""
        return self.server.api(self.http)

    def link(self, path: str) -> str:
        """A page, with the token that opens it."""
        return f"{self.api.url}{path}#token={self.server.tokens['read']}"


# --------------------------------------------------------------------------- the store
async def fill(folder: Path, count: int) -> None:
    """Make a store with so many finished sessions; every seventh has failed."""
    await asyncio.to_thread(folder.mkdir)
    async with open_database(f"sqlite:{folder / 'server.db'}") as database:
        for first in range(0, count // SAMPLES, BATCH):
            await database.write_relaxed(_finish, range(first, first + BATCH))


def _finish(tx: Tx, numbers: range) -> None:
    """Submit tasks of these numbers, and end their sessions."""
    made = [
        msgspec.structs.replace(task(f"t{n}", samples=SAMPLES), instruction=f"nothing but word{n}")
        for n in numbers
    ]
    tasks.submit(tx, [tasks.pack(one) for one in made])
    for one in made:
        for entry in sessions.select(tx, "task = :task", task=one.id):
            failed = entry.place % 7 == 6
            end = End(
                Status.FAILED if failed else Status.COMPLETED,
                failure=_FAILED if failed else None,
                reward=None if failed else float(entry.place % 2),
                sampled=900,
                trained=0 if failed else 900,
                seconds={"init": 1.0, "run": 20.0 + entry.place % 60, "eval": 3.0},
            )
            results.finish(tx, entry, end)


# --------------------------------------------------------------------------- what is measured
async def first_paint(rig: Rig) -> dict[str, Any]:
    """From the moment the Overview is asked for until it shows something, and its rows."""
    await rig.tab.send("Network.setCacheDisabled", cacheDisabled=True)
    painted, filled = [], []
    for _ in range(VISITS):
        await rig.tab.send("Page.navigate", url="about:blank")
        await rig.tab.visit(rig.link("/"))
        paint = "performance.getEntriesByName('first-contentful-paint')"
        await rig.tab.until(f"{paint}.length && document.querySelector('tbody tr')")
        painted.append(await rig.tab.js(f"{paint}[0].startTime"))
        filled.append(await rig.tab.js("performance.now()"))
    return {
        "first_paint_ms": round(statistics.median(painted)),
        "overview_filled_ms": round(statistics.median(filled)),
    }


async def lists(rig: Rig) -> dict[str, Any]:
    """One page of sessions as the console asks for it; the slowest kind counts."""
    slow, usual = {}, {}
    for name, query in LISTED.items():
        path = f"/v1/sessions?limit=200&{query.format(middle=rig.sessions // 2)}"
        taken = []
        for _ in range(LISTS):
            began = time.perf_counter()
            await rig.api.get(path)
            taken.append(1000 * (time.perf_counter() - began))
        slow[name] = round(sorted(taken)[int(0.95 * LISTS)], 1)
        usual[name] = round(statistics.median(taken), 1)
    return {
        "list_p95_ms": max(slow.values()),
        "list_p95_ms_by_filter": slow,
        "list_p50_ms_by_filter": usual,
    }


async def live_lag(rig: Rig) -> dict[str, Any]:
    """From the moment before a task is submitted until its session is a row of the page."""
    await rig.tab.visit(rig.link("/sessions"))
    await rig.tab.until("document.querySelector('.connection .live')")
    await rig.tab.js(_SEEN)
    lags = []
    for n in range(LAGS):
        began = time.time()
        await rig.api.post("/v1/tasks", [task(f"lag{n}")])
        await rig.tab.until(f"window.seen['lag{n}-0']")
        lags.append(await rig.tab.js(f"window.seen['lag{n}-0']") - 1000 * began)
    return {
        "live_lag_median_ms": round(statistics.median(lags)),
        "live_lag_max_ms": round(max(lags)),
    }


async def open_tabs(rig: Rig) -> dict[str, Any]:
    """Share of a core that the server uses while tabs are open and nothing happens."""
    for n in range(TABS):
        await rig.tab.send("Target.createTarget", url=rig.link("/sessions" if n % 2 else "/"))
    await asyncio.sleep(10)  # they load
    before, began = rig.server.cpu(), time.monotonic()
    await asyncio.sleep(IDLE_S)
    used = rig.server.cpu() - before
    return {"tabs": TABS, "tabs_cpu_percent": round(100 * used / (time.monotonic() - began), 2)}


async def sizes(_rig: Rig) -> dict[str, Any]:
    """Of the built files: the first script as it is sent, and all as they are installed."""
    (first,) = re.findall(r'src="/(assets/[^"]+)"', (ASSETS / "index.html").read_text())
    total = sum(file.stat().st_size for file in ASSETS.rglob("*.*"))
    sent = len(gzip.compress((ASSETS / first).read_bytes()))
    return {"first_javascript_kb": round(sent / 1000, 1), "assets_kb": round(total / 1000)}


MEASURES: tuple[Callable[[Rig], Awaitable[dict[str, Any]]], ...] = (
    *(sizes, lists, first_paint, live_lag, open_tabs),
)


async def run(count: int) -> dict[str, Any]:
    """Everything, on one server."""
    load = os.getloadavg()[0]
    told: dict[str, Any] = {"sessions": count}
    with tempfile.TemporaryDirectory(prefix="tugline-bench-") as path:
        folder = Path(path)
        note(f"making {count:,} finished sessions")
        await fill(folder / "server", count)
        server = Server(folder, None)
        try:
            await server.up()
            timeout = aiohttp.ClientTimeout(total=60)
            async with (
                aiohttp.ClientSession(timeout=timeout) as http,
                chromium(folder / "profile") as tab,
            ):
                for measure in MEASURES:
                    note(f"measuring: {measure.__name__}")
                    told |= await measure(Rig(server, http, tab, count))
        finally:
            server.stop()
    told["machine"] = {"cpus": os.cpu_count(), "load": [round(load, 1), os.getloadavg()[0]]}
    return told


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--sessions", type=int, default=100_000, help="in multiples of 1,000")
    options = parser.parse_args()
    report = asyncio.run(run(options.sessions))
    if options.json:
        sys.stdout.write(json.dumps(report) + "\n")
        return
    for key, value in report.items():
        budget = f"budget {BUDGETS[key]:,}" if key in BUDGETS else ""
        sys.stdout.write(f"{key:<24}{value!s:<16}{budget}".rstrip() + "\n")


if __name__ == "__main__":
    main()
