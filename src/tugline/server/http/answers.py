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
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from tugline import errors, log
from tugline.protocol import PROBLEM, FieldError, Problem

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

MEDIA = "application/problem+json"

_HEADERS = {
    401: {"www-authenticate": 'Bearer realm="tugline"'},
    408: {"connection": "close"},
    413: {"connection": "close"},
    503: {"retry-after": "1"},
}
_log = log.get("server.http")
T = TypeVar("T")


class Refusal(errors.TuglineError):
    """A request that does not reach the control plane; `problem` is a key of `PROBLEMS`."""

    def __init__(self, detail: str, problem: str, *, known: tuple[str, ...] = ()) -> None:
        super().__init__(detail)
        self.problem, self.known = problem, known


def respond(error: Exception) -> Response:
    """The problem answer for an error. An unexpected one is logged."""
    name, detail = _name_of(error), str(error)
    if name == "fault":
        fault = uuid.uuid4().hex[:12]
        # without locals: they hold tokens
        _log.error("fault", id=fault, exception="".join(traceback.format_exception(error)))
        detail = f"something went wrong here; the server's log has it under the id {fault}"
    status, title = PROBLEMS[name]
    problem = Problem(
        type=PROBLEM + name,
        title=title,
        status=status,
        detail=detail,
        field=getattr(error, "field", ""),
        known=getattr(error, "known", ()),
        errors=tuple(map(_describe, getattr(error, "problems", ()) if status == 422 else ())),
    )
    headers = {"allow": ", ".join(problem.known)} if status == 405 else _HEADERS.get(status)
    return Response(msgspec.json.encode(problem), status, headers, media_type=MEDIA)


def _describe(error: errors.TuglineError) -> FieldError:
    """One of several mistakes."""
    return FieldError(str(error), getattr(error, "field", ""), getattr(error, "known", ()))


def _name_of(error: Exception) -> str:
    if isinstance(error, errors.RequestError):  # of a body that was not read to its end
        return next(name for name, (status, _) in PROBLEMS.items() if status == error.status)
    return error.problem if isinstance(error, errors.TuglineError) else "fault"


# --------------------------------------------------------------------------- waiting
class Waits:
    """Open long polls and streams of a server; streams send something every `keep_alive_s`."""

    def __init__(self, keep_alive_s: float = 15.0) -> None:
        self.keep_alive_s = keep_alive_s
        self.open = 0
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """End all of them now, and later ones at once."""
        self._stopped.set()

    async def attend(self, work: Coroutine[Any, Any, T], *leaving: Coroutine[Any, Any, None]) -> T:
        """The result of `work`. Raises `ClientGone` when `leaving` ends, `Refusal` on `stop`."""
        working = asyncio.ensure_future(work)
        ends = [asyncio.ensure_future(each) for each in (*leaving, self._stopped.wait())]
        self.open += 1
        try:
            first: set[asyncio.Future[Any]] = {working, *ends}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
        finally:
            self.open -= 1
            for future in (working, *ends):
                future.cancel()
            await asyncio.gather(working, *ends, return_exceptions=True)
        if self._stopped.is_set():
            raise Refusal("the server is shutting down; ask again in a moment", "stopping")
        raise errors.ClientGone("the client hung up before it was answered")

    async def forward(self, pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """`pieces` until the server shuts down, which ends a stream like any other."""
        async with contextlib.aclosing(pieces):
            with contextlib.suppress(Refusal):
                while (piece := await self.attend(anext(pieces, None))) is not None:
                    yield piece
