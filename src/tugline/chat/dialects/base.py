"""Interface of a dialect: translation between a wire format and the neutral types.

No I/O and no async here. A dialect is one class that defines its routes, the headers of the secret,
both translations, the events of a stream, and error bodies. The proxy never branches on a dialect's
name. A field that changes the response and cannot be honoured is refused with a `RequestError` that
names it; it is never dropped. A client's mistake becomes a `RequestError` that names the field, its
value and valid values (never a 500).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from importlib import resources
from typing import Any, ClassVar, TypeVar

import msgspec

from tugline.chat.dialects.decoding import ParseCache
from tugline.chat.model_call import Piece, Request, Response, ThreadInfo, Usage
from tugline.errors import EngineError, RequestError, TuglineError
from tugline.types import Tool, TraceKind

T = TypeVar("T")
_REFUSED_REQUEST = frozenset({400, 413, 422})
"""Statuses with which an engine refuses the content of a request."""
CLIENT_TOOLS: Mapping[str, Tool] = msgspec.json.decode(
    (resources.files(__package__) / "client_tools.json").read_bytes(), type=dict[str, Tool]
)
"""Client-side tools whose schema the APIs define, by type without the date."""
encode = msgspec.json.Encoder().encode


class Action(Enum):
    """Purpose of a route."""

    ANSWER = auto()
    """Sample a response."""
    COUNT = auto()
    """Count the prompt's tokens; nothing is sampled."""
    MODELS = auto()
    MODEL = auto()


class HttpRequest(msgspec.Struct, frozen=True):
    """An HTTP request; `path` is the part after the session prefix and the API version."""

    method: str
    version: str
    """``v1``, ``v1beta``, or empty if the client sent none."""
    path: str
    """Path such as ``/messages`` or ``/models/m:streamGenerateContent``."""
    query: str
    headers: Mapping[str, str]
    """Headers by name in lower case."""
    body: bytes = b""


@dataclass(eq=False)
class Stream(ABC):
    """Encoder of a streamed response; methods return bytes ready to send."""

    dialect: Dialect
    """Dialect that builds the errors."""
    request: Request
    response_id: str
    created: int

    def __post_init__(self) -> None:  # noqa: B027 - not every stream has state
        """Prepare state shared by the events."""

    @property
    def content_type(self) -> str:
        """Content type of the HTTP response."""
        return "text/event-stream"

    @abstractmethod
    def start(self, usage: Usage) -> bytes:
        """Encode events before the first piece; ``usage.prompt`` is exact, or 0 if unknown."""

    @abstractmethod
    def add(self, piece: Piece, index: int = 0) -> bytes:
        """Encode a delta or a whole tool call of response number `index`."""

    @abstractmethod
    def finish(self, responses: Sequence[Response]) -> bytes:
        """Encode finish reasons, usage and the end marker."""

    @abstractmethod
    def fail(self, error: TuglineError) -> bytes:
        """Encode an error after the headers have been sent."""

    def keep_alive(self) -> bytes:
        """Return bytes that the client ignores, before and after `start`; empty if none exist."""
        return b": keep-alive\n\n"


class Dialect(ABC):
    """Base class of wire formats."""

    name: str
    posts: ClassVar[Mapping[str, Action]] = {}
    """POST routes."""
    stream_type: type[Stream]
    fields: ClassVar[Mapping[str, str]] = {}
    """This API's names of the neutral fields."""
    unavailable = 503
    """HTTP status of an engine failure after which the request may be retried."""

    def match(self, request: HttpRequest) -> Action | None:
        """Return the purpose of a request; None if it is not this dialect's."""
        if request.method == "POST":
            return self.posts.get(request.path)
        if request.method != "GET" or not self.owns_models(request):
            return None
        if request.path == "/models":
            return Action.MODELS
        return Action.MODEL if request.path.startswith("/models/") else None

    def owns_models(self, request: HttpRequest) -> bool:
        """Whether a request to the model routes, shared by dialects, is this dialect's."""
        return False

    def find_secret(self, headers: Mapping[str, str], query: str) -> str | None:
        """Return the session secret, from where this dialect's clients send it."""
        return bearer(headers)

    def carries_malformed(self, request: Request) -> bool:
        """Whether the response can carry a tool call whose arguments are not JSON."""
        return False

    @abstractmethod
    def parse(self, request: HttpRequest, cache: ParseCache) -> Request:
        """Parse a request, also for `Action.COUNT`. Raises `RequestError` naming the field."""

    def keep(self, request: Request, response: Response, cache: ParseCache) -> None:  # noqa: B027 - most have no such ids
        """Keep what later requests may name by the id of `response`; by default nothing."""

    @abstractmethod
    def encode(self, request: Request, responses: Sequence[Response]) -> bytes:
        """Encode the whole reply as one body; `responses` has length ``request.n``."""

    def stream(self, request: Request, response_id: str, created: int) -> Stream:
        """Create the encoder of a streamed response."""
        return self.stream_type(self, request, response_id, created)

    def encode_count(self, tokens: int) -> bytes:
        """Encode the reply to `Action.COUNT`."""
        return encode({"input_tokens": tokens})

    @abstractmethod
    def encode_models(self, names: Sequence[str], window: int, created: int) -> bytes:
        """Encode the reply to `Action.MODELS`."""

    def encode_model(self, name: str, window: int, created: int) -> bytes:
        """Encode the reply to `Action.MODEL`."""
        return encode(self.build_model(name, window, created))

    @abstractmethod
    def build_model(self, name: str, window: int, created: int) -> dict[str, Any]:
        """Describe a model with a context of `window` tokens."""

    def encode_error(self, error: TuglineError) -> tuple[int, dict[str, str], bytes]:
        """Return status, extra headers and body of a failure."""
        return self.find_status(error), retry_headers(error), encode(self.build_error(error))

    def find_status(self, error: TuglineError) -> int:
        """Return the HTTP status of a failure."""
        if isinstance(error, RequestError):
            return error.status
        if isinstance(error, EngineError) and error.status in _REFUSED_REQUEST:
            return 400
        if isinstance(error, EngineError) and not is_refused_by_engine(error):
            return self.unavailable
        return 500

    @abstractmethod
    def build_error(self, error: TuglineError) -> dict[str, Any]:
        """Build the body of a failure, which is also its event in a stream."""

    def name_field(self, error: TuglineError) -> str | None:
        """Return this API's name of the field that caused the error."""
        param = error.param if isinstance(error, RequestError) else None
        return self.fields.get(param, param) if param else None


def is_refused_by_engine(error: TuglineError) -> bool:
    """Whether the engine would refuse the same prompt again."""
    return isinstance(error, EngineError) and not error.temporary


def retry_headers(error: TuglineError) -> dict[str, str]:
    """Build the headers that tell clients whether and when to retry."""
    if isinstance(error, RequestError) or is_refused_by_engine(error):
        return {"x-should-retry": "false"}
    if isinstance(error, EngineError) and error.retry_after is not None:
        return {"retry-after": str(math.ceil(error.retry_after))}
    return {}


# --------------------------------------------------------------------------- headers
def bearer(headers: Mapping[str, str]) -> str | None:
    """Return the token of an ``Authorization: Bearer`` header."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def session_thread(headers: Mapping[str, str]) -> ThreadInfo:
    """Return the thread from opencode's headers, which are the same in every dialect."""
    parent = headers.get("x-parent-session-id")
    return ThreadInfo(headers.get("x-session-id"), parent, TraceKind.SUBAGENT if parent else None)
