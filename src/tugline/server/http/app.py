"""ASGI application of the control plane: route, authorize, decode, call, answer.

`serve_api` runs the application so that long answers end before the server waits for its
connections. Every error is answered as a problem.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette import routing
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tugline import log
from tugline.errors import Missing, TuglineError
from tugline.schema import decode
from tugline.server.control import ControlPlane
from tugline.server.http import answers, results, tasks
from tugline.server.http.answers import ClientDisconnected, Refusal, Waits
from tugline.server.http.route import (
    JSON,
    ApiCall,
    AppState,
    Caller,
    Nothing,
    Route,
    Tokens,
    authorize,
    identify,
)
from tugline.server.metrics import ServerMetrics
from tugline.web.serve import serve

THREAD_BYTES = 256 << 10
"""Size from which JSON is decoded in a thread."""

_BINARY = frozenset(
    {"application/octet-stream", "application/zstd", "application/x-msgpack", "text/plain", ""}
)
_IDS = {"id": re.compile(r"[A-Za-z0-9._-]{1,160}"), "number": re.compile(r"[0-9]{1,18}")}
ROUTES = (*tasks.ROUTES, *results.ROUTES)
"""Every route, in the order of the documentation."""
_log = log.get("server.http")
T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


class Api:
    """The application. Call `stop` before its sockets are closed: it ends long polls and streams.

    A body must arrive within `body_s`; streams send something every `keep_alive_s`.
    """

    def __init__(
        self,
        control: ControlPlane,
        tokens: Tokens,
        metrics: ServerMetrics | None = None,
        *,
        body_s: float = 120.0,
        keep_alive_s: float = 15.0,
    ) -> None:
        self.state = AppState(control, Waits(keep_alive_s), metrics, ROUTES)
        self._tokens, self._body_s = tokens, body_s
        by_path: dict[str, list[Route]] = {}
        for route in ROUTES:
            by_path.setdefault(route.path, []).append(route)
        self._router = routing.Router(
            [routing.Route(path, _Endpoint(self, routes)) for path, routes in by_path.items()],
            redirect_slashes=False,
            default=_Endpoint(self, ()),
            lifespan=self._lifespan,
        )

    def stop(self) -> None:
        """End every long poll and stream now."""
        self.state.waits.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._router(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: object) -> AsyncIterator[None]:
        yield
        self.stop()

    async def call(self, route: Route, request: Request) -> Response:
        """Authorize and decode a request, and run its handler."""
        caller = Caller()
        if route.roles:
            header = request.headers.get("authorization")
            find_node = self.state.control.dispatcher.find_node
            caller = await identify(header, self._tokens, find_node)
            authorize(caller, route.roles, route.name)
        ident = ""
        for kind, ident in request.path_params.items():
            if not _IDS[kind].fullmatch(ident):
                msg = f"nothing has the id {ident[:80]!r}"
                raise Missing(msg)
        query = decode_query(request.scope["query_string"].decode("latin-1"), route.query)
        body = Nothing() if request.method == "GET" else await self._read_body(request, route)
        call = ApiCall(self.state, caller, request, ident, query, body)
        answer = await route.handler(call)
        if isinstance(answer, Response):
            return answer
        if answer is None:
            return Response(status_code=204)
        return Response(msgspec.json.encode(answer), route.statuses[0], media_type=JSON)

    async def _read_body(self, request: Request, route: Route) -> Any:
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
            async with asyncio.timeout(self._body_s):
                data = await _receive(request, route.max_body)
        except TimeoutError as error:
            msg = f"the body did not arrive within {self._body_s:g} s"
            raise Refusal(msg, "slow", headers={"connection": "close"}) from error
        if route.body is bytes:
            return data
        if data and kind != JSON:
            msg = f"Content-Type is {kind[:80]!r}, must be {JSON}"
            raise Refusal(msg, "media-type")
        if len(data) > THREAD_BYTES:
            return await asyncio.to_thread(decode_json, data, route.body)
        return decode_json(data, route.body)


class _Endpoint:
    """Serves the methods of one path; without routes, answers 404."""

    def __init__(self, api: Api, routes: Sequence[Route]) -> None:
        self._api, self._routes = api, {route.method: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, began, name = Request(scope, receive), time.perf_counter(), "unknown"
        try:
            route = self._find(request)
            name = route.name
            response = await self._api.call(route, request)
        except (ClientDisconnected, ClientDisconnect):
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets a problem
            response = answers.respond(error)
        if self._api.state.metrics is not None:
            seconds = time.perf_counter() - began
            self._api.state.metrics.count_request(name, response.status_code, seconds)
        try:
            await response(scope, receive, send)
        except (ClientDisconnected, ClientDisconnect):
            return
        except TuglineError as error:  # in the middle of a stream: it breaks off, unfinished
            _log.warning("stream broke off", route=name, error=str(error))

    def _find(self, request: Request) -> Route:
        path = request.scope["path"][:200]
        if not self._routes:
            msg = f"nothing is at {path}; /openapi.json lists what there is"
            raise Refusal(msg, "no-route")
        if request.method not in self._routes:
            allow = ", ".join(sorted(self._routes))
            msg = f"{path} takes {allow}, not {request.method}"
            raise Refusal(msg, "method", known=tuple(self._routes), headers={"allow": allow})
        return self._routes[request.method]


async def _receive(request: Request, bound: int) -> bytes:
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


# --------------------------------------------------------------------------- decoding
def decode_json(data: bytes, kind: type[T]) -> T:
    """Decode a body; one object is enough for a list, nothing where every field is optional.

    Raises `Refusal` with the byte, or `ConfigError` with the field.
    """
    try:
        values = msgspec.json.decode(data or b"{}")
    except RecursionError as error:
        msg = "the body is nested too deeply"
        raise Refusal(msg, "malformed") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        at = "" if "(byte" in reason else f" (byte {len(data)})"
        msg = f"the body is not valid JSON: {reason}{at}"
        raise Refusal(msg, "malformed") from error
    if getattr(kind, "__origin__", None) is list and isinstance(values, dict):
        values = [values]
    return decode(values, kind)


def decode_query(query: str, kind: type[S]) -> S:
    """Decode a query string; a field that is a tuple may be repeated.

    Raises `Refusal`, or `ConfigError` with the field.
    """
    repeated = {field.name for field in msgspec.structs.fields(kind) if field.default == ()}
    values: dict[str, Any] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=2000)
    except ValueError as error:
        msg = f"the query cannot be parsed: {error}"
        raise Refusal(msg, "malformed") from error
    for name, value in pairs:
        if "\0" in value:
            msg = f"{name} holds a zero byte"
            raise Refusal(msg, "invalid", field=name)
        if name in repeated:
            values.setdefault(name, []).append(value)
        elif name in values:
            msg = f"{name} is given twice, must be given once"
            raise Refusal(msg, "invalid", field=name)
        else:
            values[name] = value
    decoded = decode(values, kind, strict=False)
    for name, value in values.items():
        if getattr(decoded, name) is None:  # msgspec takes the text "null" for None
            msg = f"{name} is {value!r}; leave it out instead"
            raise Refusal(msg, "invalid", field=name)
    return decoded


@contextlib.asynccontextmanager
async def serve_api(app: Api, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve `app` until the block ends; its long answers end first. Yields its base URL."""
    async with serve(app, host, port) as url:
        try:
            yield url
        finally:
            app.stop()
