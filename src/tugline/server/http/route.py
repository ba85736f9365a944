"""Routes as values: what a route takes, who may use it, what it answers.

Query, body and answer are read off the handler's signature, by the server and by the OpenAPI
document alike, so they cannot drift apart.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta
from starlette.responses import Response, StreamingResponse

from tugline.errors import UsageError
from tugline.server.control import ControlPlane
from tugline.server.http.answers import Refusal, Waits
from tugline.server.metrics import ServerMetrics
from tugline.server.store.database import Database
from tugline.web.serve import HttpRequest

Q = TypeVar("Q")
B = TypeVar("B")
T = TypeVar("T")

JSON = "application/json"
NDJSON = "application/x-ndjson"
MSGPACK = "application/x-msgpack"
ZSTD = "application/zstd"
SSE = "text/event-stream"
TEXT = "text/plain; charset=utf-8"

MAX_WAIT_S = 60.0

Limit = Annotated[int, Meta(ge=1, le=1000, description="Maximum number of items.")]
Wait = Annotated[float, Meta(ge=0, le=MAX_WAIT_S, description="Seconds to wait for new items.")]
Position = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,160}$")]
Cursor = Annotated[str, Meta(max_length=256, description="`next` of the previous page.")]


# --------------------------------------------------------------------------- who may
class ApiRole(StrEnum):
    """What a token allows."""

    CLIENT = "client"
    """Everything except what nodes do."""
    READ = "read"
    """Reading."""
    JOIN = "join"
    """Joining as a node."""
    NODE = "node"
    """Acting as the node that it was given to."""


PUBLIC: frozenset[ApiRole] = frozenset()
CLIENTS = frozenset({ApiRole.CLIENT})
READERS = frozenset({ApiRole.CLIENT, ApiRole.READ})
NODES = frozenset({ApiRole.NODE})


class Caller(NamedTuple):
    """Who sends a request; `node` is the id of a node."""

    role: ApiRole | None = None
    node: str = ""


class Tokens(msgspec.Struct, frozen=True):
    """The server's own tokens, all different. Raises `UsageError` for a malformed one."""

    client: str
    join: str
    read: str

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            token = getattr(self, name)
            if not token or not token.isascii() or any(c.isspace() for c in token):
                msg = f"the {name} token must be ASCII without spaces, and not empty"
                raise UsageError(msg)
        if len({self.client, self.join, self.read}) < 3:
            msg = "the client, join and read tokens must differ from each other"
            raise UsageError(msg)

    def __repr__(self) -> str:
        return "Tokens(...)"


async def identify(
    header: str | None, tokens: Tokens, find_node: Callable[[str], Awaitable[str | None]]
) -> Caller:
    """The caller that sends this ``Authorization`` header. Raises `Refusal`."""
    scheme, _, token = (header or "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        message = "send the header 'Authorization: Bearer TOKEN'"
        raise Refusal(message, "unauthorized")
    for role in (ApiRole.CLIENT, ApiRole.READ, ApiRole.JOIN):
        if hmac.compare_digest(getattr(tokens, role).encode(), token.encode()):
            return Caller(role)
    node = await find_node(token)
    if node is None:
        message = "this token is unknown, or of a node that is gone"
        raise Refusal(message, "unauthorized")
    return Caller(ApiRole.NODE, node)


# --------------------------------------------------------------------------- routes
class Nothing(msgspec.Struct, frozen=True):
    """No fields."""


@dataclass(slots=True)
class ApiCall(Generic[Q, B]):
    """A decoded request."""

    control: ControlPlane
    metrics: ServerMetrics
    waits: Waits
    caller: Caller
    request: HttpRequest
    id: str
    """The id in the path; empty where there is none."""
    query: Q
    body: B

    @property
    def db(self) -> Database:
        """The store."""
        return self.control.database

    async def attend(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`, at most as long as the client and the server are there."""
        return await self.waits.attend(work, self.request.wait_disconnected())

    def stream(self, pieces: AsyncGenerator[bytes], media: str, **headers: str) -> Response:
        """An answer in pieces, for as long; a slow reader slows down the source."""
        headers = {"cache-control": "no-store", **headers}
        return StreamingResponse(self.waits.forward(pieces), headers=headers, media_type=media)

    def accept(self, *media: str) -> str:
        """The first of `media` that the client accepts. Raises `Refusal` (406)."""
        header = self.request.headers.get("accept", "*/*")
        accepted = {part.partition(";")[0].strip().lower() for part in header.split(",")}
        for offered in media:
            if {offered, offered.partition("/")[0] + "/*", "*/*"} & accepted:
                return offered
        msg = f"Accept is {header!r}, must be one of {', '.join(media)}"
        raise Refusal(msg, "not-acceptable", known=media)


Handler = Callable[[ApiCall[Any, Any]], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path."""

    method: str
    path: str
    """May contain one ``{id}`` or ``{number}``."""
    roles: frozenset[ApiRole]
    """Who may use it; empty: everybody."""
    handler: Handler
    """The first line of its docstring is the summary."""
    media: tuple[str, ...] = (JSON,)
    """Of the answer."""
    statuses: tuple[int, ...] = ()
    """Of successful answers, the default first; empty: 200, or 204 for no answer."""
    problems: tuple[str, ...] = ()
    """Besides those that every route may answer."""
    max_body: int = 1 << 20
    """Bytes."""
    query: Any = field(init=False)
    body: Any = field(init=False)
    """`Nothing`: no body; bytes: a binary one."""
    answer: Any = field(init=False)
    """NoneType: 204; `Response`: as `media` says."""

    def __post_init__(self) -> None:
        hints = get_type_hints(self.handler)
        answer = hints.pop("return")
        (call,) = hints.values()
        query, body = get_args(call)
        if isinstance(answer, UnionType):
            answer = next(kind for kind in get_args(answer) if kind is not Response)
        statuses = self.statuses or (204 if answer is NoneType else 200,)
        derived = {"query": query, "body": body, "answer": answer, "statuses": statuses}
        for name, kind in derived.items():
            object.__setattr__(self, name, kind)

    @property
    def name(self) -> str:
        """Method and path."""
        return f"{self.method} {self.path}"


class Routes(list[Route]):
    """A list of routes that `add` fills."""

    def add(
        self, method: str, path: str, roles: frozenset[ApiRole], **settings: Any
    ) -> Callable[[Handler], Handler]:
        """Decorate the handler of a route; `settings` are fields of `Route`."""

        def register(handler: Handler) -> Handler:
            self.append(Route(method, path, roles, handler, **settings))
            return handler

        return register
