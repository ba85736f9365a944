"""Long polls and streams: they end with their work, with their client, or with the server.

A long poll costs nothing while nothing happens. When the server shuts down, a long poll is answered
503 at once and a stream ends like any other, so no client waits for a dead server and no shutdown
waits for a client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tugline.server.http.problems import Refusal

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client hung up; there is nobody to answer."""


class Waits:
    """Open long polls and streams of a server; streams send something every `keep_alive_s`."""

    def __init__(self, keep_alive_s: float = 15.0) -> None:
        self.keep_alive_s = keep_alive_s
        self.open = 0
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """End all of them now, and later ones at once."""
        self._stopped.set()

    async def attend(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises `ClientDisconnected`, or `Refusal` on `stop`."""
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(_disconnect(receive))
        stopping = asyncio.ensure_future(self._stopped.wait())
        self.open += 1
        try:
            first: set[asyncio.Future[Any]] = {working, leaving, stopping}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
        finally:
            self.open -= 1
            await _cancel(working, leaving, stopping)
        if self._stopped.is_set():
            msg = "the server is shutting down; ask again in a moment"
            raise Refusal(msg, "stopping")
        raise ClientDisconnected


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*futures: asyncio.Future[Any]) -> None:
    for future in futures:
        future.cancel()
    await asyncio.wait(futures)
    for future in futures:
        if not future.cancelled():
            future.exception()  # mark it as retrieved


class EventStream(Response):
    """An answer in pieces; a slow reader slows down the source."""

    def __init__(
        self,
        pieces: AsyncGenerator[bytes],
        media: str,
        waits: Waits,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(media_type=media, headers={"cache-control": "no-store", **(headers or {})})
        del self.headers["content-length"]
        self._pieces, self._waits = pieces, waits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the source, the client or the server ends."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        async with contextlib.aclosing(self._pieces) as pieces:
            with contextlib.suppress(Refusal):  # the server shuts down: a regular end
                while True:
                    piece = await self._waits.attend(receive, anext(pieces, None))
                    if piece is None:
                        break
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
