"""A node's numbers as Prometheus reads them, and how busy its engines are.

Most is counted by the parts themselves and only read here when somebody asks. The share of time in
which an engine works cannot be read afterwards, except from the embedded one: so the others are
looked at every two seconds, and the time since the last look counts as busy if requests run.
Every metric stands in docs/observability.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

import aiohttp
from prometheus_client.core import Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tugline.gateway.backend import Traffic
from tugline.measures import CONTENT_TYPE, counter, gauge, histogram, page
from tugline.node.app import Node
from tugline.node.watch import Watch
from tugline.types import Status

LOOK_S = 2.0
"""How often engines are looked at."""
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "tugline:num_requests_running")
_FORWARD = ("tugline:forward_seconds_total",)


@dataclass(slots=True)
class Busy:
    """What was seen of an engine."""

    up: bool = False
    running: float = 0.0
    seconds: float = 0.0
    """In which it worked, since the first look."""
    looked: float | None = None
    forward: float | None = None
    """As the embedded engine counts by itself."""

    def saw(self, text: str, now: float) -> None:
        """Count the time since the last look; a gap of many looks counts as one."""
        running, forward = _sum(text, _RUNNING), _sum(text, _FORWARD)
        if forward is not None:
            if self.forward is not None:  # less than before: it was started again
                self.seconds += forward - self.forward if forward >= self.forward else forward
        elif running and self.looked is not None:
            self.seconds += min(now - self.looked, 2 * LOOK_S)
        self.up, self.running, self.looked, self.forward = True, running or 0.0, now, forward


class Engines:
    """Looks at engines, at their base URLs, as long as the block lasts."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.seen = {url: Busy() for url in urls}

    @contextlib.asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        """Look again and again."""
        task = asyncio.create_task(self._look_on(), name="engine-load")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _look_on(self) -> None:
        timeout = aiohttp.ClientTimeout(total=LOOK_S)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            while True:
                await asyncio.gather(*(self._look(http, url) for url in self.seen))
                await asyncio.sleep(LOOK_S)

    async def _look(self, http: aiohttp.ClientSession, url: str) -> None:
        busy = self.seen[url]
        try:
            async with http.get(f"{url.rstrip('/')}/metrics") as answer:
                text = await answer.text() if answer.ok else ""
        except (aiohttp.ClientError, TimeoutError, ValueError):
            text = ""
        if text:
            busy.saw(text, time.monotonic())
        else:
            busy.up, busy.running, busy.looked = False, 0.0, None


