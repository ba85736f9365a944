"""The official OpenAI SDK, Chat and Responses, against the gateway with a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pydantic
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from rig import Constrained, Play, Rig, in_turn, rig, says
from tugline.testing.scripted_engine import Reply
from tugline.types import Branch, Call, CallOutcome, EchoChange, Role, TraceKind

CALLS = "".join(
    f'<tool_call>\n{{"name": "read", "arguments": {{"path":  "{path}"}}}}\n</tool_call>\n'
    for path in ("a.py", "b.py")
).rstrip()
THINKS = f"<think>\nHm, ä. It is a file.\n</think>\n\nI look.\n{CALLS}"
READ: Any = {"name": "read", "description": "Read", "parameters": {"type": "object"}}
TOOL: Any = {"type": "function", "function": READ}
FLAT: Any = {"type": "function", **READ, "strict": False}
PIXEL = "data:image/png;base64,iVBORw0KGgo="
ASK: list[Any] = [{"role": "user", "content": "Mend it."}]
both = pytest.mark.parametrize("api", ["chat", "responses"])


@contextlib.asynccontextmanager
async def client(folder: Path, *plays: Play, **how: Any) -> AsyncIterator[tuple[Rig, Any]]:
    """A session and the SDK that speaks to it."""
    async with (
        rig(folder, *plays, **how) as it,
        openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key=it.key, max_retries=0) as sdk,
    ):
        yield it, sdk


async def chat(sdk: Any, messages: list[Any] = ASK, **fields: Any) -> Any:
    """One chat completion."""
    return await sdk.chat.completions.create(model="m", messages=messages, **fields)


async def respond(sdk: Any, items: Any = ASK, **fields: Any) -> Any:
    """One response."""
    return await sdk.responses.create(model="m", input=items, **fields)


async def ask(api: str, sdk: Any, what: list[Any] = ASK, **fields: Any) -> Any:
    """The same question to either API."""
    return await (chat if api == "chat" else respond)(sdk, what, **fields)


def exact(calls: tuple[Call, ...]) -> bool:
    """Whether each call's prompt begins with all ids of the call before."""
    return all(
        np.array_equal(after.prompt_ids[: len(whole)], whole)
        for before, after in itertools.pairwise(calls)
        for whole in [np.concatenate((before.prompt_ids, before.sampled_ids))]
    )


# --------------------------------------------------------------------------- answers
@both
async def test_an_answer(tmp_path: Path, api: str) -> None:
    """Reasoning, text and true counts; every answer has an id of its own."""
    async with client(tmp_path, says("<think>\nHm.\n</think>\n\nHello.")) as (it, sdk):
        first = await ask(api, sdk)
        second = await ask(api, sdk, [{"role": "user", "content": "Again."}])
        call = it.calls[0]
    if api == "chat":
        (choice,) = first.choices
        assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", "Hello.")
        assert (choice.finish_reason, first.model) == ("stop", "m")
        counts = (first.usage.prompt_tokens, first.usage.completion_tokens)
        thoughts = first.usage.completion_tokens_details.reasoning_tokens
    else:
        assert [item.type for item in first.output] == ["reasoning", "message"]
        assert (first.output[0].summary[0].text, first.output_text) == ("Hm.", "Hello.")
        assert (first.status, first.model) == ("completed", "m")
        counts = (first.usage.input_tokens, first.usage.output_tokens)
        thoughts = first.usage.output_tokens_details.reasoning_tokens
    assert counts == (len(call.prompt_ids), len(call.sampled_ids))
    assert 0 < thoughts < len(call.sampled_ids)
    assert first.id != second.id


@pytest.mark.parametrize("echo", ["verbatim", "respaced"])
async def test_a_chat_loop_of_parallel_tools_is_one_exact_sequence(
    tmp_path: Path, echo: str
) -> None:
    """As mini-swe-agent echoes it, and as pi, qwen-code and opencode do."""
    async with client(tmp_path, in_turn(THINKS, THINKS, THINKS, "Done.")) as (it, sdk):
        messages = [{"role": "developer", "content": "Help."}, *ASK]
        for _ in range(4):
            answer = (await chat(sdk, messages, tools=[TOOL])).choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            for i, call in enumerate(answer.tool_calls or []):
                if echo == "respaced":
                    spaced = json.dumps(json.loads(call.function.arguments), indent=1)
                    messages[-1]["tool_calls"][i]["function"]["arguments"] = spaced
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "x = 1"}
                for call in answer.tool_calls or []
            ]
        calls = it.calls
    assert answer.content == "Done."
    assert [call.branch for call in calls] == [None] * 4
    assert [call.parent for call in calls] == [None, 0, 1, 2]
    assert exact(calls)
    assert calls[1].echo_changes == (() if echo == "verbatim" else (EchoChange.ARGUMENTS,))


