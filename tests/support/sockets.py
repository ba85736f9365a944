"""Servers on this machine that a test plays connection by connection, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Peer(NamedTuple):
    """A connection from the server's end."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    number: int
    """Of the connection, from 1."""

    async def next_request(self) -> bytes:
        """Read the head of a request."""
        return await self.reader.readuntil(b"\r\n\r\n")

    async def send(self, data: bytes) -> None:
        """Send at once."""
        self.writer.write(data)
        await self.writer.drain()


@contextlib.asynccontextmanager
async def serve(handle: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The port of a server that handles each connection and closes it."""
    connections: list[asyncio.Task[None]] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())  # type: ignore[arg-type]
        with contextlib.closing(writer), contextlib.suppress(OSError, EOFError):
            await handle(reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    yield server.sockets[0].getsockname()[1]
    server.close()
    async with asyncio.timeout(20):
        await asyncio.gather(*connections)


@contextlib.asynccontextmanager
async def listen(handle: Callable[[Peer], Awaitable[None]]) -> AsyncIterator[str]:
    """The URL of such a server, whose connections are numbered."""
    numbers = itertools.count(1)
    async with serve(lambda *streams: handle(Peer(*streams, next(numbers)))) as port:
        yield f"http://127.0.0.1:{port}"
