"""HTTP/1.1 client of inference engines, with connection reuse.

A model call sends a hundred kilobytes and reads a reply of many small parts; with a general client
this takes a tenth of the gateway's time. Engines need few features: keep-alive, TLS, and a
connection that is closed at once when its reply is not needed any more.
"""

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from functools import lru_cache
from typing import Any, Self, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from tugline.errors import EngineError, UsageError

ANSWER_TIMEOUT_S = 120.0
"""Timeout of a whole answer; the first one of a new engine may take half a minute."""
_CONNECT_S = 10.0
_UNUSED_S = 60.0
"""Lifetime of an idle connection."""
_AWAY = frozenset({502, 503, 504})
"""Statuses of a loading engine, or of a proxy whose engine is down."""
_Origin = tuple[str, int, bool]
"""Host, port, and whether to use TLS."""


class Reply(asyncio.Protocol):
    """A connection and the reply read from it. Raises `OSError` if the connection is lost."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """Headers by name in lower case."""
        self.replied = False
        """Whether any data came since the request was sent."""
        self.complete = False
        """Whether the reply is complete."""
        self._keep = False
        """Whether the server keeps the connection open."""
        self.used_at = 0.0
        self._transport: asyncio.Transport
        self._parts: list[bytes] = []
        self.on_body = self._parts.append  # called by the parser, hundreds of times per stream
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._fault: OSError | None = None

    async def send(self, request: Sequence[bytes | memoryview]) -> None:
        """Send a request, in parts, and wait for the reply's headers."""
        self.status = 0
        self.headers = {}
        self.replied = False
        self.complete = False
        self._transport.writelines(request)
        while self.status < 200:
            await self._wait()

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the body as it comes."""
        while self._parts or not self.complete:
            if not self._parts:
                await self._wait()
                continue
            yield self._take_parts()

    async def read(self) -> bytes:
        """Read the whole body."""
        while not self.complete:
            await self._wait()
        return self._take_parts()

    @property
    def reusable(self) -> bool:
        """Whether another request can be sent."""
        return self.complete and self._fault is None and not self._parts and self._keep

    def close(self) -> None:
        """Close the connection now."""
        self._transport.abort()

    def _take_parts(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        return data

    async def _wait(self) -> None:
        if self._fault is not None:
            raise self._fault
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        waiter = self._waiter
        self._waiter = None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _fail(self, fault: OSError) -> None:
        self._fault = self._fault or fault
        self._transport.abort()

    # ----------------------------------------------------------------------- called by the loop
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse received data."""
        self.replied = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"it sent invalid HTTP: {error}"))
        if self._parts:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the reply; a reply without a length is complete when its connection ends."""
        sized = {"content-length", "transfer-encoding"} & self.headers.keys()
        if self.status >= 200 and not sized and exc is None and self._fault is None:
            self.complete = True
        self._fault = self._fault or ConnectionError(str(exc or "it closed the connection"))
        self._wake()
        del self._parser  # it refers to this object

    # ----------------------------------------------------------------------- called by the parser
    def on_message_begin(self) -> None:
        """Reject a message without a request, after the reply; the connection is then closed."""
        if self.complete:
            raise ConnectionError("it sent a reply without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Wake the sender, which waits for a status other than an interim one such as 100."""
        self.status = self._parser.get_status_code()
        self._keep = self._parser.should_keep_alive()
        self._wake()

    def on_message_complete(self) -> None:
        """End the reply."""
        if self.status >= 200:
            self.complete = True
            self._wake()


class ModelCard(msgspec.Struct, frozen=True):
    """A model in ``/v1/models``."""

    id: str
    max_model_len: int = 0
    """Context window in tokens; 0 if the engine does not report it."""
    owned_by: str = ""


