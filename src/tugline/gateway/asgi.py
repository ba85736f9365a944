"""One HTTP request on plain ASGI: bounded reading, early headers, detection of hang-ups.

The response classes of a framework cost more than the rest of a call. Bodies are bounded before
and after decompression, and in time (I6).
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import zstandard

from tugline.errors import ClientGone, RequestError, TooLarge

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class _Timeout(RequestError):
    status = 408
    code = "request_timeout"


class _Encoding(RequestError):
    status = 415
    code = "unsupported_encoding"


class Http:
    """A request and its response."""

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: str = scope["query_string"].decode("latin-1")
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.disconnected = False
        """Whether the client left before its reply was handed over whole."""
        self.sent: list[bytes] | None = None
        """Collects the reply's body if set to a list."""
        self._complete = False
        self._receive, self._send = receive, send

    async def body(self, limit: int, timeout_s: float) -> bytes:
        """The decoded body. Raises `RequestError` if it is too large, too slow or malformed."""
        declared = self.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(int(declared), limit)
        try:
            async with asyncio.timeout(timeout_s):
                raw = await self._read(limit)
        except TimeoutError as error:
            msg = f"the request body did not arrive within {timeout_s:.0f} s"
            raise _Timeout(msg) from error
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        return raw if encoding in {"identity", ""} else _decompress(raw, encoding, limit)

    async def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Send a whole JSON reply."""
        await self._start(status, {"content-length": str(len(body)), **(headers or {})})
        await self.end(body)

    async def stream(self, content_type: str) -> None:
        """Send the headers of a stream."""
        await self._start(200, {"content-type": content_type, "cache-control": "no-cache"})
        await self.write(b"")

    async def write(self, data: bytes) -> None:
        """Send a part of a stream; waits while the client reads slowly."""
        await self._send_body(data, more=True)

    async def end(self, data: bytes) -> None:
        """Send the last part of the body."""
        self._complete = True
        await self._send_body(data)

    async def wait_disconnected(self) -> None:
        """Wait until the client hangs up."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.disconnected = not self._complete  # the server says the same after a whole reply

    async def _send_body(self, data: bytes, *, more: bool = False) -> None:
        if self.sent is not None:
            self.sent.append(data)
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        named = {"content-type": "application/json", **headers}
        encoded = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _read(self, limit: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.disconnected = True
                msg = "the client hung up before its request was complete"
                raise ClientGone(msg)
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(size, limit)
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)


async def lifespan(receive: Receive, send: Send) -> None:
    """Acknowledge start-up and shutdown."""
    for stage in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{stage}.complete"})


def _too_large(size: int, limit: int) -> TooLarge:
    return TooLarge(f"the request body has {size} bytes or more; the bound is {limit}")


def _decompress(raw: bytes, encoding: str, limit: int) -> bytes:
    """Decompress `raw`, never beyond the limit."""
    try:
        if encoding == "zstd":
            with zstandard.ZstdDecompressor().stream_reader(raw) as reader:
                data = reader.read(limit + 1)
        elif encoding in {"gzip", "x-gzip", "deflate"}:
            inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
            data = inflater.decompress(raw, limit + 1)
            if len(data) <= limit and not inflater.eof:
                msg = f"the {encoding} body ends in the middle"
                raise RequestError(msg)
        else:
            msg = f"content-encoding {encoding!r} is unknown; use gzip, deflate, zstd or none"
            raise _Encoding(msg)
    except (zlib.error, zstandard.ZstdError) as error:
        msg = f"the body is not valid {encoding}: {error}"
        raise RequestError(msg) from error
    if len(data) > limit:
        raise _too_large(len(data), limit)
    return data
