"""One HTTP request on plain ASGI: bounded reading, early headers, and knowing when a client left.

A framework's response classes cost more than the rest of a call, so the gateway speaks ASGI
itself. Bodies are bounded before and after decompression, and in time (I6).
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

MAX_BODY = 64 << 20
"""Bytes of one request, also after decompression."""
BODY_S = 60.0
"""How long a client may take to send it."""


class _Timeout(RequestError):
    status = 408
    code = "request_timeout"


class _Encoding(RequestError):
    status = 415
    code = "unsupported_encoding"


class Http:
    """A request and the way to answer it."""

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: str = scope["query_string"].decode("latin-1")
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.disconnected = False
        """Whether the client left before its reply was handed over whole."""
        self.told: list[bytes] | None = None
        """Set to a list to have what the client is sent collected in it."""
        self._whole = False
        self._receive, self._send = receive, send

    async def body(self) -> bytes:
        """The decoded body. Raises `RequestError` when it is too large, too slow or garbled."""
        declared = self.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > MAX_BODY:
            raise _too_large(int(declared))
        try:
            async with asyncio.timeout(BODY_S):
                raw = await self._read()
        except TimeoutError as error:
            msg = f"the request body did not arrive within {BODY_S:.0f} s"
            raise _Timeout(msg) from error
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        return raw if encoding in {"identity", ""} else _decoded(raw, encoding)

    async def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """A whole JSON reply."""
        await self._start(status, {"content-length": str(len(body)), **(headers or {})})
        self._whole = True
        await self._body(body)

    async def stream(self, content_type: str) -> None:
        """Send the headers of a stream, so that a client knows that somebody answers."""
        await self._start(200, {"content-type": content_type, "cache-control": "no-cache"})
        await self.write(b"")

    async def write(self, data: bytes) -> None:
        """More of a stream; waits while the client reads slowly."""
        await self._body(data, more=True)

    async def end(self, data: bytes) -> None:
        """The last of a stream."""
        self._whole = True
        await self._body(data)

    async def gone(self) -> None:
        """Wait until the client hangs up."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.disconnected = not self._whole  # the server says the same after a whole reply

    async def _body(self, data: bytes, *, more: bool = False) -> None:
        if self.told is not None:
            self.told.append(data)
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        named = {"content-type": "application/json", **headers}
        encoded = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _read(self) -> bytes:
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
            if size > MAX_BODY:
                raise _too_large(size)
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)


async def lifespan(receive: Receive, send: Send) -> None:
    """Agree to start, and to stop."""
    for stage in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{stage}.complete"})


def _too_large(size: int) -> TooLarge:
    return TooLarge(f"the request body has {size} bytes or more; the bound is {MAX_BODY}")


def _decoded(raw: bytes, encoding: str) -> bytes:
    """`raw` decompressed, never beyond the bound."""
    try:
        if encoding == "zstd":
            with zstandard.ZstdDecompressor().stream_reader(raw) as reader:
                data = reader.read(MAX_BODY + 1)
        elif encoding in {"gzip", "x-gzip", "deflate"}:
            inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
            data = inflater.decompress(raw, MAX_BODY + 1)
            if len(data) <= MAX_BODY and not inflater.eof:
                msg = f"the {encoding} body ends in the middle"
                raise RequestError(msg)
        else:
            msg = f"content-encoding {encoding!r} is unknown; use gzip, deflate, zstd or none"
            raise _Encoding(msg)
    except (zlib.error, zstandard.ZstdError) as error:
        msg = f"the body is not valid {encoding}: {error}"
        raise RequestError(msg) from error
    if len(data) > MAX_BODY:
        raise _too_large(len(data))
    return data
