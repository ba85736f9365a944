"""Handlers of results, events and webhook deliveries, and of the server's own state."""

from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
from msgspec.structs import replace
from starlette.responses import FileResponse, Response

from tugline import protocol
from tugline.server.http import route
from tugline.server.store import events, nodes, results, stats, tasks
from tugline.web.sse import encode_event

ROUTES = route.Routes()


# --------------------------------------------------------------------------- results
class AckQuery(msgspec.Struct, frozen=True):
    """Parameters of an acknowledgement."""

    consumer: protocol.Name
    """Name of the consumer, chosen by the consumer."""


@ROUTES.add("GET", "/v1/results", route.READERS)
async def list_results(call: route.QueryCall[protocol.ResultQuery]) -> protocol.Results:
    """List results after a cursor."""
    page = call.control.results(call.query)
    return await (call.attend(page) if call.query.wait_s else page)


@ROUTES.add("POST", "/v1/results/ack", route.CLIENTS, audited=False)
async def acknowledge(call: route.ApiCall[AckQuery, protocol.Ack]) -> protocol.Consumer:
    """Acknowledge results up to a cursor."""
    own = call.caller.check_name("consumer", call.query.consumer)
    return await call.db.write(results.ack, own, call.body.cursor)


@ROUTES.add("GET", "/v1/consumers", route.READERS)
async def list_consumers(call: route.PlainCall) -> list[protocol.Consumer]:
    """List consumers and their positions."""
    return await call.db.read(results.list_consumers)


@ROUTES.add("DELETE", "/v1/consumers/{id}", route.CLIENTS, shared=True)
async def delete_consumer(call: route.PlainCall) -> None:
    """Delete a consumer, so that retention no longer waits for it."""
    await call.db.write(results.delete_consumer, call.id)


# --------------------------------------------------------------------------- events
@ROUTES.add("GET", "/v1/events", route.READERS)
async def list_events(
    call: route.QueryCall[protocol.EventQuery],
) -> list[protocol.Event] | Response:
    """List events after a position: a page, or server-sent events."""
    query = call.query
    if call.accept(route.JSON, route.SSE) == route.JSON:
        page = call.control.events(query)
        return await (call.attend(page) if query.wait_s else page)
    after = await call.db.read(events.latest) if query.after is None else query.after
    query = replace(query, after=after, wait_s=0.0)
    return call.stream(_stream(call, await call.control.events(query), after), route.SSE)


async def _stream(
    call: route.QueryCall[protocol.EventQuery], page: list[protocol.Event], after: int
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
async def list_deliveries(call: route.QueryCall[protocol.DeliveryQuery]) -> list[protocol.Delivery]:
    """List webhook deliveries and their states."""
    return await call.db.read(events.list_deliveries, call.query)


@ROUTES.add("POST", "/v1/deliveries/{number}/retry", route.CLIENTS, find_owner=tasks.of_delivery)
async def retry_delivery(call: route.PlainCall) -> protocol.Delivery:
    """Send a webhook delivery again."""
    return await call.db.write(events.retry_delivery, int(call.id))


# --------------------------------------------------------------------------- the server
@ROUTES.add("GET", "/v1/status", route.READERS)
async def get_status(call: route.QueryCall[protocol.StatusQuery]) -> protocol.Counts:
    """Count sessions, tasks and nodes."""
    counts = await call.db.read(stats.detailed_counts if call.query.details else stats.counts)
    local = call.metrics.nodes
    return replace(
        counts,
        engines={url: up for node in local for url, up in node.engines.items()},
        disk_low=any(node.disk_low for node in local),
    )


@ROUTES.add("GET", "/healthz", route.PUBLIC)
async def check_health(call: route.PlainCall) -> Response:
    """Check the server and its store."""
    await call.db.read(nodes.control)
    return Response(b'{"status":"ok"}', media_type=route.JSON)


@ROUTES.add("GET", "/openapi.json", route.READERS)
async def get_openapi(call: route.PlainCall) -> Response:  # noqa: ARG001 - as every handler
    """Get this API as an OpenAPI document."""
    return FileResponse(Path(__file__).with_name("openapi.json"), media_type=route.JSON)


@ROUTES.add("GET", "/metrics", route.READERS)
async def get_metrics(call: route.PlainCall) -> Response:
    """Get the metrics for Prometheus."""
    return Response(await call.metrics.page(), media_type=route.TEXT)
