"""A refused request gets its status, also if it asked for a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from support.engine import ids, reply_with
from support.failing_engine import (
    DIALECTS,
    Dialect,
    DialectClient,
    check,
    chunk,
    each_dialect,
    open_client,
    status,
    whole,
)
from support.gateway import open_session
from support.polling import until
from tugline.errors import EngineError
from tugline.gateway.policy import CallSettings
from tugline.testing import Reply

CHAT = next(dialect for dialect in DIALECTS if dialect.name == "chat")


async def stream(client: DialectClient, dialect: Dialect) -> tuple[int, Any, str]:
    """Status, headers and text of a streamed reply."""
    body, path = dialect.body("Mend it."), dialect.path
    if dialect.name == "google":
        path = path.replace("generateContent", "streamGenerateContent") + "?alt=sse"
    else:
        body["stream"] = True
    async with client.http.post(
        client.url + path, json=body, headers=client.headers(dialect)
    ) as response:
        return response.status, response.headers, await response.text()


@each_dialect
@pytest.mark.parametrize(
    ("code", "expected"), [(429, {429, 503, 529}), (503, {503, 529})], ids=["429", "503"]
)
async def test_slow_refusals_of_every_attempt_have_their_status(
    tmp_path: Path, dialect: Dialect, code: int, expected: set[int]
) -> None:
    """A stream is not opened while the engine has refused each attempt, however long that takes."""
    refuse = status(code, retry_after="2")

    async def slowly(request: Request) -> Response:
        await asyncio.sleep(0.15)
        response: Response = await refuse(request)
        return response

    # in the middle between the times of a second attempt and a third, so that a pause of the
    # machine by a second changes nothing
    quick = {"first_token_within_s": 0.05, "longest_retry_after_s": 3.2}
    async with open_client(tmp_path, slowly, **quick) as client:
        got, headers, text = await stream(client, dialect)
        assert got in expected
        check(dialect, got, json.loads(text), "engine")
        assert headers["retry-after"] == "2"
        assert client.engine.requests == 2


async def test_retries_end_before_the_stream_is_opened(tmp_path: Path) -> None:
    """The time of all retries is bounded, not only the delay of one; the delay is never shortened.

    The delay may be a date.
    """
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    for delay, tries in (("1", 3), ("60", 1), (date, 1)):
        refuse = status(503, retry_after=delay)
        async with open_client(tmp_path, refuse, tries=10, longest_retry_after_s=2.5) as client:
            got, headers, _ = await stream(client, CHAT)
            assert (got, client.engine.requests) == (503, tries)
            assert int(headers["retry-after"]) >= {"1": 1, "60": 60}.get(delay, 85)


@each_dialect
async def test_an_error_in_the_engines_stream_before_a_token_has_a_status(
    tmp_path: Path, dialect: Dialect
) -> None:
    """An error as the first event of an engine's stream becomes the status of the reply."""

    async def refuse(_: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield b": \n\n"
            await asyncio.sleep(0.05)
            yield b'data: {"error": {"message": "busy", "code": 503}}\n\n'

        return StreamingResponse(events(), media_type="text/event-stream")

    async with open_client(tmp_path, refuse, tries=2) as client:
        got, _, text = await stream(client, dialect)
        assert got in {502, 503, 529}
        check(dialect, got, json.loads(text), "busy")


async def test_headers_are_sent_soon_after_an_acceptance_and_late_without_one(
    tmp_path: Path,
) -> None:
    """A stream opens soon after the engine's headers, or after a time limit without them."""
    released = asyncio.Event()

    async def accept(_: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            await released.wait()
            yield chunk(ids("Done."), "stop")

        return StreamingResponse(events(), media_type="text/event-stream")

    async def hold(request: Request) -> Response:
        await released.wait()
        return await whole(request)

    quick = {"first_token_within_s": 0.05}
    for answer, within_s in ((accept, 45.0), (hold, 0.1)):
        released.clear()
        async with (
            open_client(tmp_path, answer, headers_within_s=within_s, **quick) as client,
            asyncio.timeout(5),
            client.http.post(
                client.url + CHAT.path,
                json=CHAT.body("Mend it.") | {"stream": True},
                headers=client.headers(CHAT),
            ) as response,
        ):
            assert response.status == 200
            assert not released.is_set()
            released.set()
            assert "Done." in await response.text()
    assert CallSettings().headers_within_s + CallSettings().first_token_within_s < 60


async def test_a_refusal_of_one_of_several_choices_has_its_status(tmp_path: Path) -> None:
    """A stream is not opened while a choice still waits for others of the request to end."""

    def refuse_third(prompt: Any, request: str) -> Reply:
        if "-2" in request:
            return Reply([0], status=503)
        return reply_with("word " * 20, delay_s=0.002)(prompt, request)

    tuning = CallSettings(several_sampled=1, tries=1, first_token_within_s=0.0)
    async with (
        open_session(tmp_path, refuse_third, tuning=tuning) as session,
        session.post_openai(n=3, stream=True) as response,
    ):
        assert response.status == 503


async def test_a_call_that_resumes_another_may_be_refused(tmp_path: Path) -> None:
    """The replayed text does not open the stream; the earlier answer can still be resumed."""
    text = "one two three four five six seven eight nine ten " * 2
    faults: list[int] = []

    def play(prompt: Any, request: str) -> Reply:
        if faults:
            return Reply([0], status=faults.pop())
        return reply_with(text, delay_s=0.005)(prompt, request)

    tuning = CallSettings(backoff_s=0.001, grace_s=0.01, tries=1)
    async with open_session(tmp_path, play, tuning=tuning) as session:
        await session.hang_up(characters=10)
        await until(lambda: session.calls)
        faults.append(503)
        async with session.post(session.body(stream=True)) as response:
            assert response.status == 529
        assert "ten" in await session.read()
        first, second = session.calls
    assert second.resumed == len(first.sampled_ids) > 0


# --------------------------------------------------------------------------- classification
@pytest.mark.parametrize("code", [404, 408, 409, 425, 429, 500, 501, 502, 503, 504, 529, 599])
@each_dialect
async def test_what_is_retried_here_may_be_retried_by_the_client(
    tmp_path: Path, dialect: Dialect, code: int
) -> None:
    """A status that does not blame the request becomes a retryable one in every dialect."""
    async with open_client(tmp_path, status(code), tries=2) as client:
        got, headers, _ = await client.send(dialect)
        assert client.engine.requests == 2
        assert "x-should-retry" not in headers
        assert got in {429, 502, 503, 529}
        failure = client.gateway.describe("s1").failure
    assert failure.cause == "engine_lost"


@pytest.mark.parametrize("code", [400, 401, 402, 403, 405, 413, 422])
async def test_what_is_not_retried_here_may_not_be_retried_by_the_client(
    tmp_path: Path, code: int
) -> None:
    """A status with which the engine would refuse the request again forbids a retry."""

    async def refuse(_: Request) -> Response:
        return JSONResponse({"error": {"message": "no"}}, code)

    async with open_client(tmp_path, refuse, tries=2) as client:
        _, headers, _ = await client.send(CHAT)
        assert client.engine.requests == 1
        assert headers["x-should-retry"] == "false"
        failure = client.gateway.describe("s1").failure
    assert failure.cause == "engine"
    assert not EngineError("", status=code).temporary
