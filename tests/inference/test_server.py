"""The embedded engine on a real socket, asked as a gateway and as an OpenAI client asks."""

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

from inference.tiny_model import EOS, prompt, truth, until
from tugline.inference.engine import Engine
from tugline.inference.server import create_app
from tugline.web.serve import serve

WINDOW = 256
TOLERANCE = 1e-4
GENERATE = "/inference/v1/generate"
LINES = Path(__file__).with_name("refused.jsonl").read_text().splitlines()
REFUSED = [json.loads(line) for line in LINES]
"""Fields of a request, the status and the field of its refusal, and parts of the text."""
TOO_LONG = {
    "fields": {"token_ids": [5] * WINDOW},
    "status": 400,
    "param": "input_tokens",
    "words": ["256 tokens", "value=256"],
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
        """All events of a stream; checks that it ends as it should."""
        async with self.http.post(path, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            lines = [line.decode().strip() async for line in response.content]
        data = [line.removeprefix("data: ") for line in lines if line]
        assert data[-1] == "[DONE]"
        return [json.loads(one) for one in data[:-1]]

    def runs(self, count: int) -> Callable[[], bool]:
        """Whether so many requests run now."""
        return lambda: self.engine.stats().running == count


@pytest.fixture
async def served(model: Qwen3ForCausalLM) -> AsyncIterator[Served]:
    """A tiny model behind a server; the byte tokenizer is a part of its vocabulary."""
    async with (
        Engine(model, eos_ids=[EOS], max_model_len=WINDOW, threads=1) as engine,
        serve(create_app(engine, model_name="tiny")) as url,
        aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=20)) as http,
    ):
        await engine.swap(model.state_dict(), 3)
        yield Served(engine, model, http)


def body(length: int = 20, **knobs: object) -> dict[str, Any]:
    """A request for five tokens whatever they are."""
    sampling = {"max_tokens": 5, "ignore_eos": True, "logprobs": 0, "seed": 1} | knobs
    return {"model": "tiny", "token_ids": prompt(length).tolist(), "sampling_params": sampling}


async def test_generate_answers_in_the_shape_of_vllm(served: Served) -> None:
    """Ids, log probabilities, versions and the caller's id are where vLLM puts them."""
    status, answer = await served.post(GENERATE, body() | {"request_id": "abc"})
    choice = answer["choices"][0]
    said = choice["logprobs"]["content"]
    expected = truth(served.model, prompt(20), np.array(choice["token_ids"], np.int32))
    assert status == 200
    assert answer["request_id"] == "generate-tokens-abc"
    assert [one["token_id"] for one in said] == choice["token_ids"]
    assert np.abs(expected - [one["logprob"] for one in said]).max() < TOLERANCE
    assert choice["finish_reason"] == "length"
    assert choice["stop_reason"] is None
    assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": 5}]


async def test_the_stream_says_what_the_whole_answer_says(served: Served) -> None:
    """Chunks add up to the unstreamed answer, and each carries its own tokens' versions."""
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


async def test_a_stop_id_is_part_of_the_answer(served: Served) -> None:
    """Finish `stop` names the id, which is the last one."""
    _, free = await served.post(GENERATE, body(temperature=0))
    stop = free["choices"][0]["token_ids"][2]
    _, answer = await served.post(GENERATE, body(temperature=0, stop_token_ids=[stop]))
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    whole = free["choices"][0]["token_ids"]
    assert choice["token_ids"] == whole[: whole.index(stop) + 1]


@pytest.mark.parametrize("stream", [True, False])
async def test_hanging_up_aborts_the_request(served: Served, stream: bool) -> None:  # noqa: FBT001
    """A client that leaves frees its row within a second, streaming or not."""
    asked = body(length=10, max_tokens=240) | {"stream": stream}
    slow = [body(length=12 + one, max_tokens=200) for one in range(8)]
    crowd = [asyncio.create_task(served.post(GENERATE, one)) for one in slow]
    task = asyncio.create_task(served.post(GENERATE, asked))
    await until(served.runs(9))
    task.cancel()
    await until(served.runs(8), 1.0)
    assert served.engine.stats().finished["abort"] == 1
    assert all(status == 200 for status, _ in await asyncio.gather(*crowd))


async def test_requests_are_aborted_by_their_id(served: Served) -> None:
    """`/abort_requests` ends the named request with its partial answer and leaves others alone."""
    long = body(max_tokens=230)
    tasks = [
        asyncio.create_task(served.post(GENERATE, long | {"request_id": name})) for name in "ab"
    ]
    await until(served.runs(2))
    status, said = await served.post("/abort_requests", {"request_ids": ["b"]})
    (_, a), (code, b) = await asyncio.gather(*tasks)
    assert (status, said) == (200, {"status": "aborted", "aborted": 1})
    assert code == 200
    assert b["choices"][0]["finish_reason"] == "abort"
    assert len(b["choices"][0]["token_ids"]) < 230
    assert a["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("row", [TOO_LONG, *REFUSED], ids=lambda row: row["param"])
async def test_errors_name_what_is_wrong(
    served: Served,
    stream: bool,  # noqa: FBT001
    row: dict[str, Any],
) -> None:
    """Every refusal is plain JSON in vLLM's shape, before any event of a stream."""
    code, answer = await served.post(GENERATE, body() | {"stream": stream} | row["fields"])
    error = answer["error"]
    assert (code, error["code"], error["param"]) == (row["status"], row["status"], row["param"])
    assert all(word in error["message"] for word in row["words"]), error["message"]
    assert set(error) == {"message", "type", "param", "code"}


async def test_broken_json_is_a_bad_request(served: Served) -> None:
    """A body that is no JSON, or has no token ids, is refused with 400."""
    for data in (b"{", b"", b"[]"):
        async with served.http.post(GENERATE, data=data) as response:
            assert response.status == 400


async def test_models_health_and_metrics(served: Served) -> None:
    """The window, the meaning of log probabilities, and the counters are published."""
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


async def test_a_prompt_is_scored_as_a_plain_forward_pass_scores_it(served: Served) -> None:
    """`prompt_logprobs: 0` is in vLLM's shape, at the requested temperature."""
    ids = prompt(200)
    for temperature in (1.0, 0.5):
        params = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": temperature}
        request = {"token_ids": ids.tolist(), "sampling_params": params}
        status, answer = await served.post(GENERATE, request)
        assert status == 200, answer
        first, *scored = answer["prompt_logprobs"]
        assert first is None
        values = [one[str(token)]["logprob"] for token, one in zip(ids[1:], scored, strict=True)]
        right = truth(served.model, ids[:1], ids[1:], temperature)
        assert float(np.abs(np.array(values) - right).max()) < TOLERANCE


@pytest.mark.parametrize(
    ("value", "param"), [(1, "sampling_params.prompt_logprobs"), (0, "prompt_logprobs")]
)
async def test_a_prompt_is_scored_by_0_and_without_streaming_only(
    served: Served, value: int, param: str
) -> None:
    """Other requests for log probabilities of a prompt are refused by name."""
    request = body(prompt_logprobs=value) | {"stream": True}
    status, answer = await served.post(GENERATE, request)
    assert (status, answer["error"]["param"]) == (400, param)
