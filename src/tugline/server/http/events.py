"""Events to follow, and the callbacks that are on their way or given up."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
from starlette.responses import Response

from tugline.errors import Invalid
from tugline.protocol import Delivery, DeliveryState, Event
from tugline.server.http.route import (
    CLIENTS,
    JSON,
    READERS,
    SSE,
    Call,
    Limit,
    Name,
    Nothing,
    Position,
    Route,
    Wait,
)
from tugline.server.http.waiting import KEEP_ALIVE_S, Stream


class EventQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which events."""

    after: Position | None = None
    """Start after this position; a page starts at the first event, a stream with what is new."""
    limit: Limit = 100
    wait_s: Wait = 0.0
    task: Name | None = None
    """Only those of this task."""


class DeliveryQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which callbacks."""

    state: DeliveryState | None = None
    """Only those that are so far."""
    after: Position = 0
    """Start after this id."""
    limit: Limit = 100


async def listed(call: Call[EventQuery, Nothing]) -> list[Event] | Response:
    """Tell what happened after a position: a page, or server-sent events."""
    of, control = call.query, call.control
    if call.accepts(JSON, SSE) == JSON:
        asking = control.events(after=of.after or 0, limit=of.limit, wait_s=of.wait_s, task=of.task)
        return await (call.attend(asking) if of.wait_s else asking)
    after = _last_seen(call)
    if after is None:
        after = (await control.counts()).position
    first = await control.events(after=after, limit=of.limit, task=of.task)
    return Stream(_told(call, first, after), SSE, call.waits)


def _last_seen(call: Call[EventQuery, Nothing]) -> int | None:
    seen = call.request.headers.get("last-event-id")
    if seen is None:
        return call.query.after
    if not (seen.isascii() and seen.isdigit()) or int(seen) >= 1 << 63:
        msg = f"Last-Event-ID is {seen[:40]!r}, must be the id of an event"
        raise Invalid(msg, field="last-event-id")
    return int(seen)


async def _told(
    call: Call[EventQuery, Nothing], page: list[Event], after: int
) -> AsyncGenerator[bytes]:
    of = call.query
    yield b": events\n\n"
    while True:
        for event in page:
            data = msgspec.json.encode(event)
            yield b"id: %d\nevent: %b\ndata: %b\n\n" % (event.position, event.kind.encode(), data)
            after = event.position
        page = await call.control.events(
            after=after, limit=of.limit, wait_s=KEEP_ALIVE_S, task=of.task
        )
        if not page:
            yield b": still here\n\n"


async def deliveries(call: Call[DeliveryQuery, Nothing]) -> list[Delivery]:
    """List callbacks and how far they are."""
    of = call.query
    return await call.control.deliveries(state=of.state, after=of.after, limit=of.limit)


async def retry(call: Call[Nothing, Nothing]) -> Delivery:
    """Send a callback again."""
    return await call.control.redeliver(int(call.id))


ROUTES = (
    Route("GET", "/v1/events", READERS, listed, media=(JSON, SSE)),
    Route("GET", "/v1/deliveries", READERS, deliveries),
    Route("POST", "/v1/deliveries/{number}/retry", CLIENTS, retry),
)
