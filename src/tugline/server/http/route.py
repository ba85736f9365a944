"""Routes as values: what a route takes, who may use it, what it answers.

Query and body are read off the handler's signature.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec
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
MSGPACK = "application/x-msgpack"
ZSTD = "application/zstd"
GZIP = "application/gzip"
TAR = "application/x-tar"
SSE = "text/event-stream"
TEXT = "text/plain; charset=utf-8"


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
                raise UsageError(f"the {name} token must be ASCII without spaces, and not empty")
        if len({self.client, self.join, self.read}) < 3:
            raise UsageError("the client, join and read tokens must differ from each other")

    def __repr__(self) -> str:
        return "Tokens(...)"


async def identify(
    header: str | None, tokens: Tokens, find_node: Callable[[str], Awaitable[str | None]]
) -> Caller:
    """The caller that sends this ``Authorization`` header. Raises `Refusal`."""
    scheme, _, token = (header or "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise Refusal("send the header 'Authorization: Bearer TOKEN'", "unauthorized")
    for role in (ApiRole.CLIENT, ApiRole.READ, ApiRole.JOIN):
        if hmac.compare_digest(getattr(tokens, role).encode(), token.encode()):
            return Caller(role)
    node = await find_node(token)
    if node is None:
        raise Refusal("this token is unknown, or of a node that is gone", "unauthorized")
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


PlainCall = ApiCall[Nothing, Nothing]
"""A request without query and body."""
Handler = Callable[[ApiCall[Any, Any]], Awaitable[object]]


class Route(NamedTuple):
    """One method of one path."""

    method: str
    path: str
    """May contain one ``{id}`` or ``{number}``."""
    roles: frozenset[ApiRole]
    """Who may use it; empty: everybody."""
    handler: Handler
    """The first line of its docstring is the summary."""
    query: Any
    body: Any
    """`Nothing`: no body; bytes: a binary one."""
    status: int = 200
    """Of an answer that has a body."""
    max_body: int = 1 << 20
    """Bytes."""

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
            call = next(iter(get_type_hints(handler).values()))
            self.append(Route(method, path, roles, handler, *get_args(call), **settings))
            return handler

        return register