class _ListedModel(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    owned_by: str = ""
    parent: str | None = None
    """The base model of an adapter, whose window the adapter has."""


class _Models(msgspec.Struct):
    data: list[_ListedModel]


class EngineHttp:
    """Connection pool for engines, and the URL of one engine; failed requests are not retried."""

    def __init__(self, url: str = "", key: str = "") -> None:
        """`key` is the engine's API key, if any."""
        self.url = url.rstrip("/").removesuffix("/v1")
        key_line = f"authorization: Bearer {key.strip()}\r\n" if key else ""
        self._common = f"accept: */*\r\nuser-agent: tugline\r\n{key_line}".encode()
        self._idle: dict[_Origin, list[Reply]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for reply in [reply for idle in self._idle.values() for reply in idle]:
            reply.close()
        self._idle.clear()

    @contextlib.asynccontextmanager
    async def request(self, url: str, *body: bytes | memoryview) -> AsyncIterator[Reply]:
        """Get `url`, or post JSON `body` parts to it; yield the reply once its headers have come.

        A reply that is not read to its end in the block is aborted. The caller sets the timeout.
        Raises `OSError`.
        """
        origin, path, host = _split(url)
        head = b"".join((b"POST " if body else b"GET ", path, host, self._common))
        if body:
            size = sum(map(len, body))
            head += b"content-type: application/json\r\ncontent-length: %d\r\n" % size
        reply = await self._send(origin, [head + b"\r\n", *body])
        try:
            yield reply
        finally:
            if reply.reusable:
                reply.used_at = time.monotonic()
                self._idle.setdefault(origin, []).append(reply)
            else:
                reply.close()

    async def _send(self, origin: _Origin, request: Sequence[bytes | memoryview]) -> Reply:
        """Send over an idle connection, or over a new one if all idle ones were closed."""
        if origin[2]:  # each part would be a TLS record of its own
            request = [b"".join(request)]
        while True:
            idle = self._take(origin)
            reply = idle or await _connect(origin)
            try:
                await reply.send(request)
            except BaseException as error:
                reply.close()
                if idle is None or idle.replied or not isinstance(error, ConnectionError):
                    raise
            else:
                return reply

    def _take(self, origin: _Origin) -> Reply | None:
        idle = self._idle.get(origin, [])
        oldest = time.monotonic() - _UNUSED_S
        while idle and (idle[0].used_at < oldest or not idle[0].reusable):
            idle.pop(0).close()
        while idle:
            if (reply := idle.pop()).reusable:
                return reply
        return None

    async def card(
        self, model: str | None, timeout_s: float = ANSWER_TIMEOUT_S, *, url: str | None = None
    ) -> ModelCard:
        """Return the model of this name, or the first. Raises `EngineError` or `UsageError`.

        A server that lists no models is assumed to serve a model of this name.
        """
        url = self.url if url is None else url
        status: int | None = None
        where = f"{url}/v1/models"
        try:
            async with asyncio.timeout(timeout_s), self.request(where) as reply:
                if reply.status == 401:
                    msg = f"the engine at {url} rejects the API key or requires one: set "
                    msg += "engine.api_key_env (--api-key-env) to an environment variable "
                    raise UsageError(msg + "that holds a valid key")
                status = None if reply.status in _AWAY else reply.status
                if model is not None and reply.status == 404:
                    return ModelCard(model)
                data = await reply.read()
            if reply.status != 200:
                msg = f"cannot use the engine: {where} answers with status {reply.status}"
                raise EngineError(msg, status=status)
            cards = msgspec.json.decode(data, type=_Models).data
        except (OSError, msgspec.DecodeError) as error:
            reason = str(error) or type(error).__name__
            msg = f"cannot reach the engine at {where}: {reason}; start it or correct its URL"
            raise EngineError(msg, status=status) from error
        for card in cards:
            if model in {None, card.id}:
                windows = [c.max_model_len for c in cards if c.id in {card.id, card.parent}]
                return ModelCard(card.id, max(n or 0 for n in windows), card.owned_by)
        if not cards and model is not None:
            return ModelCard(model)
        if not cards:
            msg = f"the list of models at {where} is empty: name the model with --model"
            raise UsageError(msg)
        names = ", ".join(card.id for card in cards)
        raise UsageError(f"the engine at {url} does not serve model {model!r}; it serves {names}")

    async def post(
        self, path: str, body: bytes, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> tuple[int, bytes]:
        """Post JSON; return status and body. Raises `EngineError` if there is no answer."""
        try:
            async with asyncio.timeout(timeout_s), self.request(self.url + path, body) as reply:
                return reply.status, await reply.read()
        except OSError as error:
            msg = f"the engine at {self.url} did not answer {path}: {str(error) or 'too slow'}"
            raise EngineError(msg) from error

    async def get(self, path: str) -> bytes:
        """Get a page; empty if there is none."""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(ANSWER_TIMEOUT_S), self.request(self.url + path) as reply:
                if reply.status == 200:
                    return await reply.read()
        return b""

    async def get_object(self, path: str) -> dict[str, Any]:
        """Get a JSON object; empty if there is none."""
        with contextlib.suppress(msgspec.DecodeError):
            value = msgspec.json.decode(await self.get(path))
            return value if isinstance(value, dict) else {}
        return {}


@lru_cache(maxsize=256)
def _split(url: str) -> tuple[_Origin, bytes, bytes]:
    """Split `url` into origin, path, and the rest of the request line with the host header."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(f"{url!r} is not the URL of an engine, such as http://127.0.0.1:8000")
    secure = parts.scheme == "https"
    path = parts.path + ("?" + parts.query if parts.query else "")
    host = f" HTTP/1.1\r\nhost: {parts.netloc.rpartition('@')[2]}\r\n"
    return (
        (parts.hostname, parts.port or (443 if secure else 80), secure),
        path.encode(),
        host.encode(),
    )


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _connect(origin: _Origin) -> Reply:
    host, port, secure = origin
    try:
        async with asyncio.timeout(_CONNECT_S):
            loop = asyncio.get_running_loop()
            pair = await loop.create_connection(Reply, host, port, ssl=_tls() if secure else None)
            return pair[1]
    except TimeoutError as error:
        raise TimeoutError(f"it did not accept the connection within {_CONNECT_S:g} s") from error
