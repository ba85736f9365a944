"""Route definitions, with tokens and roles, problem details, long polls and streams.

The types of query and body are taken from the handler's signature.

Errors are RFC 9457 problem details, from one table: `type` is the kind of error, `field` the
invalid field, `known` the accepted values. The response to an unexpected error has the id of its
log entry, never the traceback.

Long polls wait without polling the store. When the server shuts down, long polls are answered 503
at once and streams end normally, so clients and the shutdown do not wait for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec
from msgspec.structs import replace
from starlette.responses import Response, StreamingResponse

from tugline import errors, log
from tugline.protocol import PROBLEM, FieldError, Problem
from tugline.schema import copy_fields
from tugline.server.control import ControlPlane
from tugline.server.metrics import ServerMetrics
from tugline.server.store import nodes
from tugline.server.store.database import Database
from tugline.types.task import Task, Tenant
from tugline.web.http import Http

Q = TypeVar("Q")
B = TypeVar("B")
T = TypeVar("T")

PROBLEM_JSON = "application/problem+json"
JSON = "application/json"
MSGPACK = "application/x-msgpack"
ZSTD = "application/zstd"
GZIP = "application/gzip"
TAR = "application/x-tar"
SSE = "text/event-stream"
TEXT = "text/plain; charset=utf-8"

PROBLEMS = msgspec.toml.decode(
    Path(__file__).with_name("problems.toml").read_bytes(), type=dict[str, tuple[int, str]]
)
"""Status and title by name; the name is the last part of `Problem.type`."""

_HEADERS = {
    401: {"www-authenticate": 'Bearer realm="tugline"'},
    408: {"connection": "close"},
    413: {"connection": "close"},
    503: {"retry-after": "1"},
}
_log = log.get("server.http")


class Refusal(errors.TuglineError):
    """Rejection of a request before the control plane; `problem` is a key of `PROBLEMS`."""

    def __init__(self, detail: str, problem: str, *, known: tuple[str, ...] = ()) -> None:
        super().__init__(detail)
        self.problem = problem
        self.known = known


def respond(error: Exception) -> Response:
    """Create the problem response for an error. Log an unexpected one."""
    name = _name_of(error)
    detail = str(error)
    if name == "fault":
        fault = uuid.uuid4().hex[:12]
        _log.error("fault", id=fault, traceback=log.describe_error(error))
        detail = f"internal error; the server's log has the traceback under the id {fault}"
    status, title = PROBLEMS[name]
    mistakes = getattr(error, "problems", ()) if status == 422 else ()
    listed = tuple(copy_fields(FieldError, each, detail=str(each)) for each in mistakes)
    own = {"type": PROBLEM + name, "title": title, "status": status, "detail": detail}
    problem = copy_fields(Problem, error, **own, errors=listed)
    headers = {"allow": ", ".join(problem.known)} if status == 405 else _HEADERS.get(status)
    if retry_s := getattr(error, "retry_s", 0):
        headers = {"retry-after": str(retry_s)}
    return Response(msgspec.json.encode(problem), status, headers, media_type=PROBLEM_JSON)


def _name_of(error: Exception) -> str:
    if isinstance(error, errors.RequestError):  # while reading a body
        return next(name for name, (status, _) in PROBLEMS.items() if status == error.status)
    return error.problem if isinstance(error, errors.TuglineError) else "fault"


# --------------------------------------------------------------------------- waiting
class Waits:
    """Open long polls and streams of a server; streams send data at least every `keep_alive_s`."""

    keep_alive_s = 15.0

    def __init__(self) -> None:
        self.open = 0
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """End all waits, and later ones at once."""
        self._stopped.set()

    async def attend(self, work: Coroutine[Any, Any, T], *leaving: Awaitable[object]) -> T:
        """Await `work`. Raises `ClientGone` when `leaving` ends first, `Refusal` on `stop`."""
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
            raise Refusal("the server is shutting down; retry in a moment", "stopping")
        raise errors.ClientGone("the client disconnected before the response")

    async def forward(self, pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """Yield `pieces` until the server shuts down; the stream then ends normally."""
        async with contextlib.aclosing(pieces):
            with contextlib.suppress(Refusal):
                while (piece := await self.attend(anext(pieces, None))) is not None:
                    yield piece


# --------------------------------------------------------------------------- authorization
class ApiRole(StrEnum):
    """Permissions of a token."""

    CLIENT = "client"
    """All requests except those of nodes."""
    READ = "read"
    """Read requests."""
    JOIN = "join"
    """Registration of a node."""
    NODE = "node"
    """Requests of the node that the token was issued to."""


PUBLIC: frozenset[ApiRole] = frozenset()
CLIENTS = frozenset({ApiRole.CLIENT})
READERS = frozenset({ApiRole.CLIENT, ApiRole.READ})
NODES = frozenset({ApiRole.NODE})


class Caller(NamedTuple):
    """Sender of a request; `node` is set for a node, `name` and `tenant` for a person."""

    role: ApiRole | None = None
    node: str = ""
    name: str = ""
    tenant: str | None = None

    def check_tenant(self, tenant: str) -> None:
        """Check the right to submit and cancel a tenant's work. Raises `Refusal`."""
        if self.tenant not in {None, tenant}:
            msg = f"this token is limited to tenant {self.tenant!r}; the tenant is {tenant!r}"
            raise Refusal(msg, "forbidden")

    def check_name(self, field: str, name: str) -> str:
        """Return the name of a consumer or run that may be written to. Raises `Refusal`.

        Those of a tenant have its name, or begin with it and a dot.
        """
        own = self.tenant
        if own is not None and name != own and not name.startswith(f"{own}."):
            msg = (
                f"{field} is {name!r}; but a token of tenant {own!r} requires {own!r} or a "
                "name that begins"
            )
            raise Refusal(f"{msg} with {own + '.'!r}", "forbidden")
        return name


