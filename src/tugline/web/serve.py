"""Serve an ASGI app on a socket inside this process.

Connections that send headers slowly or without end are closed (I6).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from typing import Any, TypeVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tugline.errors import UsageError

try:
    import uvloop
except ImportError:  # not on every platform
    uvloop = None  # type: ignore[assignment]

T = TypeVar("T")

STOP_S = 5.0
"""How long open responses may take to finish when a server stops."""
HEADERS_S = 10.0
"""Deadline for the headers of a request."""
MAX_HEADERS = 64 << 10
"""Bytes of request line and headers."""
KEEP_ALIVE_S = 75
"""Lifetime of an idle connection: agents run tools between their calls."""


class _BatchingTransport:
    """A transport that sends what is written in one turn of the event loop at once.

    The server writes headers and body apart, and each write wakes the client.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Send soon, together with what else is written until then."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        """Send what was written and close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._parts:
            data = b"".join(self._parts)
            self._parts.clear()
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _BoundedHttp(HttpToolsProtocol):
    """HTTP/1.1 with a deadline and a bound for the headers."""

    def __init__(self, *args: Any, headers_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers_timeout_s = headers_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        """Bytes that have come without completing a request's headers."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        batching = _BatchingTransport(transport, self.loop)  # type: ignore[arg-type]
        super().connection_made(batching)  # type: ignore[arg-type]
        self._deadline = self.loop.call_later(self._headers_timeout_s, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(self._headers_timeout_s, self.transport.close)
        self._header_bytes = 1
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._clear_deadline()
        self._header_bytes = 0
        if sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADERS:
            self._refuse()
        else:
            super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._header_bytes += len(data) if self._header_bytes else 0
        if self._header_bytes > MAX_HEADERS:
            self._refuse()

    def _unsupported_upgrade_warning(self) -> None:
        """The app answers it."""

    def _refuse(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"connection: close\r\ncontent-length: 0\r\n\r\n"
)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a server's main coroutine, on uvloop where there is one: it halves the cost of a call."""
    return asyncio.run(main) if uvloop is None else uvloop.run(main)


def freeze_gc() -> None:
    """Exclude all objects made so far from garbage collection; call once a server has started.

    Modules, templates and vocabularies live for good, and scanning them would stop every stream
    for some 80 ms. Session state lives long and has few cycles, so it is scanned less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes any free one. Raises `UsageError` when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        msg = f"cannot listen on {host}:{port} ({error.strerror}); choose a free port or 0 for any"
        raise UsageError(msg) from error
    return sock


@contextlib.asynccontextmanager
async def serve(
    app: Any, host: str = "127.0.0.1", port: int = 0, *, headers_timeout_s: float = HEADERS_S
) -> AsyncIterator[str]:
    """Serve `app` until the block ends; yields its base URL, such as ``http://127.0.0.1:40123``."""
    sock = listen(host, port)
    config = uvicorn.Config(
        app,
        interface="asgi3",  # a bound method would be taken for the old protocol
        lifespan="on",
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
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server._serve([sock]))  # noqa: SLF001 - `serve` would take over signals
    try:
        while not server.started:
            if task.done():
                task.result()
                msg = f"the server on {host} stopped while starting"
                raise UsageError(msg)
            await asyncio.sleep(0.005)
        bound = sock.getsockname()[1]
        yield f"http://{f'[{host}]' if ':' in host else host}:{bound}"
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(task), STOP_S + 1)
        sock.close()
