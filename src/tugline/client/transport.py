"""HTTP to one server, with a deadline for every call and retries of transient failures.

A restarting server, a full store (503) and a lost connection are retried with back-off and jitter
until the call's deadline. A rejected request raises an error at once, of the class that the server
raised. Every call of the API is idempotent: tasks and sessions have ids chosen by the caller,
results have a digest, and reads name a position (I3).
"""

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from tugline import log
from tugline.errors import QuotaExceeded, ServerError, UsageError
from tugline.protocol import PROBLEM, Problem

T = TypeVar("T")
Query = Mapping[str, str | int | float | bool | Sequence[str] | None]
"""Query parameters; None omits a parameter, a sequence repeats it."""

SERVER = "TUGLINE_SERVER"
TOKEN = "TUGLINE_TOKEN"  # noqa: S105 - the name of a variable
FOLDER = Path("tugline-data")
CONNECT_S = 5.0
TRY_S = 30.0
"""Read timeout of an attempt in seconds, on top of a requested wait."""
SLOWEST = 1 << 20
"""Assumed minimum bandwidth in bytes per second; large bodies get more time."""
SILENCE_S = 45.0
"""Read timeout of a stream in seconds: three missed keep-alives."""
MIN_PAUSE_S = 0.05
"""Shortest pause between attempts in seconds; an attempt needs at least this."""
MAX_PAUSE_S = 2.0
"""Longest pause between attempts in seconds."""

_RETRIED = frozenset({408, 425, 429, 502, 503, 504})
_CLASSES = {kind.problem: kind for kind in ServerError.__subclasses__()}
BROKEN = (aiohttp.ClientError, TimeoutError, ConnectionError, asyncio.IncompleteReadError)
"""Exceptions of a connection that is lost or cannot be made."""
_log = log.get("client")


