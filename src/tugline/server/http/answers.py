"""Answers that are no plain body: problems, long polls and streams.

Errors are RFC 9457 problem details, from one table. A `Problem` says in its `type` what happened,
in `field` where, and in `known` what would have been right. An unexpected error is answered with
the id under which it is logged, never its traceback.

A long poll costs nothing while nothing happens. When the server shuts down, a long poll is answered
503 at once and a stream ends like any other, so no client waits for a dead server and no shutdown
waits for a client.
"""

import asyncio
import contextlib
import traceback
import uuid
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tugline import errors, log
from tugline.protocol import Problem

PROBLEMS: dict[str, tuple[int, str]] = {
    "malformed": (400, "The request cannot be parsed"),
    "unauthorized": (401, "A token is needed"),
    "forbidden": (403, "This token does not allow this"),
    "missing": (404, "Nothing has this id"),
    "no-route": (404, "Nothing is at this address"),
    "method": (405, "This address does not take this method"),
    "not-acceptable": (406, "There is no such representation"),
    "slow": (408, "The body did not arrive in time"),
    "conflict": (409, "Something else has this id"),
    "fenced": (409, "The lease was lost"),
    "too-large": (413, "The body is too large"),
    "media-type": (415, "The body has the wrong content type"),
    "invalid": (422, "A field is invalid"),
    "fault": (500, "The server failed"),
    "unavailable": (503, "The store cannot be used now"),
    "stopping": (503, "The server is shutting down"),
}
"""Name to status and title; the name is the last part of `Problem.type`."""

PREFIX = "urn:tugline:problem:"
MEDIA = "application/problem+json"

_NAMES: dict[type[errors.TuglineError], str] = {
    errors.Invalid: "invalid",
    errors.Missing: "missing",
    errors.Conflict: "conflict",
    errors.FencedError: "fenced",
    errors.UsageError: "invalid",
    errors.StoreError: "unavailable",
}
_log = log.get("server.http")
T = TypeVar("T")


class Refusal(errors.TuglineError):
    """A request that does not reach the control plane; `name` is a key of `PROBLEMS`."""

    def __init__(
        self,
        detail: str,
        name: str,
        *,
        field: str = "",
        known: tuple[str, ...] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.name, self.field, self.known, self.headers = name, field, known, headers or {}


def respond(error: Exception) -> Response:
    """The problem answer for an error. An unexpected one is logged."""
    name = error.name if isinstance(error, Refusal) else _name_of(error)
    detail = str(error)
    if name == "fault":
        fault = uuid.uuid4().hex[:12]
        trace = "".join(traceback.format_exception(error))  # without locals: they hold tokens
        _log.error("fault", id=fault, exception=trace)
        detail = f"something went wrong here; the server's log has it under the id {fault}"
    status, title = PROBLEMS[name]
    problem = Problem(
        type=PREFIX + name,
        title=title,
        status=status,
        detail=detail,
        field=getattr(error, "field", "") or "",
        known=getattr(error, "known", ()) or (),
    )
    headers = dict(error.headers) if isinstance(error, Refusal) else {}
    if status == 503:
        headers["retry-after"] = "1"
    return Response(msgspec.json.encode(problem), status, headers, media_type=MEDIA)


def _name_of(error: Exception) -> str:
    return next((name for kind, name in _NAMES.items() if isinstance(error, kind)), "fault")


# --------------------------------------------------------------------------- waiting
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
