"""Cost of the console, in a real Chromium on a server with many finished sessions.

`docs/benchmarks.md` explains the figures. Chromium must be on the PATH: `make test-browser`
installs one, and also measures how long 250,000 tokens take to draw. `--lists` measures only the
lists, which need no browser.

    python benchmarks/console/run.py [--json] [--lists] [--store postgres] [--sessions 100000]
"""

# ruff: noqa: INP001 - a program, not a package
from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import itertools
import json
import os
import random
import re
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import psycopg

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks" / "server"), str(ROOT / "tests" / "browser")]

from chromium import chromium  # noqa: E402 - the folders above
from measures import task  # noqa: E402
from rig import Api, Server, note, postgres  # noqa: E402

from tugline.protocol import RunKind, RunStart  # noqa: E402
from tugline.server.store import results, runs, sessions, tasks  # noqa: E402
from tugline.server.store.base import Tx  # noqa: E402
from tugline.server.store.database import open_database  # noqa: E402
from tugline.server.store.results import End  # noqa: E402
from tugline.types import Boundary, Cause, Failure, Status  # noqa: E402

ASSETS = ROOT / "src" / "tugline" / "server" / "console"
SAMPLES, BATCH = 8, 125
"""Sessions of each task, and tasks in each transaction."""
VOCABULARY, WORDS = 20_000, 150
"""Different words, the n-th used 1/n times as often as the first, and words of each task."""
RUN, VERSIONS, PROBLEMS = "bench", 100, 1000
"""Run of all sessions, versions of its weights, and its tasks, each of which is tried again."""
HALF = VERSIONS // 2
RARE = 2500
"""One in this many sessions timed out."""
VISITS, LISTS, LAGS, TABS, IDLE_S = 7, 40, 10, 20, 20.0
LISTED = {
    "the newest": "newest=true",
    "failed": "newest=true&status=failed",
    "timed out (few sessions)": "newest=true&status=timed_out",
    "a status without sessions": "newest=true&status=cancelled",
    "part of an id": "newest=true&q=77",
    "an unknown id": "newest=true&q=t_none",
    "an unknown number": "newest=true&q=9999",
    "a task": "newest=true&task=t7",
    "from the middle": "newest=true&after={middle}",
}
TABLES = ["positions", "control", "tenants", "runs", "tasks", "sessions", "results", "events"]
SEARCHED = {
    "a common word": "q=nothing",
    "a word of every tenth task": "q=w00142",
    "a rare word": "q=word777",
    "an unknown word": "q=absent",
    "a prefix of many words": "q=w00",
    "two common words": "q=nothing+w00001",
    "a common and a rare word": "q=nothing+word777",
    "a word of many failures": "q=gave+up",
    "a word of few failures": "q=memory",
}
"""Searches; each is also combined with a status of many, few or no sessions, and the middle."""
LISTED |= {f"{name}: {query}": f"newest=true&{query}" for name, query in SEARCHED.items()}
LISTED |= {
    f"{name}, {more}": f"newest=true&{query}&{more}"
    for name, query in SEARCHED.items()
    for more in ("status=failed", "status=timed_out", "status=cancelled", "after={middle}")
}
"""Queries of the sessions page, by description."""
LISTED |= {
    "the highest reward": "order=highest",
    "the highest reward of a run": f"order=highest&run={RUN}",
    "the highest reward, completed": "order=highest&status=completed",
    "the longest": "order=longest",
    "the last changed": "recent=true",
    "the last changed of a run": f"recent=true&run={RUN}",
    "a reward of 1": "newest=true&min_reward=1",
    "a reward of 2": "newest=true&min_reward=2",
}
COMPARED = {
    "problems of a run": "problems",
    "a half against the other": f"changes?first={HALF}&before_last={HALF - 1}&measure=reward",
    "a tenth against the one before": (
        f"changes?first={HALF}&last={HALF + 9}&before_first={HALF - 10}&before_last={HALF - 1}"
    ),
}
"""Queries about the changes of a run, by description."""
BUDGETS = {
    "first_paint_ms": 300,
    "list_p95_ms": 100,
    "live_lag_max_ms": 1000,
    "tabs_cpu_percent": 2,
    "first_javascript_kb": 120,
    "assets_kb": 1000,
}
_SEEN = """(() => { window.seen = {}; new MutationObserver(() => {
  for (const row of document.querySelectorAll('tbody tr')) {
    const id = row.innerText.match(/lag\\d+-0/)?.[0];
    if (id) window.seen[id] ??= Date.now();
  } }).observe(document.body, {childList: true, subtree: true, characterData: true}); })()"""


