"""Limits of the HTTP server, and garbage collection."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import resource
import weakref
from typing import Any

import pytest

from tugline.launch.garbage import managed_gc
from tugline.web.http import Http
from tugline.web.serve import raise_file_limit, serve

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def app(_scope: dict[str, Any], _receive: Any, send: Any) -> None:
    """Answers everything with ``ok``."""
    head = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
    await send(head)
    await send({"type": "http.response.body", "body": b"ok"})


async def talk(url: str, *parts: bytes) -> bytes:
    """Send `parts` on one connection and read what comes back until it is closed or silent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(400), 5)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("request_bytes", "reply"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", OK),
        (b"GET / HTTP/1.1\r\nHo", b""),
        (b"", b""),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 70_000, b"HTTP/1.1 431 "),
        (b"GET / HTTP/1.1\r\n" + b"A: %s\r\n" % (b"x" * 90) * 800 + b"\r\n", b"HTTP/1.1 431 "),
        (b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", OK),
        (b"\x16\x03\x01 not http\r\n\r\n", b"HTTP/1.1 400 "),
    ],
    ids=["whole", "half", "silence", "endless header", "many headers", "upgrade", "garbage"],
)
async def test_headers_are_bounded(request_bytes: bytes, reply: bytes) -> None:
    """Time and size have limits; an upgrade is served as an ordinary request."""
    async with serve(app, headers_timeout_s=0.3) as url:
        got = await talk(url, request_bytes)
    assert got.startswith(reply)
    assert bool(got) is bool(reply)


async def echo(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Responds with the length of the body and its digest."""
    body, more = b"", True
    while more:
        message = await receive()
        assert isinstance(message["body"], bytes)
        body, more = body + message["body"], message["more_body"]
    text = b"%d %b" % (len(body), hashlib.sha256(body).hexdigest().encode())
    await Http(scope, receive, send).reply(200, text)


BODY = bytes(range(256)) * 800


@pytest.mark.parametrize("size", [1, 7, 4096, len(BODY)])
async def test_chunked_bodies_are_received_whole(size: int) -> None:
    """Small parts, parts beyond the read-ahead, and one part give the same body."""
    parts = [BODY[at : at + size] for at in range(0, len(BODY), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with serve(echo) as url:
        got = await talk(url, head + chunks)
    assert got.endswith(b"%d %b" % (len(BODY), hashlib.sha256(BODY).hexdigest().encode()))


class Cycle:
    """An object that refers to itself, which only a garbage collection frees."""

    def __init__(self) -> None:
        self.me = self


async def test_old_cycles_are_collected_when_idle() -> None:
    """Old cycles, which ordinary collections leave out to stay short, are freed when idle."""
    collected, idle = asyncio.Event(), False
    callbacks = len(gc.callbacks)
    async with managed_gc(lambda: idle, every_s=0.001, full=1):
        ring = Cycle()
        reference = weakref.ref(ring, lambda _: collected.set())
        gc.collect(1)
        del ring
        gc.collect()
        await asyncio.sleep(0)
        assert reference() is not None
        idle = True
        async with asyncio.timeout(20):
            await collected.wait()
    assert len(gc.callbacks) == callbacks


def test_the_file_limit_is_raised_to_the_maximum() -> None:
    """The soft limit of open files becomes the hard one, since thousands of agents need it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 500), hard))
        assert raise_file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
