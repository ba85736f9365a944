"""HTTP API of the embedded engine, on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from transformers import Qwen3ForCausalLM

from inference.tiny_model import EOS, prompt, truth
from support.polling import until
from tugline.inference.engine import Engine
from tugline.inference.server import create_app
from tugline.schema import read_jsonl
from tugline.web.serve import serve

WINDOW = 256
TOLERANCE = 1e-4
GENERATE = "/inference/v1/generate"
REFUSED = [row for _, row in read_jsonl(Path(__file__).with_name("refused.jsonl"))]
"""Fields of a request, and the status, the field and parts of the message of its error."""
TOO_LONG = {
    "fields": {"token_ids": [5] * WINDOW},
    "status": 400,
    "param": "input_tokens",
    "text": ["256 tokens", "value=256"],
}


@dataclass
class Served:
    """An engine, its model, and a client of its server."""

    engine: Engine
    model: Qwen3ForCausalLM
    http: aiohttp.ClientSession

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        async with self.http.post(path, json=body) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a stream, which must end with [DONE]."""
        async with self.http.post(path, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            lines = [line.decode().strip() async for line in response.content]
        data = [line.removeprefix("data: ") for line in lines if line]
        assert data[-1] == "[DONE]"
        return [json.loads(event) for event in data[:-1]]

    def runs(self, count: int) -> Callable[[], bool]:
        """A condition: this many requests are running."""
        return lambda: self.engine.stats().running == count


@pytest.fixture
async def served(model: Qwen3ForCausalLM) -> AsyncIterator[Served]:
    """A tiny model behind a server."""
    async with (
        Engine(model, eos_ids=[EOS], max_model_len=WINDOW, threads=1) as engine,
        serve(create_app(engine, model_name="tiny")) as url,
        aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=20)) as http,
    ):
        await engine.swap(model.state_dict(), 3)
        yield Served(engine, model, http)


def body(length: int = 20, **knobs: object) -> dict[str, Any]:
    """A request for five tokens."""
    sampling = {"max_tokens": 5, "ignore_eos": True, "logprobs": 0, "seed": 1} | knobs
    return {"model": "tiny", "token_ids": prompt(length).tolist(), "sampling_params": sampling}


async def test_generate_has_the_response_format_of_vllm(served: Served) -> None:
    """Ids, log probabilities, versions and the request id are in vLLM's fields."""
    status, answer = await served.post(GENERATE, body() | {"request_id": "abc"})
    choice = answer["choices"][0]
    tokens = choice["logprobs"]["content"]
    expected = truth(served.model, prompt(20), np.array(choice["token_ids"], np.int32))
    assert status == 200
    assert answer["request_id"] == "generate-tokens-abc"
    assert [token["token_id"] for token in tokens] == choice["token_ids"]
    assert np.abs(expected - [token["logprob"] for token in tokens]).max() < TOLERANCE
    assert choice["finish_reason"] == "length"
    assert choice["stop_reason"] is None
    assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": 5}]


async def test_a_stream_has_the_content_of_the_whole_response(served: Served) -> None:
    """Chunks add up to the unstreamed response; each has the versions of its tokens."""
    _, whole = await served.post(GENERATE, body(max_tokens=40))
    events = await served.events(GENERATE, body(max_tokens=40))
    choices = [event["choices"][0] for event in events]
    ids = [token for choice in choices for token in choice["token_ids"]]
    spans = [span for choice in choices for span in choice["weight_versions"]]
    assert ids == whole["choices"][0]["token_ids"]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "length"
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    assert spans[-1]["end"] == 40


async def test_a_stop_id_is_part_of_the_output(served: Served) -> None:
    """The stop reason is the id, which is the last one."""
    _, free = await served.post(GENERATE, body(temperature=0))
    stop = free["choices"][0]["token_ids"][2]
    _, answer = await served.post(GENERATE, body(temperature=0, stop_token_ids=[stop]))
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    whole = free["choices"][0]["token_ids"]
    assert choice["token_ids"] == whole[: whole.index(stop) + 1]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_aborts_the_request(served: Served, stream: bool) -> None:  # noqa: FBT001
    """The request ends within a second, streaming or not; others go on."""
    asked = body(length=10, max_tokens=240) | {"stream": stream}
    slow = [body(length=12 + extra, max_tokens=200) for extra in range(8)]
    others = [asyncio.create_task(served.post(GENERATE, request)) for request in slow]
    task = asyncio.create_task(served.post(GENERATE, asked))
    await until(served.runs(9))
    task.cancel()
    await until(served.runs(8), 1.0)
    assert served.engine.stats().finished["abort"] == 1
    assert all(status == 200 for status, _ in await asyncio.gather(*others))


