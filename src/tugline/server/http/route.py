"""One route as a value: what it takes, who may use it, what it answers.

The same value matches the request, decodes it, guards it and writes its part of the OpenAPI
document. Query, body and answer are read off the handler's signature: nothing can drift apart.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, Generic, Protocol, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from tugline.server.control import ControlPlane
from tugline.server.http.auth import Caller, Role
from tugline.server.http.problems import Refusal
from tugline.server.http.waiting import Waits

Q = TypeVar("Q")
B = TypeVar("B")
T = TypeVar("T")

JSON = "application/json"
NDJSON = "application/x-ndjson"
MSGPACK = "application/x-msgpack"
ZSTD = "application/zstd"
SSE = "text/event-stream"
TEXT = "text/plain; charset=utf-8"

WAIT_S = 60.0
"""The longest that a question may wait."""

Limit = Annotated[int, Meta(ge=1, le=1000, description="How many at most.")]
Wait = Annotated[float, Meta(ge=0, le=WAIT_S, description="Seconds to wait for something new.")]
Position = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,160}$")]
Cursor = Annotated[str, Meta(max_length=256, description="`next` of the page before.")]

CLIENTS = frozenset({Role.CLIENT})
READERS = frozenset({Role.CLIENT, Role.READ})
NODES = frozenset({Role.NODE})


class Nothing(msgspec.Struct, frozen=True):
    """No fields."""


class Metrics(Protocol):
    """Who counts what is served, and tells it to Prometheus."""

    async def page(self) -> bytes:
        """All metrics as text."""
        ...

    def served(self, route: str, status: int, seconds: float) -> None:
        """One request is answered; `route` such as ``GET /v1/tasks/{id}``."""
        ...


@dataclass(frozen=True, slots=True)
class AppState:
    """What all requests to one server share."""

    control: ControlPlane
    waits: Waits
    metrics: Metrics | None
    document: Callable[[], bytes]
    """Makes the OpenAPI document, when somebody asks for it."""


@dataclass(slots=True)
class Call(Generic[Q, B]):
    """One request, decoded."""

    house: AppState
    caller: Caller
    request: Request
    id: str
    """The id in the path; empty where there is none."""
    query: Q
    body: B
    status: int
    """Of the answer; a handler may set another one."""

    @property
    def control(self) -> ControlPlane:
        """The control plane."""
        return self.house.control

    @property
    def waits(self) -> Waits:
        """The long answers of this server."""
        return self.house.waits

    async def attend(self, work: Coroutine[Any, Any, T]) -> T:
        """A long answer: it ends with the client and with the server."""
        return await self.house.waits.attend(self.request.receive, work)

    def accepts(self, *media: str) -> str:
        """The first of `media` that the client takes. Raises `Refusal` (406)."""
        asked = self.request.headers.get("accept", "*/*")
        wanted = {part.partition(";")[0].strip().lower() for part in asked.split(",")}
        for one in media:
            if {one, one.partition("/")[0] + "/*"} & wanted:
                return one
        if "*/*" in wanted:
            return media[0]
        msg = f"Accept is {asked!r}, must be one of {', '.join(media)}"
        raise Refusal(msg, "not-acceptable", known=media)


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path. What it takes and answers stands in its handler's signature."""

    method: str
    path: str
    """May hold one ``{id}`` or ``{number}``."""
    roles: frozenset[Role]
    """Empty: open to everybody."""
    handler: Callable[[Call[Any, Any]], Awaitable[object]]
    """Its first line of docstring is the summary."""
    media: tuple[str, ...] = (JSON,)
    """Of the answer."""
    statuses: tuple[int, ...] = (200,)
    """Of an answer that is no problem."""
    problems: tuple[str, ...] = ()
    """Besides those that any route may have."""
    max_body: int = 1 << 20
    """Bytes."""
    query: Any = field(init=False)
    body: Any = field(init=False)
    """`Nothing`: no body; bytes: a binary one."""
    answer: Any = field(init=False)
    """NoneType: 204; `Response`: as `media` says."""

    def __post_init__(self) -> None:
        hints = get_type_hints(self.handler)
        query, body = get_args(hints["call"])
        told = hints["return"]
        if isinstance(told, UnionType):
            told = next(one for one in get_args(told) if one is not Response)
        for name, kind in (("query", query), ("body", body), ("answer", told)):
            object.__setattr__(self, name, kind)

    @property
    def summary(self) -> str:
        """What it does, in a line."""
        return (self.handler.__doc__ or "").splitlines()[0].rstrip(".")
