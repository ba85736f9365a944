"""Long answers: they end with what they wait for, with their client, or with the server.

A long-poll costs nothing while nothing happens: it is woken by what it waits for, never by a
clock of its own. When the server goes down, it is answered 503 at once and a stream is closed as
streams are, so nobody waits for a dead server and no shutdown waits for a client.
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
KEEP_ALIVE_S = 15.0
"""A stream says at least something this often."""


class Gone(Exception):
    """The client hung up; there is nobody to answer."""


class Waits:
    """The long answers of one server."""

    def __init__(self) -> None:
        self.open = 0
        """How many there are."""
        self._stopped: asyncio.Future[None] | None = None

    def stop(self) -> None:
        """End all of them now, and those that come later at once."""
        ending = self._ending()
        if not ending.done():
            ending.set_result(None)

    async def attend(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives. Raises `Gone` when the client hangs up, `Refusal` on `stop`."""
        ending = self._ending()
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(_gone(receive))
        self.open += 1
        try:
            first: set[asyncio.Future[Any]] = {working, leaving, ending}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
        finally:
            self.open -= 1
            await _end(working, leaving)
        if ending.done():
            msg = "the server is going down; ask again in a moment"
            raise Refusal(msg, "stopping")
        raise Gone

    def _ending(self) -> asyncio.Future[None]:
        if self._stopped is None:  # made here, inside the event loop that it belongs to
            self._stopped = asyncio.get_running_loop().create_future()
        return self._stopped


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # a fault that nobody will read


class Stream(Response):
    """A long answer, piece by piece; a reader that is slow slows down the source."""

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
            with contextlib.suppress(Refusal):  # the server goes down: an ending like any other
                while True:
                    piece = await self._waits.attend(receive, anext(pieces, None))
                    if piece is None:
                        break
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
