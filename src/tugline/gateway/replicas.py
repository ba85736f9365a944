"""Replicas of the inference engine: send a request to one and read its tokens as they come.

Calls of a session go to the same replica, whose KV cache holds their context. A fault before the
first token is retried on another replica, a bounded number of times; after it the caller decides,
because the tokens are already part of an answer. A replica that fails repeatedly is ejected until
it answers a probe. Closing the iterator closes the connection, which aborts the request. While the
gate is closed, nothing is sent, and silence is no fault.
"""

import asyncio
import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from tugline import log
from tugline.chat.engines.base import Delta, EngineFormat, EngineRequest
from tugline.errors import EngineError, TuglineError, UsageError
from tugline.gateway.gate import Gate
from tugline.gateway.policy import DEFAULTS, CallSettings
from tugline.gateway.reply import read_reply
from tugline.recording.records import Header
from tugline.web.engine_http import EngineHttp, ModelCard

_log = log.get("gateway.replicas")


class Replica:
    """An engine's address and its health."""

    def __init__(self, url: str, eject_after: int = DEFAULTS.eject_after) -> None:
        """`eject_after` is the number of consecutive faults after which the replica is ejected."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.faults = 0
        self.ejected = False
        self._eject_after = eject_after

    def count_fault(self) -> None:
        """Count a consecutive fault, and eject the replica at `eject_after` of them."""
        self.faults += 1
        if self.faults >= self._eject_after:
            self.eject()

    def eject(self) -> None:
        """Avoid it until it answers a probe."""
        if not self.ejected:
            self.ejected = True
            _log.warning("replica ejected", url=self.url, faults=self.faults)

    def mark_healthy(self) -> None:
        """Return the replica to service."""
        if self.ejected:
            _log.info("replica returned", url=self.url)
        self.faults = 0
        self.ejected = False


@dataclass(slots=True, eq=False)
class _Wait:
    """A reply being read; `scope` ends the read if the replica hangs."""

    since: float
    """The gate's time of the engine's last data, or of the request; not after `scope` began."""
    replica: Replica
    session: str
    scope: asyncio.Timeout
    began: bool = False
    """Whether a token has come."""

    def note(self, delta: Delta, now: float) -> None:
        """Note data that came at `now`; with the first token, the time limit ends."""
        self.since = now
        if delta.answers and not self.began:
            self.began = True
            self.scope.reschedule(None)


class Progress(ABC):
    """Receiver of the progress of a request, which may take several attempts."""

    @abstractmethod
    async def wait_until_sendable(self) -> None:
        """Wait while requests are held. Raises `EngineError` if that takes too long."""

    @abstractmethod
    def note_sent(self, url: str) -> str:
        """Note the replica that is sent the request next, empty for a recording; return an id."""

    @abstractmethod
    def note_accepted(self) -> None:
        """Note that the replica has accepted the request."""

    @abstractmethod
    def note_refused(self) -> None:
        """Note that the replica refused or lost the request, which is sent again later."""


class TokenSource(contextlib.AbstractAsyncContextManager[Any]):
    """Source of answers: an engine or a recording."""

    wire: EngineFormat
    gate: Gate
    """Gate that holds requests; shared with the gateway, which closes and opens it."""
    on_hang: Callable[[str, float], None] = lambda _session, _seconds: None
    """Called with a session and the seconds that it lost to a hanging replica."""
    forked_from: str = ""
    """``session@call`` of the recording whose calls are replayed first; empty if none is."""

    @abstractmethod
    async def model(self) -> ModelCard:
        """Return the served model. Raises `EngineError` if there is none."""

    def open_session(self, header: Header) -> None:
        """Prepare for a session; called before its first request."""

    @abstractmethod
    def choose(self, session: str, avoid: Sequence[str] = ()) -> Replica:
        """Choose the replica of a session, not one of the addresses in `avoid` if possible."""

    @abstractmethod
    def sample(
        self, ask: EngineRequest, session: str, progress: Progress, avoid: Sequence[str] = ()
    ) -> AsyncGenerator[Delta]:
        """Yield tokens as they come; each attempt to get them is reported to `progress`.

        Raises `EngineError`, or the engine's error about the request. Close the iterator to abort.
        """

    async def answers(self, url: str) -> bool:
        """Probe a replica after a call that ended in silence; one that hangs is avoided then."""
        return True

    @abstractmethod
    async def abort(self, request_id: str, url: str) -> bool:
        """Ask a replica to end a request and return the sampled part; False if it cannot."""


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
        """`model` is a served name, the first if None; `idle_s` bounds the wait for a first token.

        With a `card`, the engine's model is not queried. `key` is the engine's API key, if any.
        """
        self.name, self._card = model, card
        urls = [urls] if isinstance(urls, str) else urls
        self.replicas = [Replica(url, settings.eject_after) for url in urls]
        if not self.replicas:
            raise UsageError(
                "the list of engine URLs is empty; give at least one, such as http://127.0.0.1:8000"
            )
        self.wire = wire
        self._settings = settings
        self._http = EngineHttp(key=key)
        self._probes: asyncio.Task[None] | None = None
        self._waits: set[_Wait] = set()
        self._idle_s = idle_s
        self.gate = Gate()
        self.gate.on_change = self._reschedule

    async def __aenter__(self) -> Self:
        self._probes = log.start_task(self._probe_replicas(), "probe-replicas")
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._probes is not None:
            self._probes.cancel()
            await asyncio.wait({self._probes})
        await self._http.__aexit__()

    async def model(self) -> ModelCard:
        """Return the model that the first replica serves, or the `card` if one was given."""
        within_s = self._settings.probe_timeout_s
        return self._card or await self._http.card(self.name, within_s, url=self.replicas[0].url)

    def choose(self, session: str, avoid: Sequence[str] = ()) -> Replica:
        """Choose the replica of a session: the same one while it is healthy and not avoided."""
        usable = [r for r in self.replicas if not r.ejected and r.url not in avoid]
        usable = usable or [r for r in self.replicas if r.url not in avoid]
        return max(usable or self.replicas, key=lambda r: _weight(session, r.url))

    async def sample(
        self, ask: EngineRequest, session: str, progress: Progress, avoid: Sequence[str] = ()
    ) -> AsyncGenerator[Delta]:
        """See `TokenSource.sample`."""
        tried = list(avoid)
        since = self.gate.now()
        for attempt in range(self._settings.tries):
            await progress.wait_until_sendable()
            replica = self.choose(session, tried)
            ask = msgspec.structs.replace(ask, request_id=progress.note_sent(replica.url))
            reply = read_reply(self._http, replica.url, self.wire, ask, progress.note_accepted)
            wait = _Wait(self.gate.now(), replica, session, asyncio.timeout(self._idle_s))
            try:
                async with self._watch(wait), contextlib.aclosing(reply) as deltas:
                    async for delta in deltas:
                        wait.note(delta, self.gate.now())
                        yield delta
            except EngineError as error:
                # 429 means that the replica is busy, another 4xx that the request is bad
                if error.status is None or (error.status >= 500 and error.retry_after is None):
                    replica.count_fault()
                delay_s = self._retry_delay(error, attempt, since)
                if wait.began or delay_s is None:
                    raise
                progress.note_refused()
                tried.append(replica.url)
                await asyncio.sleep(delay_s)
            else:
                replica.mark_healthy()
                return

    async def abort(self, request_id: str, url: str) -> bool:
        """See `TokenSource.abort`."""
        post = self.wire.build_abort(request_id)
        if post is None:
            return False
        with contextlib.suppress(OSError):
            async with (
                asyncio.timeout(self._settings.probe_timeout_s),
                self._http.request(url + post.path, *post.body) as done,
            ):
                await done.read()
                return done.status == 200
        return False

    async def answers(self, url: str) -> bool:
        """See `TokenSource.answers`."""
        if not await self._is_alive(url) and self.gate.is_open:
            next(replica for replica in self.replicas if replica.url == url).eject()
            return False
        return True

    async def _is_alive(self, url: str) -> bool:
        with contextlib.suppress(TuglineError):
            await self._http.card(self.name, self._settings.probe_timeout_s, url=url)
            return True
        return False

    @contextlib.asynccontextmanager
    async def _watch(self, wait: _Wait) -> AsyncIterator[None]:
        """Raise `EngineError` in the block once the replica hangs while its reply is silent."""
        self._waits.add(wait)
        try:
            async with wait.scope:
                yield
        except TimeoutError as error:
            silent_s = self.gate.now() - wait.since
            self.on_hang(wait.session, silent_s)
            msg = (
                f"the engine at {wait.replica.url} hangs: it has sent nothing for {silent_s:.0f} s"
            )
            raise EngineError(msg) from error
        finally:
            self._waits.discard(wait)

    def _reschedule(self) -> None:
        """Suspend the timeouts of replies that have not begun while the gate is closed."""
        now = self.gate.now()
        loop_now = asyncio.get_running_loop().time()
        for wait in self._waits:
            if not wait.began and not wait.scope.expired():
                due = loop_now + self._idle_s - (now - wait.since)
                wait.scope.reschedule(due if self.gate.is_open else None)

    async def _probe_replicas(self) -> None:
        while True:
            await asyncio.sleep(self._settings.probe_every_s)
            await asyncio.gather(*(self._probe(replica) for replica in self.replicas))

    async def _probe(self, replica: Replica) -> None:
        """Probe an ejected or silent replica; if it hangs, end its silent replies.

        Silence alone is no fault: the computation of a long prompt is silent as well.
        """
        if not replica.ejected and not self._silent(replica):
            return
        if not await self._is_alive(replica.url):
            if not self.gate.is_open:
                return
            replica.count_fault()
            for wait in self._silent(replica):
                self.on_hang(wait.session, self.gate.now() - wait.since)
        elif replica.ejected:
            replica.mark_healthy()
        now = self.gate.now()
        for wait in self._silent(replica):
            stalled = wait.began and now - wait.since > self._settings.stalled_s
            if replica.ejected or stalled:
                wait.scope.reschedule(asyncio.get_running_loop().time())

    def _silent(self, replica: Replica) -> list[_Wait]:
        """List the replies that are silent; none while the gate is closed."""
        if not self.gate.is_open:
            return []
        bound = self.gate.now() - self._settings.silent_s
        return [wait for wait in self._waits if wait.replica is replica and wait.since < bound]

    def _retry_delay(self, error: EngineError, attempt: int, since: float) -> float | None:
        """Return seconds until the next attempt; None if the error is final.

        Refusals are retried for a limited time, counted from `since` by the gate's clock: the
        client must get the last one before its stream is opened.
        """
        settings = self._settings
        alone = len(self.replicas) == 1
        if not error.temporary or attempt == settings.tries - 1:
            return None
        asked_s = error.retry_after
        if asked_s is None:
            delay_s = settings.backoff_s * 2**attempt if alone or attempt else 0.0
        else:
            delay_s = asked_s if alone else min(asked_s, settings.backoff_s)
        end_s = max(asked_s or 0.0, self.gate.now() - since + delay_s)
        refused = error.status is not None
        return None if refused and end_s > settings.longest_retry_after_s else delay_s


def _weight(session: str, url: str) -> bytes:
    """Weigh for rendezvous hashing: a change of replicas moves only the affected sessions."""
    return hashlib.blake2b(f"{session}\0{url}".encode(), digest_size=8).digest()