@pytest.mark.parametrize("echo", ["verbatim", "without ids", "sealed"])
async def test_a_responses_loop_of_parallel_tools_is_one_exact_sequence(
    tmp_path: Path, echo: str
) -> None:
    """A turn of reasoning, text and two calls, four items, goes on as one message."""
    async with client(tmp_path, in_turn(THINKS, THINKS, THINKS, "Done.")) as (it, sdk):
        items = [{"role": "developer", "content": "Help."}, *ASK]
        for _ in range(4):
            answer = await respond(
                sdk,
                items,
                tools=[FLAT],
                store=False,
                include=["reasoning.encrypted_content"],
            )
            for item in answer.output:
                told = item.model_dump(exclude_none=True)
                if echo == "without ids":
                    told.pop("id")
                if echo == "sealed" and item.type == "reasoning":
                    told["summary"] = []
                items.append(told)
            uses = [item for item in answer.output if item.type == "function_call"]
            items += [
                {"type": "function_call_output", "call_id": use.call_id, "output": "x = 1"}
                for use in uses
            ]
        calls = it.calls
    assert answer.output_text == "Done."
    assert [call.branch for call in calls] == [None] * 4
    assert [call.parent for call in calls] == [None, 0, 1, 2]
    assert exact(calls)
    assert [call.echo_changes for call in calls] == [()] * 4
    assert [message.role for message in calls[1].messages] == [Role.TOOL, Role.TOOL]


async def test_a_streamed_chat_says_what_a_whole_one_says(tmp_path: Path) -> None:
    """The SDK puts the same message together, counts included."""
    async with client(tmp_path, says(THINKS)) as (_, sdk):
        whole = await chat(sdk, tools=[TOOL])
        state: Any = ChatCompletionStreamState()
        reasoning = ""
        async for chunk in await chat(
            sdk, [*ASK, *ASK], tools=[TOOL], stream=True, stream_options={"include_usage": True}
        ):
            state.handle_chunk(chunk)
            for choice in chunk.choices:
                reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        told = state.get_final_completion()
    first, second = whole.choices[0], told.choices[0]
    assert (first.message.content, first.finish_reason) == ("I look.", "tool_calls")
    assert (second.message.content, second.finish_reason) == ("I look.", "tool_calls")
    assert reasoning == first.message.reasoning_content == "Hm, ä. It is a file."
    for choice in (first, second):
        paths = [json.loads(c.function.arguments)["path"] for c in choice.message.tool_calls]
        assert paths == ["a.py", "b.py"]
    assert told.usage.completion_tokens == whole.usage.completion_tokens
    assert told.usage.prompt_tokens > whole.usage.prompt_tokens


