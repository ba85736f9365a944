"""The official Anthropic SDK against the gateway, over real sockets, with a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import pydantic
import pytest

from rig import Constrained, Play, Rig, in_turn, rig, says
from tugline.testing.scripted_engine import Reply
from tugline.types import Call, CallOutcome, Role

CALLS = "".join(
    f'<tool_call>\n{{"name": "read", "arguments": {{"path":  "{path}"}}}}\n</tool_call>\n'
    for path in ("a.py", "b.py")
).rstrip()
THINKS = f"<think>\nHm, ä. It is a file.\n</think>\n\nI look.\n{CALLS}"
READ: Any = {"name": "read", "description": "Read", "input_schema": {"type": "object"}}
ASK: list[Any] = [{"role": "user", "content": "Mend it."}]
SHOWN = {"type", "thinking", "signature", "text", "name", "input"}


@contextlib.asynccontextmanager
async def client(folder: Path, *plays: Play, **how: Any) -> AsyncIterator[tuple[Rig, Any]]:
    """A session and the SDK that speaks to it."""
    async with (
        rig(folder, *plays, **how) as it,
        anthropic.AsyncAnthropic(base_url=it.url, api_key=it.key, max_retries=0) as sdk,
    ):
        yield it, sdk


async def ask(sdk: Any, messages: list[Any] = ASK, **fields: Any) -> Any:
    """One message."""
    given = {"model": "m", "max_tokens": 2000, "messages": messages, **fields}
    return await sdk.messages.create(**given)


def exact(calls: tuple[Call, ...]) -> bool:
    """Whether each call's prompt begins with all ids of the call before."""
    return all(
        np.array_equal(after.prompt_ids[: len(whole)], whole)
        for before, after in itertools.pairwise(calls)
        for whole in [np.concatenate((before.prompt_ids, before.sampled_ids))]
    )


async def test_chat(tmp_path: Path) -> None:
    """Thinking, text, stop reason and true counts; every answer has an id of its own."""
    async with client(tmp_path, says("<think>\nHm.\n</think>\n\nHello.")) as (it, sdk):
        first = await ask(sdk, system="Help.")
        second = await ask(sdk, [{"role": "user", "content": "Again."}])
        calls = it.calls
    assert [block.type for block in first.content] == ["thinking", "text"]
    assert (first.content[0].thinking, first.content[1].text) == ("Hm.", "Hello.")
    assert (first.role, first.stop_reason, first.model) == ("assistant", "end_turn", "m")
    assert first.usage.input_tokens == len(calls[0].prompt_ids)
    assert first.usage.output_tokens == len(calls[0].sampled_ids)
    assert first.id != second.id


async def test_a_loop_of_parallel_tools_is_one_exact_sequence(tmp_path: Path) -> None:
    """History echoed as Claude Code does it: every turn extends the one before, id for id."""
    async with client(tmp_path, in_turn(THINKS, THINKS, THINKS, "Done.")) as (it, sdk):
        messages = list(ASK)
        system = [{"type": "text", "text": "Help."}]
        for turn in range(4):
            billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version={turn};"}
            mark = {"cache_control": {"type": "ephemeral"}}
            last = messages[-1]["content"]
            last = [{"type": "text", "text": last}] if isinstance(last, str) else list(last)
            marked = {**messages[-1], "content": [*last[:-1], {**last[-1], **mark}]}
            answer = await ask(
                sdk, [*messages[:-1], marked], tools=[READ], system=[billing, *system]
            )
            echo = [block.model_dump(exclude_none=True) for block in answer.content]
            messages.append({"role": "assistant", "content": echo})
            uses = [block for block in answer.content if block.type == "tool_use"]
            results = [
                {"type": "tool_result", "tool_use_id": use.id, "content": f"x = {i}"}
                for i, use in enumerate(uses)
            ]
            messages.append({"role": "user", "content": results})
        calls = it.calls
    assert (answer.stop_reason, answer.content[0].text) == ("end_turn", "Done.")
    assert [call.branch for call in calls] == [None] * 4
    assert [call.parent for call in calls] == [None, 0, 1, 2]
    assert exact(calls)
    assert [m.role for m in calls[1].messages] == [Role.TOOL, Role.TOOL]


