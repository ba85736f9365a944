"""A response that is produced piece by piece, and whose production ends when the client leaves.

Invariant I4: an error before the first piece is a plain error response, never a broken stream.
A hang-up closes the iterator at once, streaming or not, so the engine stops sampling.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tugline.errors import EngineError, RequestError
from tugline.inference.base import CutError
from tugline.inference.wire import error_body, error_response

_UNREACHED = "1000000000"
"""Content length announced for an answer that will be cut."""


class Pieces(Response):
    """Send what `pieces` yields; headers go out with the first one."""

    def __init__(self, pieces: AsyncGenerator[bytes, None], *, stream: bool) -> None:
        super().__init__(media_type="text/event-stream" if stream else "application/json")
        self._pieces = pieces
        self._stream = stream
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Race the answer against the client's hang-up."""
        answer = asyncio.create_task(self._answer(scope, receive, send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answer.cancel()
            gone.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)
        if not answer.cancelled():
            answer.result()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._pieces):
                async for piece in self._pieces:
                    await self._send(send, piece)
        except CutError:
            if not self._started:
                await self._start(send, length=_UNREACHED)
            await send({"type": "http.response.body", "body": b" ", "more_body": True})
            return  # unfinished: the server drops the connection
        except (EngineError, RequestError) as error:
            if not self._started:
                await error_response(error)(scope, receive, send)
                return
            await self._send(send, b"data: " + error_body(error, 500) + b"\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, send: Send, length: str | None = None) -> None:
        self._started = True
        kind = str(self.media_type).encode()
        headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
        if length:
            headers.append((b"content-length", length.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send(self, send: Send, piece: bytes) -> None:
        if not self._started:
            await self._start(send, None if self._stream else str(len(piece)))
        await send({"type": "http.response.body", "body": piece, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
