"""ASGI application of the control plane: routing, authorization, decoding, responses.

Browsers get the console, whose files need no token; its API requests do.

`serve_api` ends long polls and streams before the server waits for its connections. Every error is
returned as problem details.
"""

import asyncio
import contextlib
import os
import re
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from tugline import log
from tugline.errors import ClientGone, Invalid, TuglineError
from tugline.schema import decode
from tugline.server.control import ControlPlane
from tugline.server.http import feeds, handlers, runs
from tugline.server.http.route import (
    JSON,
    ApiCall,
    ApiRole,
    Caller,
    Nothing,
    Refusal,
    Route,
    Tokens,
    Waits,
    identify,
    respond,
)
from tugline.server.metrics import ServerMetrics
from tugline.web.http import Http
from tugline.web.serve import serve

ROUTES = (*handlers.ROUTES, *runs.ROUTES, *feeds.ROUTES)
THREAD_BYTES = 256 << 10
"""Size from which JSON is decoded in a thread."""

AUDIT = "audit.jsonl"
BODY_S = 120.0
_BINARY = {"application/octet-stream", "application/zstd", "application/x-msgpack", "text/plain"}
_PATTERNS = {"{id}": r"([A-Za-z0-9._-]{1,160})", "{number}": r"([0-9]{1,18})"}
_CONSOLE = Path(__file__).parents[1] / "console"
_PAGES = "runs|training|sessions|groups|compare|failures|tasks|nodes"
_PAGE = re.compile(rf"/|/({_PAGES}).*|/(assets/[^/]+)")
"""Paths of the console; at all paths but those of assets, the page does its own routing."""
_CONSOLE_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
}
_log = log.get("server.http")
T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


class Api:
    """ASGI application. Call `waits.stop` before closing sockets: it ends long polls and streams.

    A body must arrive within `BODY_S`. `tokens` may be replaced at any time. Changes by people and
    programs are appended to `AUDIT` in the server's folder.
    """

    def __init__(
        self, control: ControlPlane, tokens: Tokens, metrics: ServerMetrics | None = None
    ) -> None:
        self.waits = Waits()
        self._audit = control.folder / AUDIT
        self._control = control
        self.tokens = tokens
        self._metrics = metrics or ServerMetrics(control.database)
        self._metrics.waiting = lambda: self.waits.open
        self._paths: dict[re.Pattern[str], dict[str, Route]] = {}
        for route in ROUTES:
            pattern = route.path.replace(".", r"\.")
            for name, accepted in _PATTERNS.items():
                pattern = pattern.replace(name, accepted)
            self._paths.setdefault(re.compile(pattern), {})[route.method] = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        request = Http(scope, receive, send)
        began = time.perf_counter()
        name = "unknown"
        try:
            path = scope["raw_path"].decode("latin-1")
            if request.method == "GET" and (page := _PAGE.fullmatch(path)):
                name = "console"
                response = _open_console(page[2])
            else:
                route, ident = self._find(request, path)
                name = route.name
                response = await self._call(route, request, ident)
        except ClientGone:
            return
        except Exception as error:  # noqa: BLE001 - every error becomes problem details
            response = respond(error)
        self._metrics.count_request(name, response.status_code, time.perf_counter() - began)
        try:
            await response(scope, receive, send)
        except TuglineError as error:  # in a stream, which ends incomplete
            _log.warning("stream broke off", route=name, error=str(error))

    def _find(self, request: Http, path: str) -> tuple[Route, str]:
        """Return the route of a raw path (an escaped slash is no separator), and the path's id."""
        for pattern, routes in self._paths.items():
            if match := pattern.fullmatch(path):
                if request.method in routes:
                    return routes[request.method], "".join(match.groups())
                known = tuple(sorted(routes))
                msg = f"{path[:200]} accepts {', '.join(known)}, not {request.method}"
                raise Refusal(msg, "method", known=known)
        raise Refusal(f"there is no route {path[:200]}; see /openapi.json", "no-route")

    async def _call(self, route: Route, request: Http, ident: str) -> Response:
        """Authorize and decode a request, and call its handler."""
        caller = Caller()
        if route.roles:
            header = request.headers.get("authorization")
            caller = await identify(header, self.tokens, self._control.database)
            if caller.role not in route.roles:
                needed = " or ".join(sorted(route.roles))
                msg = f"{route.name} requires the {needed} token, but this is a {caller.role} token"
                raise Refusal(msg, "forbidden")
        if caller.tenant and route.shared:
            msg = (
                f"{route.name} affects all tenants, but this token is limited to tenant "
                f"{caller.tenant!r}"
            )
            raise Refusal(msg, "forbidden")
        if caller.tenant and route.find_owner:
            caller.check_tenant((await self._control.database.read(route.find_owner, ident)).tenant)
        query = decode_query(request.query, route.query)
        body = Nothing() if request.method == "GET" else await self._read_body(request, route)
        result = await route.handler(
            ApiCall(self._control, self._metrics, self.waits, caller, request, ident, query, body)
        )
        if route.audited and request.method != "GET" and caller.role is not ApiRole.NODE:
            self._note_change(caller, request, body)
        if isinstance(result, Response):
            return result
        if result is None:
            return Response(status_code=204)
        role = {"tugline-role": caller.role} if caller.role else {}
        return Response(msgspec.json.encode(result), route.status, role, media_type=JSON)

    def _note_change(self, caller: Caller, request: Http, body: Any) -> None:
        """Append to the audit log; the write only reaches the page cache, so it needs no thread."""
        line = {
            "at": datetime.now(UTC),
            "who": caller.name or caller.role,
            "from": request.peer,
            "what": f"{request.method} {request.path}",
            "query": request.query,
            "tasks": [task.id for task in body] if isinstance(body, list) else None,
            "sessions": [*getattr(body, "sessions", ())],
        }
        entry = {key: value for key, value in line.items() if value}
        try:
            with open(self._audit, "ab", opener=partial(os.open, mode=0o600)) as file:
                file.write(msgspec.json.encode(entry) + b"\n")
        except OSError as error:  # the change is made, so the request succeeds
            _log.error("audit log not written", error=str(error), **entry)

    async def _read_body(self, request: Http, route: Route) -> Any:
        """Read and decode the body, with limits on size and time."""
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise Refusal(f"Content-Encoding is {encoding[:40]!r}, must be identity", "media-type")
        data = await request.body(route.max_body, BODY_S)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        binary = route.body is bytes
        if kind not in _BINARY | {""} if binary else data and kind != JSON:
            must = "application/octet-stream" if binary else JSON
            raise Refusal(f"Content-Type is {kind[:80]!r}, must be {must}", "media-type")
        if binary:
            return data
        if len(data) > THREAD_BYTES:
            return await asyncio.to_thread(decode_json, data, route.body)
        return decode_json(data, route.body)


