"""The gateway under the official OpenAI SDK, over real sockets, before a scripted engine."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from rig import RENDERING, Rig, ids, in_turn, rig, says
from tugline.chat.engines.generate import Embedded
from tugline.errors import EngineError
from tugline.gateway.app import Gateway
from tugline.gateway.replicas import Upstream
from tugline.recording import file as recordings
from tugline.recording.records import RecordedEventKind
from tugline.testing import Reply
from tugline.traces.base import count_calls
from tugline.types import Reason

CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "read", "description": "Read", "parameters": {"type": "object"}},
    }
]
ASK: list[Any] = [{"role": "system", "content": "Help."}, {"role": "user", "content": "Mend it."}]


class Client:
    """An open session with an SDK client."""

    def __init__(self, it: Rig) -> None:
        self.it = it
        self.sdk = openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key=it.key, max_retries=0)

    async def ask(self, messages: list[Any] = ASK, **options: Any) -> Any:
        """One chat completion."""
        return await self.sdk.chat.completions.create(
            model="m", messages=messages, tools=TOOLS, **options
        )


@contextlib.asynccontextmanager
async def client(folder: Path, *plays: Any, **options: Any) -> AsyncIterator[Client]:
    """See `rig`."""
    async with rig(folder, *plays, **options) as it:
        made = Client(it)
        async with made.sdk:
            yield made


async def test_a_tool_loop_is_one_exact_sequence(tmp_path: Path) -> None:
    """Three turns, arguments re-serialised: each prompt extends the last id for id."""
    async with client(tmp_path, in_turn(CALL, CALL, "Done.")) as me:
        messages = list(ASK)
        for _ in range(3):
            answer = (await me.ask(messages)).choices[0]
            messages.append(answer.message.model_dump(exclude_none=True))
            for call in answer.message.tool_calls or []:
                compact = json.dumps(json.loads(call.function.arguments), separators=(",", ":"))
                messages[-1]["tool_calls"][0]["function"]["arguments"] = compact
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "x = 1"})
        calls, engine = me.it.calls, me.it.engines[0]
    assert answer.message.content == "Done."
    assert [(call.parent, call.branch) for call in calls] == [(None, None), (0, None), (1, None)]
    for before, after in itertools.pairwise(calls):
        whole = np.concatenate((before.prompt_ids, before.sampled_ids))
        assert np.array_equal(after.prompt_ids[: len(whole)], whole)
    for call, asked in zip(calls, engine.calls, strict=True):
        assert np.array_equal(call.prompt_ids, asked.prompt_ids)


async def test_half_an_emoji_is_mended(tmp_path: Path) -> None:
    """Tool output cut inside a surrogate pair, raw and as JSON in JSON; the record says so."""
    texts = ["a\\ud83d", "\\uDE00b", "\\ud83d\\ude00", "\\\\ud83d", "\\ud83d\\ud83d\\ude00"]
    body = b'{"model": "m", "messages": [%b]}' % b", ".join(
        b'{"role": "user", "content": "%b"}' % text.encode() for text in texts
    )
    async with rig(tmp_path, says("Hello.")) as it:
        headers = {"authorization": f"Bearer {it.key}", "content-type": "application/json"}
        url = f"{it.url}/v1/chat/completions"
        async with it.http.post(url, data=body, headers=headers) as response:
            assert response.status == 200
        (call,) = it.calls
        path = it.session.transcript.writer.path
    mended = ["a\ufffd", "\ufffdb", "\U0001f600", "\\ud83d", "\ufffd\U0001f600"]
    assert [message.content for message in call.messages] == mended
    (event,) = recordings.read(path).events
    assert (event.kind, event.call) == (RecordedEventKind.REPAIRED, 0)
    assert event.detail == "lone surrogates"


async def test_streamed_and_whole_answers_are_equal(tmp_path: Path) -> None:
    """Text, reasoning, tool call, finish reason and usage are equal either way."""
    text = f"<think>\nHm, ä.\n</think>\n\nI look.\n{CALL}"
    async with client(tmp_path, says(text)) as me:
        whole = await me.ask()
        content = reasoning = arguments = ""
        finish, usage, names = None, None, []
        stream = await me.ask(stream=True, stream_options={"include_usage": True})
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
                content += choice.delta.content or ""
                reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                for call in choice.delta.tool_calls or []:
                    names += [call.function.name] if call.function.name else []
                    arguments += call.function.arguments
        calls = me.it.calls
    message = whole.choices[0].message
    assert (content, reasoning) == ("I look.", "Hm, ä.")
    assert (message.content, message.reasoning_content) == (content, reasoning)
    assert (names, arguments) == (["read"], message.tool_calls[0].function.arguments)
    assert finish == whole.choices[0].finish_reason == "tool_calls"
    assert usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens == len(calls[0].prompt_ids)
    assert usage.completion_tokens == len(calls[1].sampled_ids)


async def test_a_stop_sequence_ends_the_answer_before_it(tmp_path: Path) -> None:
    """The engine is let go, the sampled ids end with the one that completed the match."""
    async with rig(tmp_path, says("one two three four")) as it:
        reply = await it.ask(stop_sequences=["three"])
        call, sampled = it.calls[0], it.sampled
    assert reply["content"] == [{"type": "text", "text": "one two"}]
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "three")
    assert call.sampled_ids.tolist() == ids("one two three", end=False)
    assert call.stop == "three"
    (ledger,) = count_calls([call], []).values()
    assert call.unreported_tokens + len(call.sampled_ids) == sampled > len(call.sampled_ids)
    assert ledger.dropped[Reason.BEHIND_STOP] == call.unreported_tokens


async def test_a_named_tool_choice_begins_the_call_for_the_model(tmp_path: Path) -> None:
    """The forced beginning is context; the model samples the arguments."""
    rest = '{"path": "a.py"}}\n</tool_call>'
    async with rig(tmp_path, lambda _p, _r: Reply(ids(rest))) as it:
        reply = await it.ask(tool_choice={"type": "tool", "name": "read"})
        call = it.calls[0]
    (block,) = reply["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "read", {"path": "a.py"})
    assert call.sampled_ids.tolist() == ids(rest)


async def test_without_parallel_calls_the_engine_stops_after_the_first(tmp_path: Path) -> None:
    """The sampled ids end where the first call closes."""
    async with rig(tmp_path, says(CALL + "\n" + CALL)) as it:
        reply = await it.ask(tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        call = it.calls[0]
    assert [block["type"] for block in reply["content"]] == ["tool_use"]
    assert reply["stop_reason"] == "tool_use"
    assert call.sampled_ids.tolist() == ids(CALL, end=False)


async def test_a_malformed_tool_call_is_text(tmp_path: Path) -> None:
    """Nothing is repaired: the harness sees what the model wrote."""
    async with client(tmp_path, says("Look.\n<tool_call>\n{oops}\n</tool_call>")) as me:
        choice = (await me.ask()).choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content == "Look.\n<tool_call>\n{oops}\n</tool_call>"
    assert choice.finish_reason == "stop"


async def test_counting_costs_nothing_and_is_true(tmp_path: Path) -> None:
    """The count is that of the prompt that is then sampled from."""
    async with rig(tmp_path, says("Hello.")) as it:
        body = it.body()
        counting = {key: body[key] for key in ("model", "messages", "tools")}
        url = f"{it.url}/v1/messages/count_tokens"
        async with it.http.post(url, json=counting) as response:
            count = (await response.json())["input_tokens"]
        reply = await it.ask()
    assert count == reply["usage"]["input_tokens"] == len(it.calls[0].prompt_ids)


async def test_the_window_is_listed_and_a_full_one_refused(tmp_path: Path) -> None:
    """The key alone opens the list of models; the error has the code that starts compaction."""
    async with client(tmp_path, says("Hi."), window=64) as me:
        by_key = me.sdk.with_options(base_url=f"{me.it.gateway.url}/v1")
        (model,) = (await by_key.models.list()).data
        assert model.model_dump()["max_model_len"] == 64
        with pytest.raises(openai.BadRequestError, match="maximum context length is 64") as caught:
            await me.ask()
        assert caught.value.code == "context_length_exceeded"
        assert not me.it.engines[0].calls


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"n": 0}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].image_url",
        ),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"stream": "yes"}, "stream"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    """A 400 in OpenAI's shape whose param is the field at fault."""
    async with rig(tmp_path, says("Hi.")) as it:
        async with it.http.post(
            f"{it.url}/v1/chat/completions",
            json={"model": "m", "messages": ASK} | change,
            headers={"authorization": f"Bearer {it.key}"},
        ) as response:
            error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, field)
        assert not it.engines[0].calls


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi", "max_output_tokens": 10**30}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}],
                                  "max_tokens": 10**30}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10**30}),
        ("/v1beta/models/m:generateContent", {"contents": [{"parts": [{"text": "hi"}]}],
                                              "generationConfig": {"maxOutputTokens": 10**30}}),
    ],
)  # fmt: skip
async def test_a_bound_that_no_engine_takes_is_a_wrong_request(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """In the dialect's shape, not a fault of the server."""
    async with rig(tmp_path, in_turn("hello")) as it:
        keys = {"authorization": f"Bearer {it.key}", "x-goog-api-key": it.key}
        reply = await it.http.post(it.url + path, json={"model": "m", **body}, headers=keys)
        assert reply.status == 400, await reply.text()
        assert "2147483647" in await reply.text()


async def test_items_that_are_no_message_are_a_wrong_request(tmp_path: Path) -> None:
    """An input of the Responses API that declares tools and says nothing."""
    tools = {"type": "additional_tools", "role": "developer", "tools": []}
    async with rig(tmp_path, in_turn("hello")) as it:
        keys = {"authorization": f"Bearer {it.key}"}
        body = {"model": "m", "input": [tools]}
        async with it.http.post(f"{it.url}/v1/responses", json=body, headers=keys) as reply:
            error = (await reply.json())["error"]
        assert (reply.status, error["param"]) == (400, "input"), error


async def test_a_gateway_without_an_engine_does_not_start(tmp_path: Path) -> None:
    """Starting before nothing is one clear error."""
    with pytest.raises(EngineError, match="no usable engine"):
        async with Gateway(Upstream("http://127.0.0.1:9", Embedded()), RENDERING, tmp_path):
            pass
