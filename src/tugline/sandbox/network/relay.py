"""Relay bytes between connections from a sandbox and their targets.

A `Relay` serves one listening socket. It holds a bounded number of connections with bounded
buffers: a side that does not read makes the other one wait, and connections over the limit are
reset. When one side has ended, the other is told so, and its response still comes through (a
half-close). Closing the relay drops all connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Self, cast

MAX_CONNECTIONS = 256
"""Of one relay at once."""
DIAL_S = 10.0
"""Seconds for a client to say where it wants to go and for the target to accept."""
MAX_HEAD = 32 << 10
"""Bytes that are read from a client before it has a target."""


class Side(asyncio.Protocol):
    """One end of a connection: what it receives is written to its `other`."""

    def __init__(self) -> None:
        self.other: Side | None = None
        self.transport: asyncio.Transport
        self.ended = False
        """Whether it will send nothing more."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        if self.other is not None:
            self.other.transport.write(data)

    def eof_received(self) -> bool:
        """Pass the end on; stay open for what the other side still sends."""
        self.ended = True
        if self.other is None:
            return True
        if not self.other.ended:
            self.other.transport.write_eof()
            return True
        self.other.transport.close()
        return False

    def pause_writing(self) -> None:
        """Make the other side wait, because this one does not keep up."""
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        """Let the other side go on."""
        if self.other is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, _error: Exception | None) -> None:
        """Close the other side once it has received everything."""
        if self.other is not None:
            self.other.transport.close()


class RelayClient(Side):
    """The end in the sandbox; what it sends before it has a target is buffered."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay
        self._buffer = b""
        self._changed = asyncio.Event()
        """Set when more is buffered, or nothing more will come."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Find its target, unless there are too many connections."""
        super().connection_made(transport)
        self._relay.begin(self)

    def data_received(self, data: bytes) -> None:
        """Buffer it, or pass it on."""
        if self.other is not None:
            self.other.transport.write(data)
            return
        self._buffer += data
        if len(self._buffer) >= MAX_HEAD:
            self.transport.pause_reading()
        self._changed.set()

    def take_buffer(self) -> bytes:
        """Return and clear what is buffered."""
        data, self._buffer = self._buffer, b""
        return data

    def eof_received(self) -> bool:
        """End like any side, and wake the reader."""
        self._changed.set()
        return super().eof_received()

    def connection_lost(self, _error: Exception | None) -> None:
        """Make room for another connection."""
        super().connection_lost(_error)
        self._relay.forget(self)

    async def read_until(self, mark: bytes) -> bytes:
        """Read up to `mark`, inclusive. Raises `ValueError` if it never comes.

        The caller sets a timeout.
        """
        while mark not in self._buffer:
            if self.ended or len(self._buffer) >= MAX_HEAD:
                msg = "no such mark"
                raise ValueError(msg)
            self._changed.clear()
            await self._changed.wait()
        head, _, self._buffer = self._buffer.partition(mark)
        return head + mark


class _Target(Side):
    """The end at the target, joined with its caller at once."""

    def __init__(self, caller: RelayClient, hello: bytes, first: bytes) -> None:
        super().__init__()
        self._caller, self._hello, self._first = caller, hello, first

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pass on what was buffered."""
        super().connection_made(transport)
        caller = self._caller
        if caller.transport.is_closing():
            self.transport.abort()
            return
        self.other, caller.other = caller, self
        caller.transport.write(self._hello)
        self.transport.write(self._first + caller.take_buffer())
        if caller.ended:
            self.transport.write_eof()
        else:
            caller.transport.resume_reading()


async def join(
    caller: RelayClient, host: str, port: int, *, hello: bytes = b"", first: bytes = b""
) -> None:
    """Connect a caller with its target; write `first` to the target and `hello` to the caller.

    Raises `OSError` when there is no such target.
    """
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: _Target(caller, hello, first), host, port)


Dial = Callable[[RelayClient], Awaitable[None]]
"""Connects a caller with its target, or reports an error to the caller and closes it."""


class Relay:
    """Serves the connections of one listening socket, which it owns from then on."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._callers: dict[RelayClient, asyncio.Task[None] | None] = {}
        self._server: asyncio.Server

    async def serve(self, listener: socket.socket) -> Self:
        """Begin to accept connections."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: RelayClient(self), sock=listener)
        return self

    def begin(self, caller: RelayClient) -> None:
        """Connect a new caller, unless there are too many."""
        if len(self._callers) >= MAX_CONNECTIONS:
            self._callers[caller] = None
            caller.transport.abort()
            return
        self._callers[caller] = asyncio.ensure_future(self._serve(caller))

    async def _serve(self, caller: RelayClient) -> None:
        try:
            async with asyncio.timeout(DIAL_S):
                await self._dial(caller)
        except (OSError, ValueError):  # also a timeout
            caller.transport.abort()

    def forget(self, caller: RelayClient) -> None:
        """Forget a closed connection."""
        task = self._callers.pop(caller, None)
        if task is not None:
            task.cancel()

    async def aclose(self) -> None:
        """Accept no more connections and drop the open ones."""
        self._server.close()
        tasks = [task for task in self._callers.values() if task is not None]
        for caller in self._callers:
            caller.transport.abort()
            if caller.other is not None:
                caller.other.transport.abort()
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the transports close their sockets in the next iteration
