"""Cost of a fleet of nodes: 10, 100 and 1,000 light nodes on one and two servers.

The servers are real and have their own PostgreSQL; the nodes run in this program. All share the
cores of this machine. `docs/benchmarks.md` explains each figure.

    python benchmarks/cluster/run.py [--json] [--quick] [--plot FILE]
"""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil
import psycopg
import uvloop
from light import Fleet

sys.path.append(str(Path(__file__).parents[1] / "server"))
from measures import task
from rig import Api, Server, fail, note, postgres

from tugline.web.serve import raise_file_limit

SLOTS = 64
BATCH = 1000


class Size(NamedTuple):
    """Numbers of nodes, servers and sessions."""

    rows: tuple[tuple[int, int], ...]
    """Nodes and servers of each row; the storm has as many nodes as the last row."""
    sessions: int
    probes: int
    idle_s: float
    lease_s: float
    """Lease time in the storm; the rows use the default."""
    held: int
    """Sessions held by each node when the storm begins."""
    counted: int = 200
    """Sessions for which statements are counted."""


SIZES = {
    "full": Size(
        ((10, 1), (100, 1), (1000, 1), (10, 2), (100, 2), (1000, 2)), 2000, 200, 30.0, 30.0, 32
    ),
    "quick": Size(((10, 1), (100, 1), (100, 2)), 200, 20, 1.0, 3.0, 8, 40),
}
DYING = 0.3
"""Share of the nodes that are killed in the storm."""
WAIT_S = 240.0


