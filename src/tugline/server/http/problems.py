"""Every refusal as RFC 9457 problem details, from one table.

A `Problem` says in its `type` what happened, in `field` where, in `known` what would have been
right. Whatever was not foreseen is a problem too, which names the id it was logged under: nobody
meets a bare 500, and nobody is told what a traceback says.
"""

from __future__ import annotations

import traceback
import uuid
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from tugline import log
from tugline.errors import (
    Conflict,
    FencedError,
    Invalid,
    Missing,
    StoreError,
    TuglineError,
    UsageError,
)
from tugline.protocol import Problem

PROBLEMS: dict[str, tuple[int, str]] = {
    "malformed": (400, "The request cannot be read"),
    "unauthorized": (401, "A token is needed"),
    "forbidden": (403, "This token does not open this"),
    "missing": (404, "Nothing has this id"),
    "no-route": (404, "Nothing is at this address"),
    "method": (405, "This address does not take this method"),
    "not-acceptable": (406, "This cannot be had in that form"),
    "slow": (408, "The body did not arrive in time"),
    "conflict": (409, "Something else has this id"),
    "fenced": (409, "The lease was lost"),
    "too-large": (413, "The body is too large"),
    "media-type": (415, "The body has the wrong content type"),
    "invalid": (422, "A field is not what it must be"),
    "fault": (500, "The server is at fault"),
    "unavailable": (503, "The store cannot be used now"),
    "stopping": (503, "The server is going down"),
}
"""Name to status and title; the name is the last part of `Problem.type`."""

PREFIX = "urn:tugline:problem:"
MEDIA = "application/problem+json"
RETRY_S = 1

_NAMES: tuple[tuple[type[TuglineError], str], ...] = (
    (Invalid, "invalid"),
    (Missing, "missing"),
    (Conflict, "conflict"),
    (FencedError, "fenced"),
    (UsageError, "invalid"),
    (StoreError, "unavailable"),
)
_log = log.get("server.api")


class Refusal(TuglineError):
    """A request that is refused before it reaches the control plane; `name` is of `PROBLEMS`."""

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


def answer(error: Exception) -> Response:
    """The problem that `error` is. What was not foreseen is logged here."""
    name = error.name if isinstance(error, Refusal) else _name(error)
    detail, known = str(error), error.known if isinstance(error, Refusal) else ()
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
        known=known,
    )
    headers = dict(error.headers) if isinstance(error, Refusal) else {}
    if status == 503:
        headers["retry-after"] = str(RETRY_S)
    return Response(msgspec.json.encode(problem), status, headers, media_type=MEDIA)


def _name(error: Exception) -> str:
    return next((name for kind, name in _NAMES if isinstance(error, kind)), "fault")