class RetryBudget:
    """Remaining time of an operation, and the pauses between its attempts."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.renew()

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self._end - asyncio.get_running_loop().time()

    def renew(self) -> None:
        """Restart the budget after progress."""
        self._end = asyncio.get_running_loop().time() + self.seconds
        self._pause = MIN_PAUSE_S

    def limit(self, seconds: float) -> None:
        """Move the deadline to at most `seconds` from now."""
        self._end = min(self._end, asyncio.get_running_loop().time() + seconds)

    async def wait(self, error: ServerError, at_least: float = 0.0) -> None:
        """Pause before the next attempt. Raises `error` if the deadline would pass first."""
        pause = max(at_least, self._pause * random.uniform(0.5, 1.0))
        if pause + MIN_PAUSE_S >= self.left:  # a timeout of the next attempt would hide this error
            raise error
        _log.debug("retrying", error=str(error), pause_s=round(pause, 3))
        self._pause = min(MAX_PAUSE_S, self._pause * 2)
        await asyncio.sleep(pause)


class Transport:
    """Connection pool to a server; an async context manager."""

    def __init__(self, url: str, token: str, *, deadline_s: float) -> None:
        self.url = _check_url(url)
        self.deadline_s = deadline_s
        self._token = token
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=30),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )
        return self

    async def __aexit__(self, *_exc: object) -> None:
        http = self._http
        self._http = None
        if http is not None:
            await http.close()

    async def ask(  # noqa: PLR0913 - the parts of a request
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        query: Query | None = None,
        body: msgspec.Struct | list[msgspec.Struct] | bytes | None = None,
        wait_s: float = 0.0,
        token: str | None = None,
    ) -> T:
        """Send a request; return the response decoded as `kind`, or as received for `bytes`.

        `wait_s`, the wait requested of the server, is added to the deadline. Raises the subclass of
        `ServerError` for the problem.
        """
        content = body
        headers = self._headers(token)
        headers["Accept"] = "application/zstd, */*" if kind is bytes else "application/json"
        if body is not None and not isinstance(body, bytes):
            content = msgspec.json.encode(body)
            headers["Content-Type"] = "application/json"
        sending_s = len(content) / SLOWEST if isinstance(content, bytes) else 0.0
        budget = RetryBudget(self.deadline_s + wait_s + sending_s)
        while True:
            timeout = aiohttp.ClientTimeout(
                total=max(0.01, budget.left),
                sock_connect=CONNECT_S,
                sock_read=min(TRY_S, self.deadline_s) + wait_s + sending_s,
            )
            try:
                async with self._open.request(
                    method,
                    self.url + path,
                    params=_params(query),
                    data=content,
                    headers=headers,
                    timeout=timeout,
                ) as response:
                    data = await response.read()
                    if response.ok:
                        return self._decode(data, kind)
                    error = _parse_problem(response, data)
                    pause_s = _parse_retry_after(response)
            except BROKEN as broken:
                error = self.make_unreachable_error(broken)
                pause_s = 0.0
            if not is_transient(error) or (isinstance(error, QuotaExceeded) and not pause_s):
                raise error
            budget.limit(self.deadline_s + sending_s)  # the requested wait is over
            await budget.wait(error, pause_s)

    async def get(
        self, path: str, kind: type[T], *, query: Query | None = None, wait_s: float = 0.0
    ) -> T:
        """Send a GET request; see `ask`."""
        return await self.ask("GET", path, kind, query=query, wait_s=wait_s)

    @contextlib.asynccontextmanager
    async def stream(self, path: str, query: Query) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a stream of text, without retries. Raises `ServerError` or an error in `BROKEN`."""
        sent = self._headers() | {"Accept": "text/plain"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        async with self._open.get(
            self.url + path, params=_params(query), headers=sent, timeout=timeout
        ) as response:
            if not response.ok:
                raise _parse_problem(response, await response.read())
            yield response

    def make_unreachable_error(self, error: BaseException) -> ServerError:
        """Create the error for a lost connection."""
        known = isinstance(error, OSError) and not isinstance(error, aiohttp.ClientSSLError)
        number = getattr(error, "errno", 0) or 0 if known else 0
        reason = os.strerror(number) if number > 0 else str(error) or type(error).__name__
        return ServerError(f"the server at {self.url} cannot be reached: {reason}")

    def _headers(self, token: str | None = None) -> dict[str, str]:
        return {"Authorization": f"Bearer {token or self._token}"}

    def _decode(self, data: bytes, kind: type[T]) -> T:
        if kind is bytes:
            return data  # type: ignore[return-value]
        if kind is type(None):
            return None
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as error:
            msg = (
                f"{self.url} did not send a valid {kind}: {error}; check that it is a Tugline "
                "server"
            )
            raise ServerError(msg, status=200) from error

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise UsageError(
                "this client is not open; enter it with `async with Client(...) as client`"
            )
        return self._http


def quote_id(name: str) -> str:
    """Quote an id as a path segment."""
    return quote(name, safe="")


def is_transient(error: ServerError) -> bool:
    """Whether a retry may help."""
    return error.status is None or error.status in _RETRIED


def _parse_retry_after(response: aiohttp.ClientResponse) -> float:
    """Return the seconds to wait before the next attempt, by ``Retry-After``; 0 without it."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdigit() else 0.0


def _parse_problem(response: aiohttp.ClientResponse, data: bytes) -> ServerError:
    """Return the error that a problem body describes; for any other body a 502 that quotes it.

    Another body comes from a proxy, whose 401 or 404 does not refer to the request.
    """
    try:
        problem = msgspec.json.decode(data, type=Problem)
    except msgspec.DecodeError:
        problem = None
    if problem is None or not problem.type.startswith(PROBLEM):
        text = " ".join(data[:200].decode(errors="replace").split())
        return ServerError(f"{response.status} {response.reason}: {text}", status=502)
    name = "missing" if response.status == 404 else problem.type.removeprefix(PROBLEM)
    kind = _CLASSES.get(name, ServerError)
    mistakes = problem.errors or (problem,)
    return kind.combine([kind(e.detail, status=response.status, field=e.field) for e in mistakes])


def _params(query: Query | None) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, value in (query or {}).items():
        many: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
        texts = [str(v).lower() if isinstance(v, bool) else str(v) for v in many if v is not None]
        pairs += [(name, text) for text in texts]
    return pairs


# --------------------------------------------------------------------------- server address
def find_server(
    server: str | None = None, token: str | None = None, folder: Path | str | None = None
) -> tuple[str, str]:
    """Resolve URL and token: from arguments, else the environment, else files of ``tugline up``.

    ``tugline up`` writes ``server.json`` (its URL) and ``tokens.json`` (mode 0600) in its folder,
    so clients on the same machine need no options. A token from that folder is only sent to the
    server of that folder (I6). Raises `UsageError` without a URL or a token.
    """
    base = Path(folder) if folder is not None else FOLDER
    if folder is None:
        server = server or os.environ.get(SERVER)
    token = token or os.environ.get(TOKEN)
    local = _read_field(base / "server.json", "url")
    server = server or local
    if server is None:
        raise UsageError(
            f"no server is given, and {base / 'server.json'} does not exist; start one with "
            f"`tugline up`, or name it with --server or {SERVER}"
        )
    server = _check_url(server)
    if token is None and local is not None and local.rstrip("/") == server:
        token = _read_field(base / "tokens.json", "client")
    if token is None:
        msg = (
            f"no token for {server}; give the one of the server's tokens.json with --token or "
            f"{TOKEN}"
        )
        raise UsageError(msg)
    return server, token


def _check_url(server: str) -> str:
    if not server.startswith(("http://", "https://")):
        raise UsageError(f"server {server!r} must be a URL such as http://127.0.0.1:7700")
    return server.rstrip("/")


def _read_field(path: Path, name: str) -> str | None:
    """Read a field of a JSON file; None without the file."""
    try:
        return msgspec.convert(
            msgspec.json.decode(path.read_bytes(), type=dict[str, Any])[name], str
        )
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, KeyError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def shift_index(error: ServerError, before: int) -> None:
    """Add `before` to the task index in an error's fields, which counts within the batch."""
    for each in {error, *error.problems}:
        number, dot, rest = each.field.partition(".")
        if number.isdigit():
            each.field = f"{int(number) + before}{dot}{rest}"
