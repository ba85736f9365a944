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
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import aiohttp
from prometheus_client.core import Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tugline.gateway.engine import Traffic
from tugline.histogram import CONTENT_TYPE, Values, families, page
from tugline.node.app import Node
from tugline.node.telemetry import Telemetry
from tugline.types import Status

LOOK_S = 2.0
"""How often engines are looked at."""
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "tugline:num_requests_running")
_FORWARD = ("tugline:forward_seconds_total",)
_METRICS = """
tugline_node_stage_sessions{stage} gauge: Sessions at work in a stage.
tugline_node_stage_places{stage} gauge: Places that a stage has.
tugline_node_stage_waiting{stage} gauge: Sessions that wait for a place in a stage.
tugline_node_stage_seconds{stage} histogram: Time that sessions were in a stage.
tugline_node_sessions gauge: Sessions on the node.
tugline_node_room gauge: Sessions that could begin now.
tugline_node_admission_held gauge: Ready agents that wait for their engine to have less to do.
tugline_node_admission_held_seconds_total counter: Time that agents have waited so, in all.
tugline_node_leases_total{way} counter: Sessions that were taken, and what became of their leases.
tugline_node_results_total{status} counter: Trajectories by the status of their session.
tugline_node_failures_total{boundary} counter: Failed sessions by the boundary that was crossed.
tugline_node_ledger_tokens_total{fate,reason} counter: Sampled tokens, as the ledgers say.
tugline_node_rejoined_total counter: Leases of the node that were lost.
tugline_node_outages_total counter: Times that its server was away.
tugline_node_untraced_total counter: Sessions without a trace.
tugline_node_disk_bytes gauge: Disk that its sessions use.
tugline_node_disk_low gauge: 1 while no work is taken for want of it.
tugline_gateway_calls_total{outcome} counter: Model calls by what became of the answer.
tugline_gateway_refused_total{error} counter: Requests that were answered by an error, by class.
tugline_gateway_tokens_total{kind} counter: Tokens of model calls.
tugline_gateway_first_token_seconds histogram: From a request to its first token.
tugline_gateway_answer_seconds histogram: From a request to its last token.
tugline_engine_up{engine} gauge: 1 if the engine told its load when it was last looked at.
tugline_engine_running{engine} gauge: Requests in the engine when it was last looked at.
tugline_engine_busy_seconds_total{engine} counter: Time in which the engine worked.
"""


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

    def __init__(self, node: Node, watch: Telemetry, traffic: Traffic, engines: Engines) -> None:
        """`traffic` is that of its gateway."""
        self._node, self._watch, self._traffic, self._engines = node, watch, traffic, engines

    async def page(self) -> bytes:
        """All of them as text."""
        return page(self.families())

    def families(self) -> list[Metric]:
        """All of them."""
        return families(
            _METRICS, self._stages() | self._sessions() | self._calls() | self._engine()
        )

    def app(self) -> Starlette:
        """For a node that has no server in its process: ``/metrics`` and ``/healthz``."""

        async def metrics(_request: Request) -> Response:
            return Response(await self.page(), headers={"content-type": CONTENT_TYPE})

        async def healthy(_request: Request) -> Response:
            return Response(b'{"status":"ok"}', media_type="application/json")

        return Starlette(routes=[Route("/metrics", metrics), Route("/healthz", healthy)])

    def _stages(self) -> dict[str, Values]:
        stages = self._node.stages
        pools = {status.value: pool for status, pool in stages.pools.items()}
        held = {name: pool.busy for name, pool in pools.items()}
        return {
            "tugline_node_stage_sessions": held | {Status.READY.value: stages.early - stages.cold},
            "tugline_node_stage_places": {name: pool.size for name, pool in pools.items()},
            "tugline_node_stage_waiting": {name: pool.waiting for name, pool in pools.items()},
            "tugline_node_stage_seconds": self._watch.stage_s,
            "tugline_node_sessions": stages.held,
            "tugline_node_room": stages.room(),
            "tugline_node_admission_held": stages.admission.held,
            "tugline_node_admission_held_seconds_total": stages.admission.held_s,
        }

    def _sessions(self) -> dict[str, Values]:
        stats = self._node.stats
        fates = {("trained", ""): stats.trained}
        fates |= {("masked", reason.value): n for reason, n in stats.masked.items()}
        fates |= {("dropped", reason.value): n for reason, n in stats.dropped.items()}
        ways = ("leased", "committed", "requeued", "fenced", "handed_back")
        return {
            "tugline_node_leases_total": {way: getattr(stats, way) for way in ways},
            "tugline_node_results_total": stats.ends,
            "tugline_node_failures_total": stats.failures,
            "tugline_node_ledger_tokens_total": fates,
            "tugline_node_rejoined_total": stats.rejoined,
            "tugline_node_outages_total": stats.outages,
            "tugline_node_untraced_total": self._watch.untold,
            "tugline_node_disk_bytes": stats.disk_bytes,
            "tugline_node_disk_low": stats.disk_low,
        }

    def _calls(self) -> dict[str, Values]:
        traffic = self._traffic
        tokens = {"prompt": traffic.prompt_tokens, "sampled": traffic.sampled_tokens}
        return {
            "tugline_gateway_calls_total": traffic.calls,
            "tugline_gateway_refused_total": traffic.refused,
            "tugline_gateway_tokens_total": tokens,
            "tugline_gateway_first_token_seconds": traffic.first_token_s,
            "tugline_gateway_answer_seconds": traffic.answer_s,
        }

    def _engine(self) -> dict[str, Values]:
        seen = self._engines.seen
        return {
            "tugline_engine_up": {url: one.up for url, one in seen.items()},
            "tugline_engine_running": {url: one.running for url, one in seen.items()},
            "tugline_engine_busy_seconds_total": {url: one.seconds for url, one in seen.items()},
        }


def _sum(text: str, names: Sequence[str]) -> float | None:
    """The values of a metric under one of `names`, over all its labels; None without any."""
    pattern = rf"^(?:{'|'.join(names)})(?:\{{.*\}})?\s+(\S+)"
    found = [float(value) for value in re.findall(pattern, text, re.MULTILINE)]
    return sum(found) if found else None
