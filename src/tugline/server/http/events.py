"""Routes of events, of webhook deliveries, and of the server itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
from starlette.responses import Response

from tugline.errors import Invalid, Missing
from tugline.protocol import Counts, Delivery, DeliveryState, Event
from tugline.server.http import openapi
from tugline.server.http.route import (
    CLIENTS,
    JSON,
    PUBLIC,
    READERS,
    SSE,
    TEXT,
    Call,
    Limit,
    Name,
    Nothing,
    Position,
    Routes,
    Wait,
)
from tugline.server.http.waiting import Stream
from tugline.server.store import events, nodes, outbox, stats
from tugline.web.sse import encode_event

ROUTES = Routes()


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


# --------------------------------------------------------------------------- events
@ROUTES.add("GET", "/v1/events", READERS, media=(JSON, SSE))
async def list_events(call: Call[EventQuery, Nothing]) -> list[Event] | Response:
    """List events after a position: a page, or server-sent events."""
    query = call.query
    if call.accept(JSON, SSE) == JSON:
        page = _read(call, query.after or 0, query.wait_s)
        return await (call.attend(page) if query.wait_s else page)
    after = _parse_last_event_id(call)
    if after is None:
        after = await call.db.read(events.latest)
    return Stream(_stream(call, await _read(call, after), after), SSE, call.state.waits)


async def _read(call: Call[EventQuery, Nothing], after: int, wait_s: float = 0.0) -> list[Event]:
    query = call.query
    return await call.control.events(after=after, limit=query.limit, wait_s=wait_s, task=query.task)


def _parse_last_event_id(call: Call[EventQuery, Nothing]) -> int | None:
    header = call.request.headers.get("last-event-id")
    if header is None:
        return call.query.after
    if not (header.isascii() and header.isdigit()) or int(header) >= 1 << 63:
        msg = f"Last-Event-ID is {header[:40]!r}, must be the id of an event"
        raise Invalid(msg, field="last-event-id")
    return int(header)


async def _stream(
    call: Call[EventQuery, Nothing], page: list[Event], after: int
) -> AsyncGenerator[bytes]:
    yield b": events\n\n"
    while True:
        for event in page:
            data = msgspec.json.encode(event)
            yield encode_event(data, event.kind, event.position)
            after = event.position
        page = await _read(call, after, call.state.waits.keep_alive_s)
        if not page:
            yield b": keep-alive\n\n"


# --------------------------------------------------------------------------- webhooks
@ROUTES.add("GET", "/v1/deliveries", READERS)
async def list_deliveries(call: Call[DeliveryQuery, Nothing]) -> list[Delivery]:
    """List webhook deliveries and their states."""
    return await call.db.read(outbox.page, **msgspec.structs.asdict(call.query))


@ROUTES.add("POST", "/v1/deliveries/{number}/retry", CLIENTS)
async def retry_delivery(call: Call[Nothing, Nothing]) -> Delivery:
    """Send a webhook delivery again."""
    return await call.db.write(outbox.retry, int(call.id))


# --------------------------------------------------------------------------- the server
@ROUTES.add("GET", "/v1/status", READERS)
async def get_status(call: Call[Nothing, Nothing]) -> Counts:
    """Count sessions, tasks and nodes."""
    return await call.db.read(stats.counts)


@ROUTES.add("GET", "/healthz", PUBLIC)
async def check_health(call: Call[Nothing, Nothing]) -> Response:
    """Check whether the server can work."""
    await call.db.read(nodes.control)
    return Response(b'{"status":"ok"}', media_type=JSON)


@ROUTES.add("GET", "/metrics", READERS, media=(TEXT,), problems=("missing",))
async def get_metrics(call: Call[Nothing, Nothing]) -> Response:
    """Get the metrics for Prometheus."""
    if call.state.metrics is None:
        msg = "this server has no metrics"
        raise Missing(msg)
    return Response(await call.state.metrics.page(), media_type=TEXT)


@ROUTES.add("GET", "/openapi.json", READERS)
async def get_document(call: Call[Nothing, Nothing]) -> Response:
    """Get this document."""
    document = await asyncio.to_thread(openapi.document, call.state.routes)
    return Response(document, media_type=JSON)
