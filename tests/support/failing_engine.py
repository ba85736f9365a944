"""A session in front of a failing engine, with requests in every dialect as raw HTTP."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from support.engine import ids
from support.gateway import OpenSession, open_session
from tugline.gateway.policy import CallSettings
from tugline.types import Limits
from tugline.web.serve import serve


@dataclass(frozen=True)
class Dialect:
    """Requests and errors of an API."""

    name: str
    path: str
    key: str
    """Name of the header that carries the secret."""
    body: Callable[[str], dict[str, Any]]
    end: str
    """What a stream that was cut short holds before it ends properly."""
    history: str = "messages"
    """Field of the conversation."""
    kind: str = "type"
    """Field of an error that has its kind."""

    def ask(self, text: str) -> bytes:
        """The body of a request."""
        return json.dumps(self.body(text)).encode()


def ask_messages(text: str) -> dict[str, Any]:
    """A request body of Anthropic and Chat."""
    return {"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": text}]}


DIALECTS = [
    Dialect("anthropic", "/v1/messages", "x-api-key", ask_messages, '"stop_reason":"max_tokens"'),
    Dialect(
        "chat", "/v1/chat/completions", "authorization", ask_messages, '"finish_reason":"length"'
    ),
    Dialect(
        "responses",
        "/v1/responses",
        "authorization",
        lambda text: {"model": "m", "input": text},
        '"reason":"max_output_tokens"',
        history="input",
    ),
    Dialect(
        "google",
        "/v1beta/models/m:generateContent",
        "x-goog-api-key",
        lambda text: {"contents": [{"role": "user", "parts": [{"text": text}]}]},
        '"finishReason":"MAX_TOKENS"',
        history="contents",
        kind="status",
    ),
]
each_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)


# --------------------------------------------------------------------------- an engine that fails
@dataclass
class FailingEngine:
    """An engine that responds with `answer`, and counts requests."""

    answer: Callable[[Request], Any]
    requests: int = 0

    async def models(self, _: Request) -> Response:
        """One model with a small window."""
        return JSONResponse({"data": [{"id": "m", "max_model_len": 4000}]})

    async def generate(self, request: Request) -> Response:
        """Respond with the fault."""
        self.requests += 1
        return await self.answer(request)

    @property
    def app(self) -> Starlette:
        """Its routes."""
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/inference/v1/generate", self.generate, methods=["POST"]),
            ]
        )


def dashed(headers: Mapping[str, str]) -> dict[str, str]:
    """Header names from keywords."""
    return {name.replace("_", "-"): value for name, value in headers.items()}


def status(code: int, **headers: str) -> Callable[[Request], Any]:
    """Refuse every request with this status."""

    async def answer(_: Request) -> Response:
        error = {"error": {"message": "no", "type": "x", "param": None, "code": code}}
        return JSONResponse(error, code, headers=dashed(headers))

    return answer


def chunk(tokens: list[int], finish: str | None = None, at: int = 0) -> bytes:
    """One event of a stream, whose first token is token `at` of the answer."""
    content = [{"logprob": -0.5} for _ in tokens]
    spans = [{"version": "0", "start": at, "end": at + len(tokens)}]
    choice = {
        "index": 0,
        "token_ids": tokens,
        "logprobs": {"content": content},
        "finish_reason": finish,
        "weight_versions": spans if tokens else None,
    }
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


async def whole(request: Request) -> Response:
    """A good answer, streamed or not."""
    tokens = ids("Done.")
    if json.loads(await request.body())["stream"]:
        return Response(chunk(tokens, "stop") + b"data: [DONE]\n\n", media_type="text/event-stream")
    return Response(chunk(tokens, "stop")[6:].strip(), media_type="application/json")


async def garbage(_: Request) -> Response:
    """Not JSON."""
    return Response(b"<html>busy</html>", media_type="text/html")


async def cut(request: Request) -> Response:
    """Ten tokens, then the end of the connection."""

    async def body() -> AsyncIterator[bytes]:
        yield chunk(ids("Half an answer")[:10])

    if not json.loads(await request.body())["stream"]:
        return Response(chunk(ids("Half an answer")[:10])[6:-20], media_type="application/json")
    return StreamingResponse(body(), media_type="text/event-stream")


# --------------------------------------------------------------------------- the client
@dataclass
class DialectClient(OpenSession):
    """An open session with requests in every dialect."""

    engine: FailingEngine

    def headers(self, dialect: Dialect, key: str | None = None) -> dict[str, str]:
        """Headers with the key as this dialect's clients send it."""
        secret = self.key if key is None else key
        value = f"Bearer {secret}" if dialect.key == "authorization" else secret
        more = {"anthropic-version": "2023-06-01"} if dialect.name == "anthropic" else {}
        return {dialect.key: value, "content-type": "application/json", **more}

    async def send(
        self,
        dialect: Dialect,
        body: bytes | str = "Mend it.",
        key: str | None = None,
        **headers: str,
    ) -> tuple[int, Mapping[str, str], Any]:
        """Status, headers and JSON of the response to a question, or to a body of bytes."""
        data = dialect.ask(body) if isinstance(body, str) else body
        head = {**self.headers(dialect, key), **dashed(headers)}
        sent = io.BytesIO(data)
        async with self.http.post(self.url + dialect.path, data=sent, headers=head) as response:
            return response.status, response.headers, await response.json()

    async def expect(
        self, dialect: Dialect, codes: int | set[int], text: str, **sent: Any
    ) -> tuple[int, Mapping[str, str]]:
        """Status and headers of an error with one of these codes; `sent` goes to `send`."""
        code, headers, reply = await self.send(dialect, **sent)
        assert code in ({codes} if isinstance(codes, int) else codes)
        check(dialect, code, reply, text)
        return code, headers

    async def stream(self, dialect: Dialect) -> tuple[int, str]:
        """Status and text of a streamed reply."""
        body, path = dialect.body("Mend it."), dialect.path
        if dialect.name == "google":
            path = path.replace("generateContent", "streamGenerateContent") + "?alt=sse"
        else:
            body["stream"] = True
        async with self.http.post(
            self.url + path, json=body, headers=self.headers(dialect)
        ) as response:
            return response.status, await response.text()