async def test_requests_are_aborted_by_their_id(served: Served) -> None:
    """`/abort_requests` ends the named request with partial output and no other."""
    long = body(max_tokens=230)
    tasks = [
        asyncio.create_task(served.post(GENERATE, long | {"request_id": name})) for name in "ab"
    ]
    await until(served.runs(2))
    status, reply = await served.post("/abort_requests", {"request_ids": ["b"]})
    (_, a), (code, b) = await asyncio.gather(*tasks)
    assert (status, reply) == (200, {"status": "aborted", "aborted": 1})
    assert code == 200
    assert b["choices"][0]["finish_reason"] == "abort"
    assert len(b["choices"][0]["token_ids"]) < 230
    assert a["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("row", [TOO_LONG, *REFUSED], ids=lambda row: row["param"])
async def test_errors_name_field_and_value(
    served: Served,
    stream: bool,  # noqa: FBT001
    row: dict[str, Any],
) -> None:
    """Every error is JSON in vLLM's format, also for a streaming request."""
    code, answer = await served.post(GENERATE, body() | {"stream": stream} | row["fields"])
    error = answer["error"]
    assert (code, error["code"], error["param"]) == (row["status"], row["status"], row["param"])
    assert all(part in error["message"] for part in row["text"]), error["message"]
    assert set(error) == {"message", "type", "param", "code"}


async def test_broken_json_is_a_bad_request(served: Served) -> None:
    """A body that is not JSON, or has no token ids, is refused with 400."""
    for data in (b"{", b"", b"[]"):
        async with served.http.post(GENERATE, data=data) as response:
            assert response.status == 400


async def test_models_health_and_metrics(served: Served) -> None:
    """The pages have the window, the meaning of log probabilities, and the counters."""
    await served.post(GENERATE, body())
    async with served.http.get("/v1/models") as response:
        model = (await response.json())["data"][0]
    async with served.http.get("/health") as response:
        assert (response.status, await response.text()) == (200, "")
    async with served.http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    assert (model["id"], model["max_model_len"]) == ("tiny", WINDOW)
    assert model["logprobs_mode"] == "processed_logprobs"
    assert 'tugline:generation_tokens_total{model_name="tiny"} 5' in lines
    assert 'tugline:num_requests_running{model_name="tiny"} 0' in lines


async def test_prompt_logprobs_are_those_of_a_plain_forward_pass(served: Served) -> None:
    """`prompt_logprobs: 0` has vLLM's format, at the requested temperature."""
    ids = prompt(200)
    for temperature in (1.0, 0.5):
        params = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": temperature}
        request = {"token_ids": ids.tolist(), "sampling_params": params}
        status, answer = await served.post(GENERATE, request)
        assert status == 200, answer
        first, *scored = answer["prompt_logprobs"]
        assert first is None
        pairs = zip(ids[1:], scored, strict=True)
        values = [row[str(token)]["logprob"] for token, row in pairs]
        right = truth(served.model, ids[:1], ids[1:], temperature)
        assert float(np.abs(np.array(values) - right).max()) < TOLERANCE


@pytest.mark.parametrize(
    ("value", "param"), [(1, "sampling_params.prompt_logprobs"), (0, "prompt_logprobs")]
)
async def test_prompt_logprobs_must_be_0_and_unstreamed(
    served: Served, value: int, param: str
) -> None:
    """Other requests for log probabilities of a prompt are refused by name."""
    request = body(prompt_logprobs=value) | {"stream": True}
    status, answer = await served.post(GENERATE, request)
    assert (status, answer["error"]["param"]) == (400, param)
