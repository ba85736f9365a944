"""The load generator: keep-alive connections that replay prebuilt sessions against one target.

If a connection is still busy when its next call is due, the latency of that call counts from its
due time, so that queueing behind a slow answer is included. Status and number of sampled tokens of
every answer are checked.
"""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from engine import BASE, PACED
from script import SAMPLED

DEADLINE_S = 60.0
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_CONTENT = re.compile(rb'"(?:reasoning_content|reasoning|content)": ?"[^"]|"token_id":')
_COUNT = re.compile(rb'"completion_tokens": ?%d\b' % SAMPLED)


class UnexpectedResponse(Exception):
    """A target returned an error, or another number of tokens than requested."""


@dataclass(slots=True)
class TimedResponse:
    """One response; times are seconds of the monotonic clock."""

    data: bytes
    sent: float
    first: float
    """When its first content arrived; 0 if it was not streamed."""
    done: float


class Connection(asyncio.Protocol):
    """One request at a time over one socket."""

    def __init__(self) -> None:
        self.lost = False
        self._parts: list[bytes] = []
        self._size = 0
        self._length = 0
        self._chunked = False
        self._first = 0.0
        self._stream = False
        self._waiter: asyncio.Future[float] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport for writing."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Collect until the answer is complete."""
        self._parts.append(data)
        self._size += len(data)
        if not self._length and not self._chunked:
            self._begin()
        if self._stream and not self._first and _CONTENT.search(data):
            self._first = time.monotonic()
        complete = data.endswith(b"0\r\n\r\n") if self._chunked else self._size >= self._length > 0
        if complete and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(time.monotonic())

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the call in progress, if any; the target may close idle connections."""
        self.lost = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(UnexpectedResponse(f"the target hung up: {exc}"))

    def _begin(self) -> None:
        start = b"".join(self._parts)
        end = start.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(start, 0, end)
        self._chunked = length is None
        self._length = end + 4 + int(length[1]) if length else 0

    async def ask(self, request: Sequence[bytes], *, stream: bool) -> TimedResponse:
        """Send a request and wait for the complete answer."""
        self._parts, self._size, self._length = [], 0, 0
        self._chunked, self._first, self._stream = False, 0.0, stream
        self._waiter = asyncio.get_running_loop().create_future()
        sent = time.monotonic()
        self._transport.write(b"".join(request))
        async with asyncio.timeout(DEADLINE_S):
            done = await self._waiter
        data = b"".join(self._parts)
        if not data.startswith(b"HTTP/1.1 200") or not _COUNT.search(data):
            raise UnexpectedResponse(data[:600].decode("utf-8", "replace"))
        return TimedResponse(data, sent, self._first, done)

    def close(self) -> None:
        """Close the socket."""
        self._waiter = None
        self._transport.close()


@dataclass(frozen=True)
class SessionAddress:
    """Where the calls of one session are sent."""

    path: str
    key: str = ""
    port: int = 0
    """0 means the target's port."""


@dataclass(frozen=True)
class Target:
    """The process to measure, and the requests to send to it."""

    name: str
    port: int
    bodies: Sequence[tuple[bytes, bytes]]
    turns: int
    """Number of calls in a session."""
    stream: bool
    paced: bool = False


class SessionClient:
    """A connection that plays one session after another; `next_session` gives their addresses."""

    def __init__(
        self, target: Target, number: int, next_session: Callable[[], SessionAddress]
    ) -> None:
        self.target, self._number, self._next_session = target, number, next_session
        self._connection: Connection
        self._address = SessionAddress("")
        self.turn = target.turns

    async def connect(self) -> None:
        """Open the connection."""
        loop = asyncio.get_running_loop()
        _, self._connection = await loop.create_connection(
            Connection, "127.0.0.1", self._address.port or self.target.port
        )

    def close(self) -> None:
        """Close it."""
        self._connection.close()

    async def advance(self, turns: int) -> None:
        """Play `turns` turns without pauses between them."""
        for _ in range(turns):
            await self.call(paced=False)

    async def call(self, *, paced: bool | None = None) -> TimedResponse:
        """Play the session's next turn."""
        if self._connection.lost:
            await self.connect()
        if self.turn == self.target.turns:
            before, self._address, self.turn = self._address, self._next_session(), 0
            if self._address.port not in {0, before.port}:
                self.close()
                await self.connect()
        target = self.target
        start, end = target.bodies[self.turn]
        spaced = target.paced if paced is None else paced
        number = BASE + PACED * spaced + 1000 * self._number + self.turn
        size = len(start) + len(end) + 6
        head = (
            f"POST {self._address.path} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            f"authorization: Bearer {self._address.key}\r\nuser-agent: bench\r\n"
            f"content-type: application/json\r\naccept: */*\r\ncontent-length: {size}\r\n\r\n"
        )
        self.turn += 1
        request = (head.encode(), start, b"%06d" % number, end)
        return await self._connection.ask(request, stream=target.stream)


async def closed_loop(clients: Sequence[SessionClient], calls: int) -> list[TimedResponse]:
    """Make `calls` calls with each client, one after another."""

    async def play(client: SessionClient) -> list[TimedResponse]:
        return [await client.call() for _ in range(calls)]

    return [answer for played in await asyncio.gather(*map(play, clients)) for answer in played]


async def open_loop(
    clients: Sequence[SessionClient], calls: int, rate: float, seed: int
) -> list[float]:
    """Make `calls` calls at a total of `rate` calls per second; return latencies in seconds."""
    rng = random.Random(seed)
    period = len(clients) / rate
    start = time.monotonic() + 0.02

    async def play(index: int, client: SessionClient) -> list[float]:
        latencies = []
        for k in range(-(-(calls - index) // len(clients))):
            due = start + (k + index / len(clients) + rng.uniform(0, 0.3)) * period
            early = due - time.monotonic()
            if early > 0:
                await asyncio.sleep(early)
            answer = await client.call()
            latencies.append(answer.done - (answer.sent if early > 0 else due))
        return latencies

    played = await asyncio.gather(*(play(i, client) for i, client in enumerate(clients)))
    return [latency for latencies in played for latency in latencies]
