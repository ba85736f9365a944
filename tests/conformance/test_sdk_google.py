"""The official Google SDK against the gateway, over real sockets, with a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
from google import genai
from google.genai import errors, types

from rig import Constrained, Play, Rig, in_turn, rig, says
from tugline.testing.scripted_engine import Reply
from tugline.types import Call, CallOutcome, EchoChange, Role

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession")
CALLS = "".join(
    f'<tool_call>\n{{"name": "read", "arguments": {{"path":  "{path}"}}}}\n</tool_call>\n'
    for path in ("a.py", "b.py")
).rstrip()
THINKS = f"<think>\nHm, ä. It is a file.\n</think>\n\nI look.\n{CALLS}"
PATH = types.Schema(type=types.Type.OBJECT, properties={"path": types.Schema(type="STRING")})
READ = types.FunctionDeclaration(name="read", description="Read", parameters=PATH)
TOOLS = [types.Tool(function_declarations=[READ])]


@contextlib.asynccontextmanager
async def client(folder: Path, *plays: Play, **how: Any) -> AsyncIterator[tuple[Rig, Any]]:
    """A session and the SDK that speaks to it."""
    async with rig(folder, *plays, **how) as it, sdk_of(it.url, it.key) as sdk:
        yield it, sdk


@contextlib.asynccontextmanager
async def sdk_of(url: str, key: str) -> AsyncIterator[Any]:
    """The SDK's asynchronous half."""
    options = types.HttpOptions(base_url=url, timeout=20_000)
    with genai.Client(api_key=key, http_options=options) as both:
        async with both.aio as sdk:
            yield sdk


async def ask(sdk: Any, contents: Any = "Mend it.", **config: Any) -> Any:
    """One answer."""
    return await sdk.models.generate_content(
        model="m", contents=contents, config=types.GenerateContentConfig(**config)
    )


def exact(calls: tuple[Call, ...]) -> bool:
    """Whether each call's prompt begins with all ids of the call before."""
    return all(
        np.array_equal(after.prompt_ids[: len(whole)], whole)
        for before, after in itertools.pairwise(calls)
        for whole in [np.concatenate((before.prompt_ids, before.sampled_ids))]
    )


async def test_chat(tmp_path: Path) -> None:
    """Thoughts apart, text, finish reason and true counts; every answer has an id of its own."""
    async with client(tmp_path, says("<think>\nHm.\n</think>\n\nHello.")) as (it, sdk):
        first = await ask(sdk, system_instruction="Help.")
        second = await ask(sdk, "Again.")
        (call, _) = it.calls
    thought, text = first.candidates[0].content.parts
    assert (thought.text, thought.thought, text.text) == ("Hm.", True, "Hello.")
    assert first.text == "Hello."
    assert first.candidates[0].finish_reason is types.FinishReason.STOP
    usage = first.usage_metadata
    assert usage.prompt_token_count == len(call.prompt_ids)
    assert usage.thoughts_token_count > 0
    assert usage.candidates_token_count + usage.thoughts_token_count == len(call.sampled_ids)
    assert usage.total_token_count == len(call.prompt_ids) + len(call.sampled_ids)
    assert first.response_id != second.response_id


@pytest.mark.parametrize("ids", ["kept", "dropped"])
async def test_a_loop_of_parallel_tools_is_one_exact_sequence(tmp_path: Path, ids: str) -> None:
    """History echoed as Gemini CLI does it, without thoughts: every turn extends the last by id."""
    async with client(tmp_path, in_turn(THINKS, THINKS, THINKS, "Done.")) as (it, sdk):
        contents = [types.Content(role="user", parts=[types.Part(text="Mend it.")])]
        for _ in range(4):
            answer = await ask(sdk, contents, tools=TOOLS, system_instruction="Help.")
            content = answer.candidates[0].content
            content.parts = [part for part in content.parts if not part.thought]
            for call in answer.function_calls or []:
                call.id = call.id if ids == "kept" else None
            contents.append(content)
            results = [
                types.Part(
                    function_response=types.FunctionResponse(
                        id=call.id, name=call.name, response={"output": f"x = {i}"}
                    )
                )
                for i, call in enumerate(answer.function_calls or [])
            ]
            contents.append(types.Content(role="user", parts=results))
        calls = it.calls
    assert answer.text == "Done."
    assert [call.branch for call in calls] == [None] * 4
    assert [call.parent for call in calls] == [None, 0, 1, 2]
    assert exact(calls)
    assert [m.role for m in calls[1].messages] == [Role.TOOL, Role.TOOL]
    assert EchoChange.REASONING in calls[1].echo_changes


