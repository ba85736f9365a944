"""OpenAI Chat over token ids, with answers that a script gives."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny import tokenizer
from tugline.inference.chat import Chat, Deltas
from tugline.inference.scripted import Reply, ScriptedEngine
from tugline.inference.server import create_app
from tugline.inference.wire import ChatBody, ids_array, parse
from tugline.web.serve import serve

TOKENIZER = tokenizer()
TOOL = {
    "type": "function",
    "function": {"name": "read", "description": "d", "parameters": {"type": "object"}},
}
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "ä.txt"}}\n</tool_call>'
BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "return_token_ids": True}


@asynccontextmanager
async def served(text: str) -> AsyncIterator[tuple[ScriptedEngine, aiohttp.ClientSession]]:
    """A server whose model says `text`."""
    ids = TOKENIZER.encode(text)
    engine = ScriptedEngine(
        lambda *_: Reply(ids), vocab_size=TOKENIZER.size, eos_ids=[TOKENIZER.eos_token_id or 0]
    )
    app = create_app(engine, model_name="tiny", tokenizer=TOKENIZER)
    async with serve(app) as url, aiohttp.ClientSession(url) as http:
        yield engine, http


async def whole(http: aiohttp.ClientSession, body: dict[str, Any]) -> dict[str, Any]:
    """The unstreamed answer."""
    async with http.post("/v1/chat/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def streamed(http: aiohttp.ClientSession, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a streamed answer."""
    async with http.post("/v1/chat/completions", json=body | {"stream": True}) as response:
        return [json.loads(line[6:]) async for line in response.content if line[:7] == b"data: {"]


def assemble(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from deltas."""
    message: dict[str, Any] = {}
    for delta in deltas:
        for channel in ("content", "reasoning"):
            if delta.get(channel):
                message[channel] = message.get(channel, "") + delta[channel]
        for call in delta.get("tool_calls", []):
            message.setdefault("tool_calls", []).append(call["function"])
    return message


def essence(message: dict[str, Any]) -> dict[str, Any]:
    """A message without role and call ids."""
    rest = {key: message[key] for key in ("content", "reasoning") if message.get(key)}
    if calls := message.get("tool_calls"):
        rest["tool_calls"] = [call["function"] for call in calls]
    return rest


async def test_tool_calls_and_reasoning_are_parsed_and_ids_kept() -> None:
    """Text, reasoning and calls are split; every sampled id is there, and the prompt's too."""
    text = f"<think>\nhmm\n</think>\n\nLook:\n{CALL}<|im_end|>"
    async with served(text) as (engine, http):
        answer = await whole(http, BODY | {"logprobs": True})
    choice = answer["choices"][0]
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("hmm", "Look:")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"path": "ä.txt"}
    assert choice["finish_reason"] == "tool_calls"
    assert choice["token_ids"] == TOKENIZER.encode(text)
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert answer["prompt_token_ids"] == engine.calls[0].prompt_ids.tolist()
    assert TOKENIZER.decode(answer["prompt_token_ids"]).endswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_stream_has_every_id_and_usage_when_asked() -> None:
    """Concatenated chunk ids are the answer's ids; the first chunk has the role and the prompt."""
    text = f"Grüße\n{CALL}<|im_end|>"
    async with served(text) as (_, http):
        first, *chunks, usage = await streamed(
            http, BODY | {"logprobs": True, "stream_options": {"include_usage": True}}
        )
    choices = [chunk["choices"][0] for chunk in chunks]
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert first["prompt_token_ids"]
    assert [token for one in choices for token in one["token_ids"]] == TOKENIZER.encode(text)
    assert all(len(one["logprobs"]["content"]) == len(one["token_ids"]) for one in choices)
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert assemble([one["delta"] for one in choices])["content"] == "Grüße"
    assert usage["usage"]["completion_tokens"] == len(TOKENIZER.encode(text))


TEXTS = [
    "plain answer<|im_end|>",
    "  spaces inside \n\n and around \n <|im_end|>",
    "half a character at the end ä🙂",
    f"{CALL}\n{CALL}<|im_end|>",
    f"text {CALL} trailing text<|im_end|>",
    "<tool_call>\n{broken\n</tool_call><|im_end|>",
    'before <tool_call>\n{"name": "re',
    "<think>\nnever closed",
    f"<think>a</think>b{CALL}",
    f"<think>draft {CALL} more</think> said<|im_end|>",
    f"<think>closed by a tool {CALL}<|im_end|>",
    "<think></think><|im_end|>",
    "<|im_end|>",
]


def _body(**more: object) -> ChatBody:
    return parse(json.dumps(BODY | more).encode(), ChatBody)


def _renderer() -> Chat:
    from renderers import Qwen3RendererConfig, create_renderer  # noqa: PLC0415

    config = Qwen3RendererConfig(thinking_retention="all")
    return Chat(TOKENIZER, create_renderer(TOKENIZER, config))


CHAT = _renderer()


def check_stream(text: str, cuts: list[int], body: ChatBody) -> None:
    """Deltas of `text`, cut into chunks anyhow, add up to the unstreamed message."""
    prompt = CHAT.prompt(body)
    ids = TOKENIZER.encode(text)
    deltas = Deltas(CHAT, prompt, body)
    bounds = [0, *sorted({cut % len(ids) for cut in cuts} - {0}), len(ids)]
    said = [
        deltas.push(ids_array(ids[start:end]), last=end == len(ids))
        for start, end in pairwise(bounds)
    ]
    assert assemble(said) == essence(CHAT.message(prompt, ids_array(ids), body))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tools", [[TOOL], []])
def test_a_stream_adds_up_to_the_unstreamed_message(text: str, tools: list[object]) -> None:
    """Token by token, the client ends with the same message as without streaming."""
    check_stream(text, list(range(1000)), _body(tools=tools))


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["<think>", "</think>", CALL, "<tool_call>", " ", "\n", "ä", "word", "🙂"]),
        min_size=1,
        max_size=8,
    ),
    cuts=st.lists(st.integers(0, 500), max_size=6),
)
def test_any_markup_streams_without_loss(parts: list[str], cuts: list[int]) -> None:
    """Whatever a model says, and however it is chunked, no text is invented in the stream."""
    body = _body()
    prompt, ids = CHAT.prompt(body), TOKENIZER.encode("".join(parts))
    deltas = Deltas(CHAT, prompt, body)
    bounds = [0, *sorted({cut % len(ids) for cut in cuts} - {0}), len(ids)]
    said = assemble(
        [
            deltas.push(ids_array(ids[start:end]), last=end == len(ids))
            for start, end in pairwise(bounds)
        ]
    )
    message = essence(CHAT.message(prompt, ids_array(ids), body))
    assert said.get("tool_calls", []) == message.get("tool_calls", [])


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "oracle", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"max_completion_tokens": 10**6}, "max_tokens"),
        ({"frobnicate": True}, "frobnicate"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(change: dict[str, Any], param: str) -> None:
    """Nothing that would change the answer is ignored silently."""
    async with (
        served("x") as (_, http),
        http.post("/v1/chat/completions", json=BODY | change) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param


async def test_without_a_tokenizer_only_ids_are_served() -> None:
    """The error says which route to use."""
    engine = ScriptedEngine(lambda *_: Reply([5]), vocab_size=10)
    async with (
        serve(create_app(engine, model_name="tiny")) as url,
        aiohttp.ClientSession(url) as http,
        http.post("/v1/chat/completions", json=BODY) as response,
    ):
        assert response.status == 400
        assert "/inference/v1/generate" in (await response.json())["error"]["message"]
