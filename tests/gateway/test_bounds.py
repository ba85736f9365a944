"""Limits of one session: sizes, counts and amounts in flight."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from starlette.requests import Request
from starlette.responses import Response

from support.engine import reply_with
from support.failing_engine import Dialect, ask_messages, check, each_dialect, open_client, whole
from support.gateway import open_session, open_session_in_mode
from support.polling import until
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.gateway.policy import CallSettings, InFlight
from tugline.types import Branch, Limits, Mode, SpentLimit
from tugline.types.task import MIN_TEMPERATURE

WINDOW = 4000
"""Tokens, in `support.failing_engine`; a body may have a megabyte and 16 bytes for each of them."""
MAX_BODY = (1 << 20) + 16 * WINDOW


@each_dialect
async def test_a_body_larger_than_the_window_is_an_overflow(
    tmp_path: Path, dialect: Dialect
) -> None:
    """A body, plain or compressed, is neither parsed nor rendered; the session continues."""
    plain = dialect.ask("x" * MAX_BODY)
    async with open_client(tmp_path) as client:
        packers = {"identity": bytes, "gzip": gzip.compress, "zstd": zstandard.compress}
        for encoding, pack in packers.items():
            body = pack(plain)
            await client.expect(
                dialect, 400, f"limit is {MAX_BODY}", body=body, content_encoding=encoding
            )
        assert client.engine.requests == 0
        assert (await client.send(dialect))[0] == 200


@each_dialect
async def test_an_oversized_request_gets_413_and_no_reset(tmp_path: Path, dialect: Dialect) -> None:
    """A client that sends the whole body before it reads the reply gets the reply, too."""
    data = b'{"a": "' + b"x" * (3 << 20) + b'"}'
    async with open_client(tmp_path, max_body=100_000) as client:
        port = int(client.url.split(":")[2].split("/")[0])
        lines = [f"POST {client.url.split(str(port))[1]}{dialect.path} HTTP/1.1", "host: x"]
        lines += [f"{name}: {value}" for name, value in client.headers(dialect).items()]

        def talk(*more: str) -> bytes:
            with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
                sock.sendall("\r\n".join([*lines, *more, "", ""]).encode())
                if "chunked" in more[-1]:
                    sock.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))
                else:
                    sock.sendall(data)
                return sock.recv(1 << 16)

        for header in (f"content-length: {len(data)}", "transfer-encoding: chunked"):
            reply = await asyncio.to_thread(talk, header)
            assert reply.startswith(b"HTTP/1.1 413 ")
            check(dialect, 413, json.loads(reply.partition(b"\r\n\r\n")[2]), "100000")


NESTED = "[" * 5000 + "]" * 5000


@each_dialect
@pytest.mark.parametrize("kind", ["messages", "arguments", "schema"])
async def test_too_many_messages_and_too_deep_json_are_400(
    tmp_path: Path, dialect: Dialect, kind: str
) -> None:
    """More than 10,000 messages, and JSON too deep to be parsed recursively, are refused."""
    body = dialect.body("Mend it.")
    (first,) = (
        ask_messages("Mend it.")["messages"]
        if dialect.name == "responses"
        else body[dialect.history]
    )
    function = {"name": "f", "arguments": NESTED}
    calls: dict[str, dict[str, Any]] = {
        "anthropic": {"content": [{"type": "tool_use", "id": "1", "name": "f", "input": "@"}]},
        "google": {"role": "model", "parts": [{"functionCall": {"name": "f", "args": "@"}}]},
        "chat": {"tool_calls": [{"id": "1", "type": "function", "function": function}]},
        "responses": {"type": "function_call", "call_id": "1", **function},
    }
    if kind == "messages":
        body[dialect.history] = [first] * 10_001
    elif kind == "schema":
        body["tools"] = "@"
    else:
        role = {} if dialect.name == "responses" else {"role": "assistant"}
        body[dialect.history] = [first, {**role, **calls[dialect.name]}, first]
    async with open_client(tmp_path) as client:
        data = json.dumps(body).replace('"@"', NESTED).encode()
        await client.expect(dialect, 400, "limit is 10000" if kind == "messages" else "", body=data)


async def test_large_requests_are_rendered_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop stays free for other sessions; small changes of a history are not rendered.

    It is one scenario, since each request extends the conversation before.
    """
    rendered = []
    render = Rendering.render

    def traced(self: Rendering, messages: Any, tools: Any) -> Any:
        rendered.append((len(messages[0].content), threading.current_thread()))
        return render(self, messages, tools)

    monkeypatch.setattr(Rendering, "render", traced)
    long = [{"role": "user", "content": "word " * 400}]
    more = [*long, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "More."}]
    other = [*more[:-1], {"role": "user", "content": "And?"}]
    tools = [{"name": "read", "input_schema": {"type": "object"}}]
    async with open_session(
        tmp_path, reply_with("Hi."), tuning=CallSettings(large_body=1000)
    ) as session:
        assert (await session.ask())["status"] == 200
        assert (await session.ask(long))["status"] == 200
        assert (await session.ask(more))["status"] == 200
        assert (await session.ask(other, tools=tools))["status"] == 200
        branches = [call.branch for call in session.calls[2:]]
        assert branches == [None, Branch.TOOLS_CHANGED]
    (short, first), (size, second), (again, third) = rendered
    assert short < 100 < size == again
    assert first is threading.main_thread()
    assert second is not threading.main_thread()
    assert third is not threading.main_thread()