async def test_streamed_and_whole_answers_say_the_same(tmp_path: Path) -> None:
    """The chunks add up to the same thoughts, text, calls and counts."""
    async with client(tmp_path, says(THINKS, delay_s=0.01)) as (_, sdk):
        whole = await ask(sdk, tools=TOOLS)
        stream = await sdk.models.generate_content_stream(
            model="m", contents=["Mend it."] * 2, config={"tools": TOOLS}
        )
        chunks = [chunk async for chunk in stream]
    parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts]

    def told(parts: Any) -> Any:
        thoughts = "".join(part.text for part in parts if part.thought)
        text = "".join(part.text for part in parts if part.text and not part.thought)
        calls = [part.function_call for part in parts if part.function_call]
        signed = [bool(part.thought_signature) for part in parts if part.function_call]
        return thoughts, text, [(call.name, call.args) for call in calls], signed

    assert told(parts) == told(whole.candidates[0].content.parts)
    assert told(parts)[2:] == (
        [("read", {"path": "a.py"}), ("read", {"path": "b.py"})],
        [True, False],
    )
    assert len([part for part in parts if part.thought]) > 1
    ends = [chunk.candidates[0].finish_reason for chunk in chunks]
    assert ends == [None] * (len(chunks) - 1) + [types.FinishReason.STOP]
    last, first = chunks[-1].usage_metadata, whole.usage_metadata
    assert last.candidates_token_count == first.candidates_token_count
    assert last.thoughts_token_count == first.thoughts_token_count


async def test_several_candidates(tmp_path: Path) -> None:
    """Each is sampled for itself, and each is recorded."""
    async with client(tmp_path, in_turn("One.", "Two.")) as (it, sdk):
        answer = await ask(sdk, candidate_count=2)
        assert len(it.calls) == 2
    texts = [candidate.content.parts[0].text for candidate in answer.candidates]
    assert sorted(texts) == ["One.", "Two."]
    assert [candidate.index for candidate in answer.candidates] == [0, 1]


async def test_a_forced_function_is_called(tmp_path: Path) -> None:
    """Mode ANY with one allowed name."""
    calling = types.FunctionCallingConfig(mode="ANY", allowed_function_names=["read"])
    config = types.ToolConfig(function_calling_config=calling)
    async with client(tmp_path, says(CALLS)) as (_, sdk):
        answer = await ask(sdk, tools=TOOLS, tool_config=config)
    assert [call.name for call in answer.function_calls] == ["read", "read"]


async def test_the_sdk_calls_python_functions_by_itself(tmp_path: Path) -> None:
    """Its automatic function calling ends with the answer, on one exact sequence."""

    def read(path: str) -> str:
        """Read a file."""
        return f"{path} is empty"

    async with client(tmp_path, in_turn(CALLS, "Both are empty.")) as (it, sdk):
        answer = await ask(sdk, tools=[read])
        calls = it.calls
    assert answer.text == "Both are empty."
    assert [call.branch for call in calls] == [None, None]
    assert exact(calls)
    assert [m.content for m in calls[1].messages] == ["a.py is empty", "b.py is empty"]


async def test_stop_sequences_and_limits(tmp_path: Path) -> None:
    """A stop string ends the answer before it; a limit is kept and said."""
    async with client(tmp_path, says("One END two")) as (_, sdk):
        stopped = await ask(sdk, stop_sequences=["END"])
        short = await ask(sdk, "Again.", max_output_tokens=2)
    assert stopped.text.strip() == "One"
    assert stopped.candidates[0].finish_reason is types.FinishReason.STOP
    assert short.candidates[0].finish_reason is types.FinishReason.MAX_TOKENS
    assert short.usage_metadata.candidates_token_count == 2


