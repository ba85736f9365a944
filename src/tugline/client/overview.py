"""Overview of a running server: queue, nodes, rates, failures, health.

All data come from the API, so a read token is enough. Rates are computed from the events of the
last minute.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

import msgspec

from tugline.client.api import Client
from tugline.errors import TuglineError
from tugline.protocol import Counts, Event, EventKind, NodeState, NodeView, TaskState, TaskView

_RATE_WINDOW_S = 60.0
_HISTORY = 1000
"""Number of events read at the start, and per page."""
_LISTED = 20
"""Maximum number of listed tasks, and of failures."""
_SHOW_GONE_S = 600.0


class RecentFailure(msgspec.Struct, frozen=True):
    """A session that failed or was requeued."""

    session: str
    at: float
    """Unix seconds."""
    reason: str


class NodeLoad(msgspec.Struct, frozen=True):
    """A node and its sessions by stage."""

    node: NodeView
    stages: dict[str, int]
    lease_s: float
    """Seconds until its lease expires; negative for a node that is gone."""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """Overview of a server."""

    at: float
    """Unix seconds."""
    url: str
    counts: Counts
    queue: dict[str, int]
    """Queued sessions by tenant."""
    unread: dict[str, int]
    """Unacknowledged results by consumer."""
    sessions_per_minute: float
    tokens_per_second: float
    reward: float | None
    """Mean reward of the last minute's results; None if no result has a reward."""
    nodes: tuple[NodeLoad, ...]
    open: tuple[TaskView, ...]
    """Oldest unreleased tasks."""
    failures: tuple[RecentFailure, ...]
    """Recent failures, newest first."""


class Monitor:
    """Reader of a server's overview; stores the events of the last minute between two reads."""

    def __init__(self, client: Client, *, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._clock = clock
        self._events: deque[Event] = deque()
        self._failures: deque[RecentFailure] = deque(maxlen=_LISTED)
        self._position: int | None = None
        self._complete_since = 0.0
        """Start, in Unix seconds, of the period whose events are all known."""

    async def read(self) -> Overview:
        """Read the current state. Raises `ServerError`."""
        client = self._client
        counts, nodes, open_tasks = await asyncio.gather(
            client.status(details=True), client.nodes(), self._read_open_tasks()
        )
        await self._read_events(counts.position)
        now = self._clock()
        gone = NodeState.GONE
        since = now - _SHOW_GONE_S
        recent = [node for node in nodes if node.state is not gone or node.deadline > since]
        loads = await asyncio.gather(*map(self._read_load, recent))
        results = [event for event in self._events if event.kind is EventKind.RESULT]
        rewards = [float(event.detail["reward"]) for event in results if "reward" in event.detail]
        span_s = max(1.0, min(_RATE_WINDOW_S, now - self._complete_since))
        sampled = sum(int(event.detail.get("sampled", 0)) for event in results)
        return Overview(
            at=now,
            url=client.url,
            counts=counts,
            queue=counts.queue,
            unread=counts.unread,
            sessions_per_minute=60 * len(results) / span_s,
            tokens_per_second=sampled / span_s,
            reward=fmean(rewards) if rewards else None,
            nodes=tuple(loads),
            open=tuple(open_tasks),
            failures=tuple(reversed(self._failures)),
        )

    async def _read_open_tasks(self) -> list[TaskView]:
        tasks: list[TaskView] = []
        async for task in self._client.tasks(state=TaskState.OPEN):
            tasks.append(task)
            if len(tasks) == _LISTED:
                break
        return tasks

    async def _read_events(self, latest: int) -> None:
        if self._position is None:
            self._position = max(0, latest - _HISTORY)
            self._complete_since = self._clock()
        while self._position < latest:
            page = await self._client.list_events(after=self._position, limit=_HISTORY)
            if not page or page[0].position > self._position + 1:
                self._complete_since = 0.0  # positions were skipped at the server's start
            if not page:
                break
            self._complete_since = min(self._complete_since, page[0].created)
            self._position = page[-1].position
            self._events.extend(page)
            self._failures.extend(filter(None, map(find_failure, page)))
        while self._events and self._events[0].created < self._clock() - _RATE_WINDOW_S:
            self._events.popleft()

    async def _read_load(self, node: NodeView) -> NodeLoad:
        stages: Counter[str] = Counter()
        if node.running and node.state is not NodeState.GONE:
            async for session in self._client.sessions(node=node.id):
                stages[session.status.value] += 1
        return NodeLoad(node, dict(stages), node.deadline - self._clock())


def find_failure(event: Event) -> RecentFailure | None:
    """Return the failure or requeue that an event reports; None for other events."""
    detail = event.detail
    session = event.session or ""
    if event.kind is EventKind.REQUEUED:
        return RecentFailure(session, event.created, f"requeued: {detail.get('reason', '')}")
    if event.kind is EventKind.RESULT and detail.get("status") in {"failed", "timed_out"}:
        reason = f"{detail['status']} {detail.get('boundary', '')}: {detail.get('message', '')}"
        return RecentFailure(session, event.created, reason)
    return None


# --------------------------------------------------------------------------- health
class HealthCheck(NamedTuple):
    """The state of one component."""

    component: str
    healthy: bool
    detail: str


async def examine(client: Client) -> list[HealthCheck]:
    """Check the server, callbacks, nodes, and engines of nodes in the server's process."""
    started = time.monotonic()
    try:
        counts = await client.status()
        nodes = await client.nodes()
    except TuglineError as error:
        return [HealthCheck("server", False, str(error))]
    latency_ms = 1000 * (time.monotonic() - started)
    queued = counts.sessions.get("queued", 0)
    live = [node for node in nodes if node.state is NodeState.LIVE]
    checks = [
        HealthCheck("server", True, f"{client.url} responds from its store in {latency_ms:.0f} ms")
    ]
    if counts.dead_deliveries:
        detail = f"{counts.dead_deliveries} deliveries were given up; see /v1/deliveries?state=dead"
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
    for url, up in counts.engines.items():
        state = "responds" if up else "does not respond, or does not report its load"
        checks.append(HealthCheck("engine", up, f"{url} {state}"))
    if counts.disk_low:
        detail = "a node does not accept sessions, because its disk is nearly full"
        checks.append(HealthCheck("disk", False, detail))
    return checks


def _check_node(node: NodeView) -> HealthCheck:
    lease_s = node.deadline - time.time()
    detail = f"{node.name} is {node.state}, {node.running} sessions, {node.slots} slots"
    expired = node.state is NodeState.LIVE and lease_s < 0
    if expired:
        detail += f", its lease expired {-lease_s:.0f} s ago"
    if node.fault:
        detail += f", in quarantine: {node.fault}"
    healthy = node.state is not NodeState.GONE and not expired and not node.fault
    return HealthCheck("node", healthy, detail)
