"""The gateway as the official SDK meets it, over real sockets, with a scripted engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from tiny import rendering
from tugline.chat.engines.generate import Embedded
from tugline.errors import EngineError
from tugline.gateway.app import Gateway
from tugline.gateway.replicas import Upstream
from tugline.inference.server import create_app
from tugline.testing.scripted_engine import Reply, ScriptedEngine
from tugline.types import (
    Call,
    CallOutcome,
    Finish,
    Ids,
    Limits,
    PluginSpec,
    Sampling,
    Session,
    Task,
)
from tugline.web.serve import serve

RENDERING = rendering()
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {"name": "read", "description": "Read", "parameters": {"type": "object"}},
    }
]
ASK: list[Any] = [{"role": "system", "content": "Help."}, {"role": "user", "content": "Mend it."}]


FREE = Limits()
ANY = Sampling()


def says(*answers: str, **fault: Any) -> Callable[[Ids, str], Reply]:
    """An engine that gives these answers in turn, then the last one for ever."""
    rest = list(answers)

    def reply(_prompt: Ids, _request: str) -> Reply:
        text = rest.pop(0) if len(rest) > 1 else rest[0]
        return Reply(RENDERING.tokenizer.encode(f"{text}<|im_end|>"), **fault)

    return reply


class Bench:
    """One open session on a gateway, and the engine behind it."""

    def __init__(self, engine: ScriptedEngine, gateway: Gateway, url: str, key: str) -> None:
        self.engine, self.gateway, self.url, self.key = engine, gateway, url, key
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)

    async def ask(self, messages: list[Any] = ASK, **options: Any) -> Any:
        """One chat completion through the SDK."""
        return await self.client.chat.completions.create(
            model="m", messages=messages, tools=TOOLS, **options
        )

    @property
    def calls(self) -> Any:
        """What is on disk."""
        return self.gateway.read_calls("s1")


@contextlib.asynccontextmanager
async def bench(
    folder: Path,
    reply: Callable[[Ids, str], Reply],
    *,
    window: int = 8192,
    limits: Limits = FREE,
    sampling: Sampling = ANY,
) -> AsyncIterator[Bench]:
    """Engine, gateway and one session, up while the block lasts."""
    engine = ScriptedEngine(reply, vocab_size=RENDERING.tokenizer.size, max_model_len=window)
    task = Task(
        id="t",
        instruction="",
        harness=PluginSpec("shell"),
        evaluator=PluginSpec("tests"),
        limits=limits,
        sampling=sampling,
    )
    session = Session(id="s1", task="t", sample=0)
    async with (
        serve(create_app(engine, model_name="scripted")) as engine_url,
        Gateway(Upstream(engine_url, Embedded()), RENDERING, folder) as gateway,
        gateway.open(session, task) as opened,
    ):
        it = Bench(engine, gateway, opened.base_url, opened.key)
        async with it.client:
            yield it


async def test_a_tool_loop_is_one_exact_sequence(tmp_path: Path) -> None:
    """Three turns through the SDK, arguments re-serialised: each prompt extends the last by id."""
    async with bench(tmp_path, says(CALL, CALL, "Done.")) as it:
        messages = list(ASK)
        for _ in range(3):
            answer = (await it.ask(messages)).choices[0]
            messages.append(answer.message.model_dump(exclude_none=True))
            for call in answer.message.tool_calls or []:
                compact = json.dumps(json.loads(call.function.arguments), separators=(",", ":"))
                messages[-1]["tool_calls"][0]["function"]["arguments"] = compact
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "x = 1"})
        calls = it.calls
    assert answer.message.content == "Done."
    assert [call.branch for call in calls] == [None, None, None]
    assert [call.parent for call in calls] == [None, 0, 1]
    for before, after in itertools.pairwise(calls):
        whole = np.concatenate((before.prompt_ids, before.sampled_ids))
        assert np.array_equal(after.prompt_ids[: len(whole)], whole)
    assert [
        np.array_equal(c.prompt_ids, e.prompt_ids)
        for c, e in zip(calls, it.engine.calls, strict=True)
    ]


async def test_streamed_and_whole_answers_say_the_same(tmp_path: Path) -> None:
    """Text, reasoning, tool call, finish reason and usage are equal either way."""
    text = f"<think>\nHm, ä.\n</think>\n\nI look.\n{CALL}"
    async with bench(tmp_path, says(text)) as it:
        whole = await it.ask()
        content = reasoning = arguments = ""
        finish, usage, names = None, None, []
        stream = await it.ask(stream=True, stream_options={"include_usage": True})
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
                content += choice.delta.content or ""
                reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                for call in choice.delta.tool_calls or []:
                    names += [call.function.name] if call.function.name else []
                    arguments += call.function.arguments
    message = whole.choices[0].message
    assert (
        (content, reasoning)
        == ("I look.", "Hm, ä.")
        == (message.content, message.reasoning_content)
    )
    assert (names, arguments) == (["read"], message.tool_calls[0].function.arguments)
    assert finish == whole.choices[0].finish_reason == "tool_calls"
    assert usage.prompt_tokens == whole.usage.prompt_tokens == len(it.calls[0].prompt_ids)
    assert usage.completion_tokens == len(it.calls[1].sampled_ids)


async def test_the_first_delta_comes_before_the_last_token(tmp_path: Path) -> None:
    """Streaming is real: text arrives while the engine is still sampling."""
    async with bench(tmp_path, says("word " * 20, delay_s=0.01)) as it:
        async for chunk in await it.ask(stream=True):
            if chunk.choices and chunk.choices[0].delta.content:
                assert it.engine.stats().running == 1
                assert not it.calls
                break
        await it.client.close()


async def test_a_client_that_hangs_up_stops_the_engine_and_is_recorded(tmp_path: Path) -> None:
    """Within a second nothing runs any more, and what was sampled is kept with its outcome."""
    for stream in (True, False):
        async with bench(tmp_path / str(stream), says("word " * 400, delay_s=0.01)) as it:
            asking = asyncio.create_task(_first_chunks(it) if stream else it.ask())
            await asyncio.sleep(0.4)
            asking.cancel()
            await asyncio.wait({asking}, timeout=2)
            await it.client.close()
            await _within_a_second(lambda: not it.engine.stats().running)
            await _within_a_second(lambda: bool(it.calls))
            (call,) = it.calls
            assert call.outcome is CallOutcome.CLIENT_GONE
            assert 0 < len(call.sampled_ids) < 400


async def test_a_client_that_leaves_while_its_call_is_written_is_recorded_once(
    tmp_path: Path,
) -> None:
    """The write is finished, not repeated, and the file stays whole."""
    async with bench(tmp_path, says("Hi.")) as it:
        writer = it.gateway._sessions.find(it.key, None).writer
        write, writing = writer.append, asyncio.Event()
        loop = asyncio.get_running_loop()

        def slowly(call: Call) -> int:
            loop.call_soon_threadsafe(writing.set)
            time.sleep(0.3)
            return write(call)

        writer.append = slowly  # type: ignore[method-assign]
        asking = asyncio.create_task(it.ask())
        await asyncio.wait_for(writing.wait(), 5)
        asking.cancel()
        await asyncio.wait({asking}, timeout=2)
        await _within_a_second(lambda: bool(it.calls))
        await asyncio.sleep(0.1)
        assert [call.number for call in it.calls] == [0]


async def test_parallel_calls_of_one_session_are_all_kept(tmp_path: Path) -> None:
    """Twenty requests at once: twenty records, each readable, each with its own number."""
    async with bench(tmp_path, says("Hi.", delay_s=0.01)) as it:
        await asyncio.gather(*(it.ask() for _ in range(20)))
        assert sorted(call.number for call in it.calls) == list(range(20))
        assert {call.parent for call in it.calls} == {None}


async def _within_a_second(holds: Callable[[], bool]) -> None:
    for _ in range(50):
        if holds():
            return
        await asyncio.sleep(0.02)
    pytest.fail("it did not happen within a second")


async def _first_chunks(it: Bench) -> None:
    async for _ in await it.ask(stream=True):
        pass


async def test_only_the_sessions_own_key_opens_it(tmp_path: Path) -> None:
    """No key, a wrong key and a closed session's key are all 401; the key alone is enough."""
    async with bench(tmp_path, says("Hi.")) as it, aiohttp.ClientSession() as http:
        gate = it.gateway.url
        for url, key in (
            (f"{it.url}/v1/models", None),
            (f"{it.url}/v1/models", "tl-wrong"),
            (f"{gate}/s/other/v1/models", it.key),
        ):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            async with http.get(url, headers=headers) as response:
                assert response.status == 401
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        async with http.get(
            f"{gate}/v1/models", headers={"authorization": f"Bearer {it.key}"}
        ) as response:
            assert (await response.json())["data"][0]["max_model_len"] == 8192
        key, gateway = it.key, it.gateway
        await gateway._sessions.close(gateway._sessions.find(key, None))
        with pytest.raises(openai.AuthenticationError):
            await it.ask()


