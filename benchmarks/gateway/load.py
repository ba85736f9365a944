"""The load generator: keep-alive connections that play prebuilt sessions against one target.

Where a connection is still busy when its next call is due, latency is counted from that moment, so
a slow answer is not forgiven the calls that wait behind it. Every answer is checked for its status
and its number of sampled tokens.
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


class WrongAnswer(Exception):
    """A target answered something else than was asked for."""


@dataclass(slots=True)
class Answer:
    """One reply; times are seconds of the monotonic clock."""

    data: bytes
    sent: float
    first: float
    """When the first content of it came; only looked for in streams."""
    done: float


class Connection(asyncio.Protocol):
    """One request at a time over one socket."""

    def __init__(self) -> None:
        self.lost = False
        self._parts: list[bytes] = []
        self._size = 0
        self._whole = 0
        self._chunked = False
        self._first = 0.0
        self._stream = False
        self._waiter: asyncio.Future[float] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep it for writing."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Collect until the answer is whole."""
        self._parts.append(data)
        self._size += len(data)
        if not self._whole and not self._chunked:
            self._begin()
        if self._stream and not self._first and _CONTENT.search(data):
            self._first = time.monotonic()
        over = data.endswith(b"0\r\n\r\n") if self._chunked else self._size >= self._whole > 0
        if over and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(time.monotonic())

    def connection_lost(self, exc: Exception | None) -> None:
        """Idle connections may be closed; a call that was under way is an error."""
        self.lost = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(WrongAnswer(f"the target hung up: {exc}"))

    def _begin(self) -> None:
        start = b"".join(self._parts)
        end = start.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(start, 0, end)
        self._chunked = length is None
        self._whole = end + 4 + int(length[1]) if length else 0

    async def ask(self, request: Sequence[bytes], *, stream: bool) -> Answer:
        """Send a request and wait for all of its answer."""
        self._parts, self._size, self._whole = [], 0, 0
        self._chunked, self._first, self._stream = False, 0.0, stream
        self._waiter = asyncio.get_running_loop().create_future()
        sent = time.monotonic()
        self._transport.write(b"".join(request))
        async with asyncio.timeout(DEADLINE_S):
            done = await self._waiter
        data = b"".join(self._parts)
        if not data.startswith(b"HTTP/1.1 200") or not _COUNT.search(data):
            raise WrongAnswer(data[:600].decode("utf-8", "replace"))
        return Answer(data, sent, self._first, done)

    def close(self) -> None:
        """Hang up."""
        self._waiter = None
        self._transport.close()


@dataclass(frozen=True)
class Place:
    """Where the calls of one session go."""

    path: str
    key: str = ""
    port: int = 0
    """0: that of the target."""


@dataclass(frozen=True)
class Target:
    """What is measured, and how it is asked."""

    name: str
    port: int
    bodies: Sequence[tuple[bytes, bytes]]
    turns: int
    """Calls of a session."""
    stream: bool
    paced: bool = False


class Seat:
    """One connection, and the session that it is in; `fresh` gives it the next one."""

    def __init__(self, target: Target, number: int, fresh: Callable[[], Place]) -> None:
        self.target, self._number, self._fresh = target, number, fresh
        self._connection: Connection
        self._place = Place("")
        self.turn = target.turns

    async def connect(self) -> None:
        """Open the connection."""
        loop = asyncio.get_running_loop()
        _, self._connection = await loop.create_connection(
            Connection, "127.0.0.1", self._place.port or self.target.port
        )

    def close(self) -> None:
        """Close it."""
        self._connection.close()

    async def advance(self, turns: int) -> None:
        """Play `turns` turns as fast as they are answered."""
        for _ in range(turns):
            await self.call(paced=False)

    async def call(self, *, paced: bool | None = None) -> Answer:
        """The session's next turn."""
        if self._connection.lost:
            await self.connect()
        if self.turn == self.target.turns:
            before, self._place, self.turn = self._place, self._fresh(), 0
            if self._place.port not in {0, before.port}:
                self.close()
                await self.connect()
        target = self.target
        start, end = target.bodies[self.turn]
        spaced = target.paced if paced is None else paced
        number = BASE + PACED * spaced + 1000 * self._number + self.turn
        size = len(start) + len(end) + 6
        head = (
            f"POST {self._place.path} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            f"authorization: Bearer {self._place.key}\r\nuser-agent: bench\r\n"
            f"content-type: application/json\r\naccept: */*\r\ncontent-length: {size}\r\n\r\n"
        )
        self.turn += 1
        request = (head.encode(), start, b"%06d" % number, end)
        return await self._connection.ask(request, stream=target.stream)


async def closed_loop(seats: Sequence[Seat], calls: int) -> list[Answer]:
    """Every seat makes `calls` calls, one after the other."""

    async def play(seat: Seat) -> list[Answer]:
        return [await seat.call() for _ in range(calls)]

    return [answer for played in await asyncio.gather(*map(play, seats)) for answer in played]


async def open_loop(seats: Sequence[Seat], calls: int, rate: float, seed: int) -> list[float]:
    """`calls` calls in all at a fixed total `rate` a second; their latencies in seconds."""
    draw = random.Random(seed)
    period = len(seats) / rate
    start = time.monotonic() + 0.02

    async def play(index: int, seat: Seat) -> list[float]:
        latencies = []
        for k in range(-(-(calls - index) // len(seats))):
            due = start + (k + index / len(seats) + draw.uniform(0, 0.3)) * period
            early = due - time.monotonic()
            if early > 0:
                await asyncio.sleep(early)
            answer = await seat.call()
            latencies.append(answer.done - (answer.sent if early > 0 else due))
        return latencies

    played = await asyncio.gather(*(play(i, seat) for i, seat in enumerate(seats)))
    return [latency for latencies in played for latency in latencies]
