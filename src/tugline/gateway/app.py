"""The gateway as harnesses meet it: routes, secrets, streaming, and each dialect's own errors.

`Gateway` is also what a node holds: it opens a session, hands out its address and key, pauses the
calls while weights change, and gives back what was recorded when the session is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from tugline import log
from tugline.chat.dialects import DIALECTS, fallback_dialect
from tugline.chat.dialects.base import Action, Dialect, HttpRequest
from tugline.chat.request import Request
from tugline.chat.templates.rendering import Rendering
from tugline.errors import (
    ClientGone,
    ContextOverflow,
    EngineError,
    NotFound,
    TuglineError,
    Unsupported,
    UpgradeRequired,
    UsageError,
)
from tugline.gateway import policy
from tugline.gateway.asgi import Http, Message, Receive, Send, lifespan
from tugline.gateway.backend import EngineContext
from tugline.gateway.conversation import Conversation
from tugline.gateway.proxy import ModelCall, repeats
from tugline.gateway.replicas import ModelCard, TokenSource
from tugline.gateway.sessions import LiveSession, SessionPolicy, Sessions
from tugline.protocol import PauseMode
from tugline.recording import file as recordings
from tugline.recording.file import Writer, conclude
from tugline.recording.records import EventKind, Result, capped
from tugline.types import Boundary, Call, Failure, Mode, Session, Task
from tugline.web.serve import serve

KEEP_ALIVE_S = 15.0
HEADERS_BY_S = 2.0
"""How long a stream's headers may wait for the first token, so that early faults get a status."""
_REMEMBERED = 8
"""Calls of a session that a repeated request may be about."""
_KEPT = 4096  # sessions that are over and can still be asked about
_RETRY = "x-stainless-retry-count"
_PATH = re.compile(
    r"(?:/s/(?P<session>[^/]+))?(?:/(?P<version>v1(?:alpha|beta)?\d*))?(?P<rest>/.*)"
)

_log = log.get("gateway")

StreamMode = Literal["live", "buffered"]
RawMode = Literal["none", "requests", "all"]


@dataclass(frozen=True, slots=True)
class Opened:
    """Where and with what a harness reaches its session."""

    base_url: str
    """Without ``/v1``: each harness appends what its CLI wants."""
    key: str


