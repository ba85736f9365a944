"""Serve an ASGI app on a socket of this process.

Connections that send headers too slowly or too large ones are closed (I6).
"""

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tugline import log
from tugline.errors import UsageError

STOP_S = 5.0
"""Time in which open responses must finish when a server stops."""
HEADERS_S = 10.0
"""Deadline for the headers of a request."""
MAX_HEADERS = 64 << 10
"""Bytes of request line and headers."""
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


class _Server(uvicorn.Server):
    """Server that leaves the signals to the process that it runs in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


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
            cast("dict[str, Any]", self.scope)["lost"] = self._lost
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
    server = _Server(config)
    task = asyncio.create_task(server.serve([sock]))
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
