"""The Prometheus metrics of a node, with those of its gateway and its engines.

Every metric is in docs/observability.md. The parts count by themselves; their numbers are read when
a page is requested.
"""

from prometheus_client.core import Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tugline.gateway.app import Gateway
from tugline.histogram import CONTENT_TYPE, Values, families, page
from tugline.node.admission import Engines
from tugline.node.app import Node
from tugline.types import Status

_METRICS = """
tugline_node_stage_sessions{stage} gauge: Sessions that hold a slot of a stage.
tugline_node_stage_slots{stage} gauge: Slots of a stage.
tugline_node_stage_waiting{stage} gauge: Sessions that wait for a slot of a stage.
tugline_node_stage_seconds{stage} histogram: Time that sessions were in a stage.
tugline_node_sessions gauge: Sessions on the node.
tugline_node_room gauge: Sessions that could begin now.
tugline_node_admission_held gauge: Ready agents that wait because all engines are overloaded.
tugline_node_admission_held_seconds_total counter: Total time that agents have waited so.
tugline_node_leases_total{event} counter: Leased sessions, and what became of their leases.
tugline_node_results_total{status} counter: Trajectories by the status of their session.
tugline_node_failures_total{boundary} counter: Failed sessions by boundary.
tugline_node_ledger_tokens_total{kind,reason} counter: Sampled tokens by their place in the ledger.
tugline_node_rejoined_total counter: Leases of the node that were lost.
tugline_node_outages_total counter: Times that its server was away.
tugline_node_untraced_total counter: Sessions without a trace.
tugline_node_disk_bytes gauge: Disk space of its sessions and recordings.
tugline_node_disk_low gauge: 1 while it takes no work because the disk is nearly full.
tugline_gateway_calls_total{outcome} counter: Model calls by outcome.
tugline_gateway_refused_total{error} counter: Requests that were answered by an error, by class.
tugline_gateway_tokens_total{kind} counter: Tokens of model calls.
tugline_gateway_first_token_seconds histogram: From a request to its first token.
tugline_gateway_answer_seconds histogram: From a request to its last token.
tugline_engine_up{engine} gauge: 1 if the engine answered the last poll.
tugline_engine_running{engine} gauge: Requests in the engine at the last poll.
tugline_engine_busy_seconds_total{engine} counter: Time in which the engine worked.
"""
_LEASE_EVENTS = ("leased", "committed", "requeued", "fenced", "released")


class NodeMetrics:
    """The metrics of one node."""

    def __init__(self, node: Node, gateway: Gateway, engines: Engines) -> None:
        self._node, self._gateway, self._engines = node, gateway, engines

    async def render(self) -> bytes:
        """All of them as text."""
        return page(self.collect())

    def collect(self) -> list[Metric]:
        """All of them."""
        return families(_METRICS, self._read_node() | self._read_gateway_and_engines())

    def make_app(self) -> Starlette:
        """``/metrics`` and ``/healthz``, for a node without a server in its process."""

        async def metrics(_request: Request) -> Response:
            return Response(await self.render(), headers={"content-type": CONTENT_TYPE})

        async def healthy(_request: Request) -> Response:
            return Response(b'{"status":"ok"}', media_type="application/json")

        return Starlette(routes=[Route("/metrics", metrics), Route("/healthz", healthy)])

    def _read_node(self) -> dict[str, Values]:
        stats, node = self._node.stats, self._node.pools
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
        traffic, loads = self._gateway.traffic, self._engines.loads
        tokens = {"prompt": traffic.prompt_tokens, "sampled": traffic.sampled_tokens}
        return {
            "tugline_gateway_calls_total": traffic.calls,
            "tugline_gateway_refused_total": traffic.refused,
            "tugline_gateway_tokens_total": tokens,
            "tugline_gateway_first_token_seconds": traffic.first_token_s,
            "tugline_gateway_answer_seconds": traffic.answer_s,
            "tugline_engine_up": {url: one.up for url, one in loads.items()},
            "tugline_engine_running": {url: one.running for url, one in loads.items()},
            "tugline_engine_busy_seconds_total": {url: one.busy_s for url, one in loads.items()},
        }
