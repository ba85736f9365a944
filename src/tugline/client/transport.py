"""HTTP to one server: every call has a deadline, and rides out what passes by itself.

A server that restarts, a full store (503) and a lost connection are tried again, with back-off and
jitter, until the call's deadline; an answer that says no is an error at once, of the class that the
server raised. All calls of the API may come twice without harm: tasks and sessions have ids that
the caller knows, results are told apart by their digest, questions name what the asker has (I3).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from tugline import log
from tugline.errors import Conflict, FencedError, Invalid, Missing, ServerError, UsageError
from tugline.protocol import Problem

T = TypeVar("T")
Query = Mapping[str, str | int | float | bool | Sequence[str] | None]
"""None leaves a parameter out, a sequence gives it several times."""

CONNECT_S = 5.0
TRY_S = 30.0
"""How long a server may be silent in one try, apart from what it was asked to wait."""
SLOWEST = 1 << 20
"""Bytes a second that a line has: a large body has more time."""
SILENCE_S = 45.0
"""Three signs of life of a stream that were missed."""
SHORTEST_S, LONGEST_S = 0.05, 2.0
"""Of the pause between two tries."""

_RETRIED = frozenset({408, 425, 429, 502, 503, 504})
_CLASSES: dict[str, type[ServerError]] = {
    "invalid": Invalid,
    "missing": Missing,
    "no-route": Missing,
    "conflict": Conflict,
    "fenced": FencedError,
}
BROKEN = (aiohttp.ClientError, TimeoutError, ConnectionError, asyncio.IncompleteReadError)
"""What a connection that is lost, or does not come about, raises."""
_log = log.get("client")


class RetryBudget:
    """Time that is left for something, and the pauses between its tries."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.renew()

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self._end - asyncio.get_running_loop().time()

    def renew(self) -> None:
        """Something came of it: all the time again."""
        self._end = asyncio.get_running_loop().time() + self.seconds
        self._pause = SHORTEST_S

    def at_most(self, seconds: float) -> None:
        """No more than so many seconds from now on."""
        self._end = min(self._end, asyncio.get_running_loop().time() + seconds)

    async def wait(self, error: ServerError, at_least: float = 0.0) -> None:
        """Pause before the next try. Raises `error` if the deadline would pass meanwhile."""
        pause = max(at_least, self._pause * random.uniform(0.5, 1.0))
        if pause >= self.left:
            raise error
        _log.debug("tried again", error=str(error), pause_s=round(pause, 3))
        self._pause = min(LONGEST_S, self._pause * 2)
        await asyncio.sleep(pause)


class Attempts:
    """Attempts at one stream, each of which goes on where the last one broke off.

    ``while not attempts.over: async with attempts: ...``, in which `over` is set at its end. Raises
    the `ServerError` that no attempt will mend, or the last one when the time is over.
    """

    def __init__(self, http: Transport, what: str) -> None:
        self.over = False
        self._http, self._what = http, what
        self._patience = RetryBudget(http.deadline_s)
        self.renew = self._patience.renew

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> bool:
        if error is None and self.over:
            return True
        if error is None:
            error = ServerError(f"{self._http.url} ended {self._what}; it is going down")
        elif isinstance(error, BROKEN):
            error = self._http.unreachable(error)
        elif not (isinstance(error, ServerError) and is_passing(error)):
            return False
        await self._patience.wait(error)
        return True


