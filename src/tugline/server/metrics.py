"""The server's numbers as Prometheus reads them.

What there is now is looked up in the store when somebody asks. What has happened is counted from
the events, so every number is of something that was committed, once, whatever was tried again; an
event is read here when the page is asked for, and nothing is kept of it. Where nobody asked for
100,000 events, the older ones are left out. Only how long requests and commits take is counted on
the way. Every metric stands in docs/observability.md.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence

from prometheus_client.core import Metric

from tugline.measures import MOMENTS, SIZES, SPELLS, Distribution, counter, gauge, histogram, page
from tugline.protocol import Event, EventKind, NodeState
from tugline.server.database import events
from tugline.server.database.database import Database
from tugline.server.database.depths import MOST, Depths, before, look
from tugline.types import Boundary, Status

_CHUNK = 1000
_WHYS = {*(boundary.value for boundary in Boundary), "stale"}

Page = Callable[[], Awaitable[bytes]]


class Happened:
    """What the events told so far."""

    def __init__(self) -> None:
        self.kinds = Counter[str]({kind.value: 0 for kind in EventKind})
        self.requeued = Counter[str]()
        self.results = Counter[str]()
        self.failures = Counter[str]()
        self.tokens = Counter[str]()
        self.waited = Distribution((*MOMENTS, *SPELLS[5:]))

    def add(self, event: Event) -> None:
        """One more."""
        detail = event.detail
        self.kinds[event.kind] += 1
        if event.kind is EventKind.REQUEUED:
            why = str(detail.get("why", "")).partition(":")[0]
            self.requeued[why if why in _WHYS else "handed back"] += 1
        elif event.kind is EventKind.LEASED and "waited" in detail:
            self.waited.add(float(detail["waited"]))
        elif event.kind is EventKind.RESULT:
            self.results[str(detail.get("status", ""))] += 1
            if "boundary" in detail:
                self.failures[str(detail["boundary"])] += 1
            for kind in ("sampled", "trained"):
                self.tokens[kind] += int(detail.get(kind, 0))


class ServerMetrics:
    """The page of one server, with those of `others`, such as a node in the same process."""

    def __init__(self, database: Database, others: Sequence[Page] = ()) -> None:
        """`database` tells of each commit from here on."""
        self._database, self.others = database, list(others)
        database.on_batch = self._committed
        self._commit_s, self._batch = Distribution(MOMENTS), Distribution(SIZES)
        self._routes: dict[tuple[str, ...], Distribution] = defaultdict(
            lambda: Distribution((*MOMENTS, 30.0, 60.0))
        )
        self._happened = Happened()
        self._read: int | None = None
        """Position of the last event that is counted."""
        self._lock = asyncio.Lock()
        self._started = time.time()

    def served(self, route: str, status: int, seconds: float) -> None:
        """One request is answered; `route` such as ``GET /v1/tasks/{id}``."""
        self._routes[route, f"{status // 100}xx"].add(seconds)

    def _committed(self, operations: int, seconds: float) -> None:
        self._batch.add(operations)
        self._commit_s.add(seconds)

    async def page(self) -> bytes:
        """All of them as text. Raises `StoreError`."""
        own = page(await self.families())
        return own + b"".join([await other() for other in self.others])

    async def families(self) -> list[Metric]:
        """The server's own. Raises `StoreError`."""
        depths = await self._database.read(look)
        async with self._lock:
            await self._count()
        return [*_now(depths), *_past(self._happened), *self._works()]

    async def _count(self) -> None:
        """Read the events since the last page; for the first page, since the start."""
        latest = await self._database.read(events.latest)
        if self._read is None:
            self._read = await self._database.read(lambda tx: before(tx, self._started))
        at = max(latest - MOST, self._read)
        while at < latest:
            after = at
            found = await self._database.read(lambda tx: events.page(tx, after, _CHUNK))  # noqa: B023
            for event in found:
                self._happened.add(event)
            at = found[-1].position if found else latest
        self._read = at

    def _works(self) -> Iterable[Metric]:
        name = self._database.name
        return (
            histogram(
                "tugline_http_seconds",
                "Time to answer a request; one that waits for something takes as long as that.",
                self._routes,
                "route",
                "status",
            ),
            histogram(
                "tugline_store_commit_seconds",
                "Time of a commit, with all operations in it.",
                {name: self._commit_s},
                "store",
            ),
            histogram(
                "tugline_store_commit_operations",
                "Operations that share a commit.",
                {name: self._batch},
                "store",
            ),
            gauge(
                "tugline_waiting",
                "What long-polls and streams listen to, added up.",
                self._database.hub.listeners,
            ),
        )


def _now(depths: Depths) -> Iterable[Metric]:
    statuses = dict.fromkeys((status.value for status in Status), 0) | depths.sessions
    states = dict.fromkeys((state.value for state in NodeState), 0) | depths.nodes
    return (
        gauge("tugline_sessions", "Sessions by status.", statuses, "status"),
        gauge("tugline_queue", "Sessions in line, by tenant.", depths.queued, "tenant"),
        gauge("tugline_tasks_open", "Tasks of which not all is over.", depths.tasks_open),
        gauge("tugline_nodes", "Nodes by state.", states, "state"),
        gauge("tugline_slots", "Agents that the live nodes may run at once.", depths.slots),
        gauge(
            "tugline_results_unread",
            "Results that a consumer has not acknowledged, up to 100,000.",
            depths.unread,
            "consumer",
        ),
        gauge("tugline_callbacks", "Callbacks that did not arrive yet.", depths.outbox, "state"),
        gauge("tugline_position", "Number of the latest event.", depths.position),
        gauge(
            "tugline_weights_version", "The newest version of the weights.", depths.control.version
        ),
        gauge(
            "tugline_weights_paused", "1 while model calls are held.", bool(depths.control.paused)
        ),
    )


def _past(happened: Happened) -> Iterable[Metric]:
    return (
        counter("tugline_events", "What happened, by kind.", happened.kinds, "kind"),
        counter(
            "tugline_requeued",
            "Sessions that went back into the line, by the boundary that was crossed.",
            happened.requeued,
            "why",
        ),
        counter("tugline_results", "Results by status.", happened.results, "status"),
        counter("tugline_failures", "Failed sessions by boundary.", happened.failures, "boundary"),
        counter("tugline_tokens", "Tokens of the results.", happened.tokens, "kind"),
        histogram(
            "tugline_queue_seconds",
            "From when a session could be given out to when it was.",
            happened.waited,
        ),
    )
