"""The server itself: is it well, how much is there to do, what does it speak."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from tugline.errors import Missing
from tugline.protocol import Counts
from tugline.server.http.route import JSON, READERS, TEXT, Call, Nothing, Route


async def health(call: Call[Nothing, Nothing]) -> Response:
    """Say whether the server can work."""
    await call.control.control()
    return Response(b'{"status":"ok"}', media_type=JSON)


async def status(call: Call[Nothing, Nothing]) -> Counts:
    """Count everything."""
    return await call.control.counts()


async def metrics(call: Call[Nothing, Nothing]) -> Response:
    """Tell Prometheus."""
    if call.house.metrics is None:
        msg = "this server keeps no metrics"
        raise Missing(msg)
    return Response(await call.house.metrics.page(), media_type=TEXT)


async def document(call: Call[Nothing, Nothing]) -> Response:
    """Give this document."""
    return Response(await asyncio.to_thread(call.house.document), media_type=JSON)


ROUTES = (
    Route("GET", "/v1/status", READERS, status),
    Route("GET", "/healthz", frozenset(), health),
    Route("GET", "/metrics", READERS, metrics, media=(TEXT,), problems=("missing",)),
    Route("GET", "/openapi.json", READERS, document),
)