async def test_streamed_and_whole_answers_say_the_same(tmp_path: Path) -> None:
    """The SDK puts the same message together, from events that come as tokens are sampled."""
    async with client(tmp_path, says(THINKS, delay_s=0.01)) as (_, sdk):
        whole = await ask(sdk, tools=[READ])
        async with sdk.messages.stream(
            model="m", max_tokens=2000, messages=[*ASK, *ASK], tools=[READ]
        ) as stream:
            kinds = [event.type async for event in stream]
            told = await stream.get_final_message()
    assert told.stop_reason == whole.stop_reason == "tool_use"
    assert told.usage.output_tokens == whole.usage.output_tokens
    assert told.usage.input_tokens > whole.usage.input_tokens, "the second one asks for more"
    assert [block.model_dump(include=SHOWN) for block in told.content] == [
        block.model_dump(include=SHOWN) for block in whole.content
    ]
    assert [block.input for block in told.content[2:]] == [{"path": "a.py"}, {"path": "b.py"}]
    assert kinds.count("thinking") > 1
    assert kinds.count("text") > 1


async def test_the_first_event_has_the_true_prompt(tmp_path: Path) -> None:
    """Claude Code decides on compaction from it."""
    async with client(tmp_path, says("Hello.")) as (it, sdk):
        stream = await ask(sdk, stream=True)
        events = [event async for event in stream]
        prompt = len(it.calls[0].prompt_ids)
    assert events[0].type == "message_start"
    assert events[0].message.usage.input_tokens == prompt
    assert events[-2].usage.input_tokens == prompt


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "read"}])
async def test_a_forced_tool_is_called(tmp_path: Path, choice: Any) -> None:
    """What tool_choice asks for is what the answer is."""
    async with client(tmp_path, says(CALLS)) as (_, sdk):
        answer = await ask(sdk, tools=[READ], tool_choice=choice)
    assert answer.stop_reason == "tool_use"
    assert answer.content[-1].name == "read"


