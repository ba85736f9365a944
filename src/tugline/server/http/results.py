"""Routes of results, events and webhook deliveries, and of the server itself.

Results come as a page, a line for each page, or a binary stream with the trajectories. All three
have the same `Results` in the same order, and `Results.cursor` is what a consumer acknowledges. The
binary stream is made of frames; a frame is a four-byte big-endian length and that many bytes of
msgpack (`Results`), followed by one such length and that many bytes of trajectory for each of its
items, where a length of 0 says that the session never ran, or that its trajectory is lost.
"""

from collections.abc import AsyncGenerator
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from tugline import log
from tugline.errors import Invalid, Missing
from tugline.protocol import (
    Ack,
    Consumer,
    Counts,
    Delivery,
    DeliveryState,
    Event,
    Results,
    ResultView,
)
from tugline.server.control import ControlPlane
from tugline.server.http import route
from tugline.server.store import events, nodes, results, stats
from tugline.web.sse import encode_event

ROUTES = route.Routes()
_log = log.get("server")


class ResultQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which results."""

    consumer: route.Name | None = None
    """Start after what this consumer has acknowledged."""
    after: route.Position | None = None
    """Start after this position instead."""
    limit: route.Limit = 100
    wait_s: route.Wait = 0.0
    task: Annotated[tuple[route.Name, ...], Meta(max_length=1000)] = ()
    """Only those of these tasks."""
    groups: bool = False
    """Whole groups, once they are released."""
    follow: bool = True
    """A stream continues when there are no more results yet."""


class AckQuery(msgspec.Struct, frozen=True):
    """Whose position."""

    consumer: route.Name
    """Name of the consumer, which it chooses itself."""


@ROUTES.add("GET", "/v1/results", route.READERS, media=(route.JSON, route.NDJSON, route.MSGPACK))
async def list_results(call: route.ApiCall[ResultQuery, route.Nothing]) -> Results | Response:
    """List results after a cursor: a page, lines, or frames with the trajectories."""
    media, query = call.accept(route.JSON, route.NDJSON, route.MSGPACK), call.query
    if media == route.JSON:
        page = _read_results(call, query.after, query.wait_s, query.consumer)
        return await (call.attend(page) if query.wait_s else page)
    first = await _read_results(call, query.after, 0.0, query.consumer)
    pieces = _lines(call, first) if media == route.NDJSON else _frames(call, first)
    return call.stream(pieces, media)


async def _read_results(
    call: route.ApiCall[ResultQuery, route.Nothing],
    after: int | None,
    wait_s: float,
    consumer: str | None = None,
) -> Results:
    query = call.query
    return await call.control.results(
        consumer=consumer,
        after=after,
        limit=query.limit,
        wait_s=wait_s,
        tasks=query.task or None,
        groups=query.groups,
    )


async def _pages(
    call: route.ApiCall[ResultQuery, route.Nothing], page: Results
) -> AsyncGenerator[Results]:
    """`page` and what follows; empty ones keep a quiet stream alive."""
    wait_s = call.waits.keep_alive_s if call.query.follow else 0.0
    while page.items or page.groups or call.query.follow:
        yield page
        page = await _read_results(call, page.cursor, wait_s)


async def _lines(
    call: route.ApiCall[ResultQuery, route.Nothing], first: Results
) -> AsyncGenerator[bytes]:
    async for page in _pages(call, first):
        yield msgspec.json.encode(page) + b"\n"


async def _frames(
    call: route.ApiCall[ResultQuery, route.Nothing], first: Results
) -> AsyncGenerator[bytes]:
    async for page in _pages(call, first):
        yield _frame(msgspec.msgpack.encode(page))
        for item in page.items:
            yield _frame(await _read_trajectory(call.control, item) if item.bytes else b"")


async def _read_trajectory(control: ControlPlane, item: ResultView) -> bytes:
    """Empty for one that is lost or damaged: what follows it can still be read."""
    try:
        return await control.trajectory(item.session)
    except Missing as error:
        _log.error("result lost", session=item.session, error=str(error))
        return b""


def _frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


@ROUTES.add("POST", "/v1/results/ack", route.CLIENTS)
async def acknowledge(call: route.ApiCall[AckQuery, Ack]) -> Consumer:
    """Acknowledge results up to a cursor."""
    return await call.db.write(results.ack, call.query.consumer, call.body.cursor)


@ROUTES.add("GET", "/v1/consumers", route.READERS)
async def list_consumers(call: route.ApiCall[route.Nothing, route.Nothing]) -> list[Consumer]:
    """List consumers and their positions."""
    return await call.db.read(results.list_consumers)


# --------------------------------------------------------------------------- events
class EventQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which events."""

    after: route.Position | None = None
    """Start after this position; a page starts at the first event, a stream with new ones."""
    limit: route.Limit = 100
    wait_s: route.Wait = 0.0
    task: route.Name | None = None
    """Only those of this task."""


class DeliveryQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which deliveries."""

    state: DeliveryState | None = None
    """Only those in this state."""
    after: route.Position = 0
    """Start after this id."""
    limit: route.Limit = 100


@ROUTES.add("GET", "/v1/events", route.READERS, media=(route.JSON, route.SSE))
async def list_events(call: route.ApiCall[EventQuery, route.Nothing]) -> list[Event] | Response:
    """List events after a position: a page, or server-sent events."""
    query = call.query
    if call.accept(route.JSON, route.SSE) == route.JSON:
        page = _read_events(call, query.after or 0, query.wait_s)
        return await (call.attend(page) if query.wait_s else page)
    after = _parse_last_event_id(call)
    if after is None:
        after = await call.db.read(events.latest)
    return call.stream(_stream(call, await _read_events(call, after), after), route.SSE)


async def _read_events(
    call: route.ApiCall[EventQuery, route.Nothing], after: int, wait_s: float = 0.0
) -> list[Event]:
    query = call.query
    return await call.control.events(after=after, limit=query.limit, wait_s=wait_s, task=query.task)


def _parse_last_event_id(call: route.ApiCall[EventQuery, route.Nothing]) -> int | None:
    header = call.request.headers.get("last-event-id")
    if header is None:
        return call.query.after
    if not (header.isascii() and header.isdigit()) or int(header) >= 1 << 63:
        msg = f"Last-Event-ID is {header[:40]!r}, must be the id of an event"
        raise Invalid(msg, field="last-event-id")
    return int(header)


async def _stream(
    call: route.ApiCall[EventQuery, route.Nothing], page: list[Event], after: int
) -> AsyncGenerator[bytes]:
    yield b": events\n\n"
    while True:
        for event in page:
            data = msgspec.json.encode(event)
            yield encode_event(data, event.kind, event.position)
            after = event.position
        page = await _read_events(call, after, call.waits.keep_alive_s)
        if not page:
            yield b": keep-alive\n\n"


# --------------------------------------------------------------------------- webhooks
@ROUTES.add("GET", "/v1/deliveries", route.READERS)
async def list_deliveries(call: route.ApiCall[DeliveryQuery, route.Nothing]) -> list[Delivery]:
    """List webhook deliveries and their states."""
    return await call.db.read(events.list_deliveries, **msgspec.structs.asdict(call.query))


@ROUTES.add("POST", "/v1/deliveries/{number}/retry", route.CLIENTS)
async def retry_delivery(call: route.ApiCall[route.Nothing, route.Nothing]) -> Delivery:
    """Send a webhook delivery again."""
    return await call.db.write(events.retry_delivery, int(call.id))


# --------------------------------------------------------------------------- the server
@ROUTES.add("GET", "/v1/status", route.READERS)
async def get_status(call: route.ApiCall[route.Nothing, route.Nothing]) -> Counts:
    """Count sessions, tasks and nodes."""
    return await call.db.read(stats.counts)


@ROUTES.add("GET", "/healthz", route.PUBLIC)
async def check_health(call: route.ApiCall[route.Nothing, route.Nothing]) -> Response:
    """Check whether the server can work."""
    await call.db.read(nodes.control)
    return Response(b'{"status":"ok"}', media_type=route.JSON)


@ROUTES.add("GET", "/metrics", route.READERS, media=(route.TEXT,))
async def get_metrics(call: route.ApiCall[route.Nothing, route.Nothing]) -> Response:
    """Get the metrics for Prometheus."""
    return Response(await call.metrics.page(), media_type=route.TEXT)
