"""Slow, endless and malformed requests hold a socket for a moment only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tugline.web.serve import serve

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answers everything with ``ok``."""
    if scope["type"] == "lifespan":
        for stage in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{stage}.complete"})
        return
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
async def test_what_a_connection_gets(request_bytes: bytes, reply: bytes) -> None:
    """Headers have a deadline and a bound; an upgrade is an ordinary request to the app."""
    async with serve(app, headers_timeout_s=0.3) as url:
        got = await talk(url, request_bytes)
    assert got.startswith(reply)
    assert bool(got) is bool(reply)
