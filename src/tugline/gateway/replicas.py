"""The inference engine's replicas: ask one for tokens and read them as they are sampled.

Calls of one session stick to one replica, whose KV cache holds their context. A fault before the
first token is retried on another replica, a bounded number of times; after it the caller decides,
because the tokens are already part of an answer. A replica that fails repeatedly is left out until
it answers a probe. Closing the iterator closes the connection, which aborts the request.
"""

import asyncio
import contextlib
import hashlib
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from tugline import log
from tugline.chat.engines.base import Delta, EngineFormat, EngineRequest, Reader, parse_engine_error
from tugline.errors import EngineError, TuglineError, UsageError
from tugline.gateway.policy import DEFAULTS, CallSettings
from tugline.recording.records import Header
from tugline.web.engine_http import EngineHttp, ModelCard
from tugline.web.sse import read_payloads

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})

_log = log.get("gateway.replicas")


class Replica:
    """One address and its health."""

    def __init__(self, url: str, eject_after: int = DEFAULTS.eject_after) -> None:
        """`eject_after` is the number of consecutive faults after which it is left out."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.faults = 0
        self.ejected = False
        self._eject_after = eject_after

    def count_fault(self) -> None:
        """Count one more consecutive fault."""
        self.faults += 1
        if self.faults >= self._eject_after and not self.ejected:
            self.ejected = True
            _log.warning("replica ejected", url=self.url, faults=self.faults)

    def mark_healthy(self) -> None:
        """Return it to service."""
        if self.ejected:
            _log.info("replica returned", url=self.url)
        self.faults, self.ejected = 0, False


@dataclass(slots=True, eq=False)
class _Wait:
    """A reply that is read, until `scope` ends it because its replica hangs."""

    replica: Replica
    session: str
    scope: asyncio.Timeout
    since: float = field(default_factory=time.monotonic)
    """When the engine sent something, or was asked."""
    streams: bool = False
    """Whether it is a stream whose first token has come."""


class TokenSource(contextlib.AbstractAsyncContextManager[Any]):
    """Where answers come from: an engine, or a recording."""

    wire: EngineFormat
    on_hang: Callable[[str, float], None] = lambda _session, _seconds: None
    """Called with a session and the seconds that it lost to a replica that hung."""
    forked_from: str = ""
    """``session@call`` of a recording whose calls are replayed first; else empty."""

    @abstractmethod
    async def model(self) -> ModelCard:
        """The model that is served. Raises `EngineError` if none is."""

    def open_session(self, header: Header) -> None:
        """Called before the first request of a session."""

    @abstractmethod
    def choose(self, session: str, avoid: Sequence[str] = ()) -> Replica:
        """The replica of a session, if possible none of the addresses to `avoid`."""

    @abstractmethod
    def sample(
        self, ask: EngineRequest, session: str, used: list[str], avoid: Sequence[str] = ()
    ) -> AsyncGenerator[Delta]:
        """Tokens as they come; `used` gets the address of the replica that answers.

        Raises `EngineError`, or what the engine says is wrong with the request. Close the iterator
        to abort.
        """

    async def answers(self, session: str) -> bool:
        """Whether the replica of a session answers a probe."""
        return True

    @abstractmethod
    async def abort(self, request_id: str, url: str) -> None:
        """Ask a replica to end a request and answer with what there is; quiet if it cannot."""


class Upstream(TokenSource):
    """Replicas of one engine behind one connection pool."""

    def __init__(  # noqa: PLR0913 - an engine's address, format and limits
        self,
        urls: str | Sequence[str],
        wire: EngineFormat,
        *,
        model: str | None = None,
        card: ModelCard | None = None,
        idle_s: float = 300.0,
        settings: CallSettings = DEFAULTS,
        key: str = "",
    ) -> None:
        """`model` is a served name, the first if None; `idle_s` how long its first token may take.

        With a `card` the engine is not asked for its model. `key` is its API key, if it wants one.
        """
        self.name, self._card = model, card
        urls = [urls] if isinstance(urls, str) else urls
        self.replicas = [Replica(url, settings.eject_after) for url in urls]
        if not self.replicas:
            raise UsageError("an engine needs at least one address, such as http://127.0.0.1:8000")
        self.wire = wire
        self._settings = settings
        self._http = EngineHttp(key=key)
        self._probes: asyncio.Task[None] | None = None
        self._waits: set[_Wait] = set()
        self._idle_s = idle_s

    async def __aenter__(self) -> Self:
        self._probes = asyncio.create_task(self._probe_replicas(), name="probe-replicas")
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._probes is not None:
            self._probes.cancel()
            await asyncio.wait({self._probes})
        await self._http.__aexit__()

    async def model(self) -> ModelCard:
        """The model that the first replica serves, unless it is known already."""
        within_s = self._settings.probe_timeout_s
        return self._card or await self._http.card(self.name, within_s, url=self.replicas[0].url)

    def choose(self, session: str, avoid: Sequence[str] = ()) -> Replica:
        """The replica of a session: always the same while it is healthy and not avoided."""
        usable = [r for r in self.replicas if not r.ejected and r.url not in avoid]
        usable = usable or [r for r in self.replicas if r.url not in avoid]
        return max(usable or self.replicas, key=lambda r: _weight(session, r.url))

    async def sample(
        self, ask: EngineRequest, session: str, used: list[str], avoid: Sequence[str] = ()
    ) -> AsyncGenerator[Delta]:
        """See `TokenSource.sample`."""
        tried, last = list(avoid), self._settings.tries - 1
        for attempt in range(self._settings.tries):
            replica = self.choose(session, tried)
            began = False
            try:
                reply = read_reply(self._http, replica.url, self.wire, ask)
                async with (
                    self._watch(replica, session) as reading,
                    contextlib.aclosing(reply) as deltas,
                ):
                    async for delta in deltas:
                        reading.since, reading.streams = time.monotonic(), ask.request.stream
                        if not began:
                            began = True
                            used.append(replica.url)
                            reading.scope.reschedule(None)
                        yield delta
            except EngineError as error:
                if _is_fault(error):
                    replica.count_fault()
                wait = self._retry_delay(error, attempt)
                if began or not _is_retried(error) or attempt == last or wait is None:
                    raise
                tried.append(replica.url)
                await asyncio.sleep(wait)
            else:
                replica.mark_healthy()
                return

    async def abort(self, request_id: str, url: str) -> None:
        """See `TokenSource.abort`."""
        post = self.wire.build_abort(request_id)
        if post is None:
            return
        with contextlib.suppress(OSError):
            async with (
                asyncio.timeout(self._settings.probe_timeout_s),
                self._http.request(url + post.path, *post.body) as done,
            ):
                await done.read()

    async def answers(self, session: str) -> bool:
        """See `TokenSource.answers`."""
        return await self._answers(self.choose(session))

    async def _answers(self, replica: Replica) -> bool:
        try:
            await self._http.card(self.name, self._settings.probe_timeout_s, url=replica.url)
        except TuglineError:
            return False
        return True

    @contextlib.asynccontextmanager
    async def _watch(self, replica: Replica, session: str) -> AsyncIterator[_Wait]:
        """Raise `EngineError` in the block once its reply is silent and the replica hangs."""
        scope = asyncio.timeout(self._idle_s)
        wait = _Wait(replica, session, scope)
        self._waits.add(wait)
        try:
            async with scope:
                yield wait
        except TimeoutError as error:
            silent_s = time.monotonic() - wait.since
            self.on_hang(session, silent_s)
            msg = f"the engine at {replica.url} hangs: for {silent_s:.0f} s it has sent nothing"
            raise EngineError(msg) from error
        finally:
            self._waits.discard(wait)

    async def _probe_replicas(self) -> None:
        while True:
            await asyncio.sleep(self._settings.probe_every_s)
            await asyncio.gather(*(self._probe(replica) for replica in self.replicas))

    async def _probe(self, replica: Replica) -> None:
        """Probe a replica that is ejected or silent, and end the silent replies of one that hangs.

        An answer of many tokens without a stream is silent, too, so silence alone means nothing.
        """
        if not replica.ejected and not self._silent(replica):
            return
        if not await self._answers(replica):
            replica.count_fault()
            for wait in self._silent(replica):
                self.on_hang(wait.session, time.monotonic() - wait.since)
        elif replica.ejected:
            replica.mark_healthy()
        now = time.monotonic()
        for wait in self._silent(replica):
            stalled = wait.streams and now - wait.since > self._settings.stalled_s
            if replica.ejected or stalled:
                wait.scope.reschedule(asyncio.get_running_loop().time())

    def _silent(self, replica: Replica) -> list[_Wait]:
        bound = time.monotonic() - self._settings.silent_s
        return [wait for wait in self._waits if wait.replica is replica and wait.since < bound]

    def _retry_delay(self, error: EngineError, attempt: int) -> float | None:
        """Seconds until the next attempt; None if the engine asks for more than is waited for."""
        alone, backoff_s = len(self.replicas) == 1, self._settings.backoff_s
        if error.retry_after is None:
            return backoff_s * 2**attempt if alone or attempt else 0.0
        if error.retry_after > self._settings.longest_retry_after_s:
            return None
        return error.retry_after if alone else min(error.retry_after, backoff_s)


async def read_reply(
    http: EngineHttp, url: str, wire: EngineFormat, ask: EngineRequest
) -> AsyncGenerator[Delta]:
    """Ask the engine at `url` once, and read its reply as it comes.

    Raises what the engine says is wrong with the request, or `EngineError` if it is lost.
    """
    post, reader = wire.build_request(ask), wire.make_reader()
    finished = False
    try:
        async with http.request(url + post.path, *post.body) as response:
            kind = response.headers.get("content-type", "").partition(";")[0]
            if response.status != 200:
                retry_after = response.headers.get("retry-after")
                raise parse_engine_error(response.status, await response.read(), retry_after)
            if not ask.request.stream:
                for delta in reader.read_body(await response.read()):
                    finished = finished or delta.finish is not None
                    yield delta
            elif kind != "text/event-stream":
                start = (await anext(response.chunks(), b""))[:200].decode("utf-8", "replace")
                raise EngineError(
                    f"the engine at {url} answered a streamed request with "
                    f"{kind}, not an event stream: {start}"
                )
            else:
                async for payloads in read_payloads(response.chunks()):
                    deltas, failure = _read_events(reader, payloads)
                    for delta in deltas:
                        finished = finished or delta.finish is not None
                        yield delta
                    if failure is not None:
                        raise failure
    except OSError as error:
        msg = f"the engine at {url} was lost: {error or type(error).__name__}"
        raise EngineError(msg) from error
    if not finished:
        raise EngineError("the engine closed the stream without a finish reason")


def _read_events(
    reader: Reader[Any], payloads: list[bytes]
) -> tuple[list[Delta], EngineError | None]:
    """What precedes the first event that cannot be read or reports a failure, and that failure."""
    try:
        return reader.read_events(payloads), None
    except EngineError:
        for place, payload in enumerate(payloads):
            try:
                reader.decode(payload)
            except EngineError as error:  # nothing was added yet: all are decoded first
                return (reader.read_events(payloads[:place]) if place else []), error
        raise


def _is_fault(error: EngineError) -> bool:
    """Whether the replica failed: 429 says that it is busy, other 4xx that the request is wrong."""
    return error.status is None or (error.status >= 500 and error.retry_after is None)


def _is_retried(error: EngineError) -> bool:
    return error.status is None or error.status in _RETRIED


def _weight(session: str, url: str) -> bytes:
    """Rendezvous hashing: a replica that comes or goes moves only its own sessions."""
    return hashlib.blake2b(f"{session}\0{url}".encode(), digest_size=8).digest()
