"""Metrics of a node, for Prometheus."""

from prometheus_client.core import Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tugline.histogram import CONTENT_TYPE, Values, families, page
from tugline.node.admission import Engines
from tugline.node.app import Node
from tugline.types import Status

_LEASE_EVENTS = ("leased", "committed", "requeued", "fenced", "released")


class NodeMetrics:
    """Metrics of a node and of its gateway and engines; docs/observability.md lists them.

    The numbers are read when a page is requested.
    """

    def __init__(self, node: Node, engines: Engines) -> None:
        self._node = node
        self._engines = engines

    async def render(self) -> bytes:
        """Return all metrics as text."""
        return page(self.collect())

    def collect(self) -> list[Metric]:
        """Return all metrics."""
        return families(self._read_node() | self._read_gateway_and_engines())

    @property
    def engines(self) -> dict[str, bool]:
        """Whether each engine of the node answers and reports its load, by URL."""
        return {url: load.up for url, load in self._engines.loads.items()}

    @property
    def disk_low(self) -> bool:
        """Whether the node takes no work because its disk is nearly full."""
        return self._node.stats.disk_low

    def make_app(self) -> Starlette:
        """Return an app with ``/metrics`` and ``/healthz``, for a node in its own process."""

        async def metrics(_request: Request) -> Response:
            return Response(await self.render(), headers={"content-type": CONTENT_TYPE})

        async def healthy(_request: Request) -> Response:
            return Response(b'{"status":"ok"}', media_type="application/json")

        return Starlette(routes=[Route("/metrics", metrics), Route("/healthz", healthy)])

    def _read_node(self) -> dict[str, Values]:
        stats = self._node.stats
        node = self._node.pools
        pools = {status.value: pool for status, pool in node.by_stage.items()}
        sessions = {name: pool.busy for name, pool in pools.items()}
        sessions[Status.READY.value] = node.count({Status.INIT})
        tokens = {("trained", ""): stats.trained}
        tokens |= {("masked", reason.value): n for reason, n in stats.masked.items()}
        tokens |= {("dropped", reason.value): n for reason, n in stats.dropped.items()}
        return {
            "tugline_node_stage_sessions": sessions,
            "tugline_node_stage_slots": {name: pool.size for name, pool in pools.items()},
            "tugline_node_stage_waiting": {name: pool.waiting for name, pool in pools.items()},
            "tugline_node_stage_seconds": stats.stage_s,
            "tugline_node_sessions": len(node.members),
            "tugline_node_room": node.count_room(),
            "tugline_node_admission_held": node.admission.waiting,
            "tugline_node_admission_held_seconds_total": node.admission.waited_s,
            "tugline_node_leases_total": {name: getattr(stats, name) for name in _LEASE_EVENTS},
            "tugline_node_results_total": stats.ends,
            "tugline_node_failures_total": stats.failures,
            "tugline_node_ledger_tokens_total": tokens,
            "tugline_node_rejoined_total": stats.rejoined,
            "tugline_node_outages_total": stats.outages,
            "tugline_node_untraced_total": stats.untraced,
            "tugline_node_disk_bytes": stats.disk_bytes,
            "tugline_node_disk_low": stats.disk_low,
        }

    def _read_gateway_and_engines(self) -> dict[str, Values]:
        traffic = self._node.gateway.traffic
        loads = self._engines.loads
        tokens = {"prompt": traffic.prompt_tokens, "sampled": traffic.sampled_tokens}
        return {
            "tugline_gateway_calls_total": traffic.calls,
            "tugline_gateway_refused_total": traffic.refused,
            "tugline_gateway_tokens_total": tokens,
            "tugline_gateway_first_token_seconds": traffic.first_token_s,
            "tugline_gateway_answer_seconds": traffic.answer_s,
            "tugline_engine_up": self.engines,
            "tugline_engine_running": {url: load.running for url, load in loads.items()},
            "tugline_engine_busy_seconds_total": {url: load.busy_s for url, load in loads.items()},
        }