async def test_a_full_window_is_refused_before_the_engine_is_asked(tmp_path: Path) -> None:
    """The error has the code that harnesses start compaction on."""
    async with bench(tmp_path, says("Hi."), window=64) as it:
        with pytest.raises(openai.BadRequestError, match="maximum context length is 64") as caught:
            await it.ask()
        assert caught.value.code == "context_length_exceeded"
        assert not it.engine.calls


async def test_budgets_end_a_session_without_sampling(tmp_path: Path) -> None:
    """The call after the last allowed one is a 400 that says why."""
    async with bench(tmp_path, says("Hi."), limits=Limits(max_turns=1)) as it:
        await it.ask()
        with pytest.raises(openai.BadRequestError, match="used its 1 model calls"):
            await it.ask()
        assert len(it.engine.calls) == 1
    async with bench(tmp_path / "b", says("Hi."), limits=Limits(max_sampled_tokens=3)) as it:
        await it.ask()
        with pytest.raises(openai.BadRequestError, match="used its 3 sampled tokens"):
            await it.ask()


async def test_the_contract_overrides_what_the_client_asks(tmp_path: Path) -> None:
    """Temperature and seed are the task's, the answer's length is the smaller wish."""
    contract = Sampling(temperature=1.0, top_p=1.0, max_tokens=5, seed=7)
    async with bench(tmp_path, says("word " * 9), sampling=contract) as it:
        answer = await it.ask(temperature=0.2, max_completion_tokens=900, seed=1)
        await it.ask(max_tokens=2)
        first, second = it.engine.calls
        assert answer.choices[0].finish_reason == "length"
        assert (first.temperature, first.max_tokens, second.max_tokens) == (1.0, 5, 2)
        assert len({first.seed, second.seed, 1, 7}) == 4
        assert it.calls[0].requested.temperature == 0.2
        assert it.calls[0].finish is Finish.LENGTH


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
    async with bench(tmp_path, says("Hi.")) as it, aiohttp.ClientSession() as http:
        body = {"model": "m", "messages": ASK} | change
        async with http.post(
            f"{it.url}/v1/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {it.key}"},
        ) as response:
            error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, field)
        assert not it.engine.calls


