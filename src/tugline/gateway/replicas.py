"""Talk to the inference engine's replicas: ask for tokens, read them as they are sampled.

Calls of one session stick to one replica, whose KV cache holds their context. A fault before the
first token is retried on another replica, a bounded number of times; after it the caller decides,
because the tokens are already part of somebody's answer. A replica that fails again and again is
left out until it answers a probe. Leaving the iterator closes the connection, which aborts the
request on the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Protocol, Self

import aiohttp
import msgspec

from tugline import log
from tugline.chat.engines.base import Delta, EngineFormat, EngineRequest, Post
from tugline.errors import EngineError, TuglineError, UsageError

_TRIES = 4
_BACKOFF_S = 0.25
_LONGEST_WAIT_S = 20.0
"""A Retry-After beyond this is not waited for."""
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_EJECT_AFTER = 2
"""Faults in a row that take a replica out."""
_PROBE_EVERY_S = 1.0
_PROBE_S = 5.0

_log = log.get("gateway.upstream")


class ModelCard(msgspec.Struct, frozen=True):
    """What the engine serves: its name and its context window in tokens."""

    id: str
    max_model_len: int = 0
    """0 where the engine does not say."""


class _Models(msgspec.Struct):
    data: list[ModelCard]


class Replica:
    """One address, and how it has been doing."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.running = 0
        self.faults = 0
        self.ejected = False

    def failed(self) -> None:
        """One more fault in a row."""
        self.faults += 1
        if self.faults >= _EJECT_AFTER and not self.ejected:
            self.ejected = True
            _log.warning("replica ejected", url=self.url, faults=self.faults)

    def answered(self) -> None:
        """It works."""
        if self.ejected:
            _log.info("replica returned", url=self.url)
        self.faults, self.ejected = 0, False