class NodeMetrics:
    """The page of one node."""

    def __init__(self, node: Node, watch: Watch, traffic: Traffic, engines: Engines) -> None:
        """`traffic` is that of its gateway."""
        self._node, self._watch, self._traffic, self._engines = node, watch, traffic, engines

    async def page(self) -> bytes:
        """All of them as text."""
        return page(self.families())

    def families(self) -> list[Metric]:
        """All of them."""
        return [
            *self._stages(),
            *self._sessions(),
            *self._tokens(),
            *self._calls(),
            *self._engine(),
        ]

    def app(self) -> Starlette:
        """For a node that has no server in its process: ``/metrics`` and ``/healthz``."""

        async def metrics(_request: Request) -> Response:
            return Response(await self.page(), headers={"content-type": CONTENT_TYPE})

        async def healthy(_request: Request) -> Response:
            return Response(b'{"status":"ok"}', media_type="application/json")

        return Starlette(routes=[Route("/metrics", metrics), Route("/healthz", healthy)])

    def _stages(self) -> Iterable[Metric]:
        stages = self._node.stages
        pools = {status.value: pool for status, pool in stages.pools.items()}
        held = {name: float(pool.busy) for name, pool in pools.items()}
        held[Status.READY.value] = stages.early - stages.cold
        return (
            gauge("tugline_node_stage_sessions", "Sessions at work in a stage.", held, "stage"),
            gauge(
                "tugline_node_stage_places",
                "Places that a stage has.",
                {name: pool.size for name, pool in pools.items()},
                "stage",
            ),
            gauge(
                "tugline_node_stage_waiting",
                "Sessions that wait for a place in a stage.",
                {name: pool.waiting for name, pool in pools.items()},
                "stage",
            ),
            histogram(
                "tugline_node_stage_seconds",
                "Time that sessions were in a stage.",
                {status.value: spread for status, spread in self._watch.stage_s.items()},
                "stage",
            ),
            gauge("tugline_node_sessions", "Sessions on the node.", stages.held),
            gauge("tugline_node_room", "Sessions that could begin now.", stages.room()),
            gauge(
                "tugline_node_admission_held",
                "Ready agents that wait for their engine to have less to do.",
                stages.admission.held,
            ),
            counter(
                "tugline_node_admission_held_seconds",
                "Time that agents have waited for their engine, in all.",
                stages.admission.held_s,
            ),
        )

    def _sessions(self) -> Iterable[Metric]:
        stats = self._node.stats
        ways = ("leased", "committed", "requeued", "fenced", "handed_back")
        return (
            counter(
                "tugline_node_leases",
                "Sessions that were taken, and what became of their leases.",
                {way: getattr(stats, way) for way in ways},
                "way",
            ),
            counter(
                "tugline_node_results",
                "Trajectories by the status of their session.",
                {status.value: n for status, n in stats.ends.items()},
                "status",
            ),
            counter(
                "tugline_node_failures",
                "Failed sessions by the boundary that was crossed.",
                {boundary.value: n for boundary, n in stats.failures.items()},
                "boundary",
            ),
            counter("tugline_node_rejoined", "Leases of the node that were lost.", stats.rejoined),
            counter("tugline_node_outages", "Times that its server was away.", stats.outages),
            counter("tugline_node_untraced", "Sessions without a trace.", self._watch.untold),
            gauge("tugline_node_disk_bytes", "Disk that its sessions use.", stats.disk_bytes),
            gauge("tugline_node_disk_low", "1 while no work is taken for it.", stats.disk_low),
        )

    def _tokens(self) -> Iterable[Metric]:
        stats = self._node.stats
        fates: dict[tuple[str, ...], float] = {("trained", ""): stats.trained}
        fates |= {("masked", reason.value): n for reason, n in stats.masked.items()}
        fates |= {("dropped", reason.value): n for reason, n in stats.dropped.items()}
        text = "Sampled tokens of ended sessions, by what the ledger says of them."
        return (counter("tugline_node_ledger_tokens", text, fates, "fate", "reason"),)

    def _calls(self) -> Iterable[Metric]:
        traffic = self._traffic
        tokens = {"prompt": traffic.prompt_tokens, "sampled": traffic.sampled_tokens}
        return (
            counter(
                "tugline_gateway_calls",
                "Model calls by what became of the answer.",
                dict(traffic.calls),
                "outcome",
            ),
            counter(
                "tugline_gateway_refused",
                "Requests that were answered by an error, by its class.",
                dict(traffic.refused),
                "error",
            ),
            counter("tugline_gateway_tokens", "Tokens of model calls.", tokens, "kind"),
            histogram(
                "tugline_gateway_first_token_seconds",
                "From a request to its first token.",
                traffic.first_token_s,
            ),
            histogram(
                "tugline_gateway_answer_seconds",
                "From a request to its last token.",
                traffic.answer_s,
            ),
        )

    def _engine(self) -> Iterable[Metric]:
        seen = self._engines.seen
        return (
            gauge(
                "tugline_engine_up",
                "1 if the engine told its load when it was last looked at.",
                {url: float(one.up) for url, one in seen.items()},
                "engine",
            ),
            gauge(
                "tugline_engine_running",
                "Requests in the engine when it was last looked at.",
                {url: one.running for url, one in seen.items()},
                "engine",
            ),
            counter(
                "tugline_engine_busy_seconds",
                "Time in which the engine worked.",
                {url: one.seconds for url, one in seen.items()},
                "engine",
            ),
        )


def _sum(text: str, names: Sequence[str]) -> float | None:
    """The values of a metric under one of `names`, over all its labels; None without any."""
    pattern = rf"^(?:{'|'.join(names)})(?:\{{.*\}})?\s+(\S+)"
    found = [float(value) for value in re.findall(pattern, text, re.MULTILINE)]
    return sum(found) if found else None