async def test_a_stop_sequence_ends_the_answer(tmp_path: Path) -> None:
    """It is named, and neither it nor what follows is in the text."""
    async with client(tmp_path, says("One END two")) as (_, sdk):
        answer = await ask(sdk, stop_sequences=["END"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    assert answer.content[0].text.strip() == "One"


async def test_a_short_limit_ends_the_answer(tmp_path: Path) -> None:
    """max_tokens is kept and said."""
    async with client(tmp_path, says("Hello there.")) as (_, sdk):
        answer = await ask(sdk, max_tokens=3)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 3)


async def test_pictures_are_refused_where_the_model_sees_text_alone(tmp_path: Path) -> None:
    """A clear 400, in the SDK's own class."""
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    async with client(tmp_path, says("Red.")) as (it, sdk):
        with pytest.raises(anthropic.BadRequestError, match="text alone"):
            await ask(sdk, [{"role": "user", "content": content}])
        assert it.calls == ()


class Verdict(pydantic.BaseModel):
    """What a structured answer must be."""

    good: bool


async def test_structured_output(tmp_path: Path) -> None:
    """The SDK's own parsing: the schema reaches the engine, the answer becomes an object."""
    wire = Constrained()
    asked: Any = {"model": "m", "max_tokens": 99, "messages": ASK, "output_format": Verdict}
    async with client(tmp_path, says('{"good": true}'), wire=wire) as (_, sdk):
        answer = await sdk.messages.parse(**asked)
    assert answer.parsed_output == Verdict(good=True)
    assert wire.asked[0] is not None
    assert '"good"' in wire.asked[0].schema
    async with client(tmp_path / "other", says("{}")) as (_, sdk):
        with pytest.raises(anthropic.BadRequestError, match="structured output"):
            await sdk.messages.parse(**asked)


async def test_counting_is_what_the_prompt_has(tmp_path: Path) -> None:
    """count_tokens says what the same messages are then charged."""
    async with client(tmp_path, says("Hello.")) as (it, sdk):
        counted = await sdk.messages.count_tokens(
            model="m", messages=ASK, tools=[READ], system="Help."
        )
        answer = await ask(sdk, tools=[READ], system="Help.")
        assert len(it.calls) == 1
    assert counted.input_tokens == answer.usage.input_tokens


async def test_models(tmp_path: Path) -> None:
    """The list, and each model by its name."""
    async with client(tmp_path, says("")) as (_, sdk):
        (one,) = [model async for model in sdk.models.list()]
        again = await sdk.models.retrieve(one.id)
    assert (one.id, one.max_input_tokens) == ("scripted", 20_000)
    assert again == one


async def test_errors_are_the_sdks_own(tmp_path: Path) -> None:
    """Wrong secret, wrong field, unknown route, hosted tool: each with its class and its words."""
    hosted: Any = {"type": "web_search_20250305", "name": "web_search"}
    async with client(tmp_path, says("x")) as (it, sdk):
        with pytest.raises(anthropic.BadRequestError, match="max_tokens=0"):
            await ask(sdk, max_tokens=0)
        with pytest.raises(anthropic.BadRequestError, match="web_search"):
            await ask(sdk, tools=[hosted])
        with pytest.raises(anthropic.NotFoundError):
            await sdk.messages.batches.list()
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await ask(sdk.with_options(api_key="wrong"))
        assert it.calls == ()
    assert caught.value.body["error"]["type"] == "authentication_error"
    assert caught.value.request_id


async def test_an_overflow_is_what_claude_code_compacts_on(tmp_path: Path) -> None:
    """Its words and its numbers."""
    async with client(tmp_path, says("x"), window=100) as (_, sdk):
        long = [{"role": "user", "content": "Hello. " * 40}]
        with pytest.raises(anthropic.BadRequestError) as caught:
            await ask(sdk, long)
    assert "prompt is too long: " in caught.value.message
    assert "tokens > 100 maximum" in caught.value.message


async def test_a_busy_engine_is_an_overload(tmp_path: Path) -> None:
    """529, told to come back later."""
    busy = Reply([], status=503, retry_after_s=0.01)
    async with client(tmp_path, lambda *_: busy) as (_, sdk):
        with pytest.raises(anthropic.APIStatusError) as caught:
            await ask(sdk)
    assert caught.value.status_code == 529
    assert caught.value.body["error"]["type"] == "overloaded_error"


async def test_closing_the_stream_stops_the_engine(tmp_path: Path) -> None:
    """Within a second nothing runs any more, and the call is kept as what it was."""
    async with client(tmp_path, says("word " * 200, delay_s=0.02)) as (it, sdk):
        stream = await ask(sdk, stream=True)
        async for event in stream:
            if event.type == "content_block_delta":
                break
        await stream.close()
        async with asyncio.timeout(5):
            while it.running or not it.calls:  # noqa: ASYNC110  # the engine tells no event
                await asyncio.sleep(0.01)
        assert it.calls[0].outcome is CallOutcome.CLIENT_GONE


async def test_the_beta_route_and_a_late_system_message(tmp_path: Path) -> None:
    """``?beta=true`` and a system message inside the messages, which stays in its place."""
    late: Any = [*ASK, {"role": "system", "content": "It is Monday."}]
    async with client(tmp_path, says("Yes.")) as (it, sdk):
        answer = await sdk.beta.messages.create(
            model="m", max_tokens=99, messages=late, betas=["a-beta"]
        )
        (call,) = it.calls
    assert answer.content[0].text == "Yes."
    assert [message.role for message in call.messages] == [Role.USER, Role.SYSTEM]