async def test_a_streamed_response_says_what_a_whole_one_says(tmp_path: Path) -> None:
    """The SDK accumulates it from the events, each of a type that it knows."""
    async with client(tmp_path, says(THINKS, delay_s=0.005)) as (_, sdk):
        whole = await respond(sdk, tools=[FLAT])
        async with sdk.responses.stream(model="m", input=[*ASK, *ASK], tools=[FLAT]) as stream:
            events = [event async for event in stream]
            told = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    deltas = [e.delta for e in events if e.type == "response.reasoning_summary_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == "Hm, ä. It is a file."
    assert [item.type for item in told.output] == [item.type for item in whole.output]
    assert told.output_text == whole.output_text == "I look."
    assert [json.loads(item.arguments)["path"] for item in told.output[2:]] == ["a.py", "b.py"]
    assert told.usage.output_tokens == whole.usage.output_tokens


async def test_several_choices(tmp_path: Path) -> None:
    """Each is a sample of its own, whole and streamed."""
    async with client(tmp_path, says("Hello.")) as (it, sdk):
        whole = await chat(sdk, n=3)
        texts = ["", "", ""]
        async for chunk in await chat(sdk, [*ASK, *ASK], n=3, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert len(it.calls) == 6
    assert [choice.message.content for choice in whole.choices] == ["Hello."] * 3
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert texts == ["Hello."] * 3
    assert whole.usage.completion_tokens == sum(len(call.sampled_ids) for call in it.calls[:3])


async def test_a_stop_string_ends_the_answer(tmp_path: Path) -> None:
    """Neither it nor what follows is in the text."""
    async with client(tmp_path, says("One END two")) as (_, sdk):
        choice = (await chat(sdk, stop=["END"])).choices[0]
    assert (choice.message.content.strip(), choice.finish_reason) == ("One", "stop")


async def test_a_short_limit_ends_the_answer(tmp_path: Path) -> None:
    """Chat says length, Responses incomplete, whole and streamed."""
    async with client(tmp_path, says("Hello there.")) as (_, sdk):
        choice = (await chat(sdk, max_completion_tokens=3)).choices[0]
        response = await respond(sdk, max_output_tokens=3)
        async with sdk.responses.stream(model="m", input="Hi", max_output_tokens=3) as stream:
            last = [event async for event in stream][-1]
    assert choice.finish_reason == "length"
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert (last.type, last.response.usage.output_tokens) == ("response.incomplete", 3)


@pytest.mark.parametrize("choice", ["required", "named"])
@both
async def test_a_forced_tool_is_called(tmp_path: Path, api: str, choice: str) -> None:
    """What tool_choice asks for is what the answer is."""
    named = {"type": "function", "function": {"name": "read"}, "name": "read"}
    fields = {
        "tools": [TOOL if api == "chat" else FLAT],
        "tool_choice": named if choice == "named" else choice,
    }
    async with client(tmp_path, says(CALLS)) as (_, sdk):
        answer = await ask(api, sdk, **fields)
    if api == "chat":
        assert answer.choices[0].message.tool_calls[0].function.name == "read"
    else:
        assert answer.output[-1].name == "read"


async def test_a_choice_among_some_tools_is_refused(tmp_path: Path) -> None:
    """The model sees all of them, and nothing could hold it to a few."""
    other = {"type": "function", "function": {**READ, "name": "write"}}
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "read"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    async with client(tmp_path, says("x")) as (it, sdk):
        with pytest.raises(openai.BadRequestError, match="some of the tools") as caught:
            await chat(sdk, tools=[TOOL, other], tool_choice=choice)
        assert caught.value.param == "tool_choice"
        assert it.calls == ()


async def test_a_custom_tool_takes_free_text(tmp_path: Path) -> None:
    """In both APIs, in their own types."""
    text = '<tool_call>\n{"name": "patch", "arguments": {"input": "+x"}}\n</tool_call>'
    custom = {"name": "patch", "description": "Mend"}
    async with client(tmp_path, says(text)) as (_, sdk):
        told = (await chat(sdk, tools=[{"type": "custom", "custom": custom}])).choices[0].message
        item = (await respond(sdk, tools=[{"type": "custom", **custom}])).output[-1]
    assert (told.tool_calls[0].type, told.tool_calls[0].custom.input) == ("custom", "+x")
    assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", "+x")


class Verdict(pydantic.BaseModel):
    """What a structured answer must be."""

    good: bool


async def test_structured_output(tmp_path: Path) -> None:
    """The SDK's own parsing: the schema reaches the engine, the answer becomes an object."""
    wire = Constrained()
    async with client(tmp_path, says('{"good": true}'), wire=wire) as (it, sdk):
        told = await sdk.chat.completions.parse(model="m", messages=ASK, response_format=Verdict)
        response = await sdk.responses.parse(model="m", input="Well?", text_format=Verdict)
        await sdk.chat.completions.create(model="m", messages=ASK)
        assert [call.constrained for call in it.calls] == [True, True, False]
    assert told.choices[0].message.parsed == response.output_parsed == Verdict(good=True)
    assert [(asked.name, '"good"' in asked.schema) for asked in wire.asked if asked] == [
        ("Verdict", True)
    ] * 2
    async with client(tmp_path / "other", says("{}")) as (_, sdk):
        with pytest.raises(openai.BadRequestError, match="structured output") as caught:
            await sdk.responses.parse(model="m", input="Well?", text_format=Verdict)
    assert caught.value.param == "text.format"


async def test_compaction(tmp_path: Path) -> None:
    """The summary comes sealed, and is the user's in what follows: a branch that says so."""
    async with client(tmp_path, in_turn("Done.", "All mended.", "Yes.")) as (it, sdk):
        items: list[Any] = list(ASK)
        items += [item.model_dump() for item in (await respond(sdk, items)).output]
        compacted = await sdk.responses.compact(model="m", input=items)
        output = [item.model_dump(exclude_none=True, warnings=False) for item in compacted.output]
        after = [*output, {"role": "user", "content": "Is it?"}]
        answer = await respond(sdk, after)
        calls = it.calls
    assert [item["type"] for item in output] == ["message", "compaction"]
    assert answer.output_text == "Yes."
    assert calls[1].kind is TraceKind.COMPACTION
    assert calls[1].branch is None
    assert exact(calls[:2])
    assert calls[2].branch in set(Branch)
    assert "All mended." in calls[2].messages[1].content


# --------------------------------------------------------------------------- around answers
async def test_counting_is_what_the_prompt_has(tmp_path: Path) -> None:
    """input_tokens says what the same input is then charged."""
    given: Any = {"model": "m", "input": ASK, "tools": [FLAT], "instructions": "Help."}
    async with client(tmp_path, says("Hello.")) as (it, sdk):
        counted = await sdk.responses.input_tokens.count(**given)
        answer = await sdk.responses.create(**given)
        assert len(it.calls) == 1
    assert counted.input_tokens == answer.usage.input_tokens


async def test_models(tmp_path: Path) -> None:
    """The list, and each model by its name."""
    async with client(tmp_path, says("")) as (_, sdk):
        (one,) = [model async for model in sdk.models.list()]
        again = await sdk.models.retrieve(one.id)
    assert (one.id, one.object) == ("scripted", "model")
    assert again == one


@both
async def test_pictures_are_refused_where_the_model_sees_text_alone(
    tmp_path: Path, api: str
) -> None:
    """A clear 400, in the SDK's own class."""
    part: dict[str, Any] = {"type": "input_image", "image_url": PIXEL}
    if api == "chat":
        part = {"type": "image_url", "image_url": {"url": PIXEL}}
    async with client(tmp_path, says("Red.")) as (it, sdk):
        with pytest.raises(openai.BadRequestError, match="text alone"):
            await ask(api, sdk, [{"role": "user", "content": [part]}])
        assert it.calls == ()


@both
async def test_errors_are_the_sdks_own(tmp_path: Path, api: str) -> None:
    """Wrong secret, wrong field, hosted tool, unknown route, overlong prompt."""
    async with client(tmp_path, says("x"), window=200) as (it, sdk):
        with pytest.raises(openai.BadRequestError, match="top_logprobs=2") as caught:
            await ask(api, sdk, top_logprobs=2)
        assert (caught.value.param, caught.value.type) == ("top_logprobs", "invalid_request_error")
        with pytest.raises(openai.BadRequestError, match="web_search"):
            await ask(api, sdk, tools=[{"type": "web_search"}])
        with pytest.raises(openai.NotFoundError):
            await sdk.files.list()
        with pytest.raises(openai.AuthenticationError) as wrong:
            await ask(api, sdk.with_options(api_key="wrong"))
        assert wrong.value.code == "invalid_api_key"
        with pytest.raises(openai.BadRequestError, match="maximum context length") as full:
            await ask(api, sdk, [{"role": "user", "content": "Hello. " * 40}])
        assert full.value.code == "context_length_exceeded"
        assert it.calls == ()


@pytest.mark.parametrize(
    ("status", "kind"), [(429, openai.RateLimitError), (503, openai.InternalServerError)]
)
@both
async def test_a_busy_engine_is_told_as_such(
    tmp_path: Path, api: str, status: int, kind: type[openai.APIStatusError]
) -> None:
    """With the time after which to ask again."""
    busy = Reply([], status=status, retry_after_s=0.01)
    async with client(tmp_path, lambda *_: busy) as (_, sdk):
        with pytest.raises(kind) as caught:
            await ask(api, sdk)
    assert caught.value.status_code == status
    assert "retry-after" in caught.value.response.headers


@both
async def test_closing_the_stream_stops_the_engine(tmp_path: Path, api: str) -> None:
    """Within a moment nothing runs any more, and the call is kept as what it was."""
    async with client(tmp_path, says("word " * 200, delay_s=0.02)) as (it, sdk):
        stream = await ask(api, sdk, stream=True)
        async for event in stream:
            if "delta" in getattr(event, "type", "delta"):
                break
        await stream.close()
        async with asyncio.timeout(5):
            while it.running or not it.calls:  # noqa: ASYNC110  # the engine tells no event
                await asyncio.sleep(0.01)
        assert it.calls[0].outcome is CallOutcome.CLIENT_GONE
