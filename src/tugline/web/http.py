"""Read an HTTP request of an ASGI app and answer it.

Bodies are bounded before and after decompression, and in time (I6). No framework is used, because
its response classes would cost more than the rest of a model call.
"""

import asyncio
import contextlib
import zlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import zstandard

from tugline.errors import ClientGone, EngineError, RequestError, TooLarge

_DRAIN_S = 5.0
"""Seconds for which a refused body is still read, so that its sender gets the refusal."""
_DRAIN_BYTES = 256 << 20
"""Bytes of a refused body that are still read."""
_REQUEST_BYTES = 4 << 10
"""Memory of a request without its body."""
_ZSTD_WINDOW = 8 << 20
"""Maximum window of decompression in bytes, as in RFC 9659."""
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
    """An HTTP request and its response."""

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: str = scope["query_string"].decode("latin-1")
        self.peer: str = (scope.get("client") or ("",))[0]
        """Address of the client."""
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.started = False
        """Whether the headers of the response were sent."""
        self.disconnected = False
        """Whether the client disconnected before the whole reply was sent."""
        self._complete = False
        self._more = True
        """Whether more of the request's body is expected."""
        self._receive = receive
        self._send = send
        self.lost: asyncio.Future[None] = scope.get("lost") or asyncio.Future()
        """Future that is done when the connection is lost."""

    async def body(
        self, limit: int, timeout_s: float, take: Callable[[int], None] = lambda _size: None
    ) -> bytes:
        """Read the decoded body. Raises `RequestError` if it is too large, too slow or malformed.

        `take` is called with the size of each part, and may raise `EngineError` above a limit. The
        rest of a refused body is read and dropped, for a bounded time.
        """
        parts: list[bytes] = []

        def keep(part: bytes) -> None:
            take(len(part))
            parts.append(part)

        declared = self.headers.get("content-length", "")
        try:
            take(_REQUEST_BYTES)
            if declared.isdigit() and int(declared) > limit:
                raise _too_large(int(declared), limit)
            async with asyncio.timeout(timeout_s):
                await self._read(limit, keep)
        except TimeoutError as error:
            raise _Timeout(f"the request body did not arrive within {timeout_s:.0f} s") from error
        except (TooLarge, EngineError):
            with contextlib.suppress(TimeoutError, TooLarge):
                async with asyncio.timeout(_DRAIN_S):
                    await self._read(_DRAIN_BYTES, len)
            raise
        raw = b"".join(parts)
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding in {"identity", ""}:
            return raw
        data = _decompress(raw, encoding, limit)
        take(len(data))
        return data

    async def _read(self, limit: int, keep: Callable[[bytes], object]) -> None:
        size = 0
        while self._more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.disconnected = True
                raise ClientGone("the client disconnected before its request was complete")
            part: bytes = message.get("body", b"")
            size += len(part)
            self._more = message.get("more_body", False)
            if size > limit:
                raise _too_large(size, limit)
            keep(part)

    # ----------------------------------------------------------------------- response
    async def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Send a whole JSON reply."""
        await self._start(status, {"content-length": str(len(body)), **(headers or {})})
        await self.end(body)

    async def stream(self, content_type: str) -> None:
        """Send the headers of a stream."""
        await self._start(200, {"content-type": content_type, "cache-control": "no-cache"})
        await self.write(b"")

    async def write(self, data: bytes) -> None:
        """Send a part of a stream; wait while the client reads slowly."""
        await self._send_body(data, more=True)

    async def end(self, data: bytes) -> None:
        """Send the last part of the body."""
        self._complete = True
        await self._send_body(data)

    @contextlib.contextmanager
    def while_connected(self) -> Iterator[None]:
        """Leave the block as soon as the client disconnects."""
        task = asyncio.current_task()

        def leave(_lost: asyncio.Future[None]) -> None:
            self.disconnected = not self._complete
            if self.disconnected and task is not None:
                task.cancel()

        self.lost.add_done_callback(leave)
        try:
            yield
        except asyncio.CancelledError:
            if not self.disconnected:
                raise
        finally:
            self.lost.remove_done_callback(leave)

    async def _send_body(self, data: bytes, *, more: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self.started = True
        named = {"content-type": "application/json", **headers}
        encoded = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})


def _too_large(size: int, limit: int) -> TooLarge:
    return TooLarge(f"the request body has at least {size} bytes; the limit is {limit}")


def _decompress(raw: bytes, encoding: str, limit: int) -> bytes:
    """Decompress `raw`, at most up to `limit`. Raises `RequestError`."""
    try:
        if encoding == "zstd":
            decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
            with decompressor.stream_reader(raw) as reader:
                data = reader.read(limit + 1)
        elif encoding in {"gzip", "x-gzip", "deflate"}:
            inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
            data = inflater.decompress(raw, limit + 1)
            if len(data) <= limit and not inflater.eof:
                raise RequestError(f"the {encoding} body is incomplete")
        else:
            msg = f"content-encoding {encoding!r} is not supported; use gzip, deflate, zstd or none"
            raise _Encoding(msg)
    except (zlib.error, zstandard.ZstdError) as error:
        raise RequestError(f"the body is not valid {encoding}: {error}") from error
    if len(data) > limit:
        raise _too_large(len(data), limit)
    return data