class TokenSource(Protocol):
    """Where answers come from: an engine, or a recording."""

    wire: EngineFormat
    forked_from: str
    """``session@call`` of a recording whose calls are replayed first; else empty."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    async def model(self) -> ModelCard:
        """What is served."""
        ...

    def choose(self, session: str, avoid: Sequence[str] = ()) -> Replica:
        """The replica of a session."""
        ...

    def sample(
        self, ask: EngineRequest, session: str, used: list[str], avoid: Sequence[str] = ()
    ) -> AsyncGenerator[Delta]:
        """Tokens as they come; see `Upstream.sample`."""
        ...

    async def abort(self, request_id: str, url: str) -> None:
        """End a request and answer with what there is, where that can be."""
        ...


class Upstream:
    """Replicas of one engine behind one connection pool."""

    forked_from = ""

    def __init__(
        self,
        urls: str | Sequence[str],
        wire: EngineFormat,
        *,
        model: str | None = None,
        card: ModelCard | None = None,
        idle_s: float = 300.0,
    ) -> None:
        """`model` is a served name, the first if None; `idle_s` how long a reply may pause.

        Who has asked the engine already gives its `card`; it is not asked again then.
        """
        self.name, self._known = model, card
        self.replicas = [Replica(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self.replicas:
            msg = "an engine needs at least one address, such as http://127.0.0.1:8000"
            raise UsageError(msg)
        self.wire = wire
        self._timeout = aiohttp.ClientTimeout(total=None, connect=10, sock_read=idle_s)
        self._client: aiohttp.ClientSession | None = None
        self._probes: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        self._client = aiohttp.ClientSession(
            connector=connector, timeout=self._timeout, read_bufsize=1 << 20, auto_decompress=True
        )
        self._probes = asyncio.create_task(self._probe_ejected(), name="probe-replicas")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._probes is not None:
            self._probes.cancel()
            await asyncio.wait({self._probes})
        if self._client is not None:
            await self._client.close()

    async def model(self) -> ModelCard:
        """The first model that a replica serves. Raises `EngineError` if none answers."""
        if self._known is not None:
            return self._known
        fault: EngineError | None = None
        for replica in self.replicas:
            try:
                return await self._card(replica)
            except EngineError as error:
                replica.failed()
                fault = fault or error
        if fault is None:
            fault = EngineError("no engine is configured")
        raise fault

    def choose(self, session: str, avoid: Sequence[str] = ()) -> Replica:
        """The replica of a session: always the same while it is healthy and not avoided."""
        usable = [r for r in self.replicas if not r.ejected and r.url not in avoid]
        usable = usable or [r for r in self.replicas if r.url not in avoid]
        return max(usable or self.replicas, key=lambda r: _weight(session, r.url))

    async def sample(
        self, ask: EngineRequest, session: str, used: list[str], avoid: Sequence[str] = ()
    ) -> AsyncGenerator[Delta]:
        """Tokens as they come; `used` gets the address of the replica that answers.

        Raises `EngineError`, or what the engine says is wrong with the request. Close the iterator
        to abort.
        """
        post = self.wire.build_request(ask)
        shunned = list(avoid)
        for attempt in range(_TRIES):
            replica = self.choose(session, shunned)
            began = False
            try:
                async with contextlib.aclosing(self._once(replica, ask, post)) as deltas:
                    async for delta in deltas:
                        if not began:
                            began = True
                            used.append(replica.url)
                        yield delta
            except EngineError as error:
                if _is_fault(error):
                    replica.failed()
                wait = _wait(error, attempt, alone=len(self.replicas) == 1)
                if began or not _is_retried(error) or attempt == _TRIES - 1 or wait is None:
                    raise
                shunned.append(replica.url)
                await asyncio.sleep(wait)
            else:
                replica.answered()
                return

    async def abort(self, request_id: str, url: str) -> None:
        """Ask a replica to end a request and answer with what there is; quiet if it cannot."""
        post = self.wire.build_abort(request_id)
        if post is None:
            return
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with (
                asyncio.timeout(_PROBE_S),
                self._session.post(url + post.path, data=post.body, headers=_headers(post)) as done,
            ):
                await done.read()

    # ----------------------------------------------------------------------- one replica
    async def _once(
        self, replica: Replica, ask: EngineRequest, post: Post
    ) -> AsyncGenerator[Delta]:
        reader = self.wire.make_reader(ask)
        replica.running += 1
        try:
            async with self._session.post(
                replica.url + post.path, data=post.body, headers=_headers(post)
            ) as response:
                if response.status != 200:
                    raise self.wire.parse_error(
                        response.status,
                        await response.read(),
                        response.headers.get("retry-after"),
                    )
                if not ask.stream:
                    deltas = reader.read_body(await response.read())
                    for delta in deltas:
                        yield delta
                    _check_finished(any(d.finish is not None for d in deltas))
                    return
                finished = False
                async for payloads in _events(response.content):
                    for delta in reader.read_events(payloads):
                        finished = finished or delta.finish is not None
                        yield delta
                _check_finished(finished)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            msg = f"the engine at {replica.url} was lost: {error or type(error).__name__}"
            raise EngineError(msg) from error
        finally:
            replica.running -= 1

    async def _card(self, replica: Replica) -> ModelCard:
        try:
            async with (
                asyncio.timeout(_PROBE_S),
                self._session.get(f"{replica.url}/v1/models") as response,
            ):
                body = await response.read()
                if response.status != 200:
                    raise self.wire.parse_error(response.status, body, None)
                cards = msgspec.json.decode(body, type=_Models).data
                return [card for card in cards if self.name in {None, card.id}][0]  # noqa: RUF015
        except EngineError:
            raise
        except (
            aiohttp.ClientError,
            TimeoutError,
            msgspec.DecodeError,
            IndexError,
            TuglineError,
        ) as error:
            reason = str(error) or type(error).__name__
            msg = f"no usable engine at {replica.url}: {reason}; start it or mend its address"
            raise EngineError(msg) from error

    async def _probe_ejected(self) -> None:
        while True:
            await asyncio.sleep(_PROBE_EVERY_S)
            for replica in [r for r in self.replicas if r.ejected]:
                with contextlib.suppress(EngineError):
                    await self._card(replica)
                    replica.answered()

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._client is None:
            msg = "the upstream is not open; enter it with `async with`"
            raise EngineError(msg)
        return self._client


# --------------------------------------------------------------------------- reading events
async def _events(content: aiohttp.StreamReader) -> AsyncGenerator[list[bytes]]:
    """Payloads of server-sent events, all that one read completes together."""
    rest = b""
    async for chunk in content.iter_any():
        lines = (rest + chunk).split(b"\n") if rest else chunk.split(b"\n")
        rest = lines.pop()
        payloads = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        if payloads and payloads[-1] == b"[DONE]":
            payloads.pop()
        if payloads:
            yield payloads
    if rest.startswith(b"data:") and rest[5:].strip() != b"[DONE]":
        yield [rest[5:].strip()]


def _check_finished(finished: bool) -> None:  # noqa: FBT001 - said by its name
    if not finished:
        msg = "the engine closed the stream without a finish reason"
        raise EngineError(msg)


def _headers(post: Post) -> dict[str, str]:
    return {"content-type": "application/json", **post.headers}


# --------------------------------------------------------------------------- faults
def _is_fault(error: EngineError) -> bool:
    """Whether the replica is to blame: 429 says that it is busy, 4xx that we asked wrongly."""
    return error.status is None or (error.status >= 500 and error.retry_after is None)


def _is_retried(error: EngineError) -> bool:
    return error.status is None or error.status in _RETRIED


def _wait(error: EngineError, attempt: int, *, alone: bool) -> float | None:
    """Seconds until the next try; None when the engine asks for more than is waited for."""
    if error.retry_after is not None:
        if error.retry_after > _LONGEST_WAIT_S:
            return None
        return error.retry_after if alone else min(error.retry_after, _BACKOFF_S)
    return _BACKOFF_S * 2**attempt if alone or attempt else 0.0


def _weight(session: str, url: str) -> bytes:
    """Rendezvous hashing: a replica that comes or goes moves only its own sessions."""
    return hashlib.blake2b(f"{session}\0{url}".encode(), digest_size=8).digest()
