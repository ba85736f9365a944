"""Routes of results, events and webhook deliveries, and of the server itself.

Results come as a page, a line for each page, or a binary stream with the trajectories. All three
have the same `Results` in the same order, and `Results.cursor` is what a consumer acknowledges. The
binary stream is made of frames; a frame is a four-byte big-endian length and that many bytes of
msgpack (`Results`), followed by one such length and that many bytes of trajectory for each of its
items, where a length of 0 says that the session never ran, or that its trajectory is lost.
"""

from collections.abc import AsyncGenerator

import msgspec
from msgspec.structs import replace
from starlette.responses import Response

from tugline import log, protocol
from tugline.errors import Invalid, Missing
from tugline.server.control import ControlPlane
from tugline.server.http import route
from tugline.server.store import events, nodes, results, stats
from tugline.web.sse import encode_event

ROUTES = route.Routes()
_log = log.get("server")


class AckQuery(msgspec.Struct, frozen=True):
    """Whose position."""

    consumer: protocol.Name
    """Name of the consumer, which it chooses itself."""


@ROUTES.add("GET", "/v1/results", route.READERS, media=(route.JSON, route.NDJSON, route.MSGPACK))
async def list_results(
    call: route.ApiCall[protocol.ResultQuery, route.Nothing],
) -> protocol.Results | Response:
    """List results after a cursor: a page, lines, or frames with the trajectories."""
    media, query = call.accept(route.JSON, route.NDJSON, route.MSGPACK), call.query
    if media == route.JSON:
        page = call.control.results(query)
        return await (call.attend(page) if query.wait_s else page)
    first = await call.control.results(replace(query, wait_s=0.0))
    pieces = _lines(call, first) if media == route.NDJSON else _frames(call, first)
    return call.stream(pieces, media)


async def _pages(
    call: route.ApiCall[protocol.ResultQuery, route.Nothing], page: protocol.Results
) -> AsyncGenerator[protocol.Results]:
    """`page` and what follows; empty ones keep a quiet stream alive."""
    query = replace(call.query, wait_s=call.waits.keep_alive_s if call.query.follow else 0.0)
    while page.items or page.groups or query.follow:
        yield page
        page = await call.control.results(replace(query, after=page.cursor))


async def _lines(
    call: route.ApiCall[protocol.ResultQuery, route.Nothing], first: protocol.Results
) -> AsyncGenerator[bytes]:
    async for page in _pages(call, first):
        yield msgspec.json.encode(page) + b"\n"


async def _frames(
    call: route.ApiCall[protocol.ResultQuery, route.Nothing], first: protocol.Results
) -> AsyncGenerator[bytes]:
    async for page in _pages(call, first):
        yield _frame(msgspec.msgpack.encode(page))
        for item in page.items:
            yield _frame(await _read_trajectory(call.control, item) if item.bytes else b"")


async def _read_trajectory(control: ControlPlane, item: protocol.ResultView) -> bytes:
    """Empty for one that is lost or damaged: what follows it can still be read."""
    try:
        return await control.trajectory(item.session)
    except Missing as error:
        _log.error("result lost", session=item.session, error=str(error))
        return b""


def _frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


@ROUTES.add("POST", "/v1/results/ack", route.CLIENTS)
async def acknowledge(call: route.ApiCall[AckQuery, protocol.Ack]) -> protocol.Consumer:
    """Acknowledge results up to a cursor."""
    return await call.db.write(results.ack, call.query.consumer, call.body.cursor)


@ROUTES.add("GET", "/v1/consumers", route.READERS)
async def list_consumers(call: route.PlainCall) -> list[protocol.Consumer]:
    """List consumers and their positions."""
    return await call.db.read(results.list_consumers)


@ROUTES.add("DELETE", "/v1/consumers/{id}", route.CLIENTS)
async def delete_consumer(call: route.PlainCall) -> None:
    """Forget a consumer, so that retention no longer waits for it."""
    await call.db.write(results.delete_consumer, call.id)


# --------------------------------------------------------------------------- events
@ROUTES.add("GET", "/v1/events", route.READERS, media=(route.JSON, route.SSE))
async def list_events(
    call: route.ApiCall[protocol.EventQuery, route.Nothing],
) -> list[protocol.Event] | Response:
    """List events after a position: a page, or server-sent events."""
    query = call.query
    if call.accept(route.JSON, route.SSE) == route.JSON:
        page = call.control.events(query)
        return await (call.attend(page) if query.wait_s else page)
    after = _parse_last_event_id(call)
    if after is None:
        after = await call.db.read(events.latest)
    query = replace(query, after=after, wait_s=0.0)
    return call.stream(_stream(call, await call.control.events(query), after), route.SSE)


def _parse_last_event_id(call: route.ApiCall[protocol.EventQuery, route.Nothing]) -> int | None:
    header = call.request.headers.get("last-event-id")
    if header is None:
        return call.query.after
    if not (header.isascii() and header.isdigit()) or int(header) >= 1 << 63:
        msg = f"Last-Event-ID is {header[:40]!r}, must be the id of an event"
        raise Invalid(msg, field="last-event-id")
    return int(header)


async def _stream(
    call: route.ApiCall[protocol.EventQuery, route.Nothing], page: list[protocol.Event], after: int
) -> AsyncGenerator[bytes]:
    yield b": events\n\n"
    while True:
        for event in page:
            data = msgspec.json.encode(event)
            yield encode_event(data, event.kind, event.position)
            after = event.position
        query = replace(call.query, after=after, wait_s=call.waits.keep_alive_s)
        page = await call.control.events(query)
        if not page:
            yield b": keep-alive\n\n"


# --------------------------------------------------------------------------- webhooks
@ROUTES.add("GET", "/v1/deliveries", route.READERS)
async def list_deliveries(
    call: route.ApiCall[protocol.DeliveryQuery, route.Nothing],
) -> list[protocol.Delivery]:
    """List webhook deliveries and their states."""
    return await call.db.read(events.list_deliveries, call.query)


@ROUTES.add("POST", "/v1/deliveries/{number}/retry", route.CLIENTS)
async def retry_delivery(call: route.PlainCall) -> protocol.Delivery:
    """Send a webhook delivery again."""
    return await call.db.write(events.retry_delivery, int(call.id))


# --------------------------------------------------------------------------- the server
@ROUTES.add("GET", "/v1/status", route.READERS)
async def get_status(call: route.PlainCall) -> protocol.Counts:
    """Count sessions, tasks and nodes."""
    return await call.db.read(stats.counts)


@ROUTES.add("GET", "/healthz", route.PUBLIC)
async def check_health(call: route.PlainCall) -> Response:
    """Check whether the server can work."""
    await call.db.read(nodes.control)
    return Response(b'{"status":"ok"}', media_type=route.JSON)


@ROUTES.add("GET", "/metrics", route.READERS, media=(route.TEXT,))
async def get_metrics(call: route.PlainCall) -> Response:
    """Get the metrics for Prometheus."""
    return Response(await call.metrics.page(), media_type=route.TEXT)
