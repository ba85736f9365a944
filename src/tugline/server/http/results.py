"""Routes of results: a page, a line for each page, or a binary stream with the trajectories.

All three have the same `Results` in the same order, and `Results.cursor` is what a consumer
acknowledges. The binary stream is made of frames; a frame is a four-byte big-endian length and that
many bytes of msgpack (`Results`), followed by one such length and that many bytes of trajectory for
each of its items, where a length of 0 says that the session never ran.
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
    Routes,
    Wait,
)
from tugline.server.http.waiting import Stream
from tugline.server.store import results

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
async def list_results(call: Call[ResultQuery, Nothing]) -> Results | Response:
    """List results after a cursor: a page, lines, or frames with the trajectories."""
    media, query = call.accept(JSON, NDJSON, MSGPACK), call.query
    if media == JSON:
        page = _read(call, query.after, query.wait_s, query.consumer)
        return await (call.attend(page) if query.wait_s else page)
    first = await _read(call, query.after, 0.0, query.consumer)
    pieces = _lines(call, first) if media == NDJSON else _frames(call, first)
    return Stream(pieces, media, call.state.waits)


async def _read(
    call: Call[ResultQuery, Nothing],
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


async def _pages(call: Call[ResultQuery, Nothing], page: Results) -> AsyncGenerator[Results]:
    """`page` and what follows; empty ones keep a quiet stream alive."""
    wait_s = call.state.waits.keep_alive_s if call.query.follow else 0.0
    while page.items or page.groups or call.query.follow:
        yield page
        page = await _read(call, page.cursor, wait_s)


async def _lines(call: Call[ResultQuery, Nothing], first: Results) -> AsyncGenerator[bytes]:
    async for page in _pages(call, first):
        yield msgspec.json.encode(page) + b"\n"


async def _frames(call: Call[ResultQuery, Nothing], first: Results) -> AsyncGenerator[bytes]:
    async for page in _pages(call, first):
        yield _frame(msgspec.msgpack.encode(page))
        for item in page.items:
            yield _frame(await call.control.trajectory(item.session) if item.bytes else b"")


def _frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


@ROUTES.add("POST", "/v1/results/ack", CLIENTS)
async def acknowledge(call: Call[AckQuery, Ack]) -> Consumer:
    """Acknowledge results up to a cursor."""
    return await call.db.write(results.ack, call.query.consumer, call.body.cursor)


@ROUTES.add("GET", "/v1/consumers", READERS)
async def list_consumers(call: Call[Nothing, Nothing]) -> list[Consumer]:
    """List consumers and their positions."""
    return await call.db.read(results.list_consumers)
