"""Routes of results, events and webhook deliveries, and of the server itself.

Results come as a page, a line for each page, or a binary stream with the trajectories. All three
have the same `Results` in the same order, and `Results.cursor` is what a consumer acknowledges. The
binary stream is made of frames; a frame is a four-byte big-endian length and that many bytes of
msgpack (`Results`), followed by one such length and that many bytes of trajectory for each of its
items, where a length of 0 says that the session never ran.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from tugline.errors import Invalid, Missing
from tugline.protocol import Ack, Consumer, Counts, Delivery, DeliveryState, Event, Results
from tugline.server.http import openapi
from tugline.server.http.answers import EventStream
from tugline.server.http.route import (
    CLIENTS,
    JSON,
    MSGPACK,
    NDJSON,
    PUBLIC,
    READERS,
    SSE,
    TEXT,
    ApiCall,
    Limit,
    Name,
    Nothing,
    Position,
    Routes,
    Wait,
)
from tugline.server.store import events, nodes, results, stats
from tugline.web.sse import encode_event

ROUTES = Routes()


class ResultQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which results."""

    consumer: Name | None = None
    """Start after what this consumer has acknowledged."""
    after: Position | None = None
    """Start after this position instead."""
    limit: Limit = 100
    wait_s: Wait = 0.0
    task: Annotated[tuple[Name, ...], Meta(max_length=1000)] = ()
    """Only those of these tasks."""
    groups: bool = False
    """Whole groups, once they are released."""
    follow: bool = True
    """A stream continues when there are no more results yet."""


class AckQuery(msgspec.Struct, frozen=True):
    """Whose position."""

    consumer: Name
    """Name of the consumer, which it chooses itself."""


@ROUTES.add("GET", "/v1/results", READERS, media=(JSON, NDJSON, MSGPACK))
async def list_results(call: ApiCall[ResultQuery, Nothing]) -> Results | Response:
    """List results after a cursor: a page, lines, or frames with the trajectories."""
    media, query = call.accept(JSON, NDJSON, MSGPACK), call.query
    if media == JSON:
        page = _read_results(call, query.after, query.wait_s, query.consumer)
        return await (call.attend(page) if query.wait_s else page)
    first = await _read_results(call, query.after, 0.0, query.consumer)
    pieces = _lines(call, first) if media == NDJSON else _frames(call, first)
    return EventStream(pieces, media, call.state.waits)