class Person(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Personal token."""

    token: str
    role: Literal["client", "read"] = "client"
    tenant: Tenant | None = None
    """Tenant whose work the token may submit and cancel; None: all tenants."""


class Tokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens of a server, all different. Raises `UsageError` for a malformed one."""

    client: str
    join: str
    read: str
    people: dict[str, Person] = {}
    """Personal tokens by name, which appears in the audit log."""

    def __post_init__(self) -> None:
        own = {"client": self.client, "join": self.join, "read": self.read}
        tokens = own | {f"people.{name}": person.token for name, person in self.people.items()}
        for name, token in tokens.items():
            if not token or not token.isascii() or any(c.isspace() for c in token):
                msg = f"the {name} token must be non-empty ASCII without spaces"
                raise errors.UsageError(msg)
        if len(set(tokens.values())) < len(tokens):
            raise errors.UsageError(f"the {', '.join(tokens)} tokens must differ from each other")

    @property
    def callers(self) -> list[tuple[str, Caller]]:
        """Tokens with their callers, except those of nodes."""
        own = [(getattr(self, role), Caller(role)) for role in ApiRole if role is not ApiRole.NODE]
        people = self.people.items()
        return own + [(p.token, Caller(ApiRole(p.role), "", name, p.tenant)) for name, p in people]

    def __repr__(self) -> str:
        return "Tokens(...)"


async def identify(header: str | None, tokens: Tokens, database: Database) -> Caller:
    """Return the caller with this ``Authorization`` header. Raises `Refusal`."""
    scheme, _, token = (header or "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise Refusal("send the header 'Authorization: Bearer TOKEN'", "unauthorized")
    for known, caller in tokens.callers:
        if hmac.compare_digest(known.encode(), token.encode()):
            return caller
    node = await database.read(nodes.find_by_token, token)
    if node is None:
        raise Refusal(
            "the token is unknown, or belongs to a node that has been removed", "unauthorized"
        )
    return Caller(ApiRole.NODE, node)


# --------------------------------------------------------------------------- routes
class Nothing(msgspec.Struct, frozen=True):
    """Absence of a query or body."""


@dataclass(slots=True)
class ApiCall(Generic[Q, B]):
    """A decoded request."""

    control: ControlPlane
    metrics: ServerMetrics
    waits: Waits
    caller: Caller
    request: Http
    id: str
    """Id in the path; empty for a path without one."""
    query: Q
    body: B

    @property
    def db(self) -> Database:
        """Database of the server."""
        return self.control.database

    async def attend(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` until the client disconnects or the server shuts down."""
        return await self.waits.attend(work, asyncio.wait({self.request.lost}))

    def stream(self, pieces: AsyncGenerator[bytes], media: str, **headers: str) -> Response:
        """Create a streaming response; a slow reader slows down `pieces`."""
        headers = {"cache-control": "no-store", **headers}
        return StreamingResponse(self.waits.forward(pieces), headers=headers, media_type=media)

    def accept(self, *media: str) -> str:
        """Return the first of `media` that the client accepts. Raises `Refusal` (406)."""
        header = self.request.headers.get("accept", "*/*")
        accepted = {part.partition(";")[0].strip().lower() for part in header.split(",")}
        for offered in media:
            if {offered, offered.partition("/")[0] + "/*", "*/*"} & accepted:
                return offered
        msg = f"Accept is {header!r}, must be one of {', '.join(media)}"
        raise Refusal(msg, "not-acceptable", known=media)


def admit(call: ApiCall[Any, list[Task]]) -> list[Task]:
    """Return submitted tasks with the caller's tenant. Raises `Refusal`, `QuotaExceeded`."""
    own = call.caller.tenant
    tasks = call.body
    batch = [replace(t, tenant=own) if own and t.tenant == "default" else t for t in tasks]
    for tenant in sorted({task.tenant for task in batch}):
        call.caller.check_tenant(tenant)
        call.control.count_request(call.caller, tenant)
    return batch


PlainCall = ApiCall[Nothing, Nothing]
"""Request without query and body."""
QueryCall = ApiCall[Q, Nothing]
BodyCall = ApiCall[Nothing, B]
Handler = Callable[[ApiCall[Any, Any]], Awaitable[object]]


class Route(NamedTuple):
    """Method, path and handler of an endpoint."""

    method: str
    path: str
    """Path, with at most one ``{id}`` or ``{number}``."""
    roles: frozenset[ApiRole]
    """Permitted roles; empty: no token needed."""
    handler: Handler
    """Handler; the first line of its docstring is the summary in the OpenAPI document."""
    query: Any
    body: Any
    """Type of the body; `Nothing`: no body; bytes: a binary body."""
    status: int = 200
    """Status of a response with a body."""
    max_body: int = 1 << 20
    """Maximum size of the body in bytes."""
    audited: bool = True
    """Whether the audit log records changes by people and programs."""
    find_owner: Callable[..., Any] | None = None
    """Operation that reads the object with this id, whose `tenant` must be that of the caller."""

    shared: bool = False
    """Whether it changes something of all tenants, which a tenant's own token may not."""

    @property
    def name(self) -> str:
        """Method and path."""
        return f"{self.method} {self.path}"


class Routes(list[Route]):
    """List of routes with a decorator to add to it."""

    def add(
        self, method: str, path: str, roles: frozenset[ApiRole], **settings: Any
    ) -> Callable[[Handler], Handler]:
        """Decorate the handler of a route; `settings` are fields of `Route`."""

        def register(handler: Handler) -> Handler:
            call = next(iter(get_type_hints(handler).values()))
            self.append(Route(method, path, roles, handler, *get_args(call), **settings))
            return handler

        return register