class Rig(NamedTuple):
    """A server with many sessions, and a browser."""

    server: Server
    http: aiohttp.ClientSession
    tab: Any
    """`Tab`; None without a browser."""
    sessions: int

    @property
    def api(self) -> Api:
        """API client that may submit tasks."""
        return self.server.api(self.http)

    def link(self, path: str) -> str:
        """URL of a page, with the read token."""
        return f"{self.api.url}{path}#token={self.server.tokens['read']}"


# --------------------------------------------------------------------------- the store
async def fill(path: Path, count: int) -> None:
    """Make a SQLite store with `count` finished sessions, every seventh of them failed."""
    async with open_database(f"sqlite:{path}") as database:
        await database.write_relaxed(runs.start, RUN, RunStart(kind=RunKind.TRAIN))
        for first in range(0, count // SAMPLES, BATCH):
            await database.write_relaxed(_finish, range(first, first + BATCH), count)


async def copy(path: Path, url: str) -> None:
    """Copy the rows of a SQLite store into a new PostgreSQL store, which takes only seconds."""
    async with open_database(url):  # makes the tables
        pass
    with psycopg.connect(url) as target, contextlib.closing(sqlite3.connect(path)) as source:
        target.execute("TRUNCATE positions, control")
        for table in TABLES:
            rows = source.execute(f"SELECT * FROM {table}")  # noqa: S608 - constants
            _write(target, table, [column[0] for column in rows.description], rows)
        _write(
            target, "texts", ["rowid", "words"], source.execute("SELECT rowid, words FROM texts")
        )


def _write(
    target: psycopg.Connection[Any], table: str, columns: list[str], rows: Iterable[tuple[Any, ...]]
) -> None:
    with target.cursor().copy(f"COPY {table} ({', '.join(columns)}) FROM STDIN") as copying:
        for row in rows:
            copying.write_row(row)


_SHARES = list(itertools.accumulate(1 / n for n in range(1, VOCABULARY + 1)))


def _instruct(n: int) -> str:
    chosen = random.Random(n).choices(range(VOCABULARY), cum_weights=_SHARES, k=WORDS)
    return f"nothing but word{n} {' '.join(f'w{word:05}' for word in chosen)}"


def _finish(tx: Tx, numbers: range, count: int) -> None:
    """Submit the tasks with these numbers, and write results for their `count` sessions."""
    new_tasks = [
        msgspec.structs.replace(
            task(f"t{n}", samples=SAMPLES),
            instruction=_instruct(n),
            tags={"instance": f"problem{n % PROBLEMS}", "family": f"family{n % 10}"},
        )
        for n in numbers
    ]
    tasks.submit(tx, [tasks.pack(new) for new in new_tasks], run=RUN)
    version = VERSIONS * SAMPLES * numbers.start // count
    for new in new_tasks:
        tx.run("UPDATE sessions SET version = :to WHERE task = :task", to=version, task=new.id)
        for entry in sessions.select(tx, "task = :task", task=new.id):
            failed = entry.place % 7 == 6
            timed_out = entry.place % RARE == 0
            message = "out of memory" if entry.place % 699 == 6 else "the agent gave up"
            end = End(
                Status.FAILED if failed else Status.TIMED_OUT if timed_out else Status.COMPLETED,
                failure=Failure(Boundary.AGENT, message, Cause.ENGINE) if failed else None,
                reward=None if failed else float(entry.place % 2),
                sampled=900,
                trained=0 if failed else 900,
                seconds={"init": 1.0, "run": 20.0 + entry.place % 60, "eval": 3.0},
            )
            results.finish(tx, entry, end)


# --------------------------------------------------------------------------- measures
async def first_paint(rig: Rig) -> dict[str, Any]:
    """Time from opening the Overview until its first paint, and until it has rows."""
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
    """Latency of a page of sessions or changes for every query; `list_p95_ms` is the slowest."""
    slow, usual = {}, {}
    paths = {
        name: f"/v1/sessions?limit=200&{query.format(middle=rig.sessions // 2)}"
        for name, query in LISTED.items()
    }
    paths |= {name: f"/v1/runs/{RUN}/{query}" for name, query in COMPARED.items()}
    for name, path in paths.items():
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
    """Time from before a task is submitted until the page has a row for its session."""
    await rig.tab.visit(rig.link("/sessions?sort=newest"))
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
    """Share of a core that the server uses for open tabs while nothing happens."""
    for n in range(TABS):
        await rig.tab.send("Target.createTarget", url=rig.link("/sessions" if n % 2 else "/"))
    await asyncio.sleep(10)  # until the tabs have loaded
    before, began = rig.server.cpu(), time.monotonic()
    await asyncio.sleep(IDLE_S)
    used = rig.server.cpu() - before
    return {"tabs": TABS, "tabs_cpu_percent": round(100 * used / (time.monotonic() - began), 2)}


async def sizes(_rig: Rig) -> dict[str, Any]:
    """Size of the first script, compressed as it is sent, and of all installed files."""
    (first,) = re.findall(r'src="/(assets/[^"]+)"', (ASSETS / "index.html").read_text())
    total = sum(file.stat().st_size for file in ASSETS.rglob("*.*"))
    sent = len(gzip.compress((ASSETS / first).read_bytes()))
    return {"first_javascript_kb": round(sent / 1000, 1), "assets_kb": round(total / 1000)}


MEASURES: tuple[Callable[[Rig], Awaitable[dict[str, Any]]], ...] = (
    *(sizes, lists, first_paint, live_lag, open_tabs),
)


async def run(count: int, store: str, *, browser: bool) -> dict[str, Any]:
    """Measure everything on one server; only the lists without a browser."""
    load = os.getloadavg()[0]
    report: dict[str, Any] = {"sessions": count, "store": store}
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tugline-bench-")))
        note(f"making {count:,} finished sessions")
        await asyncio.to_thread((folder / "server").mkdir)
        file, url = folder / "server" / "server.db", None
        await fill(file, count)
        if store == "postgres":
            await asyncio.to_thread(
                folder.chmod, 0o755
            )  # as root, the database runs as another user
            url = stack.enter_context(postgres(folder / "pg"))
            await copy(file, url)
        server = Server(folder, url)
        stack.callback(server.stop)
        await server.up()
        timeout = aiohttp.ClientTimeout(total=60)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        tab = await stack.enter_async_context(chromium(folder / "profile")) if browser else None
        for measure in MEASURES if browser else (lists,):
            note(f"measuring: {measure.__name__}")
            report |= await measure(Rig(server, http, tab, count))
    report["machine"] = {"cpus": os.cpu_count(), "load": [round(load, 1), os.getloadavg()[0]]}
    return report


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--sessions", type=int, default=100_000, help="in multiples of 1,000")
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--lists", action="store_true", help="only the lists, without a browser")
    options = parser.parse_args()
    report = asyncio.run(run(options.sessions, options.store, browser=not options.lists))
    if options.json:
        sys.stdout.write(json.dumps(report) + "\n")
        return
    for key, value in report.items():
        budget = f"budget {BUDGETS[key]:,}" if key in BUDGETS else ""
        sys.stdout.write(f"{key:<24}{value!s:<16}{budget}".rstrip() + "\n")


if __name__ == "__main__":
    main()
