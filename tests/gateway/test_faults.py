"""Faults, and the status, error shape and ledger entry that follow from each.

Every row is tried in every dialect, over real sockets.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from support.engine import ids
from support.failing_engine import (
    DIALECTS,
    Dialect,
    check,
    chunk,
    cut,
    each_dialect,
    garbage,
    open_client,
    status,
    whole,
)
from tugline.chat.stream_parser import StreamParser
from tugline.chat.templates.rendering import Rendering
from tugline.recording.file import Writer
from tugline.traces.base import PrefixMerging
from tugline.types import CallOutcome, Cause

LOST = {502, 503, 529}
"""Statuses of an engine that did not answer."""


# --------------------------------------------------------------------------- the client's faults
@each_dialect
async def test_only_the_key_of_a_session_is_accepted(tmp_path: Path, dialect: Dialect) -> None:
    """Unknown, missing and foreign keys get 401, and the own key once the session is closed."""
    async with open_client(tmp_path) as client:
        for key in ("wrong", "", "tl-ü"):
            await client.expect(dialect, 401, "key", key=key)
        own = client.url
        client.url = own.replace("/s/s1", "/s/s2")
        assert (await client.send(dialect))[0] == 401
        client.url = own.replace("/s/s1", "")
        assert (await client.send(dialect))[0] == 200, "the key alone says which session it is"
        await client.gateway._sessions.close(client.gateway._sessions.find(client.key, "s1"))
        await client.expect(dialect, 401, "key")


@each_dialect
async def test_compressed_bodies_are_read(tmp_path: Path, dialect: Dialect) -> None:
    """The size limit applies to the decompressed body."""
    plain = dialect.ask("Mend it.")
    async with open_client(tmp_path, max_body=100_000) as client:
        for encoding, pack in (("gzip", gzip.compress), ("deflate", zlib.compress)):
            good = pack(plain)
            assert (await client.send(dialect, good, content_encoding=encoding))[0] == 200
            bomb = pack(b" " * 5_000_000)
            await client.expect(dialect, 413, "100000", body=bomb, content_encoding=encoding)
            await client.expect(dialect, 400, "", body=good[:-6], content_encoding=encoding)
        await client.expect(dialect, 415, "rot13", content_encoding="rot13")


@each_dialect
async def test_a_body_that_never_ends_is_408(tmp_path: Path, dialect: Dialect) -> None:
    """Reading a request has a deadline."""
    answered = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await answered.wait()

    async with (
        open_client(tmp_path, body_timeout_s=0.05) as client,
        client.http.post(
            client.url + dialect.path, data=endless(), headers=client.headers(dialect)
        ) as response,
    ):
        assert response.status == 408
        check(dialect, 408, await response.json(), "did not arrive")
        answered.set()


@each_dialect
async def test_nul_bytes_pass_and_a_megabyte_of_text_overflows(
    tmp_path: Path, dialect: Dialect
) -> None:
    """An escaped NUL is text; a prompt beyond the window is the dialect's overflow error."""
    async with open_client(tmp_path) as client:
        assert (await client.send(dialect, "a\0b"))[0] == 200
        await client.expect(dialect, 400, "4000", body="x" * 1_000_000)
        failure = client.gateway.describe("s1").failure
    assert failure is None, "an earlier call was answered"


@each_dialect
async def test_an_unknown_route_is_404(tmp_path: Path, dialect: Dialect) -> None:
    """The error has the shape of the dialect that the request looks like."""
    async with open_client(tmp_path) as client:
        url = f"{client.url}{dialect.path.split('/models')[0]}/nonsense"
        async with client.http.post(url, json={}, headers=client.headers(dialect)) as response:
            assert response.status == 404
            check(dialect, 404, await response.json(), "nonsense")


async def test_a_websocket_upgrade_is_426(tmp_path: Path) -> None:
    """The refusal is the status on which Codex falls back to plain HTTP at once."""
    async with open_client(tmp_path) as client:
        headers = {
            "authorization": f"Bearer {client.key}",
            "connection": "Upgrade",
            "upgrade": "websocket",
            "sec-websocket-version": "13",
            "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
        }
        async with client.http.get(f"{client.url}/v1/responses", headers=headers) as response:
            assert response.status == 426


