"""HTTP/1.1 to inference engines, over connections that are used again.

A model call sends a hundred kilobytes and reads a reply of many small parts, which costs a general
client a tenth of all that the gateway does. What engines need is little: keep-alive, TLS, and a
connection that is closed at once when nobody waits for its reply.
"""

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator
from functools import lru_cache
from typing import Any, Self, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from tugline.errors import EngineError, UsageError

ANSWER_TIMEOUT_S = 120.0
"""For one whole answer: the first of a fresh engine may take half a minute."""
_CONNECT_S = 10.0
_UNUSED_S = 60.0
"""How long a connection is kept that nobody uses."""
_UNREAD = 1 << 20
"""Bytes of a reply from which the engine waits for its reader."""
_AWAY = frozenset({502, 503, 504})
"""Statuses of an engine that is loading, or of a proxy whose engine is down."""
_COMMON = b"accept: */*\r\nuser-agent: tugline\r\n"
_Origin = tuple[str, int, bool]
"""Host, port, and whether it speaks TLS."""


class Reply(asyncio.Protocol):
    """A connection, and the reply that is read from it. Raises `OSError` when it is lost."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """By their names in small letters."""
        self.replied = self.complete = False
        """Whether anything came since the request was sent, and whether all has come."""
        self.used_at = 0.0
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._unread, self._active_at, self._keep = 0, 0.0, False
        self._waiter: asyncio.Future[None] | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._fault: OSError | None = None

    async def send(self, head: bytes, body: bytes, idle_s: float) -> None:
        """Send a request and wait for the reply's headers. Silence of `idle_s` ends the reply."""
        self.status, self.replied, self.complete = 0, False, False
        self._active_at = time.monotonic()
        self._transport.writelines([head, body])
        self._watch(idle_s)
        while self.status < 200:
            await self._wait()

    async def chunks(self) -> AsyncGenerator[bytes]:
        """The body as it comes."""
        while self._parts or not self.complete:
            if not self._parts:
                await self._wait()
                continue
            data, self._parts = b"".join(self._parts), []
            if self._unread > _UNREAD:
                self._transport.resume_reading()
            self._unread = 0
            yield data

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks()])

    @property
    def reusable(self) -> bool:
        """Whether another request may follow."""
        return self.complete and self._fault is None and not self._parts and self._keep

    def close(self) -> None:
        """End the connection now."""
        self._transport.abort()

    async def _wait(self) -> None:
        if self._fault is not None:
            raise self._fault
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _watch(self, idle_s: float) -> None:
        left = self._active_at + idle_s - time.monotonic()
        if left > 0:
            self._silence = asyncio.get_running_loop().call_later(left, self._watch, idle_s)
        else:
            self._fail(TimeoutError(f"it has sent nothing for {idle_s:g} s"))

    def _rest(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
        self._wake()

    def _fail(self, fault: OSError) -> None:
        self._fault = self._fault or fault
        self._transport.abort()

    # ----------------------------------------------------------------------- called by the loop
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        self.replied, self._active_at = True, time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"it sent what is no HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """End the reply: one without a length ends well with its connection."""
        sized = {"content-length", "transfer-encoding"} & self.headers.keys()
        if self.status >= 200 and not sized and exc is None and self._fault is None:
            self.complete = True
        self._fault = self._fault or ConnectionError(str(exc or "it closed the connection"))
        self._rest()

    # ----------------------------------------------------------------------- called by the parser
    def on_message_begin(self) -> None:
        """Begin a reply; one before the reply proper, as of status 100, is skipped."""
        self.headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Let the sender look at the status."""
        self.status, self._keep = self._parser.get_status_code(), self._parser.should_keep_alive()
        self._wake()

    def on_body(self, data: bytes) -> None:
        """Keep a part of the body, and stop reading while too much of it waits."""
        self._parts.append(data)
        before, self._unread = self._unread, self._unread + len(data)
        if before <= _UNREAD < self._unread:
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        """End the reply."""
        if self.status >= 200:
            self.complete = True
            self._rest()


class ModelCard(msgspec.Struct, frozen=True):
    """One model as ``/v1/models`` lists it."""

    id: str
    max_model_len: int = 0
    """Context window in tokens; 0 where the engine does not say."""
    owned_by: str = ""


class _ListedModel(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    owned_by: str = ""
    parent: str | None = None
    """Of an adapter: the model it is added to, whose window is its own."""


class _Models(msgspec.Struct):
    data: list[_ListedModel]


class EngineHttp:
    """Connections to engines, and the address of one; nothing is retried."""

    def __init__(self, url: str = "", key: str = "", *, idle_s: float = ANSWER_TIMEOUT_S) -> None:
        """`key` is the API key, if engines want one; `idle_s` is how long a reply may pause."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._idle_s = idle_s
        self._common = _COMMON + (
            f"authorization: Bearer {key.strip()}\r\n".encode() if key else b""
        )
        self._idle: dict[_Origin, list[Reply]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for reply in [one for kept in self._idle.values() for one in kept]:
            reply.close()
        self._idle.clear()

    @contextlib.asynccontextmanager
    async def request(self, url: str, body: bytes | None = None) -> AsyncIterator[Reply]:
        """Get `url`, or post JSON to it; yields the reply once its headers have come.

        A reply that was not read to its end when the block ends is aborted. Raises `OSError`.
        """
        origin, path, host = _split(url)
        head = b"".join((b"GET " if body is None else b"POST ", path, host, self._common))
        if body is not None:
            head += b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        reply = await self._send(origin, head + b"\r\n", body or b"")
        try:
            yield reply
        finally:
            if reply.reusable:
                reply.used_at = time.monotonic()
                self._idle.setdefault(origin, []).append(reply)
            else:
                reply.close()

    async def _send(self, origin: _Origin, head: bytes, body: bytes) -> Reply:
        """Send over a kept connection, or over a new one if engines have closed those."""
        while True:
            kept = self._take(origin)
            reply = kept or await _connect(origin)
            try:
                await reply.send(head, body, self._idle_s)
            except BaseException as error:
                reply.close()
                if kept is None or kept.replied or not isinstance(error, ConnectionError):
                    raise
            else:
                return reply

    def _take(self, origin: _Origin) -> Reply | None:
        kept, oldest = self._idle.get(origin, []), time.monotonic() - _UNUSED_S
        while kept and (kept[0].used_at < oldest or not kept[0].reusable):
            kept.pop(0).close()
        while kept:
            if (reply := kept.pop()).reusable:
                return reply
        return None

    async def card(
        self, model: str | None, timeout_s: float = ANSWER_TIMEOUT_S, *, url: str | None = None
    ) -> ModelCard:
        """The model of this name, or the first. Raises `EngineError` or `UsageError`.

        A server that lists no models is believed to serve the one of this name.
        """
        url = self.url if url is None else url
        status: int | None = None
        where = f"{url}/v1/models"
        try:
            async with asyncio.timeout(timeout_s), self.request(where) as reply:
                if reply.status == 401:
                    msg = f"the engine at {url} refuses the API key, or wants one: "
                    msg += "engine.api_key_env (--api-key-env) must name an environment variable "
                    raise UsageError(msg + "with one that it accepts")
                status = None if reply.status in _AWAY else reply.status
                if model is not None and reply.status == 404:
                    return ModelCard(model)
                data = await reply.read()
            if reply.status != 200:
                msg = f"no usable engine: {where} answers {reply.status}"
                raise EngineError(msg, status=status)
            cards = msgspec.json.decode(data, type=_Models).data
        except (OSError, msgspec.DecodeError) as error:
            reason = str(error) or type(error).__name__
            msg = f"no usable engine at {where}: {reason}; start it or correct its address"
            raise EngineError(msg, status=status) from error
        for card in cards:
            if model in {None, card.id}:
                windows = [one.max_model_len for one in cards if one.id in {card.id, card.parent}]
                return ModelCard(card.id, max(n or 0 for n in windows), card.owned_by)
        if not cards and model is not None:
            return ModelCard(model)
        if not cards:
            msg = f"the engine lists no models at {where}: name the one it serves (--model)"
            raise UsageError(msg)
        names = ", ".join(card.id for card in cards)
        raise UsageError(f"the engine at {url} serves no model {model!r}; it serves {names}")

    async def post(
        self, path: str, body: bytes, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> tuple[int, bytes]:
        """Send JSON; returns status and body. Raises `EngineError` if there is no answer."""
        try:
            async with asyncio.timeout(timeout_s), self.request(self.url + path, body) as reply:
                return reply.status, await reply.read()
        except OSError as error:
            reason = str(error) or type(error).__name__
            msg = f"the engine at {self.url} did not answer {path}: {reason}"
            raise EngineError(msg) from error

    async def get(self, path: str) -> bytes:
        """A body; empty unless the status is 200."""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(ANSWER_TIMEOUT_S), self.request(self.url + path) as reply:
                return await reply.read() if reply.status == 200 else b""
        return b""

    async def get_object(self, path: str) -> dict[str, Any]:
        """A JSON object; empty if there is none."""
        try:
            value = msgspec.json.decode(await self.get(path) or b"{}")
        except msgspec.DecodeError:
            return {}
        return value if isinstance(value, dict) else {}


@lru_cache(maxsize=256)
def _split(url: str) -> tuple[_Origin, bytes, bytes]:
    """Where `url` leads, its path, and the lines that follow it."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(f"{url!r} is no address of an engine, such as http://127.0.0.1:8000")
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
            made = await loop.create_connection(Reply, host, port, ssl=_tls() if secure else None)
            return made[1]
    except TimeoutError as error:
        raise TimeoutError(f"it did not take the connection within {_CONNECT_S:g} s") from error