@contextlib.asynccontextmanager
async def open_client(
    folder: Path,
    answer: Callable[[Request], Any] = whole,
    *,
    limits: Limits | None = None,
    idle_s: float = 300.0,
    **tuning: Any,
) -> AsyncIterator[DialectClient]:
    """A session in front of a failing engine."""
    engine = FailingEngine(answer)
    settings = CallSettings(backoff_s=0.001, grace_s=0.01, **tuning)
    async with (
        serve(engine.app) as url,
        open_session(folder, url, tuning=settings, limits=limits, idle_s=idle_s) as session,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http,
    ):
        yield DialectClient(
            [], session.upstream, session.gateway, session.url, session.key, http, engine
        )


KINDS = {
    400: {"invalid_request_error", "INVALID_ARGUMENT"},
    401: {"authentication_error", "invalid_request_error", "UNAUTHENTICATED"},
    404: {"not_found_error", "invalid_request_error", "NOT_FOUND"},
    408: {"invalid_request_error", "timeout_error", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED"},
    413: {"request_too_large", "invalid_request_error", "INVALID_ARGUMENT"},
    415: {"invalid_request_error", "INVALID_ARGUMENT"},
    429: {"rate_limit_error", "RESOURCE_EXHAUSTED", "rate_limit_exceeded"},
    500: {"api_error", "server_error", "INTERNAL"},
    502: {"api_error", "server_error", "INTERNAL", "UNAVAILABLE"},
    503: {"overloaded_error", "server_error", "UNAVAILABLE", "service_unavailable_error"},
    529: {"overloaded_error"},
}


def check(dialect: Dialect, code: int, reply: Any, text: str) -> None:
    """An error has the dialect's shape, a kind that fits its status, and this text."""
    kind = reply["error"][dialect.kind]
    assert kind in KINDS[code], f"{dialect.name}: {kind} with {code}"
    assert text in reply["error"]["message"], reply
