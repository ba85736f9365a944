"""The control plane on a socket: match, identify, decode, call, answer.

`create_app` makes the ASGI application and `serve_api` runs it, so that long answers end before
the server waits for its connections. Nothing is known here of what the routes do: all that is in
`api/table.py`. Whatever goes wrong is told as a problem (`api/problems.py`), never as a bare 500.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tugline import log
from tugline.errors import Missing, TuglineError
from tugline.server.control import ControlPlane
from tugline.server.http import openapi, problems
from tugline.server.http.auth import Caller, Tokens, authorise, identify
from tugline.server.http.decoding import from_json, from_query
from tugline.server.http.problems import Refusal
from tugline.server.http.route import JSON, AppState, Call, Metrics, Nothing, Route
from tugline.server.http.table import ROUTES
from tugline.server.http.waiting import Gone, Waits
from tugline.web.serve import serve

BODY_S = 120.0
"""How long a body may take to arrive."""
IN_THREAD = 256 << 10
"""Bytes of JSON from which it is read beside the event loop."""

_BINARY = frozenset(
    {"application/octet-stream", "application/zstd", "application/x-msgpack", "text/plain", ""}
)
_IDS = {"id": re.compile(r"[A-Za-z0-9._-]{1,160}"), "number": re.compile(r"[0-9]{1,18}")}
_log = log.get("server.api")


class Api:
    """The application. `stop` ends its long answers; it is called before its sockets are closed."""

    def __init__(self, control: ControlPlane, tokens: Tokens, metrics: Metrics | None) -> None:
        self._house = AppState(
            control, Waits(), metrics, functools.cache(lambda: openapi.document(ROUTES))
        )
        self._tokens = tokens
        self._fixed: dict[str, dict[str, Route]] = {}
        for route in ROUTES:
            self._fixed.setdefault(route.path, {})[route.method] = route
        self._patterns = [
            (re.compile(re.sub(r"\\\{\w+\\\}", "([^/]+)", re.escape(path))), path)
            for path in self._fixed
            if "{" in path
        ]

    @property
    def waiting(self) -> int:
        """Long answers that are open."""
        return self._house.waits.open

    def stop(self) -> None:
        """End every long answer now."""
        self._house.waits.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            with contextlib.suppress(Gone, ClientDisconnect):
                await self._serve(Request(scope, receive), send)

    async def _serve(self, request: Request, send: Send) -> None:
        began, name = time.perf_counter(), "unknown"
        try:
            route, ident = self._find(request)
            name = f"{route.method} {route.path}"
            response = await self._answer(route, ident, request)
        except (Gone, ClientDisconnect):
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets a problem
            response = problems.answer(error)
        if self._house.metrics is not None:
            self._house.metrics.served(name, response.status_code, time.perf_counter() - began)
        try:
            await response(request.scope, request.receive, send)
        except TuglineError as error:  # in the middle of a stream: it breaks off, unfinished
            _log.warning("stream broke off", route=name, error=str(error))

    def _find(self, request: Request) -> tuple[Route, str]:
        """The route and the id in its path. Raises `Refusal` (404, 405)."""
        path = request.scope["path"]
        methods, ident = self._fixed.get(path), ""
        for pattern, fixed in self._patterns if methods is None else ():
            found = pattern.fullmatch(path)
            if found:
                methods, ident = self._fixed[fixed], found[1]
        if methods is None or "{" in path:
            msg = f"nothing is at {path[:200]}; /openapi.json lists what there is"
            raise Refusal(msg, "no-route")
        if request.method not in methods:
            allow = ", ".join(sorted(methods))
            msg = f"{path[:200]} takes {allow}, not {request.method}"
            raise Refusal(msg, "method", known=tuple(methods), headers={"allow": allow})
        return methods[request.method], ident

    async def _answer(self, route: Route, ident: str, request: Request) -> Response:
        caller = Caller()
        if route.roles:
            header = request.headers.get("authorization")
            caller = await identify(header, self._tokens, self._house.control.node_of)
            authorise(caller, route.roles, f"{route.method} {route.path}")
        kind = re.search(r"\{(\w+)\}", route.path)
        if kind and not _IDS[kind[1]].fullmatch(ident):
            msg = f"nothing has the id {ident[:80]!r}"
            raise Missing(msg)
        query = from_query(request.scope["query_string"].decode("latin-1"), route.query)
        body = Nothing() if request.method == "GET" else await _body(request, route)
        call = Call(self._house, caller, request, ident, query, body, route.statuses[0])
        told = await route.handler(call)
        if isinstance(told, Response):
            return told
        if told is None:
            return Response(status_code=204)
        return Response(msgspec.json.encode(told), call.status, media_type=JSON)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        for stage in ("startup", "shutdown"):
            await receive()
            if stage == "shutdown":
                self.stop()
            await send({"type": f"lifespan.{stage}.complete"})


async def _body(request: Request, route: Route) -> Any:
    """The decoded body, bounded in size and time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        msg = f"Content-Encoding is {encoding[:40]!r}, must be identity"
        raise Refusal(msg, "media-type")
    if route.body is bytes and kind not in _BINARY:
        msg = f"Content-Type is {kind[:80]!r}, must be application/octet-stream"
        raise Refusal(msg, "media-type")
    try:
        async with asyncio.timeout(BODY_S):
            data = await _read(request, route.max_body)
    except TimeoutError as error:
        msg = f"the body did not arrive within {BODY_S:g} s"
        raise Refusal(msg, "slow", headers={"connection": "close"}) from error
    if route.body is bytes:
        return data
    if data and kind != JSON:
        msg = f"Content-Type is {kind[:80]!r}, must be {JSON}"
        raise Refusal(msg, "media-type")
    if len(data) > IN_THREAD:
        return await asyncio.to_thread(from_json, data, route.body)
    return from_json(data, route.body)


async def _read(request: Request, bound: int) -> bytes:
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdigit() else 0
    parts: list[bytes] = []
    if size <= bound:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > bound:
                break
            parts.append(part)
    if size > bound:
        msg = f"the body has {size} bytes or more, must have at most {bound}"
        raise Refusal(msg, "too-large", headers={"connection": "close"})
    return b"".join(parts)


def create_app(control: ControlPlane, tokens: Tokens, metrics: Metrics | None = None) -> Api:
    """The HTTP API of `control`, which is open for as long as it is served."""
    return Api(control, tokens, metrics)


@contextlib.asynccontextmanager
async def serve_api(app: Api, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve `app` until the block ends; its long answers end first. Yields its base URL."""
    async with serve(app, host, port) as url:
        try:
            yield url
        finally:
            app.stop()