def _open_console(asset: str | None) -> Response:
    """Return a file of the console, or its page. Names of assets change with their content."""
    file = _CONSOLE / (asset or "index.html")
    if not file.is_file():
        raise Refusal(f"the console has no {asset}", "no-route")
    caching = "public, max-age=31536000, immutable" if asset else "no-cache"
    return FileResponse(file, headers={**_CONSOLE_HEADERS, "cache-control": caching})


# --------------------------------------------------------------------------- decoding
def decode_json(data: bytes, kind: type[T]) -> T:
    """Decode a body; for a list, a single object is enough; an empty body is an empty object.

    Raises `Refusal` with the position, or `ConfigError` with the field.
    """
    try:
        values = msgspec.json.decode(data or b"{}")
    except RecursionError as error:
        raise Refusal("the body is nested too deeply", "malformed") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        at = "" if "(byte" in reason else f" (byte {len(data)})"
        raise Refusal(f"the body is not valid JSON: {reason}{at}", "malformed") from error
    if getattr(kind, "__origin__", None) is list and isinstance(values, dict):
        values = [values]
    return decode(values, kind)


def decode_query(query: str, kind: type[S]) -> S:
    """Decode a query string; fields whose default is an empty tuple may be repeated.

    Raises `Refusal`, or `ConfigError` with the field.
    """
    repeated = {field.name for field in msgspec.structs.fields(kind) if field.default == ()}
    values: dict[str, Any] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=2000)
    except ValueError as error:
        raise Refusal(f"the query cannot be parsed: {error}", "malformed") from error
    for name, value in pairs:
        if "\0" in value:
            raise Invalid(f"{name} contains a NUL byte", field=name)
        if name in repeated:
            values.setdefault(name, []).append(value)
        elif name in values:
            raise Invalid(f"{name} is given more than once", field=name)
        else:
            values[name] = value
    decoded = decode(values, kind, strict=False)
    for name, value in values.items():
        if getattr(decoded, name) is None:  # msgspec takes the text "null" for None
            raise Invalid(f"{name} is {value!r}, which is not a value; leave it out", field=name)
    return decoded


@contextlib.asynccontextmanager
async def serve_api(
    app: Api, host: str = "127.0.0.1", port: int = 0, tls: tuple[Path, Path] | None = None
) -> AsyncIterator[str]:
    """Serve `app` during the block; yield its base URL. Long polls and streams end first."""
    async with serve(app, host, port, tls=tls) as url:
        try:
            yield url
        finally:
            app.waits.stop()
