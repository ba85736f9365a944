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
from collections.abc import Awaitable, Callable, Sequence

from prometheus_client.core import Metric

from tugline.histogram import MOMENTS, SIZES, SPELLS, Distribution, Values, families, page
from tugline.protocol import Event, EventKind, NodeState
from tugline.server.store import events
from tugline.server.store.database import Database
from tugline.server.store.queue_stats import MOST, Depths, before, look
from tugline.types import Boundary, Status

_CHUNK = 1000
_WHYS = {*(boundary.value for boundary in Boundary), "stale"}

_METRICS = """
tugline_sessions{status} gauge: Sessions by status.
tugline_queue{tenant} gauge: Sessions in line, by tenant.
tugline_tasks_open gauge: Tasks of which not all is over.
tugline_nodes{state} gauge: Nodes by state.
tugline_slots gauge: Agents that the live nodes may run at once.
tugline_results_unread{consumer} gauge: Results that a consumer has not acknowledged, up to 100,000.
tugline_callbacks{state} gauge: Callbacks that did not arrive yet.
tugline_position gauge: Number of the latest event.
tugline_weights_version gauge: The newest version of the weights.
tugline_weights_paused gauge: 1 while model calls are held.
tugline_events_total{kind} counter: What happened, by kind.
tugline_requeued_total{reason} counter: Sessions that went back into the line, by boundary.
tugline_results_total{status} counter: Results by status.
tugline_failures_total{boundary} counter: Failed sessions by boundary.
tugline_tokens_total{kind} counter: Tokens of the results.
tugline_queue_seconds histogram: From when a session could be given out to when it was.
tugline_http_seconds{route,status} histogram: Time to answer a request, its wait included.
tugline_store_commit_seconds{store} histogram: Time of a commit, with all operations in it.
tugline_store_commit_operations{store} histogram: Operations that share a commit.
tugline_waiting gauge: Long-polls and streams that are open.
"""

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
            reason = str(detail.get("reason", "")).partition(":")[0]
            self.requeued[reason if reason in _WHYS else "handed back"] += 1
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
        self.waiting: Callable[[], int] = lambda: 0
        """Tells how many long answers are open."""
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
        store = self._database.name
        works: dict[str, Values] = {
            "tugline_http_seconds": self._routes,
            "tugline_store_commit_seconds": {store: self._commit_s},
            "tugline_store_commit_operations": {store: self._batch},
            "tugline_waiting": self.waiting(),
        }
        return families(_METRICS, _now(depths) | _past(self._happened) | works)

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


def _now(depths: Depths) -> dict[str, Values]:
    return {
        "tugline_sessions": dict.fromkeys((one.value for one in Status), 0) | depths.sessions,
        "tugline_queue": depths.queued,
        "tugline_tasks_open": depths.tasks_open,
        "tugline_nodes": dict.fromkeys((one.value for one in NodeState), 0) | depths.nodes,
        "tugline_slots": depths.slots,
        "tugline_results_unread": depths.unread,
        "tugline_callbacks": depths.outbox,
        "tugline_position": depths.position,
        "tugline_weights_version": depths.control.version,
        "tugline_weights_paused": depths.control.paused is not None,
    }


def _past(happened: Happened) -> dict[str, Values]:
    return {
        "tugline_events_total": happened.kinds,
        "tugline_requeued_total": happened.requeued,
        "tugline_results_total": happened.results,
        "tugline_failures_total": happened.failures,
        "tugline_tokens_total": happened.tokens,
        "tugline_queue_seconds": happened.waited,
    }
