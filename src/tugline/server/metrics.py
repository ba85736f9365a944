"""Prometheus metrics of the server.

Gauges are read from the store for each scrape. Counters are derived from the events since the last
scrape, so a committed change counts once, even if it was retried; of more than 100,000 events
between two scrapes, the older ones are not counted. Durations of requests and commits are recorded
when they end. docs/observability.md lists every metric.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Protocol

from prometheus_client.core import Metric

from tugline.histogram import MOMENTS, SIZES, SPELLS, Distribution, Values, families, page
from tugline.protocol import Event, EventKind
from tugline.server.store import events
from tugline.server.store.database import Database
from tugline.server.store.stats import MAX_SCAN, gauges
from tugline.types import Boundary

_CHUNK = 1000
_REASONS = {*(boundary.value for boundary in Boundary), "stale"}


class LocalNode(Protocol):
    """A node in the server's process."""

    async def render(self) -> bytes:
        """Return its metrics in the text format."""

    @property
    def engines(self) -> Mapping[str, bool]:
        """Whether each of its engines answers, by URL."""

    @property
    def disk_low(self) -> bool:
        """Whether it takes no work because its disk is nearly full."""


class _EventCounts:
    """Counters derived from events, as attributes with the names of the metrics."""

    def __init__(self) -> None:
        self.events_total = Counter[str]({kind.value: 0 for kind in EventKind})
        self.requeued_total = Counter[str]()
        self.results_total = Counter[str]()
        self.failures_total = Counter[str]()
        self.tokens_total = Counter[str]()
        self.queue_seconds = Distribution((*MOMENTS, *SPELLS[5:]))

    def values(self) -> dict[str, Values]:
        """Return the metrics by name."""
        return {f"tugline_{name}": value for name, value in vars(self).items()}

    def add(self, event: Event) -> None:
        """Count one event."""
        detail = event.detail
        self.events_total[event.kind] += 1
        if event.kind is EventKind.REQUEUED:
            reason = str(detail.get("reason", "")).partition(":")[0]
            self.requeued_total[reason if reason in _REASONS else "released"] += 1
        elif event.kind is EventKind.LEASED and "waited" in detail:
            self.queue_seconds.add(float(detail["waited"]))
        elif event.kind is EventKind.RESULT:
            self.results_total[str(detail.get("status", ""))] += 1
            if "boundary" in detail:
                self.failures_total[str(detail["boundary"])] += 1
            for kind in ("sampled", "trained"):
                self.tokens_total[kind] += int(detail.get(kind, 0))


class ServerMetrics:
    """Metrics page of a server and of `nodes` in the same process.

    Events after the position `since` are counted.
    """

    def __init__(self, database: Database, since: int = 0) -> None:
        self._database = database
        self.nodes: list[LocalNode] = []
        self.waiting: Callable[[], int] = lambda: 0
        """Function that returns the number of open long polls and streams."""
        database.on_commit = self._count_commit
        self._commit_s = Distribution(MOMENTS)
        self._batch = Distribution(SIZES)
        self._routes: dict[tuple[str, ...], Distribution] = defaultdict(
            lambda: Distribution((*MOMENTS, 30.0, 60.0))
        )
        self._event_counts = _EventCounts()
        self._read = since
        """Position of the last counted event."""
        self._lock = asyncio.Lock()

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Count an answered request; `route` is, for example, ``GET /v1/tasks/{id}``."""
        self._routes[route, f"{status // 100}xx"].add(seconds)

    def _count_commit(self, operations: int, seconds: float) -> None:
        self._batch.add(operations)
        self._commit_s.add(seconds)

    async def page(self) -> bytes:
        """Return all metrics in the text format. Raises `StoreError`."""
        own = page(await self.families())
        return own + b"".join([await node.render() for node in self.nodes])

    async def families(self) -> list[Metric]:
        """Return the server's own metrics. Raises `StoreError`."""
        stored = await self._database.read(gauges)
        async with self._lock:
            await self._count_events()
        store = self._database.name
        measured: dict[str, Values] = {
            "tugline_http_seconds": self._routes,
            "tugline_store_commit_seconds": {store: self._commit_s},
            "tugline_store_commit_operations": {store: self._batch},
            "tugline_waiting": self.waiting(),
        }
        return families(stored | self._event_counts.values() | measured)

    async def _count_events(self) -> None:
        """Count the events since the last scrape."""
        latest = await self._database.read(events.latest)
        at = max(latest - MAX_SCAN, self._read)
        while at < latest:
            page = await self._database.read(events.page, at, _CHUNK)
            for event in page:
                self._event_counts.add(event)
            at = page[-1].position if page else latest
        self._read = at
