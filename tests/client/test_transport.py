"""Retries, deadlines and errors of the client's requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tugline import errors
from tugline.client.transport import Transport, find_server
from tugline.protocol import Version
from tugline.web.serve import serve


def problem(name: str, status: int, **more: str) -> JSONResponse:
    """An error body."""
    body = {"type": f"urn:tugline:problem:{name}", "title": "t", "status": status, "detail": "why"}
    return JSONResponse(body | more, status)


@asynccontextmanager
async def server(
    answer: Callable[[int], Response | None], deadline_s: float = 5.0
) -> AsyncIterator[tuple[Transport, list[Request]]]:
    """A client of a server with scripted responses by request number; None: no response."""
    requests: list[Request] = []
    closing = asyncio.Event()

    async def route(request: Request) -> Response:
        requests.append(request)
        response = answer(len(requests))
        if response is None:
            await closing.wait()
        return response or Response()

    app = Starlette(routes=[Route("/x", route, methods=["GET", "POST"])])
    async with serve(app) as url, Transport(url, "secret", deadline_s=deadline_s) as http:
        try:
            yield http, requests
        finally:
            closing.set()


async def test_transient_errors_are_retried() -> None:
    """A 503, and a 429 after its `retry-after`, are retried; each request has the token."""
    asked_at: list[float] = []

    def answer(number: int) -> Response:
        asked_at.append(time.monotonic())
        if number == 3:
            return JSONResponse({"version": 7})
        response = problem("unavailable", 503) if number == 1 else problem("quota", 429)
        response.headers["retry-after"] = str(number - 1)
        return response

    async with server(answer) as (http, requests):
        assert await http.ask("POST", "/x", Version, body=Version(1)) == Version(7)
        assert [request.headers["authorization"] for request in requests] == ["Bearer secret"] * 3
    first, second, third = asked_at
    assert second - first < 0.3
    assert 1.0 <= third - second < 1.3


@pytest.mark.parametrize(
    ("name", "status", "kind"),
    [
        ("invalid", 422, errors.Invalid),
        ("missing", 404, errors.Missing),
        ("conflict", 409, errors.Conflict),
        ("fenced", 409, errors.FencedError),
        ("quota", 429, errors.QuotaExceeded),
        ("unauthorized", 401, errors.ServerError),
        ("forbidden", 403, errors.ServerError),
        ("fault", 500, errors.ServerError),
    ],
)
async def test_refusals_raise_their_class(
    name: str, status: int, kind: type[errors.ServerError]
) -> None:
    """A refusal raises at once, with the field and the message of the server."""
    async with server(lambda _n: problem(name, status, field="0.id")) as (http, requests):
        with pytest.raises(errors.ServerError, match="why") as raised:
            await http.ask("GET", "/x", Version)
        assert type(raised.value) is kind
        assert (raised.value.status, raised.value.field) == (status, "0.id")
        assert len(requests) == 1


async def test_a_silent_server_times_out() -> None:
    """A silent server is an error, and no attempt begins after the deadline."""
    async with server(lambda _n: None, deadline_s=0.2) as (http, requests):
        with pytest.raises(errors.ServerError, match="cannot be reached"):
            await http.ask("GET", "/x", Version, wait_s=0.1)
        assert len(requests) == 1


@pytest.mark.parametrize("status", [401, 403, 404, 409, 413, 500])
async def test_errors_of_a_proxy_are_retried(status: int) -> None:
    """A proxy's error is retried like 502, whatever its status and body."""
    page = PlainTextResponse("<html>no</html>", status)
    other = JSONResponse({"type": "about:blank", "title": "", "status": 1, "detail": ""}, status)
    ours = JSONResponse({"version": 7})
    async with server(lambda n: (page, other, ours)[n - 1]) as (http, requests):
        assert await http.ask("GET", "/x", Version) == Version(7)
        assert len(requests) == 3


async def test_responses_of_another_server_are_errors() -> None:
    """A strange response is quoted in the error, and not taken for a success."""
    async with server(lambda _n: PlainTextResponse("<html>hello")) as (http, _):
        with pytest.raises(errors.ServerError, match="check that it is a Tugline server"):
            await http.ask("GET", "/x", Version)
    page = PlainTextResponse("no such page", 404)
    async with server(lambda _n: page, deadline_s=0.5) as (http, _):
        with pytest.raises(errors.ServerError, match="404 Not Found: no such page"):
            await http.ask("GET", "/x", Version)
    with pytest.raises(errors.UsageError, match="must be a URL"):
        find_server("localhost:7700")  # an error before any token is looked for