async def test_a_body_that_is_no_json_is_a_400(tmp_path: Path) -> None:
    """Garbage, NUL bytes included, is refused in the dialect's shape."""
    async with bench(tmp_path, says("Hi.")) as it, aiohttp.ClientSession() as http:
        for body in (b"\x00\x00", b'{"messages": ', b"[]"):
            async with http.post(
                f"{it.url}/v1/chat/completions",
                data=body,
                headers={"authorization": f"Bearer {it.key}"},
            ) as response:
                assert response.status == 400
                assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_an_engine_that_fails_first_is_tried_again(tmp_path: Path) -> None:
    """Two refusals before the first token are not the client's problem; three are a 503."""
    faults = [503, 503, None]
    fine = says("Hi.")

    def reply(prompt: Ids, request: str) -> Reply:
        status = faults.pop(0) if faults else 503
        return Reply([0], status=status, retry_after_s=0.01) if status else fine(prompt, request)

    async with bench(tmp_path, reply) as it:
        assert (await it.ask()).choices[0].message.content == "Hi."
        with pytest.raises(openai.InternalServerError):
            await it.ask()
        assert len(it.calls) == 1
        failure = it.gateway.engine_failure("s1")
        assert failure is not None
        assert failure.boundary == "engine"


async def test_an_engine_lost_mid_answer_ends_it_as_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client gets a whole answer that was cut short, and the record says who is to blame."""
    monkeypatch.setattr("tugline.gateway.completion._CONTINUATIONS", 0)
    async with bench(tmp_path, says("word " * 9, cut_after=6)) as it:
        finish = [c.choices[0].finish_reason async for c in await it.ask(stream=True) if c.choices]
        assert finish[-1] == "length"
        (call,) = it.calls
        assert (call.outcome, len(call.sampled_ids)) == (CallOutcome.ENGINE_LOST, 6)


async def test_an_sdk_retry_of_an_answered_call_samples_once(tmp_path: Path) -> None:
    """The same body marked as a retry gets the same answer; a deliberate twin gets its own."""
    async with bench(tmp_path, says("One.", "Two.")) as it, aiohttp.ClientSession() as http:
        body = json.dumps({"model": "m", "messages": ASK})
        said = []
        for retry in ("0", "1", "0"):
            async with http.post(
                f"{it.url}/v1/chat/completions",
                data=body,
                headers={"authorization": f"Bearer {it.key}", "x-stainless-retry-count": retry},
            ) as response:
                said.append((await response.json())["choices"][0]["message"]["content"])
        assert said == ["One.", "One.", "Two."]
        assert [(call.parent, call.branch) for call in it.calls] == [(None, None), (None, None)]


async def test_a_malformed_tool_call_is_shown_as_text(tmp_path: Path) -> None:
    """Nothing is repaired: the harness sees what the model wrote."""
    async with bench(tmp_path, says("Look.\n<tool_call>\n{oops}\n</tool_call>")) as it:
        choice = (await it.ask()).choices[0]
        assert choice.message.tool_calls is None
        assert choice.message.content == "Look.\n<tool_call>\n{oops}\n</tool_call>"
        assert choice.finish_reason == "stop"


async def test_a_gateway_without_an_engine_says_so(tmp_path: Path) -> None:
    """Starting in front of nothing is one clear error."""
    with pytest.raises(EngineError, match="no usable engine"):
        async with Gateway(Upstream("http://127.0.0.1:9", Embedded()), RENDERING, tmp_path):
            pass
