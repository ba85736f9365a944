"""Health checks of a running server, its nodes and their engines, through the server's API."""

from __future__ import annotations

import re
import time
from typing import NamedTuple

from tugline.client.api import Client
from tugline.errors import Missing, TuglineError
from tugline.protocol import NodeState, NodeView

_ENGINE = re.compile(r'^tugline_engine_up\{.*engine="([^"]*)".*\} (\S+)', re.MULTILINE)
_LOW = re.compile(r"^tugline_node_disk_low(?:\{.*\})? (\S+)", re.MULTILINE)


class HealthCheck(NamedTuple):
    """The state of one component."""

    component: str
    healthy: bool
    detail: str


async def examine(client: Client) -> list[HealthCheck]:
    """Check the server, callbacks, nodes, and the engines of nodes in the server's process."""
    started = time.monotonic()
    try:
        counts, nodes = await client.status(), await client.nodes()
    except TuglineError as error:
        return [HealthCheck("server", False, str(error))]
    latency_ms = 1000 * (time.monotonic() - started)
    queued = counts.sessions.get("queued", 0)
    live = [node for node in nodes if node.state is NodeState.LIVE]
    checks = [
        HealthCheck("server", True, f"{client.url} answers from its store in {latency_ms:.0f} ms")
    ]
    if counts.dead_deliveries:
        detail = f"{counts.dead_deliveries} were given up; see /v1/deliveries?state=dead"
        checks.append(HealthCheck("callbacks", False, detail))
    if counts.paused:
        checks.append(HealthCheck("weights", False, "model calls are paused"))
    if not live:
        detail = f"{queued} sessions are queued and no node is live; start one with `tugline node`"
        checks.append(HealthCheck("nodes", False, detail))
    replaced = {node.name for node in nodes if node.state is not NodeState.GONE}
    checks += [
        _check_node(node)
        for node in nodes
        if node.state is not NodeState.GONE or node.name not in replaced
    ]
    metrics = await _read_metrics(client)
    for url, up in _ENGINE.findall(metrics):
        state = "answers" if float(up) else "does not answer, or reports no load"
        checks.append(HealthCheck("engine", bool(float(up)), f"{url} {state}"))
    if any(float(low) for low in _LOW.findall(metrics)):
        detail = "a node accepts no work: its disk is nearly full"
        checks.append(HealthCheck("disk", False, detail))
    return checks


async def _read_metrics(client: Client) -> str:
    """The server's metrics; empty where it has none."""
    try:
        return await client.metrics()
    except Missing:
        return ""


def _check_node(node: NodeView) -> HealthCheck:
    lease_s = node.deadline - time.time()
    detail = f"{node.name} is {node.state}, {node.running} sessions, {node.slots} slots"
    expired = node.state is NodeState.LIVE and lease_s < 0
    if expired:
        detail += f", its lease expired {-lease_s:.0f} s ago"
    return HealthCheck("node", node.state is not NodeState.GONE and not expired, detail)