class Transport:
    """One connection pool to one server; an async context manager."""

    def __init__(self, url: str, token: str, *, deadline_s: float) -> None:
        self.url, self._token, self.deadline_s = url.rstrip("/"), token, deadline_s
        if not self.url.startswith(("http://", "https://")):
            msg = f"server {url!r} must be a URL such as http://127.0.0.1:7700"
            raise UsageError(msg)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=30),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def ask(  # noqa: PLR0913 - a request has that many parts
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
        """The answer as `kind`; as it is for `bytes`, and None for ``type(None)``.

        `wait_s` is how long the server was asked to wait, which is not on the deadline. Raises
        `ServerError`, of the class that fits.
        """
        packed, headers = body, self._headers(token)
        headers["Accept"] = "application/zstd, */*" if kind is bytes else "application/json"
        if body is not None and not isinstance(body, bytes):
            packed = msgspec.json.encode(body)
            headers["Content-Type"] = "application/json"
        sending_s = len(packed) / SLOWEST if isinstance(packed, bytes) else 0.0
        patience = RetryBudget(self.deadline_s + wait_s + sending_s)
        while True:
            late = aiohttp.ClientTimeout(
                total=max(0.01, patience.left),
                sock_connect=CONNECT_S,
                sock_read=min(TRY_S, self.deadline_s) + wait_s + sending_s,
            )
            try:
                async with self._open.request(
                    method,
                    self.url + path,
                    params=_params(query),
                    data=packed,
                    headers=headers,
                    timeout=late,
                ) as answer:
                    data = await answer.read()
                    if answer.ok:
                        return self._told(data, kind)
                    error, after = refusal(answer, data), retry_after(answer)
            except BROKEN as broken:
                error, after = self.unreachable(broken), 0.0
            if error.status is not None and error.status not in _RETRIED:
                raise error
            patience.at_most(self.deadline_s + sending_s)  # there is nothing to wait for any more
            await patience.wait(error, after)

    @contextlib.asynccontextmanager
    async def stream(
        self,
        path: str,
        accept: str,
        *,
        query: Query | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A long answer, one try. Raises `ServerError`, and `BROKEN` when it breaks off."""
        sent = self._headers() | {"Accept": accept} | dict(headers or {})
        late = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        async with self._open.get(
            self.url + path, params=_params(query), headers=sent, timeout=late
        ) as answer:
            if not answer.ok:
                raise refusal(answer, await answer.read())
            yield answer

    def unreachable(self, error: BaseException) -> ServerError:
        """What a lost connection is called."""
        number = getattr(error, "errno", None) or 0
        why = os.strerror(number) if number > 0 else str(error) or type(error).__name__
        return ServerError(f"the server at {self.url} cannot be reached: {why}")

    def _headers(self, token: str | None = None) -> dict[str, str]:
        return {"Authorization": f"Bearer {token or self._token}"}

    def _told(self, data: bytes, kind: type[T]) -> T:
        if kind is bytes:
            return data  # type: ignore[return-value]
        if kind is type(None):
            return None
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as error:
            msg = f"{self.url} answered what is no {kind}: {error}; is it a Tugline server?"
            raise ServerError(msg, status=200) from error

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._http is None:
            msg = "this client is not open: use `async with Client(...) as client`"
            raise UsageError(msg)
        return self._http


def quoted(name: str) -> str:
    """An id as a part of a path, whatever somebody has typed for one."""
    return quote(name, safe="")


def is_passing(error: ServerError) -> bool:
    """Whether trying again may help."""
    return error.status is None or error.status in _RETRIED


def retry_after(answer: aiohttp.ClientResponse) -> float:
    """Seconds that the server asks for before the next try."""
    told = answer.headers.get("Retry-After", "")
    return float(told) if told.isdigit() else 0.0


def refusal(answer: aiohttp.ClientResponse, data: bytes) -> ServerError:
    """The error that a problem body tells of; any other body is quoted."""
    try:
        problem = msgspec.json.decode(data, type=Problem)
    except msgspec.DecodeError:
        text = " ".join(data[:200].decode(errors="replace").split())
        return ServerError(f"{answer.status} {answer.reason}: {text}", status=answer.status)
    kind = _CLASSES.get(problem.type.rpartition(":")[2], ServerError)
    return kind(problem.detail, status=answer.status, field=problem.field)


def _params(query: Query | None) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, value in (query or {}).items():
        many: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
        pairs += [(name, _text(one)) for one in many if one is not None]
    return pairs


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
