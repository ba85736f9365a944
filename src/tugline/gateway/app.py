"""The gateway: its routes and streaming, and its interface for nodes and trainers.

One call runs through `Gateway._handle`: authenticate, parse, `LiveSession.prepare` makes the
`Prompt`, `LiveSession.complete` starts the `Completion`, and the dialect encodes its pieces.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Self

import msgspec

from tugline import errors, log
from tugline.chat.dialects import DIALECTS, fallback_dialect
from tugline.chat.dialects.base import Action, Dialect, HttpRequest
from tugline.chat.templates.rendering import Rendering
from tugline.gateway.answer import AT_ENGINE, AnswerState
from tugline.gateway.completion import Completion
from tugline.gateway.context import EngineContext, explain
from tugline.gateway.model_call import ModelCall
from tugline.gateway.policy import DEFAULTS, CallSettings
from tugline.gateway.replicas import TokenSource
from tugline.gateway.session import Clock, LiveSession
from tugline.gateway.sessions import Sessions
from tugline.gateway.terms import DEFAULT_TERMS, Opened, SessionState, SessionTerms
from tugline.gateway.traffic import Traffic
from tugline.protocol import PauseMode
from tugline.recording import file as recordings
from tugline.recording.file import Writer
from tugline.recording.folder import file_name
from tugline.recording.records import RecordedEventKind, RecordedResult
from tugline.types import Call, Mode, Session, Task
from tugline.web.engine_http import ModelCard
from tugline.web.http import Http, Message, Receive, Send
from tugline.web.serve import serve

_PATH = re.compile(
    r"(?:/s/(?P<session>[^/]+))?(?:/(?P<version>v1(?:alpha|beta)?\d*))?(?P<rest>/.*)"
)

_log = log.get("gateway")


class Gateway:
    """A gateway in front of one engine's replicas, with its own socket."""

    def __init__(  # noqa: PLR0913 - independent settings
        self,
        upstream: TokenSource,
        rendering: Rendering | None,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        flush_s: float = 1.0,
        settings: CallSettings = DEFAULTS,
        clock: Clock = time.monotonic,
    ) -> None:
        """Recordings are written to `folder`, one file per session; port 0 takes any free port.

        `rendering` makes the prompts in exact mode and is None in other modes. An answered call
        survives a crash of any process at once, and a power loss after at most `flush_s`.
        """
        if (rendering is None) is (upstream.wire.mode is Mode.EXACT):
            wants = "a rendering" if rendering is None else "rendering=None"
            msg = f"engine format {upstream.wire.name!r} is {upstream.wire.mode}: it needs {wants}"
            raise errors.UsageError(msg)
        self.url = ""
        self._upstream = upstream
        self.folder = folder
        """Folder of the recordings."""
        self._host, self._port = host, port
        self._flush_s = flush_s
        self._settings, self._clock = settings, clock
        self._engine = EngineContext(upstream, ModelCard("", 0), rendering, settings)
        self._sessions = Sessions()
        self._closed: dict[str, SessionState] = {}
        upstream.on_hang = self._sessions.credit
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._upstream)
            self._engine.card = await self._upstream.model()
            await asyncio.to_thread(self._engine.keep_tokenizer, self.folder)
            self.url = await stack.enter_async_context(serve(self.app, self._host, self._port))
            flusher = log.start_task(self._flush(), "flush-recordings")
            stack.callback(flusher.cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._stack.aclose()

    # ----------------------------------------------------------------------- for nodes and trainers
    @property
    def card(self) -> ModelCard:
        """The model that the engine serves."""
        return self._engine.card

    @property
    def traffic(self) -> Traffic:
        """Counters over all model calls."""
        return self._engine.traffic

    @property
    def idle(self) -> bool:
        """Whether no model call is running in this process."""
        return not any(live.running for live in self._sessions)

    @contextlib.asynccontextmanager
    async def open(
        self,
        session: Session,
        task: Task,
        terms: SessionTerms = DEFAULT_TERMS,
        *,
        on_hang: Callable[[float], None] = lambda _seconds: None,
    ) -> AsyncIterator[Opened]:
        """Accept the model calls of one attempt at a session during the block.

        `on_hang` is called with the seconds lost to a hanging engine.
        """
        if self._sessions.get(session.id) is not None:
            raise errors.UsageError(f"session {session.id!r} is already open")
        header = self._engine.header(session, task, terms.workdir, terms.home)
        self._upstream.open_session(header)
        path = self.recording_path(session)
        if not terms.key:
            path.unlink(missing_ok=True)  # left by an attempt that a restored store does not have
        live = LiveSession(
            header, Writer(path, header), self._engine, terms, clock=self._clock, on_hang=on_hang
        )
        try:
            if terms.key:
                await asyncio.to_thread(live.restore, path)
            secret = self._sessions.open(live, terms.key)
            yield Opened(f"{self.url}/s/{session.id}", secret)
        finally:
            await asyncio.shield(self._close(live))

    async def _close(self, live: LiveSession) -> None:
        await self._sessions.close(live)
        self._keep_closed(live.id, live.describe())

    def _keep_closed(self, session: str, state: SessionState) -> None:
        """Keep the states of the last closed sessions."""
        self._closed.pop(session, None)
        self._closed[session] = state
        if len(self._closed) > self._settings.closed_sessions:
            del self._closed[next(iter(self._closed))]

    def forget(self, session: str) -> None:
        """Drop the state of a closed session, whose calls can then not be read any more."""
        self._closed.pop(session, None)

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(self._flush_s)
            await self._sessions.flush()

    def describe(self, session: str) -> SessionState:
        """Return the state of a live or recently closed session. Raises `KeyError`."""
        live = self._sessions.get(session)
        return live.describe() if live else self._closed[session]

    def recording_path(self, session: Session) -> Path:
        """Return the path of an attempt's recording."""
        return self.folder / file_name(session)

    def read_calls(self, session: str) -> tuple[Call, ...]:
        """Read the calls of the session's last attempt. Raises `KeyError`."""
        return recordings.read(self.describe(session).path).calls

    async def write_result(self, session: str, result: RecordedResult) -> None:
        """Record the outcome of a session that has been closed. Raises `CaptureError`."""
        await asyncio.to_thread(recordings.write_result, self.describe(session).path, result)

    async def pause(self, mode: PauseMode = PauseMode.WAIT, *, within_s: float = 600.0) -> None:
        """Hold new calls; calls in flight finish, are aborted or continue, by `mode`.

        Raises `EngineError` if they do not end within `within_s`; the gateway then stays paused.
        """
        self._upstream.gate.close()
        self._sessions.note(RecordedEventKind.PAUSED, mode)
        if mode == PauseMode.KEEP:
            return
        running = [c.life for live in self._sessions for call in live.running for c in call.choices]
        unfinished = AT_ENGINE | {AnswerState.ABANDONED}
        try:
            async with asyncio.timeout(within_s):
                if mode == PauseMode.ABORT:
                    await asyncio.gather(*(life.stop_early() for life in running))
                while any(life.state in unfinished for life in running):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except TimeoutError as error:
            msg = f"model calls were still in flight {within_s:g} s after pause({str(mode)!r})"
            raise errors.EngineError(msg) from error

    async def resume(self) -> None:
        """Release held calls."""
        self._upstream.gate.open()
        self._sessions.note(RecordedEventKind.RESUMED, "")

    async def set_weights_version(self, version: int) -> None:
        """Announce the served version, for engines that do not report it with tokens."""
        self._engine.version = version
        self._sessions.note(RecordedEventKind.WEIGHTS, str(version))

    # ----------------------------------------------------------------------- routes
    async def app(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve ASGI; a session is identified by a path prefix and its key, or by its key alone."""
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
            log.bind(**live.log_context)
            await self._handle(http, dialect, action, incoming, live)
        except errors.ClientGone:
            return
        except Exception as error:  # noqa: BLE001 - every error becomes a reply
            await self._refuse(http, dialect, live, explain(error))

    async def _refuse(
        self, http: Http, dialect: Dialect, live: LiveSession | None, error: errors.TuglineError
    ) -> None:
        """Reply with an error; the server closes the connection of a reply that has begun."""
        if http.started:
            return
        status, headers, body = dialect.encode_error(error)
        self._engine.traffic.refused[type(error).__name__] += 1
        _log.info("refused", status=status, error=type(error).__name__, dialect=dialect.name)
        if live is not None:
            live.note_refusal(error, status)
        await http.reply(status, body, headers)

    async def _handle(
        self,
        http: Http,
        dialect: Dialect,
        action: Action | None,
        incoming: HttpRequest,
        live: LiveSession,
    ) -> None:
        if action is None:
            if "upgrade" in http.headers:
                raise errors.UpgradeRequired("protocol upgrades are not supported; send a POST")
            served = ", ".join(route for dialect in DIALECTS for route in dialect.posts)
            raise errors.NotFound(
                f"{http.method} {incoming.path} is not a route: known are {served}, Google's "
                "generateContent and GET /models"
            )
        if action is Action.MODELS or action is Action.MODEL:
            await http.reply(200, self._describe_models(dialect, action, incoming))
            return
        if action is Action.COUNT and self._engine.rendering is None:
            msg = "tokens cannot be counted: the gateway counts them in exact mode only"
            raise errors.Unsupported(msg)
        with live.bytes_in_flight.hold() as take:
            body = await live.read_body(http, take)
            incoming = msgspec.structs.replace(incoming, body=body)
            call = await live.prepare(dialect, incoming)
            if action is Action.COUNT:
                tokens = self._engine.count_prompt(call)
                await http.reply(200, dialect.encode_count(tokens))
                return
            completion = await live.complete(call)
            if call.repaired:
                number = completion.choices[0].number
                live.transcript.note(RecordedEventKind.REPAIRED, "lone surrogates", call=number)
            send = self._send_stream if call.request.stream else self._send_whole
            with http.while_connected():
                with completion.attached():
                    await send(http, call, completion)
                if not http.disconnected:
                    completion.deliver()

    def _describe_models(self, dialect: Dialect, action: Action, incoming: HttpRequest) -> bytes:
        card = self._engine.card
        if action is Action.MODELS:
            return dialect.encode_models([card.id], card.max_model_len, 0)
        return dialect.encode_model(incoming.path.removeprefix("/models/"), card.max_model_len, 0)

    # ----------------------------------------------------------------------- answering
    async def _send_stream(self, http: Http, call: ModelCall, completion: Completion) -> None:
        await completion.wait_until_accepted()
        completion.check()
        stream = call.dialect.stream(call.request, completion.id, int(completion.received))
        await http.stream(stream.content_type)
        opened = bool(completion.usage.prompt)
        if opened:
            await http.write(stream.start(completion.usage))
        async for batch in completion.pieces():
            data = b"".join([stream.add(piece, index) for index, piece in batch])
            if not batch:
                data = stream.keep_alive()
            elif not opened:
                data = stream.start(completion.usage) + data
                opened = True
            if data:
                await http.write(data)
        start = b"" if opened else stream.start(completion.usage)
        error = completion.error
        last = stream.fail(error) if error else stream.finish(completion.responses)
        await http.end(start + last)

    async def _send_whole(self, http: Http, call: ModelCall, completion: Completion) -> None:
        await completion.wait_done()
        completion.check()
        await http.reply(200, call.dialect.encode(call.request, completion.responses))


def _route(incoming: HttpRequest) -> tuple[Dialect, Action | None]:
    for dialect in DIALECTS:
        action = dialect.match(incoming)
        if action is not None:
            return dialect, action
    return fallback_dialect(incoming), None
