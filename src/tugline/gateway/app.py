"""The gateway as harnesses meet it: routes, secrets, streaming, and the dialect's own errors.

`Gateway` is also what a node holds: it opens a session, hands out its address and key, and gives
back the recorded calls when the session is over.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tugline import log
from tugline.capture import segments
from tugline.capture.segments import Writer
from tugline.errors import ContextOverflow, EngineError, RequestError, TuglineError
from tugline.gateway.conversation import Conversation
from tugline.gateway.dialects.base import Dialect
from tugline.gateway.dialects.openai_chat import OpenAIChat
from tugline.gateway.proxy import Backend, Exchange, body_digest, contract_of
from tugline.gateway.rendering import Rendering
from tugline.gateway.sessions import LiveSession, Sessions
from tugline.gateway.upstream import ModelCard, Upstream
from tugline.serving import serve
from tugline.types import Boundary, Call, Failure, Session, Task

MAX_BODY = 64 << 20
"""Bytes of one request."""
KEEP_ALIVE_S = 15.0
HEADERS_BY_S = 2.0
"""How long a stream's headers may wait for the first token, so that early faults get a status."""
_RETRY = "x-stainless-retry-count"

_log = log.get("gateway")


class _TooLarge(RequestError):
    status = 413


@dataclass(frozen=True, slots=True)
class Opened:
    """Where and with what a harness reaches its session."""

    base_url: str
    """Without ``/v1``: each harness appends what its CLI wants."""
    key: str


class Gateway:
    """One gateway in front of one engine, on a socket of its own."""

    def __init__(
        self,
        upstream: Upstream,
        rendering: Rendering,
        segments_dir: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """Calls are kept under `segments_dir`, one file per session; port 0 takes any free one."""
        self._upstream, self._rendering, self._folder = upstream, rendering, segments_dir
        self._host, self._port = host, port
        self._sessions = Sessions()
        self._chat = OpenAIChat()
        self._last: dict[str, Exchange] = {}
        self._segments: dict[str, Path] = {}
        self._overflow: dict[str, ContextOverflow] = {}
        self._stack = contextlib.AsyncExitStack()
        self.url = ""
        self.card = ModelCard("", 0)

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._upstream)
            self.card = await self._upstream.model()
            self.url = await stack.enter_async_context(serve(self.app(), self._host, self._port))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    @contextlib.asynccontextmanager
    async def open(self, session: Session, task: Task) -> AsyncIterator[Opened]:
        """Take the model calls of one attempt at a session while the block lasts."""
        segment = self.segment(session)
        self._segments[session.id] = segment
        live, secret = self._sessions.open(
            session.id,
            contract=contract_of(task.sampling, session.sample),
            limits=task.limits,
            conversation=Conversation(self._rendering),
            writer=Writer(segment),
        )
        self._last.pop(session.id, None)
        try:
            yield Opened(f"{self.url}/s/{session.id}", secret)
        finally:
            await asyncio.shield(self._sessions.close(live))

    def segment(self, session: Session) -> Path:
        """Where an attempt's calls are kept."""
        return self._folder / f"{session.id}.{session.epoch}.seg"

    def calls(self, session: str) -> tuple[Call, ...]:
        """What the session's last attempt recorded, read back from disk."""
        return segments.read(self._segments[session]).calls

    def failure(self, session: str) -> Failure | None:
        """Why its last call got no answer, if the engine or its window is to blame.

        A session that outgrows the window later on has answers to be judged by.
        """
        last = self._last.get(session)
        error = last.error if last is not None else self._overflow.get(session)
        if isinstance(error, EngineError | ContextOverflow):
            return Failure(Boundary.ENGINE, str(error))
        return None

    # ----------------------------------------------------------------------- routes
    def app(self) -> Starlette:
        """The ASGI application; the session comes by path prefix or by key alone."""
        routes = [Route("/healthz", self._health, methods=["GET"])]
        for prefix in ("/s/{session}/v1", "/s/{session}", "/v1"):
            routes += [
                Route(f"{prefix}/chat/completions", self._complete, methods=["POST"]),
                Route(f"{prefix}/models", self._models, methods=["GET"]),
            ]
        return Starlette(routes=routes)

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, http: Request) -> Response:
        try:
            self._find(http, self._chat)
        except TuglineError as error:
            return _refusal(self._chat, error)
        body = self._chat.models([self.card.id], self.card.max_model_len)
        return Response(body, media_type="application/json")

    async def _complete(self, http: Request) -> Response:
        dialect: Dialect = self._chat
        try:
            live = self._find(http, dialect)
            body = await _body(http)
            exchange = self._repeated(live, http, body) or self._begin(live, dialect, body)
        except TuglineError as error:
            return _refusal(dialect, error)
        except ClientDisconnect:
            return Response(status_code=400)
        if exchange.request.stream:
            return await _streamed(http, dialect, exchange)
        return await _whole(http, dialect, exchange)

    def _begin(self, live: LiveSession, dialect: Dialect, body: bytes) -> Exchange:
        try:
            backend = Backend(self._upstream, self.card, self._rendering)
            exchange = Exchange(live, dialect, dialect.parse(body), body, backend)
        except ContextOverflow as error:
            self._overflow[live.id] = error
            raise
        exchange.start()
        self._last[live.id] = exchange
        return exchange

    def _find(self, http: Request, dialect: Dialect) -> LiveSession:
        return self._sessions.find(dialect.key(http.headers.raw), http.path_params.get("session"))

    def _repeated(self, live: LiveSession, http: Request, body: bytes) -> Exchange | None:
        """The answered exchange that an SDK's retry of the same body asks for again."""
        last = self._last.get(live.id)
        if last is None or http.headers.get(_RETRY, "0") == "0":
            return None
        return last if last.answer and last.body_digest == body_digest(body) else None


