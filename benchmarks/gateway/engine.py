"""The stub engine: sends the responses made by `replies` immediately, from memory.

A request's ``max_tokens`` encodes the turn (its three lowest digits) and whether the stream is
paced. Proxies forward it unchanged, so the stub needs no knowledge of sessions. It prints
``{"port": N}`` when it is up. ``GET /times`` returns and clears the times at which the first
visible token of each stream was written (seconds of the monotonic clock).

    python engine.py REPLIES_FILE
"""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from pathlib import Path
from typing import cast

import msgspec
import uvloop
from replies import INTERVAL, Replies, Streamed

WINDOW = 2_000_000
PACED = 500_000
"""Added to `BASE` in ``max_tokens`` to request a paced stream."""
BASE = 100_000
SPACING_S = 0.0015

_NUMBER = re.compile(rb'"max_(?:completion_)?tokens": ?(\d{6})')
_STREAM = re.compile(rb'"stream": ?true')
_COARSE = re.compile(rb'"stream_interval": ?%d\b' % INTERVAL)
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_MODELS = {"object": "list", "data": [{"id": "stub", "object": "model", "max_model_len": WINDOW}]}


class Engine(asyncio.Protocol):
    """One connection."""

    def __init__(self, replies: dict[str, Replies], times: list[float]) -> None:
        self._replies, self._times = replies, times
        self._buffer = bytearray()
        self._needed = 0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport for writing."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Answer every complete request."""
        self._buffer += data
        while len(self._buffer) >= max(self._needed, 4):
            if not self._needed:
                end = self._buffer.find(b"\r\n\r\n")
                if end < 0:
                    return
                length = _LENGTH.search(self._buffer, 0, end)
                self._needed = end + 4 + (int(length[1]) if length else 0)
                continue
            request = bytes(self._buffer[: self._needed])
            del self._buffer[: self._needed]
            self._needed = 0
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        path = request[: request.index(b"\r\n")].split(b" ")[1].decode()
        if path == "/times":
            self._json(self._times)
            self._times.clear()
        elif path in self._replies:
            self._sample(self._replies[path], request)
        else:
            self._json(_MODELS)

    def _sample(self, replies: Replies, request: bytes) -> None:
        match = _NUMBER.search(request, request.index(b"\r\n\r\n"))
        if match is None:
            self._json({"error": {"message": "the request has no six-digit max_tokens"}})
            return
        number = int(match[1]) - BASE
        turn = number % 1000
        ends = request[:2000], request[-20_000:]
        if not any(map(_STREAM.search, ends)):
            self._transport.write(replies.whole[turn])
        elif any(map(_COARSE.search, ends)):
            streamed = replies.coarse[turn]
            self._transport.write(b"".join([streamed.head, *streamed.chunks, b"0\r\n\r\n"]))
        elif number < PACED:
            self._times.append(time.monotonic())
            streamed = replies.streamed[turn]
            self._transport.write(b"".join([streamed.head, *streamed.chunks, b"0\r\n\r\n"]))
        else:
            _Paced(self._transport, replies.streamed[turn], self._times).step()

    def _json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data) + data)


class _Paced:
    """A stream that sends one event every `SPACING_S`."""

    def __init__(
        self, transport: asyncio.Transport, streamed: Streamed, times: list[float]
    ) -> None:
        self._transport, self._streamed, self._times = transport, streamed, times
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._at = 0
        transport.write(streamed.head)

    def step(self) -> None:
        """Write the events that are due, and schedule the next step."""
        if self._transport.is_closing():
            return
        chunks, visible = self._streamed.chunks, self._streamed.visible
        due = min(int((self._loop.time() - self._began) / SPACING_S) + 1, len(chunks))
        if self._at <= visible < due:
            self._times.append(time.monotonic())
        if due > self._at:
            self._transport.write(b"".join(chunks[self._at : due]))
            self._at = due
        if due == len(chunks):
            self._transport.write(b"0\r\n\r\n")
        else:
            self._loop.call_at(self._began + due * SPACING_S, self.step)


async def main(replies: dict[str, Replies]) -> None:
    """Serve until the standard input closes."""
    times: list[float] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Engine(replies, times), "127.0.0.1", 0)
    sys.stdout.write(json.dumps({"port": server.sockets[0].getsockname()[1]}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    stored = Path(sys.argv[1]).read_bytes()
    uvloop.run(main(msgspec.msgpack.decode(stored, type=dict[str, Replies])))