async def test_pictures_are_refused_where_the_model_sees_text_alone(tmp_path: Path) -> None:
    """A clear 400, in the SDK's own class."""
    picture = types.Part.from_bytes(data=b"\x89PNG", mime_type="image/png")
    async with client(tmp_path, says("Red.")) as (it, sdk):
        with pytest.raises(errors.ClientError, match="text alone") as caught:
            await ask(sdk, [picture, "What is it?"])
        assert it.calls == ()
    assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")


class Verdict(pydantic.BaseModel):
    """What a structured answer must be."""

    good: bool


async def test_structured_output(tmp_path: Path) -> None:
    """The SDK's own parsing: the schema reaches the engine, the answer becomes an object."""
    wire = Constrained()
    asked: Any = {"response_mime_type": "application/json", "response_schema": Verdict}
    async with client(tmp_path, says('{"good": true}'), wire=wire) as (_, sdk):
        answer = await ask(sdk, **asked)
    assert answer.parsed == Verdict(good=True)
    assert wire.asked[0] is not None
    assert '"type":"boolean"' in wire.asked[0].schema
    async with client(tmp_path / "other", says("{}")) as (_, sdk):
        with pytest.raises(errors.ClientError, match="structured output"):
            await ask(sdk, **asked)


async def test_counting_is_what_the_prompt_has(tmp_path: Path) -> None:
    """A count says what the same contents are then charged."""
    async with client(tmp_path, says("Hello.")) as (it, sdk):
        counted = await sdk.models.count_tokens(model="m", contents="Mend it.")
        answer = await ask(sdk)
        assert len(it.calls) == 1
    assert counted.total_tokens == answer.usage_metadata.prompt_token_count


async def test_models(tmp_path: Path) -> None:
    """The list, and each model by its name."""
    async with client(tmp_path, says("")) as (_, sdk):
        (one,) = [model async for model in await sdk.models.list()]
        again = await sdk.models.get(model=one.name)
    assert (one.name, one.input_token_limit) == ("models/scripted", 20_000)
    assert again == one


async def test_errors_are_the_sdks_own(tmp_path: Path) -> None:
    """Wrong secret, wrong field, hosted tool, overflow: each with its status and its words."""
    search = types.Tool(google_search=types.GoogleSearch())
    async with client(tmp_path, says("x"), window=100) as (it, sdk):
        for words, contents, config in (
            ("topP=2", "Hi", {"top_p": 2}),
            ("googleSearch", "Hi", {"tools": [search]}),
            ("input token count .* exceeds the maximum", "Hello. " * 40, {}),
        ):
            with pytest.raises(errors.ClientError, match=words) as caught:
                await ask(sdk, contents, **config)
            assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
        async with sdk_of(it.url, "wrong") as stranger:
            with pytest.raises(errors.ClientError) as caught:
                await ask(stranger)
        assert (caught.value.code, caught.value.status) == (401, "UNAUTHENTICATED")
        assert it.calls == ()


@pytest.mark.parametrize("method", ["generate_content", "generate_content_stream"])
async def test_a_busy_engine_is_unavailable(tmp_path: Path, method: str) -> None:
    """503, also for a stream that has not begun."""
    busy = Reply([], status=503, retry_after_s=0.01)
    async with client(tmp_path, lambda *_: busy) as (_, sdk):
        with pytest.raises(errors.ServerError) as caught:
            await anext(aiter(await getattr(sdk.models, method)(model="m", contents="Hi")))
    assert (caught.value.code, caught.value.status) == (503, "UNAVAILABLE")


async def test_hanging_up_stops_the_engine(tmp_path: Path) -> None:
    """Within a second nothing runs any more, and the call is kept as what it was.

    The SDK has no way to close a stream: its connection ends with its client.
    """
    async with rig(tmp_path, says("word " * 200, delay_s=0.02)) as it:
        async with sdk_of(it.url, it.key) as sdk:
            stream = await sdk.models.generate_content_stream(model="m", contents="Hi")
            assert (await anext(stream)).text
            await stream.aclose()
        async with asyncio.timeout(5):
            while it.running or not it.calls:  # noqa: ASYNC110  # the engine tells no event
                await asyncio.sleep(0.01)
        assert it.calls[0].outcome is CallOutcome.CLIENT_GONE