# --------------------------------------------------------------------------- answering
async def _body(http: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in http.stream():
        size += len(part)
        if size > MAX_BODY:
            msg = f"the request body is larger than {MAX_BODY} bytes"
            raise _TooLarge(msg)
        parts.append(part)
    return b"".join(parts)


async def _streamed(http: Request, dialect: Dialect, exchange: Exchange) -> Response:
    watch = asyncio.create_task(_gone(http))
    first = asyncio.create_task(exchange.begun(HEADERS_BY_S))
    await asyncio.wait({watch, first}, return_when=asyncio.FIRST_COMPLETED)
    early = watch.done()
    watch.cancel()
    first.cancel()
    if early:
        exchange.leave()
        return Response(status_code=499)
    if exchange.error is not None:
        return _refusal(dialect, exchange.error)
    stream = dialect.stream(exchange.request, exchange.id, int(exchange.received))

    async def events() -> AsyncGenerator[bytes]:
        try:
            yield stream.open()
            async for piece in exchange.follow(KEEP_ALIVE_S):
                yield stream.keep_alive() if piece is None else stream.piece(piece)
            if exchange.answer is not None:
                yield stream.close(exchange.answer)
            elif exchange.error is not None:
                yield stream.fault(exchange.error)
        finally:
            exchange.leave()

    return StreamingResponse(
        events(), media_type=stream.content_type, headers={"cache-control": "no-cache"}
    )


async def _whole(http: Request, dialect: Dialect, exchange: Exchange) -> Response:
    watch = asyncio.create_task(_gone(http))
    work = asyncio.create_task(exchange.settled_answer())
    await asyncio.wait({watch, work}, return_when=asyncio.FIRST_COMPLETED)
    watch.cancel()
    if not exchange.done:
        exchange.leave()
        work.cancel()
        return Response(status_code=499)
    if exchange.answer is None:
        return _refusal(dialect, exchange.error or TuglineError("no answer"))
    return Response(dialect.answer(exchange.answer), media_type="application/json")


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _refusal(dialect: Dialect, error: TuglineError) -> Response:
    status, headers, body = dialect.error(error)
    _log.info("refused", status=status, error=type(error).__name__)
    return Response(body, status, headers, media_type="application/json")