class Gateway:
    """One gateway in front of one engine's replicas, on a socket of its own."""

    def __init__(  # noqa: PLR0913 - each is a setting of its own
        self,
        upstream: TokenSource,
        rendering: Rendering | None,
        recordings_dir: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        stream: StreamMode = "live",
        flush_s: float = 1.0,
        raw: RawMode = "requests",
        raw_limit: int = 4 << 20,
    ) -> None:
        """Calls are kept under `recordings_dir`, one file per session; port 0 takes any free one.

        `rendering` makes the prompts in exact mode and is None in the other modes. With `stream`
        ``buffered`` an answer is told when it is complete. A call that was answered survives the
        death of any process; every `flush_s` it becomes safe from a loss of power as well, and with
        0 before its answer ends. Of what is on the wire, `raw` is kept as it was, of each body the
        first `raw_limit` bytes.
        """
        if (rendering is None) is (upstream.wire.mode is Mode.EXACT):
            wants = "a rendering" if rendering is None else "no rendering"
            msg = f"engine format {upstream.wire.name!r} is {upstream.wire.mode}: it needs {wants}"
            raise UsageError(msg)
        self._upstream, self._folder, self._mode = upstream, recordings_dir, stream
        self._flush_s, self._raw, self._raw_limit = flush_s, raw, raw_limit
        self._backend = EngineContext(upstream, ModelCard("", 0), rendering)
        self._backend.gate.set()
        self.traffic = self._backend.traffic
        self._host, self._port = host, port
        self._sessions = Sessions()
        self._recent: dict[str, deque[ModelCall]] = {}
        self._recordings: dict[str, Path] = {}
        self._overflow: dict[str, ContextOverflow] = {}
        self._faults: dict[str, TuglineError | None] = {}
        """How the last call of a session that is over ended."""
        self._stack = contextlib.AsyncExitStack()
        self.url = ""

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._upstream)
            self._backend.card = await self._upstream.model()
            await asyncio.to_thread(self._backend.keep_tokenizer, self._folder)
            self.url = await stack.enter_async_context(serve(self.app, self._host, self._port))
            if self._flush_s:
                flusher = asyncio.create_task(self._flush(), name="flush-recordings")
                stack.callback(flusher.cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    # ----------------------------------------------------------------------- for a node
    @property
    def card(self) -> ModelCard:
        """What the engine serves."""
        return self._backend.card

    @contextlib.asynccontextmanager
    async def open(
        self,
        session: Session,
        task: Task,
        *,
        spent_status: int = 400,
        offers_tools: bool = False,
        workdir: str = "",
        home: str = "",
    ) -> AsyncIterator[Opened]:
        """Take the model calls of one attempt at a session while the block lasts.

        `spent_status` is the HTTP status of a spent budget: the one its harness stops on.
        `offers_tools` says that its calls declare tools, so that one without is beside the task.
        `workdir` and `home` are its folders, kept for whoever replays it.
        """
        recording = self._recordings[session.id] = self.recording_path(session)
        contract = policy.contract_of(task.sampling, session.sample)
        live, secret = self._sessions.open(
            session.id,
            terms=SessionPolicy(contract, task.sampling_policy, task.limits, spent_status),
            conversation=Conversation(self._backend.rendering),
            writer=Writer(
                recording,
                self._backend.header(session, task, workdir, home),
                sync=not self._flush_s,
            ),
        )
        live.saw_tools = offers_tools
        self._recent[session.id] = deque(maxlen=_REMEMBERED)
        self._faults.pop(session.id, None)
        try:
            yield Opened(f"{self.url}/s/{session.id}", secret)
        finally:
            await asyncio.shield(self._sessions.close(live))
            recent = self._recent.pop(session.id)
            overflow = self._overflow.pop(session.id, None)
            self._faults[session.id] = recent[-1].error if recent else overflow
            if len(self._faults) > _KEPT:
                old = next(iter(self._faults))
                del self._faults[old], self._recordings[old]

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(self._flush_s)
            await self._sessions.flush()

    def recording_path(self, session: Session) -> Path:
        """Where an attempt's calls are kept."""
        return self._folder / f"{session.id}.{session.epoch}.rec"

    def read_calls(self, session: str) -> tuple[Call, ...]:
        """What the session's last attempt recorded, read back without raw requests."""
        return recordings.read(self._recordings[session], bodies=False).calls

    async def write_result(self, session: str, result: Result) -> None:
        """Write down what became of a session that has been left. Raises `CaptureError`."""
        await asyncio.to_thread(conclude, self._recordings[session], result)

    def engine_failure(self, session: str) -> Failure | None:
        """Why its last call got no answer, if the engine or its window is to blame.

        A session that outgrows the window later on has answers to be judged by.
        """
        recent = self._recent.get(session)
        error = self._overflow.get(session) or self._faults.get(session)
        if recent:
            error = recent[-1].error
        if isinstance(error, EngineError | ContextOverflow):
            return Failure(Boundary.ENGINE, str(error))
        return None

    # ----------------------------------------------------------------------- for a trainer
    async def pause(self, mode: PauseMode = PauseMode.WAIT, *, within_s: float = 600.0) -> None:
        """Hold new calls. Those in flight end first, end now with what they have, or stay.

        Raises `EngineError` when they are not over in time; the gateway then stays paused.
        """
        self._backend.gate.clear()
        self._sessions.note(EventKind.PAUSED, mode)
        if mode == PauseMode.ABORT:
            await asyncio.gather(*(draw.abort() for draw in list(self._backend.running)))
        if mode == PauseMode.KEEP:
            return
        try:
            async with asyncio.timeout(within_s):
                while any(draw.sending for draw in self._backend.running):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except TimeoutError as error:
            msg = f"model calls were still in flight {within_s:g} s after pause({str(mode)!r})"
            raise EngineError(msg) from error

    def resume(self) -> None:
        """Let calls go on."""
        self._backend.gate.set()
        self._sessions.note(EventKind.RESUMED, "")

    def set_weights_version(self, version: int) -> None:
        """Announce what the engine now serves, for engines that do not say it with each token."""
        self._backend.version = version
        self._sessions.note(EventKind.WEIGHTS, str(version))

    # ----------------------------------------------------------------------- routes
    async def app(self, scope: Message, receive: Receive, send: Send) -> None:
        """The ASGI application; the session comes by path prefix or by key alone."""
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        http = Http(scope, receive, send)
        if http.path == "/healthz":
            await http.reply(200, b'{"status":"ok"}')
            return
        parts = _PATH.fullmatch(http.path)
        rest, version = (parts["rest"], parts["version"] or "") if parts else (http.path, "")
        incoming = HttpRequest(http.method, version, rest, http.query, http.headers)
        dialect, action = _route(incoming)
        live = None
        try:
            session = parts["session"] if parts else None
            live = self._sessions.find(dialect.find_secret(http.headers, http.query), session)
            log.bind(**live.about)
            await self._serve(http, dialect, action, incoming, live)
        except ClientGone:
            return
        except TuglineError as error:
            status, headers, body = dialect.encode_error(error)
            self.traffic.refused[type(error).__name__] += 1
            _log.info("refused", status=status, error=type(error).__name__, dialect=dialect.name)
            if live is not None:
                live.refused(error, status)
            await http.reply(status, body, headers)

    async def _serve(
        self,
        http: Http,
        dialect: Dialect,
        action: Action | None,
        incoming: HttpRequest,
        live: LiveSession,
    ) -> None:
        if action is None:
            if "upgrade" in http.headers:
                msg = "only plain HTTP is spoken here; send a POST"
                raise UpgradeRequired(msg)
            msg = f"{http.method} {incoming.path} is not served here"
            raise NotFound(msg)
        if action is Action.MODELS or action is Action.MODEL:
            card = self._backend.card
            window, name = card.max_model_len, incoming.path.removeprefix("/models/")
            many = action is Action.MODELS
            tell = (
                dialect.encode_models([card.id], window, 0)
                if many
                else dialect.encode_model(name, window, 0)
            )
            await http.reply(200, tell)
            return
        incoming = msgspec.structs.replace(incoming, body=await http.body())
        request = dialect.parse(incoming, live.memory)
        if action is Action.COUNT:
            await http.reply(200, dialect.encode_count(self._count(live, request)))
            return
        exchange = await self._begin(http, live, dialect, request, incoming.body)
        await self._answer(http, dialect, request, exchange)

    def _count(self, live: LiveSession, request: Request) -> int:
        policy.check(request, self._backend.mode, self._upstream.wire.features)
        if self._backend.rendering is None:
            msg = "tokens cannot be counted here: the engine renders the prompts"
            raise Unsupported(msg)
        return len(live.conversation.plan(request.messages, request.tools).prompt)

    async def _begin(
        self, http: Http, live: LiveSession, dialect: Dialect, request: Request, body: bytes
    ) -> ModelCall:
        """A new exchange, or the one that this request repeats."""
        recent = self._recent[live.id]
        body = b"" if self._raw == "none" else capped(body, self._raw_limit)
        fresh = ModelCall(live, dialect, request, body, self._backend)
        retry = http.headers.get(_RETRY, "0") != "0"
        repeated = partial(repeats, new=fresh, retry=retry)
        old = next(filter(repeated, reversed(recent)), None)
        if old is not None and old.ending:  # given up: what there is of it can be taken up soon
            await old.settled()
            old = next(filter(repeated, reversed(recent)), None)
        if old is not None and not old.broke_off:
            live.note(EventKind.REPEATED, call=old.draws[0].number)
            return old
        try:
            fresh.start(old)
        except ContextOverflow as error:
            self._overflow[live.id] = error
            raise
        recent.append(fresh)
        return fresh

    # ----------------------------------------------------------------------- answering
    async def _answer(
        self, http: Http, dialect: Dialect, request: Request, exchange: ModelCall
    ) -> None:
        """Tell the exchange to this client, for as long as it listens."""
        exchange.join()
        http.told = [] if self._raw == "all" else None
        telling = self._stream if request.stream else self._whole
        me = asyncio.current_task()
        watch = asyncio.create_task(http.gone())
        watch.add_done_callback(lambda _gone: me.cancel() if me and http.disconnected else None)
        try:
            await telling(http, dialect, request, exchange)
            exchange.delivered = exchange.delivered or not http.disconnected
        except asyncio.CancelledError:
            if not http.disconnected:
                raise
        finally:
            watch.cancel()
            exchange.leave(capped(b"".join(http.told or ()), self._raw_limit))

    async def _stream(
        self, http: Http, dialect: Dialect, request: Request, exchange: ModelCall
    ) -> None:
        await exchange.wait_begun(HEADERS_BY_S)
        if exchange.error is not None:
            raise exchange.error
        stream = dialect.stream(request, exchange.id, int(exchange.received))
        await http.stream(stream.content_type)
        opened = bool(exchange.usage.prompt) and self._mode == "live"
        if opened:
            await http.write(stream.start(exchange.usage))
        held: list[bytes] = []
        async for told in exchange.follow(KEEP_ALIVE_S):
            pieces = b"".join([stream.add(piece, index) for index, piece in told])
            if not told:
                pieces = stream.keep_alive()
            elif self._mode == "buffered":
                held.append(pieces)
                continue
            elif not opened:
                pieces, opened = stream.start(exchange.usage) + pieces, True
            if pieces:
                await http.write(pieces)
        start = b"" if opened else stream.start(exchange.usage)
        last = stream.fail(exchange.error) if exchange.error else stream.finish(exchange.answers)
        await http.end(start + b"".join(held) + last)

    async def _whole(
        self, http: Http, dialect: Dialect, request: Request, exchange: ModelCall
    ) -> None:
        await exchange.settled_answer()
        if exchange.error is not None:
            raise exchange.error
        await http.reply(200, dialect.encode(request, exchange.answers))


def _route(incoming: HttpRequest) -> tuple[Dialect, Action | None]:
    for dialect in DIALECTS:
        action = dialect.match(incoming)
        if action is not None:
            return dialect, action
    return fallback_dialect(incoming), None
