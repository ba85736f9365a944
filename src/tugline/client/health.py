"""What is wrong with a running server, its nodes and their engines, found out by asking the server.

Nothing is measured here that the server's own pages do not tell, so it works from anywhere.
"""

from __future__ import annotations

import re
import time
from typing import NamedTuple

from tugline.client.api import Client
from tugline.errors import Missing, TuglineError
from tugline.protocol import NodeState, NodeView

_ENGINE = re.compile(r'^tugline_engine_up\{.*engine="([^"]*)".*\} (\S+)', re.MULTILINE)
_LOW = re.compile(r"^tugline_node_disk_low(?:\{.*\})? (\S+)", re.MULTILINE)


class Finding(NamedTuple):
    """One thing that was looked at."""

    what: str
    sound: bool
    detail: str


async def examine(client: Client) -> list[Finding]:
    """Server, callbacks, nodes, and the engines of those that are in the server's process."""
    began = time.monotonic()
    try:
        counts, nodes = await client.status(), await client.nodes()
    except TuglineError as error:
        return [Finding("server", False, str(error))]
    took = 1000 * (time.monotonic() - began)
    queued = counts.sessions.get("queued", 0)
    live = [node for node in nodes if node.state is NodeState.LIVE]
    found = [Finding("server", True, f"{client.url} answers from its store in {took:.0f} ms")]
    if counts.dead_deliveries:
        detail = f"{counts.dead_deliveries} were given up; see /v1/deliveries?state=dead"
        found.append(Finding("callbacks", False, detail))
    if counts.paused:
        found.append(Finding("weights", False, "model calls are paused until somebody resumes"))
    if not live:
        detail = f"{queued} sessions wait and no node is live; start one with `tugline node`"
        found.append(Finding("nodes", False, detail))
    here = {node.name for node in nodes if node.state is not NodeState.GONE}
    found += [
        _node(node) for node in nodes if node.state is not NodeState.GONE or node.name not in here
    ]
    page = await _page(client)
    for url, up in _ENGINE.findall(page):
        told = "answers" if float(up) else "does not answer, or tells no load"
        found.append(Finding("engine", bool(float(up)), f"{url} {told}"))
    if any(float(low) for low in _LOW.findall(page)):
        found.append(Finding("disk", False, "a node takes no work, for its disk is nearly full"))
    return found


async def _page(client: Client) -> str:
    """The server's metrics; nothing where it keeps none."""
    try:
        return await client.metrics()
    except Missing:
        return ""


def _node(node: NodeView) -> Finding:
    left = node.deadline - time.time()
    detail = f"{node.name} is {node.state}, {node.running} sessions, {node.slots} slots"
    late = node.state is NodeState.LIVE and left < 0
    if late:
        detail += f", not heard of for so long that its lease ended {-left:.0f} s ago"
    return Finding("node", node.state is not NodeState.GONE and not late, detail)
