"""The measurements, one function each; `docs/benchmarks.md` explains their figures."""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from rig import Api, Program, Server, engine, fail, note

from tugline.protocol import LeaseRequest, NodeRegistration
from tugline.recording.trajectories import pack
from tugline.types import Group, Ledger, PluginSpec, Reward, Status, Task, Trajectory

SLOTS = 16
BATCH = 1000


@dataclass(frozen=True)
class Size:
    """Numbers of sessions, tasks and requests."""

    sessions: int
    probes: int
    tasks: int
    polls: int = 1000
    polls_s: float = 10.0


SIZES = {
    "full": Size(3000, 400, 100_000),
    "quick": Size(600, 100, 20_000),
    "smoke": Size(40, 10, 2000, 20, 1.0),
}


def task(name: str, *, samples: int = 1, priority: int = 0) -> Task:
    """Make a task whose sessions do no work."""
    return Task(
        id=name,
        instruction="nothing",
        harness=PluginSpec("noop:Agent"),
        runtime=PluginSpec("noop:Memory"),
        evaluator=PluginSpec("noop:Verdicts"),
        samples=samples,
        priority=priority,
        group=Group(),
    )


# --------------------------------------------------------------------------- the whole pipeline
async def pipeline(server: Server, http: aiohttp.ClientSession, size: Size) -> dict[str, Any]:
    """Sessions per second through one node, from queue to result, and their CPU time."""
    api = server.api(http)
    tasks = [task(f"p{n}", samples=4) for n in range(size.sessions // 4)]
    async with engine(server.folder) as url:
        node = Program(
            server.folder, "node", "node", "--server", api.url, "--config", "node.yaml",
            "--dir", "node", "--slots", str(SLOTS), "--name", "bench", "--engine", url,
            TUGLINE_JOIN_TOKEN=server.tokens["join"],
        )  # fmt: skip
        try:
            await _until(lambda: _live(api), node)
            before = server.cpu(), node.cpu()
            for first in range(0, len(tasks), BATCH):
                await api.post("/v1/tasks", tasks[first : first + BATCH])
            await _until(lambda: _ended(api, size.sessions), node)
            after = server.cpu(), node.cpu()
        finally:
            node.stop()
    results = await _results(api)
    failed = [result for result in results if result["status"] != Status.COMPLETED]
    if failed:
        fail(f"{len(failed)} of {len(results)} sessions did not complete, such as {failed[0]}")
    times = sorted(result["created"] for result in results)
    low, high = len(times) // 10, len(times) * 9 // 10
    cpu = [(b - a) / size.sessions * 1000 for a, b in zip(before, after, strict=True)]
    return {
        "sessions_per_s": round((high - low) / (times[high] - times[low]), 1),
        "server_cpu_ms_per_session": round(cpu[0], 2),
        "node_cpu_ms_per_session": round(cpu[1], 2),
    }


async def _live(api: Api) -> bool:
    return bool((await api.get("/v1/status"))["nodes"])


async def _ended(api: Api, count: int) -> bool:
    sessions = (await api.get("/v1/status"))["sessions"]
    return sum(sessions.get(one, 0) for one in ("completed", "failed", "timed_out")) >= count


async def _until(done: Callable[[], Awaitable[bool]], program: Program) -> None:
    until = time.monotonic() + 300
    while not await done():
        program.check()
        if time.monotonic() > until:
            fail("waited 300 s for the sessions to end")
        await asyncio.sleep(0.25)


async def _results(api: Api) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    after = 0
    while items := (page := await api.get(f"/v1/results?after={after}&limit=1000"))["items"]:
        results += items
        after = page["cursor"]
    return results


# --------------------------------------------------------------------------- dispatch
class Worker:
    """A node that leases one session at a time and commits its result immediately."""

    def __init__(self, api: Api, node: str) -> None:
        self._api, self.node = api, node

    @classmethod
    async def join(cls, server: Server, http: aiohttp.ClientSession, name: str) -> Worker:
        """Register."""
        registration = NodeRegistration(name=name, slots=4, capacity=4)
        registered = await server.api(http, "join").post("/v1/nodes", registration)
        return cls(Api(http, server.api(http).url, registered["token"]), registered["node"])

    async def lease(self) -> dict[str, Any]:
        """Wait for the next session."""
        while True:
            response = await self._api.post(
                f"/v1/nodes/{self.node}/lease", LeaseRequest(capacity=1)
            )
            if response["work"]:
                session: dict[str, Any] = response["work"][0]["session"]
                return session

    async def commit(self, session: dict[str, Any]) -> None:
        """Commit the result of a session: completed, without tokens."""
        trajectory = Trajectory(
            session=session["id"],
            task=session["task"],
            sample=session["sample"],
            status=Status.COMPLETED,
            traces=(),
            ledger=Ledger(),
            reward=Reward(1.0),
        )
        data = pack(trajectory)
        path = f"/v1/sessions/{session['id']}/result?epoch={session['epoch']}"
        await self._api.send("POST", path, data, "application/x-msgpack")


async def dispatch(server: Server, http: aiohttp.ClientSession, size: Size) -> dict[str, Any]:
    """Time from the commit of a task to its lease: by a waiting node, and past 1,000 others."""
    api = server.api(http)
    worker = await Worker.join(server, http, "dispatch")
    idle = []
    for number in range(size.probes):
        waiting = asyncio.create_task(worker.lease())
        await asyncio.sleep(0.01)
        sent = time.perf_counter()
        await api.post("/v1/tasks", task(f"idle{number}"))
        session = await waiting
        idle.append(time.perf_counter() - sent)
        await worker.commit(session)
    await api.post("/v1/tasks", [task(f"queued{n}") for n in range(BATCH)])
    queued = []
    for number in range(size.probes):
        await api.post("/v1/tasks", task(f"probe{number}", priority=10))
        committed = time.perf_counter()
        session = await worker.lease()
        queued.append(time.perf_counter() - committed)
        if session["task"] != f"probe{number}":
            fail(f"probe{number} has the highest priority, but {session['task']} was leased")
        await worker.commit(session)
    return {**_percentiles("dispatch", queued), **_percentiles("idle_dispatch", idle)}


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    return {
        f"{name}_p50_ms": round(statistics.median(seconds) * 1000, 2),
        f"{name}_p99_ms": round(sorted(seconds)[int(len(seconds) * 0.99)] * 1000, 2),
    }


# --------------------------------------------------------------------------- a long queue
async def queue(server: Server, http: aiohttp.ClientSession, size: Size) -> dict[str, Any]:
    """Submit `size.tasks` tasks; measure rate, memory, and latency of lists and status."""
    api = server.api(http)
    seconds, small = 0.0, 0.0
    batch = min(BATCH, size.tasks // 10)
    for first in range(0, size.tasks, batch):
        if first == size.tasks // 10:
            small = server.rss_mb()
        body = [task(f"q{first + n}") for n in range(batch)]
        began = time.perf_counter()
        await api.post("/v1/tasks", body)
        seconds += time.perf_counter() - began
    note(f"{size.tasks} tasks are queued")
    page = await api.get("/v1/tasks?limit=100")
    paths = ("/v1/tasks?limit=100", f"/v1/tasks?limit=100&after={page['next']}",
             "/v1/sessions?limit=100&status=queued", "/v1/tasks?limit=100&state=open")  # fmt: skip
    lists = [await _time(api, path) for _ in range(10) for path in paths]
    status = [await _time(api, "/v1/status") for _ in range(40)]
    return {
        "submit_per_s": round(size.tasks / seconds),
        "list_ms": round(_p95(lists), 1),
        "status_ms": round(_p95(status), 1),
        "rss_mb": round(server.rss_mb(), 1),
        "rss_growth_mb": round(server.rss_mb() - small, 1),
        "queued": size.tasks,
    }


async def _time(api: Api, path: str) -> float:
    began = time.perf_counter()
    await api.get(path)
    return (time.perf_counter() - began) * 1000


def _p95(values: Sequence[float]) -> float:
    """The 95th percentile."""
    return sorted(values)[int(len(values) * 0.95)]
