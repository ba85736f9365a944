"""The scripted engine behind the inference server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from support.commands import run_python
from support.polling import until
from tugline.inference.server import create_app
from tugline.testing import Reply, ScriptedEngine
from tugline.types import Ids
from tugline.web.serve import serve

GENERATE = "/inference/v1/generate"
BODY = {"token_ids": [7, 8, 9], "sampling_params": {"logprobs": 0}, "request_id": "r1"}


@asynccontextmanager
async def served(
    reply: Callable[[Ids, str], Reply],
) -> AsyncIterator[tuple[ScriptedEngine, aiohttp.ClientSession]]:
    """A scripted engine and a client of its server."""
    engine = ScriptedEngine(reply, vocab_size=100, max_model_len=32, eos_ids=[2], version=9)
    async with (
        serve(create_app(engine, model_name="scripted")) as url,
        aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=10)) as http,
    ):
        yield engine, http


async def ask(http: aiohttp.ClientSession, **more: Any) -> dict[str, Any]:
    """The choice of a whole reply."""
    async with http.post(GENERATE, json=BODY | more) as response:
        choice: dict[str, Any] = (await response.json())["choices"][0]
        return choice


async def test_a_script_gets_the_request_and_makes_the_reply() -> None:
    """Prompt ids and request id go in; ids, log probabilities and version come out."""

    def reply(ids: Ids, name: str) -> Reply:
        seen.append((ids.tolist(), name))
        return Reply([5, 6, 2], logprobs=[-1.0, -2.0, -0.5])

    seen: list[tuple[list[int], str]] = []
    async with served(reply) as (engine, http):
        choice = await ask(http)
    assert seen == [([7, 8, 9], "r1")]
    assert choice["token_ids"] == [5, 6, 2]
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == [-1.0, -2.0, -0.5]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 2)
    assert choice["weight_versions"] == [{"version": "9", "start": 0, "end": 3}]
    assert [call.id for call in engine.calls] == ["r1"]


async def test_replies_are_cut_at_the_limit() -> None:
    """A reply ends at `max_tokens` and at the end of the context window."""
    async with served(lambda *_: Reply([5] * 50)) as (_, http):
        whole, cut = await ask(http), await ask(http, sampling_params={"max_tokens": 4})
    assert (len(whole["token_ids"]), whole["finish_reason"]) == (29, "length")
    assert len(cut["token_ids"]) == 4


async def test_streams_have_chunks_of_the_given_size() -> None:
    """A chunk may hold several ids, as real engines send them under load."""
    async with (
        served(lambda *_: Reply([5, 6, 7, 8, 2], tokens_per_chunk=2)) as (_, http),
        http.post(GENERATE, json=BODY | {"stream": True}) as response,
    ):
        lines = [line[6:] async for line in response.content if line.startswith(b"data: {")]
    assert [json.loads(line)["choices"][0]["token_ids"] for line in lines] == [[5, 6], [7, 8], [2]]


async def test_a_scripted_status_is_an_error() -> None:
    """The error has its `retry-after`, streamed or not."""
    async with served(lambda *_: Reply([], status=503, retry_after_s=2)) as (_, http):
        for stream in (False, True):
            async with http.post(GENERATE, json=BODY | {"stream": stream}) as response:
                assert response.status == 503
                assert response.headers["retry-after"] == "2"
                assert (await response.json())["error"]["code"] == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_a_scripted_cut_drops_the_connection(stream: bool) -> None:  # noqa: FBT001
    """The client gets what came before the cut, then a broken connection, never a clean end."""
    got = b""
    async with served(lambda *_: Reply([5] * 9 + [2], cut_after=3)) as (engine, http):
        with pytest.raises(aiohttp.ClientPayloadError):  # noqa: PT012 - parts arrive before it
            async with http.post(GENERATE, json=BODY | {"stream": stream}) as response:
                async for part in response.content.iter_any():
                    got += part
        assert engine.stats().running == 0
    assert got.count(b'"token_ids":[5]') == (3 if stream else 0)
    assert b"[DONE]" not in got


async def test_requests_are_aborted_by_client_or_route() -> None:
    """A disconnect counts as an abort; the route without ids ends all with what they have."""
    async with served(lambda *_: Reply([5] * 20, delay_s=0.02)) as (engine, http):
        leaving = asyncio.create_task(ask(http))
        await until(lambda: engine.stats().running == 1)
        leaving.cancel()
        await until(lambda: engine.stats().running == 0)
        assert engine.stats().finished["abort"] == 1
        staying = asyncio.create_task(ask(http))
        await until(lambda: engine.stats().running == 1)
        async with http.post("/abort_requests") as response:
            assert (await response.json())["aborted"] == 1
        assert (await staying)["finish_reason"] == "abort"


def test_no_heavy_library_is_imported() -> None:
    """Server, scripted engine and templates import no torch, transformers or OpenAI SDK.

    The SDK can still be imported whole afterwards.
    """
    code = (
        "import sys, tugline.inference.server, tugline.testing\n"
        "assert not {'torch', 'transformers', 'openai'} & set(sys.modules)\n"
        "import openai; openai.AsyncOpenAI(api_key='none')\n"
    )
    assert run_python(code).returncode == 0