@pytest.mark.parametrize("answered", [0, 1])
async def test_a_window_that_only_the_engine_knows(tmp_path: Path, answered: int) -> None:
    """The engine's refusal is the session's failure only if no call was answered before."""
    error = {"error": {"message": "maximum context length is 64 tokens, but 70 were given"}}
    chat = next(dialect for dialect in DIALECTS if dialect.name == "chat")
    async with open_client(tmp_path) as client:
        for _ in range(answered):
            assert (await client.send(chat))[0] == 200
        client.engine.answer = lambda _: asyncio.sleep(0, JSONResponse(error, 400))
        await client.expect(chat, 400, "64", body="A longer one.")
        failure = client.gateway.describe("s1").failure
    assert (failure is None) == bool(answered)


# --------------------------------------------------------------------------- the engine's faults
@each_dialect
@pytest.mark.parametrize(
    ("answer", "codes", "message"),
    [
        (status(500), LOST, "engine"),
        (status(503), LOST, "engine"),
        (status(503, retry_after="60"), {503, 529}, "engine"),
        (status(429, retry_after="60"), {429, 503, 529}, "engine"),
        (status(429), {429, 502, 503, 529}, "engine"),
        (garbage, {500, 502, 503, 529}, "text/html, not an event stream: <html>busy</html>"),
    ],
    ids=["500", "503", "503 with Retry-After", "429 with Retry-After", "429", "garbage"],
)
async def test_a_failing_engine_is_an_error_of_the_dialect(
    tmp_path: Path, dialect: Dialect, answer: Any, codes: set[int], message: str
) -> None:
    """After bounded tries nothing is recorded, and the failure is the engine's.

    An early fault has a status in streams, too; a proxy's page is named by its content type.
    """
    async with open_client(tmp_path, answer) as client:
        code, headers = await client.expect(dialect, codes, "engine")
        if "retry_after" in repr(answer.__closure__):
            assert headers["retry-after"] == "60"
        assert 1 <= client.engine.requests <= 5
        streamed, text = await client.stream(dialect)
        assert streamed == code
        check(dialect, code, json.loads(text), message)
        failure = client.gateway.describe("s1").failure
        assert failure.boundary == "engine"
        assert client.gateway.read_calls("s1") == ()


@each_dialect
async def test_an_unreachable_engine_is_named(tmp_path: Path, dialect: Dialect) -> None:
    """The error has the engine's address; a later call succeeds when the engine is back."""
    async with open_client(tmp_path) as client:
        (replica,) = client.upstream.replicas
        right, replica.url = replica.url, "http://127.0.0.1:9"
        await client.expect(dialect, LOST, "127.0.0.1:9")
        replica.url = right
        assert (await client.send(dialect))[0] == 200


@each_dialect
async def test_a_stream_that_loses_its_engine_ends_as_truncated(
    tmp_path: Path, dialect: Dialect
) -> None:
    """The sampled tokens are trained, and the outcome of the call names the loss."""
    async with open_client(tmp_path, cut, failovers=0) as client:
        code, text = await client.stream(dialect)
        call = client.gateway.read_calls("s1")[0]
    assert code == 200
    assert dialect.end in text.replace(" ", "")
    assert call.outcome is CallOutcome.ENGINE_LOST
    ledger = PrefixMerging().build([call]).ledger
    assert (ledger.sampled, ledger.trained) == (10, 10)


async def test_tokens_received_with_an_error_are_recorded(tmp_path: Path) -> None:
    """An error event does not discard tokens from the same read."""
    tokens = ids("It is a file with many words in it, and it goes on.")[:10]

    async def fail(_: Request) -> Response:
        events = chunk(tokens[:6]) + chunk(tokens[6:], at=6)
        error = b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'
        return Response(events + error, media_type="text/event-stream")

    async with open_client(tmp_path, fail, failovers=0) as client:
        code, text = await client.stream(DIALECTS[0])
        (call,) = client.gateway.read_calls("s1")
    assert (code, DIALECTS[0].end in text) == (200, True)
    assert (call.outcome, call.sampled_ids.tolist()) == (CallOutcome.ENGINE_LOST, tokens)


