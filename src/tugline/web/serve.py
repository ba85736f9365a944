"""Serve an ASGI app on a socket of this process, and read and answer its requests.

Connections that send headers too slowly or too large ones are closed; bodies are bounded before and
after decompression, and in time (I6). No framework is used, because its response classes would cost
more than the rest of a model call.
"""

import asyncio
import contextlib
import resource
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import uvicorn
import zstandard
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tugline import log
from tugline.errors import ClientGone, EngineError, RequestError, TooLarge, UsageError

STOP_S = 5.0
"""Time in which open responses must finish when a server stops."""
HEADERS_S = 10.0
"""Deadline for the headers of a request."""
MAX_HEADERS = 64 << 10
"""Bytes of request line and headers."""
_DRAIN_S = 5.0
"""Seconds for which a refused body is still read, so that its sender gets the refusal."""
_DRAIN_BYTES = 256 << 20
"""Bytes of a refused body that are still read."""
_REQUEST_BYTES = 4 << 10
"""Memory of a request without its body."""
_ZSTD_WINDOW = 8 << 20
"""Maximum window of decompression in bytes, as in RFC 9659."""
KEEP_ALIVE_S = 75
"""Lifetime of an idle connection: agents run tools between their calls."""


class _BatchingTransport:
    """A transport that sends headers together with the data that follows.

    The server writes headers and body separately, and each write would wake the client.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._headers = b""

    def write(self, data: bytes) -> None:
        """Send data; headers wait for the next write or the next turn of the event loop."""
        if data.startswith(b"HTTP/") and not self._headers:
            self._headers = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(self._headers + data)
            self._headers = b""

    def close(self) -> None:
        """Send pending headers and close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._headers:
            self.write(b"")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _BoundedHttp(HttpToolsProtocol):
    """HTTP/1.1 protocol with a timeout and a size limit for headers."""

    def __init__(self, *args: Any, headers_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers_timeout_s = headers_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        """Bytes received of a request's incomplete headers."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        batching = _BatchingTransport(transport, self.loop)  # type: ignore[arg-type]
        super().connection_made(batching)  # type: ignore[arg-type]
        self._deadline = self.loop.call_later(self._headers_timeout_s, transport.close)
        self._lost = self.loop.create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        self._lost.set_result(None)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(self._headers_timeout_s, self.transport.close)
        self._header_bytes = 1
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._clear_deadline()
        self._header_bytes = 0
        if sum(map(len, chain.from_iterable(self.headers))) > MAX_HEADERS:
            self._refuse()
        else:
            cast("Message", self.scope)["lost"] = self._lost
            super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._header_bytes += len(data) if self._header_bytes else 0
        if self._header_bytes > MAX_HEADERS:
            self._refuse()

    def on_body(self, body: bytes) -> None:
        """Store a single part without a copy, which the server's own buffer would make."""
        cycle: Any = self.cycle
        if cycle.response_complete:
            return
        if not cycle.body:
            cycle.body = body
        elif isinstance(cycle.body, bytes):
            cycle.body = bytearray(cycle.body + body)
        else:
            cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def _unsupported_upgrade_warning(self) -> None:
        """Do nothing: the app answers the request."""

    def _refuse(self) -> None:
        if not self.transport.is_closing():
            status = b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
            self.transport.write(status + b"connection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def raise_file_limit() -> int:
    """Raise the limit of open files to the system's maximum; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):  # macOS reports a limit that it then refuses
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket; port 0 takes any free port. Raises `UsageError` if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        msg = f"cannot listen on {host}:{port} ({error.strerror}); choose a free port, or 0 for any"
        raise UsageError(msg) from error
    return sock


async def _run(app: Any, scope: Any, receive: Any, send: Any) -> None:
    """Run the app; the server would log an unexpected error with its text, which has contents."""
    with log.isolate("request failed", part="web"):
        await app(scope, receive, send)


@contextlib.asynccontextmanager
async def serve(
    app: Any,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    headers_timeout_s: float = HEADERS_S,
    tls: tuple[Path, Path] | None = None,
) -> AsyncIterator[str]:
    """Serve `app` during the block; yield its base URL, such as ``http://127.0.0.1:40123``.

    With `tls`, PEM files of a certificate and its key, HTTPS is served. Raises `UsageError`.
    """
    sock = listen(host, port)
    config = uvicorn.Config(
        partial(_run, app),
        interface="asgi3",  # otherwise a partial function is mistaken for ASGI 2
        lifespan="off",
        access_log=False,
        log_level="warning",
        log_config=None,  # `log` formats its messages
        http=partial(_BoundedHttp, headers_timeout_s=headers_timeout_s),  # type: ignore[arg-type]
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        proxy_headers=False,
        date_header=False,
        server_header=False,
        timeout_graceful_shutdown=int(STOP_S),
        ssl_certfile=tls[0] if tls else None,
        ssl_keyfile=tls[1] if tls else None,
    )
    try:
        config.load()
    except OSError as error:  # includes the errors of `ssl`
        sock.close()
        msg = f"certificate {tls and tls[0]} and key {tls and tls[1]} cannot be used: {error}"
        raise UsageError(msg) from error
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve([sock]))  # noqa: SLF001 - `serve` would take over signals
    try:
        while not server.started:
            if task.done():
                task.result()
                raise UsageError(f"the server on {host} stopped while starting")
            await asyncio.sleep(0.005)
        bound = sock.getsockname()[1]
        yield f"http{'s' * bool(tls)}://{f'[{host}]' if ':' in host else host}:{bound}"
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(task), STOP_S + 1)
        sock.close()


# --------------------------------------------------------------------------- requests
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
