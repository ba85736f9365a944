"""Bytes between a connection from a sandbox and one to its target, and nothing else.

A `Relay` is what is behind one listening socket. It holds a bounded number of connections, each
with bounded buffers: a side that does not read makes the other one wait, and a program that opens
sockets without end gets the further ones reset. When one side has ended, the other is told so, and
its answer still comes through (a half-close). All of it is gone when the relay is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Self, cast

CONNECTIONS = 256
"""Of one relay at once."""
DIAL_S = 10.0
"""Seconds for a client to say where it wants to go and for the target to accept."""
HEAD = 32 << 10
"""Bytes that are taken from a client before it has a target."""


class Side(asyncio.Protocol):
    """One end of a connection: what it receives is written to its `other`."""

    def __init__(self) -> None:
        self.other: Side | None = None
        self.transport: asyncio.Transport
        self.ended = False
        """Whether it will say nothing more."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        if self.other is not None:
            self.other.transport.write(data)

    def eof_received(self) -> bool:
        """Pass the end on; stay open for what the other side still says."""
        self.ended = True
        if self.other is None:
            return True
        if not self.other.ended:
            self.other.transport.write_eof()
            return True
        self.other.transport.close()
        return False

    def pause_writing(self) -> None:
        """It does not keep up: the other side has to wait."""
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        """It has caught up."""
        if self.other is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, _error: Exception | None) -> None:
        """The other side ends once it has what was said."""
        if self.other is not None:
            self.other.transport.close()


class Caller(Side):
    """The end in the sandbox: what it says before it has a target is held."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay
        self.held = b""
        self.news = asyncio.Event()
        """Set when more is held, or nothing more will come."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Look for its target, if there is room."""
        super().connection_made(transport)
        self._relay.begin(self)

    def data_received(self, data: bytes) -> None:
        """Hold it, or pass it on."""
        if self.other is not None:
            self.other.transport.write(data)
            return
        self.held += data
        if len(self.held) >= HEAD:
            self.transport.pause_reading()
        self.news.set()

    def eof_received(self) -> bool:
        """As any side, and wake who reads."""
        self.news.set()
        return super().eof_received()

    def connection_lost(self, _error: Exception | None) -> None:
        """Make room for another one."""
        super().connection_lost(_error)
        self._relay.forget(self)

    async def until(self, mark: bytes) -> bytes:
        """What was said up to `mark` and with it, no longer held; `ValueError` if it never comes.

        Whoever calls this has a deadline of its own.
        """
        while mark not in self.held:
            if self.ended or len(self.held) >= HEAD:
                msg = "no such mark"
                raise ValueError(msg)
            self.news.clear()
            await self.news.wait()
        head, _, self.held = self.held.partition(mark)
        return head + mark


class _Target(Side):
    """The end at the target; made for a caller, and joined with it at once."""

    def __init__(self, caller: Caller, hello: bytes, first: bytes) -> None:
        super().__init__()
        self._caller, self._hello, self._first = caller, hello, first

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pass on what was held."""
        super().connection_made(transport)
        caller = self._caller
        if caller.transport.is_closing():
            self.transport.abort()
            return
        self.other, caller.other = caller, self
        caller.transport.write(self._hello)
        self.transport.write(self._first + caller.held)
        caller.held = b""
        if caller.ended:
            self.transport.write_eof()
        else:
            caller.transport.resume_reading()


async def join(
    caller: Caller, host: str, port: int, *, hello: bytes = b"", first: bytes = b""
) -> None:
    """Connect a caller with its target, which is told `first` first, as the caller is `hello`.

    Raises `OSError` when there is no such target.
    """
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: _Target(caller, hello, first), host, port)


Dial = Callable[[Caller], Awaitable[None]]
"""Finds a caller's target and joins them, or tells the caller why not and closes it."""


class Relay:
    """Serves the connections of one listening socket, which it owns from then on."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._callers: dict[Caller, asyncio.Task[None] | None] = {}
        self._server: asyncio.Server

    async def serve(self, listener: socket.socket) -> Self:
        """Begin to accept."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Caller(self), sock=listener)
        return self

    def begin(self, caller: Caller) -> None:
        """Somebody is there: dial, unless too many are."""
        if len(self._callers) >= CONNECTIONS:
            self._callers[caller] = None
            caller.transport.abort()
            return
        self._callers[caller] = asyncio.ensure_future(self._serve(caller))

    async def _serve(self, caller: Caller) -> None:
        try:
            async with asyncio.timeout(DIAL_S):
                await self._dial(caller)
        except (OSError, ValueError):  # also out of time
            caller.transport.abort()

    def forget(self, caller: Caller) -> None:
        """It is gone."""
        task = self._callers.pop(caller, None)
        if task is not None:
            task.cancel()

    async def aclose(self) -> None:
        """Accept no more and drop what is there."""
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
        await asyncio.sleep(0)  # where the transports let go of their sockets