async def test_encoding_of_text_stops_beyond_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt beyond the window is refused once a little more text than fits is encoded."""
    encoded = []
    encode = Tokenizer.encode

    def traced(self: Tokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, **options)

    async with open_session(tmp_path, reply_with("Hi.")) as session:
        monkeypatch.setattr(Tokenizer, "encode", traced)
        window = session.gateway._engine.card.max_model_len
        reply = await session.ask([{"role": "user", "content": "7 " * 10 * window}])
        assert reply["status"] == 400
        assert "too long" in reply["error"]["message"]
        assert 0 < sum(encoded) < 4 * window + (1 << 15)
        assert session.gateway.describe("s1").failure is not None


async def test_choices_of_a_request_are_sampled_a_few_at_a_time(tmp_path: Path) -> None:
    """All requested choices are sampled, a few at a time, so that other calls are not starved."""
    tuning = CallSettings(several_sampled=2)
    async with open_session(
        tmp_path, reply_with("word " * 20, delay_s=0.002), tuning=tuning
    ) as session:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, session.running)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        async with session.post_openai(n=7) as response:
            assert len((await response.json())["choices"]) == 7
        watching.cancel()
        assert len(session.calls) == 7
    assert most == 2


# --------------------------------------------------------------------------- values
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 10**30}}}
VALUES: list[tuple[dict[str, Any], int]] = [
    ({"max_tokens": 2**31 - 1}, 200), ({"max_tokens": 2**31}, 400), ({"max_tokens": 10**9}, 200),
    ({"seed": -1}, 200), ({"seed": 2**63 - 1}, 200), ({"seed": -(2**63)}, 200),
    ({"seed": 2**63}, 400), ({"seed": 2**64}, 400), ({"seed": 10**40}, 400),
    ({"temperature": 1e-300}, 200), ({"temperature": 11}, 400), ({"top_p": 1e-300}, 200),
    ({"top_k": 2**31 - 1}, 200), ({"top_k": 2**31}, 400), ({"stop": ["x" * 1025]}, 400),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]}, 400),
]  # fmt: skip


@pytest.mark.parametrize("mode", [Mode.EXACT, Mode.OBSERVED])
async def test_a_value_out_of_bounds_is_refused_by_name(tmp_path: Path, mode: Mode) -> None:
    """Accepted values reach the engine within its own bounds, and their record is readable."""
    async with open_session_in_mode(tmp_path, reply_with("Hi."), mode) as session:
        answered = 0
        for fields, status in VALUES:
            async with session.post_openai(**fields) as response:
                reply = await response.json()
            assert response.status == status, (fields, reply)
            answered += status == 200
            if status == 400:
                (name,) = fields
                assert (reply["error"]["param"] or "").startswith(name), reply
            assert len(session.calls) == answered
        requested = [call.requested for call in session.calls]
    assert requested[0].max_tokens == 2**31 - 1
    assert requested[2].seed == 2**53 - 1
    assert session.calls[5].sampling.temperature == MIN_TEMPERATURE


# --------------------------------------------------------------------------- in flight
@each_dialect
@pytest.mark.parametrize("who", ["session", "gateway"])
async def test_bytes_in_flight_are_bounded(tmp_path: Path, dialect: Dialect, who: str) -> None:
    """The refusal names the bound and has a Retry-After; released bytes can be used again."""
    released = asyncio.Event()

    async def wait(request: Request) -> Response:
        await released.wait()
        return await whole(request)

    async with open_client(tmp_path, wait, **{f"{who}_bytes": 10_000}) as client:
        large = "a" * 3000
        engine = client.gateway._engine
        first = asyncio.create_task(client.send(dialect, large))
        await until(lambda: client.engine.requests)
        codes = {"anthropic": 529, "google": 503}
        code = codes.get(dialect.name, 429 if who == "session" else 503)
        message = f"the limit of the {who} is 10000 request bytes in flight"
        _, headers = await client.expect(dialect, code, message, body=large)
        assert headers["retry-after"] == "1"
        released.set()
        assert (await first)[0] == 200
        await until(lambda: engine.bytes_in_flight.used == 0)
        assert (await client.send(dialect, large))[0] == 200


async def test_bytes_of_a_slow_sender_count_until_it_leaves(tmp_path: Path) -> None:
    """Bytes count as they arrive, and are released when the sender disconnects."""
    async with open_session(tmp_path, reply_with("Hi.")) as session:

        async def slowly() -> AsyncIterator[bytes]:
            yield b" " * 10_000
            await asyncio.Event().wait()

        sending = asyncio.create_task(
            session.http.post(f"{session.url}/v1/messages", data=slowly()).__aenter__()
        )
        used = session.live.bytes_in_flight
        await until(lambda: used.used > 10_000)
        sending.cancel()
        await until(lambda: used.used == 0)


async def test_concurrent_answers_of_a_session_are_limited(tmp_path: Path) -> None:
    """A request for more than the limit is refused until running ones have ended."""
    tuning = CallSettings(session_answers=3)
    async with open_session(
        tmp_path, reply_with("word " * 50, delay_s=0.005), tuning=tuning
    ) as session:

        async def ask(n: int) -> tuple[int, Any]:
            async with session.post_openai(n=n) as response:
                return response.status, await response.json()

        first = asyncio.create_task(ask(2))
        await until(lambda: session.live.running)
        status, reply = await ask(2)
        assert status == 429
        assert reply["error"]["code"] == "rate_limit_exceeded"
        status, reply = await ask(4)
        assert (status, reply["error"]["param"]) == (400, "n")
        assert (await first)[0] == 200
        assert (await ask(3))[0] == 200
        assert len(session.calls) == 5


def test_an_amount_that_the_total_refuses_is_not_counted() -> None:
    """Neither session nor gateway counts an amount that exceeds the limit of one of them."""
    total = InFlight("bytes", 10)
    first, second = InFlight("bytes", 8, total), InFlight("bytes", 8, total)
    with first.hold() as take:
        take(8)
        with (
            pytest.raises(Exception, match="limit of the gateway is 10 bytes"),
            second.hold() as claim,
        ):
            claim(3)
        assert (first.used, second.used, total.used) == (8, 0, 8)
    assert (first.used, total.used) == (0, 0)


# --------------------------------------------------------------------------- session totals
async def test_concurrent_calls_share_the_token_budget(tmp_path: Path) -> None:
    """Forty calls share ten tokens: each running call reserves what it may sample."""
    limits = Limits(max_sampled_tokens=10)
    async with open_session(
        tmp_path, reply_with("one two three four five six"), limits=limits
    ) as session:
        asks = [
            session.ask([{"role": "user", "content": f"No. {n}"}], max_tokens=4) for n in range(40)
        ]
        replies = await asyncio.gather(*asks)
        sampled = sum(len(call.sampled_ids) for call in session.calls)
    assert sampled == 10
    assert sorted({reply["status"] for reply in replies}) == [200, 400]
    refused = next(reply for reply in replies if reply["status"] == 400)
    assert "10 sampled tokens" in refused["error"]["message"]


async def test_a_full_recording_ends_its_session(tmp_path: Path) -> None:
    """Messages are recorded up to the limit, which the description of the session names."""
    tuning = CallSettings(max_recording=20_000)
    limits = Limits(max_turns=100)
    async with open_session(tmp_path, reply_with("Hi."), tuning=tuning, limits=limits) as session:
        for number in range(100):
            padding = random.Random(number).randbytes(500).hex()
            reply = await session.ask([{"role": "user", "content": padding}])
            if reply["status"] != 200:
                break
        assert reply["status"] == 400
        assert "recording" in reply["error"]["message"]
        size = session.live.transcript.writer.size
        for _ in range(20):
            await session.ask()
        assert session.live.transcript.writer.size == size, "refusals are not recorded any more"
    assert session.gateway.describe("s1").spent is SpentLimit.MAX_RECORDING