class Bench:
    """Servers with their own database, and their fleet."""

    def __init__(self, folder: Path, url: str, servers: int, lease_s: float | None = None) -> None:
        self.name, self._log = folder.name, folder.parent / "pg" / "log"
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {self.name}")  # type: ignore[call-overload]
        self._url = url.replace("/bench?", f"/{self.name}?")
        lease = {"lease_s": lease_s} if lease_s else {}
        self._folders = [folder / f"server{n}" for n in range(servers)]
        self._settings = {"blobs": str(folder / "blobs"), **lease}
        self.servers: list[Server] = []

    async def start(self, stack: AsyncExitStack) -> None:
        """Start the servers; the first one starts alone and makes the tables and the tokens."""
        for folder in self._folders:
            (folder / "server").mkdir(parents=True)
            for name in ("tokens.json", "callback.key") if self.servers else ():
                shutil.copy(self.servers[0].folder / "server" / name, folder / "server" / name)
            server = Server(folder, self._url, **self._settings)
            stack.callback(server.stop)
            await server.up()
            self.servers.append(server)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=WAIT_S)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, timeout=timeout)
        )
        self.apis = [server.api(http) for server in self.servers]

    async def join(self, stack: AsyncExitStack, count: int) -> Fleet:
        """Start `count` nodes and wait until all are registered; `stack` kills them at its end."""
        urls, token = [api.url for api in self.apis], self.servers[0].tokens["join"]
        fleet = Fleet(urls, token, count=count, slots=SLOTS)
        stack.push_async_callback(fleet.kill, fleet.nodes)
        await asyncio.wait_for(fleet.start(), WAIT_S)
        return fleet

    def cpu(self) -> float:
        """CPU seconds used by the servers so far."""
        return sum(server.cpu() for server in self.servers)

    def database_cpu(self) -> float:
        """CPU seconds used by the processes of this database so far."""
        used = 0.0
        for process in psutil.process_iter(["cmdline"]):
            if f" {self.name} " in " ".join(process.info["cmdline"] or ()):
                times = process.cpu_times()
                used += times.user + times.system
        return used

    def memory_mb(self) -> float:
        """Resident memory of all servers."""
        return sum(server.rss_mb() for server in self.servers)

    def wal_bytes(self) -> int:
        """Bytes that the database has written to its write-ahead log so far."""
        with psycopg.connect(self._url) as connection:
            row = connection.execute("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn").fetchone()
        return int(row[0]) if row else 0

    def log_statements(self, *, on: bool) -> int:
        """Turn PostgreSQL's statement log on or off; return the number of logged statements."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET log_statement = '{'all' if on else 'none'}'")  # type: ignore[call-overload]
            connection.execute("SELECT pg_reload_conf()")
        text = self._log.read_text(errors="replace")
        return len(re.findall(r"LOG:  (?:statement|execute)", text))


# --------------------------------------------------------------------------- measures
async def wait_until(done: Callable[[], bool], fleet: Fleet, what: str) -> float:
    """Wait until `done()`, checked on progress of a node; return seconds. Fail after `WAIT_S`."""
    began = time.monotonic()
    while not done():
        if time.monotonic() - began > WAIT_S:
            fail(f"waited {WAIT_S:.0f} s for {what}. {fleet.describe_errors()}")
        fleet.progress.clear()
        try:
            async with asyncio.timeout(1.0):
                await fleet.progress.wait()
        except TimeoutError:
            continue
    return time.monotonic() - began


async def submit(apis: Sequence[Api], name: str, sessions: int, samples: int = 4) -> None:
    """Submit sessions in groups of `samples`, to each server in turn."""
    tasks = [task(f"{name}{n}", samples=samples) for n in range(-(-sessions // samples))]
    for n in range(0, len(tasks), BATCH):
        await apis[n // BATCH % len(apis)].post("/v1/tasks", tasks[n : n + BATCH])


async def throughput(bench: Bench, fleet: Fleet, size: Size) -> dict[str, Any]:
    """Submit sessions and wait until the fleet has committed all of them."""
    target = fleet.committed + size.sessions
    before, wal = (bench.cpu(), bench.database_cpu()), bench.wal_bytes()
    began = time.monotonic()
    await submit(bench.apis, "work", size.sessions)
    await wait_until(lambda: fleet.committed >= target, fleet, "the sessions to end")
    seconds = time.monotonic() - began
    cpu, db_cpu = bench.cpu() - before[0], bench.database_cpu() - before[1]
    wal = bench.wal_bytes() - wal
    logged = bench.log_statements(on=True)
    target = fleet.committed + size.counted
    await submit(bench.apis, "count", size.counted)
    await wait_until(lambda: fleet.committed >= target, fleet, "the counted sessions to end")
    statements = bench.log_statements(on=False) - logged
    return {
        "sessions_per_s": round(size.sessions / seconds, 1),
        "server_cpu_ms_per_session": round(cpu * 1000 / size.sessions, 2),
        "database_cpu_ms_per_session": round(db_cpu * 1000 / size.sessions, 2),
        "statements_per_session": round(statements / size.counted, 1),
        "wal_bytes_per_session": round(wal / size.sessions),
    }


async def dispatch(bench: Bench, fleet: Fleet, size: Size) -> dict[str, Any]:
    """Time from before a task is sent until a waiting node has leased its session."""
    spent = []
    for n in range(size.probes):
        name = f"probe{n}"
        began = time.monotonic()
        [accepted] = await bench.apis[n % len(bench.apis)].post("/v1/tasks", task(name))
        [session] = accepted["sessions"]
        await wait_until(lambda session=session: session in fleet.leased, fleet, name)
        spent.append((fleet.leased[session] - began) * 1000)
        await asyncio.sleep(0.02)
    spent.sort()
    return {
        "dispatch_p50_ms": round(spent[len(spent) // 2], 1),
        "dispatch_p99_ms": round(spent[int(len(spent) * 0.99)], 1),
    }


async def idle(bench: Bench, size: Size) -> dict[str, Any]:
    """Share of a core that the servers use while nodes only wait and renew."""
    await asyncio.sleep(min(3.0, size.idle_s))
    began, cpu, database = time.monotonic(), bench.cpu(), bench.database_cpu()
    await asyncio.sleep(size.idle_s)
    seconds = time.monotonic() - began
    return {
        "idle_cores": round((bench.cpu() - cpu) / seconds, 4),
        "idle_database_cores": round((bench.database_cpu() - database) / seconds, 4),
    }


async def measure(folder: Path, url: str, nodes: int, servers: int, size: Size) -> dict[str, Any]:
    """Measure one row of the table."""
    async with AsyncExitStack() as stack:
        bench = Bench(folder, url, servers)
        await bench.start(stack)
        before, began = bench.memory_mb(), time.monotonic()
        fleet = await bench.join(stack, nodes)
        joined_s = time.monotonic() - began
        row = {"nodes": nodes, "servers": servers, "join_s": round(joined_s, 2)}
        row |= await idle(bench, size)
        row["server_kb_per_node"] = round((bench.memory_mb() - before) * 1024 / nodes, 1)
        row |= await dispatch(bench, fleet, size)
        row |= await throughput(bench, fleet, size)
        row |= {"rejoined": fleet.rejoined, "failed_calls": len(fleet.errors)}
        note(json.dumps(row))
        return row


async def storm(folder: Path, url: str, nodes: int, size: Size) -> dict[str, Any]:
    """Kill the share `DYING` of the nodes; measure until all their sessions are leased again."""
    async with AsyncExitStack() as stack:
        bench = Bench(folder, url, 1, size.lease_s)
        await bench.start(stack)
        fleet = await bench.join(stack, nodes)
        fleet.holds_sessions = True
        began, total = time.monotonic(), nodes * size.held
        await submit(bench.apis, "held", total, samples=size.held)
        await wait_until(lambda: len(fleet.leased) >= total, fleet, "the first leases")
        filled_s = time.monotonic() - began
        dying = fleet.nodes[: int(nodes * DYING)]
        died = time.monotonic()
        await fleet.kill(dying)
        lost = {session for node in dying for session in node.held}
        cpu = bench.cpu()

        def is_over() -> bool:
            return all(fleet.leased[session] > died for session in lost)

        await wait_until(is_over, fleet, "the leases of the dead nodes")
        again = sorted(fleet.leased[session] - died for session in lost)
        report = {
            "nodes": nodes,
            "died": len(dying),
            "sessions_lost": len(lost),
            "lease_s": size.lease_s,
            "fill_s": round(filled_s, 1),
            "first_again_s": round(again[0], 1),
            "all_again_s": round(again[-1], 1),
            "beyond_lease_s": round(again[-1] - size.lease_s, 1),
            "server_cpu_s": round(bench.cpu() - cpu, 1),
            "survivors_lost": fleet.rejoined,
        }
        note(json.dumps({"storm": report}))
        return report


async def run(size: Size) -> dict[str, Any]:
    """Measure every row and the storm, each with new servers and a new database."""
    began, load = time.time(), os.getloadavg()[0]
    raise_file_limit()
    rows = []
    with tempfile.TemporaryDirectory(prefix="tugline-bench-") as path:
        folder = Path(path)
        with postgres(folder / "pg") as url:
            for nodes, servers in size.rows:
                subfolder = folder / f"s{servers}n{nodes}"
                rows.append(await measure(subfolder, url, nodes, servers, size))
            report = await storm(folder / "storm", url, size.rows[-1][0], size)
    machine = {
        "cpus": os.cpu_count(),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "seconds": round(time.time() - began),
    }
    return {"rows": rows, "storm": report, "slots": SLOTS, "machine": machine}


# --------------------------------------------------------------------------- output
def draw(report: dict[str, Any], path: Path) -> None:
    """Draw cost and rate over the number of nodes."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only for a picture

    panels = {
        "server_cpu_ms_per_session": "server CPU a session, ms",
        "sessions_per_s": "sessions/s",
        "dispatch_p50_ms": "dispatch p50, ms",
        "idle_cores": "idle: share of a core",
    }
    figure = Figure(figsize=(11, 3), layout="constrained")
    for (key, title), axes in zip(panels.items(), figure.subplots(1, len(panels)), strict=True):
        for servers in (1, 2):
            rows = [row for row in report["rows"] if row["servers"] == servers]
            nodes = [row["nodes"] for row in rows]
            axes.plot(nodes, [row[key] for row in rows], "o-", label=f"{servers} server(s)")
        axes.set(title=title, xlabel="nodes", xscale="log")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="10 and 100 nodes, rougher figures")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the rows into an .svg or .png file"
    )
    options = parser.parse_args()
    report = uvloop.run(run(SIZES["quick" if options.quick else "full"]))
    if options.plot is not None:
        draw(report, options.plot)
    if options.json:
        sys.stdout.write(json.dumps(report) + "\n")
        return
    names = list(report["rows"][0])
    for name in names:
        cells = "".join(f"{row[name]:>12}" for row in report["rows"])
        sys.stdout.write(f"{name:<30}{cells}\n")
    for name, value in report["storm"].items():
        sys.stdout.write(f"storm.{name:<24}{value:>12}\n")


if __name__ == "__main__":
    main()
