"""Run an ASGI app on a socket inside this process, up when entered and down when left."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from tugline.errors import UsageError

STOP_S = 5.0
"""How long open answers may take to finish when a server goes down."""


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
async def serve(app: Any, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve `app` until the block ends; yields its base URL, such as ``http://127.0.0.1:40123``."""
    sock = listen(host, port)
    config = uvicorn.Config(
        app,
        lifespan="on",
        access_log=False,
        log_level="warning",
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
