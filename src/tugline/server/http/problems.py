"""Errors as RFC 9457 problem details, from one table.

A `Problem` says in its `type` what happened, in `field` where, and in `known` what would have been
right. An unexpected error is answered with the id under which it is logged, never its traceback.
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

_NAMES: dict[type[TuglineError], str] = {
    Invalid: "invalid",
    Missing: "missing",
    Conflict: "conflict",
    FencedError: "fenced",
    UsageError: "invalid",
    StoreError: "unavailable",
}
_log = log.get("server.http")


class Refusal(TuglineError):
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
