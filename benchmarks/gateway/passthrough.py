"""The baseline: a Python proxy that forwards bytes without reading them.

It is a raw ASGI application on uvicorn (uvloop, httptools) with an aiohttp connection pool.
Prints ``{"port": N}`` when it is up.

    python passthrough.py ENGINE_URL
"""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Any

import aiohttp
import uvicorn
import uvloop


class PassThrough:
    """The ASGI application."""

    def __init__(self, client: aiohttp.ClientSession, engine: str) -> None:
        self._client, self._engine = client, engine

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Forward one request, and its answer chunk by chunk."""
        parts = []
        more = True
        while more:
            message = await receive()
            parts.append(message["body"])
            more = message["more_body"]
        headers = {"content-type": "application/json"}
        async with self._client.post(
            self._engine + scope["path"], data=b"".join(parts), headers=headers
        ) as answer:
            forwarded = [
                (name.lower(), value)
                for name, value in answer.raw_headers
                if name.lower() in {b"content-type", b"content-length"}
            ]
            start = {"type": "http.response.start", "status": answer.status, "headers": forwarded}
            await send(start)
            async for data in answer.content.iter_any():
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def main(engine: str) -> None:
    """Serve until the standard input closes."""
    sock = socket.create_server(("127.0.0.1", 0))
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=1 << 20
    ) as client:
        config = uvicorn.Config(
            PassThrough(client, engine),
            http="httptools",
            lifespan="off",
            log_level="warning",
            access_log=False,
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        sys.stdout.write(json.dumps({"port": sock.getsockname()[1]}) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)
        server.should_exit = True
        await serving


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
