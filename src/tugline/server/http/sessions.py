"""Sessions: looked at, cancelled, their logs and results; and what their nodes say of them.

A node speaks for the sessions that it holds. What it says of one that another node holds by now
is answered as any lost lease is (fencing), whatever epoch it names.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any

import msgspec
import numpy as np
import zstandard
from msgspec import Meta
from starlette.responses import Response

from tugline.errors import FencedError
from tugline.protocol import Cancelled, Commit, Page, Release, ResultView, SessionView
from tugline.server.checks import check_release
from tugline.server.http.problems import Refusal
from tugline.server.http.route import (
    CLIENTS,
    JSON,
    NODES,
    READERS,
    TEXT,
    ZSTD,
    Call,
    Cursor,
    Limit,
    Name,
    Nothing,
    Position,
    Route,
)
from tugline.server.http.tasks import By
from tugline.server.http.waiting import KEEP_ALIVE_S, Stream
from tugline.types import Status, Trajectory, decode

MAX_RESULT = 256 << 20
"""Bytes of a trajectory as its node sends it."""
MAX_UNPACKED = 1 << 30
"""Bytes of one that is told as JSON."""
MAX_CHUNK = 4 << 20
"""Bytes of log in one request."""


Epoch = Annotated[int, Meta(ge=0, le=2**31 - 1, description="Of the lease.")]


class SessionQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which sessions to list."""

    task: Name | None = None
    """Only those of this task."""
    status: Status | None = None
    """Only those in this state."""
    node: Annotated[str, Meta(max_length=160)] | None = None
    """Only those that this node holds."""
    after: Cursor | None = None
    limit: Limit = 100


class LogQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a log, and whether to stay."""

    offset: Position = 0
    """Byte to start at."""
    tail: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    """Start this many bytes before the end instead."""
    follow: bool = False
    """Go on until the session is over."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Which lease a node speaks of."""

    epoch: Epoch


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Where a piece of a log belongs."""

    epoch: Epoch
    offset: Position
    """Byte of the log at which it begins."""


class Length(msgspec.Struct, frozen=True):
    """Of a log, in bytes: where to go on."""

    length: int


# --------------------------------------------------------------------------- for clients
async def listed(call: Call[SessionQuery, Nothing]) -> Page:
    """List sessions, in the order of submission."""
    of = call.query
    return await call.control.sessions(
        task=of.task, status=of.status, node=of.node, after=of.after, limit=of.limit
    )


async def one(call: Call[Nothing, Nothing]) -> SessionView:
    """A session as it stands."""
    return await call.control.session(call.id)


async def cancel(call: Call[By, Nothing]) -> Cancelled:
    """Cancel a session."""
    return await call.control.cancel(session=call.id, by=call.query.by)


async def log(call: Call[LogQuery, Nothing]) -> Response:
    """What the agent wrote, as text; to the end of the session if followed."""
    of = call.query
    offset = of.offset if of.tail is None else -of.tail
    part = await call.control.read_log(call.id, offset=offset)
    start = {"tugline-offset": str(part.offset - len(part.data))}

    async def pieces() -> AsyncGenerator[bytes]:
        last = part
        while last.data or (of.follow and not last.ended):
            if last.data:
                yield last.data
            wait_s = KEEP_ALIVE_S if of.follow else 0.0
            last = await call.control.read_log(call.id, offset=last.offset, wait_s=wait_s)

    return Stream(pieces(), TEXT, call.waits, start)


async def result(call: Call[Nothing, Nothing]) -> ResultView:
    """A result without its tokens."""
    return await call.control.result(call.id)


async def trajectory(call: Call[Nothing, Nothing]) -> Response:
    """A trajectory: packed as it is kept, or as JSON."""
    media = call.accepts(ZSTD, JSON)
    data = await call.control.trajectory(call.id)
    told = await asyncio.to_thread(_as_json, data) if media == JSON else data
    return Response(told, media_type=media)


def _as_json(data: bytes) -> bytes:
    with zstandard.ZstdDecompressor().stream_reader(data) as reader:
        plain = reader.read(MAX_UNPACKED + 1)
    if len(plain) > MAX_UNPACKED:
        msg = f"this trajectory has over {MAX_UNPACKED} bytes; take it as {ZSTD}"
        raise Refusal(msg, "not-acceptable", known=(ZSTD,))
    return msgspec.json.encode(decode(plain, Trajectory), enc_hook=_listed)


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    msg = f"cannot tell {type(value).__name__} as JSON"
    raise NotImplementedError(msg)


# --------------------------------------------------------------------------- for nodes
async def commit(call: Call[Lease, bytes]) -> Commit:
    """Commit a result, once: a trajectory as zstd-compressed msgpack."""
    await _not_of_another(call)
    return await call.control.commit(call.id, call.query.epoch, call.body)


async def release(call: Call[Nothing, Release]) -> None:
    """Give a session back to the queue."""
    check_release(call.body)
    await _not_of_another(call)
    await call.control.release(call.id, call.body)


async def append(call: Call[Chunk, bytes]) -> Length:
    """Add to a session's log."""
    await _not_of_another(call)
    of = call.query
    return Length(await call.control.log(call.id, of.epoch, of.offset, call.body))


async def _not_of_another(call: Call[Any, Any]) -> None:
    holder = (await call.control.session(call.id)).node
    if holder not in {None, call.caller.node}:
        msg = f"session {call.id} is with another node by now"
        raise FencedError(msg)


_FENCED = ("fenced",)
ROUTES = (
    Route("GET", "/v1/sessions", READERS, listed),
    Route("GET", "/v1/sessions/{id}", READERS, one),
    Route("POST", "/v1/sessions/{id}/cancel", CLIENTS, cancel),
    Route("GET", "/v1/sessions/{id}/log", READERS, log, media=(TEXT,)),
    Route("POST", "/v1/sessions/{id}/log", NODES, append, problems=_FENCED, max_body=MAX_CHUNK),
    Route("GET", "/v1/sessions/{id}/result", READERS, result),
    Route("POST", "/v1/sessions/{id}/result", NODES, commit, problems=_FENCED, max_body=MAX_RESULT),
    Route("GET", "/v1/sessions/{id}/trajectory", READERS, trajectory, media=(ZSTD, JSON)),
    Route("POST", "/v1/sessions/{id}/release", NODES, release, statuses=(204,), problems=_FENCED),
)
