"""Results: a page, a line for each page, or a binary stream with the trajectories in it.

All three tell the same `Results` in the same order, and in all three `Results.cursor` is what a
consumer acknowledges. The binary stream is made of frames; a frame is a four-byte big-endian
length and that many bytes of msgpack (`Results`), followed by one such length and that many bytes
of trajectory for each of its items, where a length of 0 says that the session never ran.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from tugline.protocol import Ack, Consumer, Results
from tugline.server.http.route import (
    CLIENTS,
    JSON,
    MSGPACK,
    NDJSON,
    READERS,
    Call,
    Limit,
    Name,
    Nothing,
    Position,
    Route,
    Wait,
)
from tugline.server.http.waiting import KEEP_ALIVE_S, Stream


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
    """A stream goes on when there is nothing more for now."""


class Who(msgspec.Struct, frozen=True):
    """Whose cursor."""

    consumer: Name
    """Its name, which it chooses itself."""


async def listed(call: Call[ResultQuery, Nothing]) -> Results | Response:
    """Results after a cursor: a page, lines, or frames with the trajectories."""
    media = call.accepts(JSON, NDJSON, MSGPACK)
    of = call.query
    if media == JSON:
        asking = call.control.results(
            consumer=of.consumer,
            after=of.after,
            limit=of.limit,
            wait_s=of.wait_s,
            tasks=of.task or None,
            groups=of.groups,
        )
        return await (call.attend(asking) if of.wait_s else asking)
    first = await call.control.results(
        consumer=of.consumer,
        after=of.after,
        limit=of.limit,
        tasks=of.task or None,
        groups=of.groups,
    )
    told = _lines(call, first) if media == NDJSON else _frames(call, first)
    return Stream(told, media, call.waits)


async def _pages(call: Call[ResultQuery, Nothing], page: Results) -> AsyncGenerator[Results]:
    """`page` and what follows; an empty one now and then says that the stream is alive."""
    of = call.query
    while True:
        if not (page.items or page.groups or of.follow):
            return
        yield page
        page = await call.control.results(
            after=page.cursor,
            limit=of.limit,
            wait_s=KEEP_ALIVE_S if of.follow else 0.0,
            tasks=of.task or None,
            groups=of.groups,
        )


async def _lines(call: Call[ResultQuery, Nothing], first: Results) -> AsyncGenerator[bytes]:
    async for page in _pages(call, first):
        yield msgspec.json.encode(page) + b"\n"


async def _frames(call: Call[ResultQuery, Nothing], first: Results) -> AsyncGenerator[bytes]:
    async for page in _pages(call, first):
        yield _framed(msgspec.msgpack.encode(page))
        for item in page.items:
            yield _framed(await call.control.trajectory(item.session) if item.bytes else b"")


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


async def ack(call: Call[Who, Ack]) -> Consumer:
    """Acknowledge results up to a cursor."""
    return await call.control.ack(call.query.consumer, call.body.cursor)


async def consumers(call: Call[Nothing, Nothing]) -> list[Consumer]:
    """Tell how far each consumer is."""
    return await call.control.consumers()


ROUTES = (
    Route("GET", "/v1/results", READERS, listed, media=(JSON, NDJSON, MSGPACK)),
    Route("POST", "/v1/results/ack", CLIENTS, ack),
    Route("GET", "/v1/consumers", READERS, consumers),
)
