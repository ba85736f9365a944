"""The engine's end of a connection, played by a test byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple


class Peer(NamedTuple):
    """The engine's end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    number: int
    """Of the connection, from 1."""

    async def next_request(self) -> bytes:
        """Read the head of one."""
        return await self.reader.readuntil(b"\r\n\r\n")

    async def send(self, data: bytes) -> None:
        """Send at once."""
        self.writer.write(data)
        await self.writer.drain()


@contextlib.asynccontextmanager
async def listen(handle: Callable[[Peer], Awaitable[None]]) -> AsyncIterator[str]:
    """The URL of a server that does with each connection what `handle` does, and closes it."""
    served: list[asyncio.Task[None]] = []

    async def serve(peer: Peer) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await handle(peer)
        peer.writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.create_task(serve(Peer(reader, writer, len(served) + 1))))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    async with asyncio.timeout(5):
        await asyncio.gather(*served)