@each_dialect
async def test_token_ids_outside_the_vocabulary_are_an_engine_error(
    tmp_path: Path, dialect: Dialect
) -> None:
    """Such an answer is refused, streamed or whole, and nothing is recorded."""
    wrong = [-1]

    async def answer(request: Request) -> Response:
        event = chunk([*ids("Done."), *wrong], "stop")
        if json.loads(await request.body())["stream"]:
            return Response(event, media_type="text/event-stream")
        return Response(event[6:].strip(), media_type="application/json")

    async with open_client(tmp_path, answer, tries=1) as client:
        for wrong[0] in (-1, 1 << 31, 1 << 70):
            code, _ = await client.expect(dialect, LOST, "token id")
            assert (await client.stream(dialect))[0] == code
        assert client.gateway.read_calls("s1") == ()


@each_dialect
@pytest.mark.parametrize("code", [400, 413, 422])
async def test_a_request_that_the_engine_refuses_is_a_400(
    tmp_path: Path, dialect: Dialect, code: int
) -> None:
    """A refusal is not the engine's fault; the session has failed if nothing else is answered."""
    async with open_client(tmp_path, status(code)) as client:
        _, headers = await client.expect(dialect, 400, "no")
        assert headers["x-should-retry"] == "false"
        assert (await client.stream(dialect))[0] == 400
        failure = client.gateway.describe("s1").failure
    assert failure is not None
    assert failure.cause is Cause.ENGINE


@each_dialect
async def test_an_exception_in_the_gateway_is_a_500(
    tmp_path: Path, dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client gets an error of its dialect, and the next call works."""
    async with open_client(tmp_path) as client:
        for owner, method in ((Rendering, "render"), (StreamParser, "feed"), (Writer, "append")):
            with monkeypatch.context() as patch, structlog.testing.capture_logs() as logged:
                patch.setattr(owner, method, lambda *_, **_options: 1 / 0)
                await client.expect(dialect, 500, "ZeroDivisionError")
                assert (await client.stream(dialect))[0] == 500
            assert [entry["event"] for entry in logged].count("gateway failed") == 2
        assert (await client.send(dialect))[0] == 200


@each_dialect
async def test_an_engine_slower_than_its_deadline_is_lost(tmp_path: Path, dialect: Dialect) -> None:
    """A stalled reply is aborted and retried; if the retries stall, too, it is an error."""
    given_up = asyncio.Event()

    async def stall(_: Request) -> Response:
        await given_up.wait()
        return await whole(_)

    async with open_client(tmp_path, stall, idle_s=0.05, tries=2) as client:
        await client.expect(dialect, LOST, "has sent nothing")
        given_up.set()
        assert client.engine.requests == 2


@each_dialect
async def test_a_megabyte_of_tool_arguments_comes_through(tmp_path: Path, dialect: Dialect) -> None:
    """A call with a megabyte of arguments is sent and recorded in full."""
    argument = "x" * 1_000_000
    text = f'<tool_call>\n{{"name": "read", "arguments": {{"path": "{argument}"}}}}\n</tool_call>'
    tokens = ids(text)

    async def answer(_: Request) -> Response:
        return Response(chunk(tokens, "stop")[6:].strip(), media_type="application/json")

    async with open_client(tmp_path, answer) as client:
        code, _, reply = await client.send(dialect)
        assert code == 200
        assert argument in json.dumps(reply)
        assert len(client.gateway.read_calls("s1")[0].sampled_ids) == len(tokens)


@each_dialect
async def test_prompts_and_keys_are_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dialect: Dialect
) -> None:
    """The log has no text of answered or refused calls, and no keys."""
    with structlog.testing.capture_logs() as logged, caplog.at_level("DEBUG"):
        async with open_client(tmp_path) as client:
            await client.send(dialect, "a-secret-word")
            await client.send(dialect, b'{"model": "a-secret-word", "messages": "a-secret-word"')
            await client.send(dialect, key="a-secret-word")
            key = client.key
    text = repr(logged) + caplog.text
    assert "refused" in text
    assert "a-secret-word" not in text
    assert key not in text