async def _read_results(
    call: ApiCall[ResultQuery, Nothing],
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


async def _pages(call: ApiCall[ResultQuery, Nothing], page: Results) -> AsyncGenerator[Results]:
    """`page` and what follows; empty ones keep a quiet stream alive."""
    wait_s = call.state.waits.keep_alive_s if call.query.follow else 0.0
    while page.items or page.groups or call.query.follow:
        yield page
        page = await _read_results(call, page.cursor, wait_s)


async def _lines(call: ApiCall[ResultQuery, Nothing], first: Results) -> AsyncGenerator[bytes]:
    async for page in _pages(call, first):
        yield msgspec.json.encode(page) + b"\n"


async def _frames(call: ApiCall[ResultQuery, Nothing], first: Results) -> AsyncGenerator[bytes]:
    async for page in _pages(call, first):
        yield _frame(msgspec.msgpack.encode(page))
        for item in page.items:
            yield _frame(await call.control.trajectory(item.session) if item.bytes else b"")


def _frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


@ROUTES.add("POST", "/v1/results/ack", CLIENTS)
async def acknowledge(call: ApiCall[AckQuery, Ack]) -> Consumer:
    """Acknowledge results up to a cursor."""
    return await call.db.write(results.ack, call.query.consumer, call.body.cursor)


@ROUTES.add("GET", "/v1/consumers", READERS)
async def list_consumers(call: ApiCall[Nothing, Nothing]) -> list[Consumer]:
    """List consumers and their positions."""
    return await call.db.read(results.list_consumers)


# --------------------------------------------------------------------------- events
class EventQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which events."""

    after: Position | None = None
    """Start after this position; a page starts at the first event, a stream with new ones."""
    limit: Limit = 100
    wait_s: Wait = 0.0
    task: Name | None = None
    """Only those of this task."""


class DeliveryQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which deliveries."""

    state: DeliveryState | None = None
    """Only those in this state."""
    after: Position = 0
    """Start after this id."""
    limit: Limit = 100


@ROUTES.add("GET", "/v1/events", READERS, media=(JSON, SSE))
async def list_events(call: ApiCall[EventQuery, Nothing]) -> list[Event] | Response:
    """List events after a position: a page, or server-sent events."""
    query = call.query
    if call.accept(JSON, SSE) == JSON:
        page = _read_events(call, query.after or 0, query.wait_s)
        return await (call.attend(page) if query.wait_s else page)
    after = _parse_last_event_id(call)
    if after is None:
        after = await call.db.read(events.latest)
    return EventStream(_stream(call, await _read_events(call, after), after), SSE, call.state.waits)


async def _read_events(
    call: ApiCall[EventQuery, Nothing], after: int, wait_s: float = 0.0
) -> list[Event]:
    query = call.query
    return await call.control.events(after=after, limit=query.limit, wait_s=wait_s, task=query.task)


def _parse_last_event_id(call: ApiCall[EventQuery, Nothing]) -> int | None:
    header = call.request.headers.get("last-event-id")
    if header is None:
        return call.query.after
    if not (header.isascii() and header.isdigit()) or int(header) >= 1 << 63:
        msg = f"Last-Event-ID is {header[:40]!r}, must be the id of an event"
        raise Invalid(msg, field="last-event-id")
    return int(header)


async def _stream(
    call: ApiCall[EventQuery, Nothing], page: list[Event], after: int
) -> AsyncGenerator[bytes]:
    yield b": events\n\n"
    while True:
        for event in page:
            data = msgspec.json.encode(event)
            yield encode_event(data, event.kind, event.position)
            after = event.position
        page = await _read_events(call, after, call.state.waits.keep_alive_s)
        if not page:
            yield b": keep-alive\n\n"


# --------------------------------------------------------------------------- webhooks
@ROUTES.add("GET", "/v1/deliveries", READERS)
async def list_deliveries(call: ApiCall[DeliveryQuery, Nothing]) -> list[Delivery]:
    """List webhook deliveries and their states."""
    return await call.db.read(events.list_deliveries, **msgspec.structs.asdict(call.query))


@ROUTES.add("POST", "/v1/deliveries/{number}/retry", CLIENTS)
async def retry_delivery(call: ApiCall[Nothing, Nothing]) -> Delivery:
    """Send a webhook delivery again."""
    return await call.db.write(events.retry_delivery, int(call.id))


# --------------------------------------------------------------------------- the server
@ROUTES.add("GET", "/v1/status", READERS)
async def get_status(call: ApiCall[Nothing, Nothing]) -> Counts:
    """Count sessions, tasks and nodes."""
    return await call.db.read(stats.counts)


@ROUTES.add("GET", "/healthz", PUBLIC)
async def check_health(call: ApiCall[Nothing, Nothing]) -> Response:
    """Check whether the server can work."""
    await call.db.read(nodes.control)
    return Response(b'{"status":"ok"}', media_type=JSON)


@ROUTES.add("GET", "/metrics", READERS, media=(TEXT,), problems=("missing",))
async def get_metrics(call: ApiCall[Nothing, Nothing]) -> Response:
    """Get the metrics for Prometheus."""
    if call.state.metrics is None:
        msg = "this server has no metrics"
        raise Missing(msg)
    return Response(await call.state.metrics.page(), media_type=TEXT)


@ROUTES.add("GET", "/openapi.json", READERS)
async def get_document(call: ApiCall[Nothing, Nothing]) -> Response:
    """Get this document."""
    document = await asyncio.to_thread(openapi.document, call.state.routes)
    return Response(document, media_type=JSON)
