"""The official SDKs of four APIs against the gateway, over real sockets, as one table."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from anthropic.lib.tools import BetaAsyncAbstractMemoryTool
from google.genai import errors, types

from conformance.programs import CALLS, THINKS, exact
from conformance.sdk_clients import APIS, READ, Api
from support.engine import Constrained, Play, reply_in_turn, reply_with
from support.gateway import OpenSession, open_session
from tugline.gateway.policy import CallSettings
from tugline.testing import Reply
from tugline.types import Branch, EchoChange, Role, TraceKind

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession")
BOTH = [("read", {"path": "a.py"}), ("read", {"path": "b.py"})]
CHAT, RESPONSES, ANTHROPIC, GOOGLE = APIS
each_api = pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
each_echo = pytest.mark.parametrize(
    ("api", "echo"),
    [(api, echo) for api in APIS for echo in api.echoes],
    ids=lambda value: getattr(value, "name", value),
)


@contextlib.asynccontextmanager
async def client(
    folder: Path, api: Api, *plays: Play, **how: Any
) -> AsyncIterator[tuple[OpenSession, Any]]:
    """A session and the SDK that speaks to it."""
    async with (
        open_session(folder, *plays, **how) as session,
        api.connect(session.url, session.key) as sdk,
    ):
        yield session, sdk


# --------------------------------------------------------------------------- answers
@each_echo
async def test_a_loop_of_parallel_tools_is_one_exact_sequence(
    tmp_path: Path, api: Api, echo: str
) -> None:
    """However harnesses echo the history, every turn extends the ids of the one before."""
    async with client(tmp_path, api, reply_in_turn(THINKS, THINKS, THINKS, "Done.")) as (
        session,
        sdk,
    ):
        history = api.start("Mend it.")
        for _ in range(4):
            reply = await api.ask(sdk, history, tools=True, system="Help.")
            history += api.echo(reply, echo)
        calls = session.calls
    assert (reply.text, reply.finish) == ("Done.", "stop")
    assert [call.branch for call in calls] == [None] * 4
    assert [call.parent for call in calls] == [None, 0, 1, 2]
    assert exact(calls)
    assert [message.role for message in calls[1].messages] == [Role.TOOL, Role.TOOL]
    changes = {call.echo_changes for call in calls[1:]}
    if api is GOOGLE:
        assert all(EchoChange.REASONING in change for change in changes)
    else:
        rewritten = {"respaced": (EchoChange.ARGUMENTS,)}
        rewritten["as text"] = (EchoChange.REASONING, EchoChange.TEXT)
        assert changes == {rewritten.get(echo, ())}


@each_api
async def test_streamed_and_whole_answers_are_equal(tmp_path: Path, api: Api) -> None:
    """The SDK builds the same answer from events that come as tokens are sampled.

    The counts are exact, and every answer has an id of its own.
    """
    async with client(tmp_path, api, reply_with(THINKS, delay_s=0.002)) as (session, sdk):
        whole = await api.ask(sdk, api.start("Mend it."), tools=True)
        streamed = await api.stream(sdk, api.start("Mend it. Mend it."), tools=True)
        calls = session.calls
    assert whole.content == streamed.content == ("I look.", "Hm, ä. It is a file.", BOTH, "tools")
    for reply, call in zip((whole, streamed), calls, strict=True):
        assert (reply.prompt, reply.sampled) == (len(call.prompt_ids), len(call.sampled_ids))
    assert whole.id != streamed.id
    assert streamed.deltas > 1


@pytest.mark.parametrize("force", ["any", "named"])
@each_api
async def test_a_forced_tool_is_called(tmp_path: Path, api: Api, force: str) -> None:
    """The answer is the call that the tool choice requires."""
    async with client(tmp_path, api, reply_with(CALLS)) as (_, sdk):
        reply = await api.ask(sdk, api.start("Mend it."), tools=True, force=force)
    assert reply.finish == "tools"
    assert reply.calls[-1][0] == "read"


@each_api
async def test_a_short_limit_ends_the_answer(tmp_path: Path, api: Api) -> None:
    """Whole and streamed answers end at the limit."""
    async with client(tmp_path, api, reply_with("Hello there.")) as (_, sdk):
        whole = await api.ask(sdk, api.start("Mend it."), limit=3)
        streamed = await api.stream(sdk, api.start("Again."), limit=3)
    assert (whole.finish, whole.sampled) == (streamed.finish, streamed.sampled) == ("length", 3)


class Verdict(pydantic.BaseModel):
    """The type of a structured answer."""

    good: bool


async def _parse(api: Api, sdk: Any) -> Any:
    ask: list[Any] = [{"role": "user", "content": "Well?"}]
    if api is CHAT:
        answer = await sdk.chat.completions.parse(model="m", messages=ask, response_format=Verdict)
        return answer.choices[0].message.parsed
    if api is RESPONSES:
        answer = await sdk.responses.parse(model="m", input="Well?", text_format=Verdict)
        return answer.output_parsed
    if api is ANTHROPIC:
        answer = await sdk.messages.parse(
            model="m", max_tokens=99, messages=ask, output_format=Verdict
        )
        return answer.parsed_output
    config: Any = {"response_mime_type": "application/json", "response_schema": Verdict}
    answer = await sdk.models.generate_content(model="m", contents="Well?", config=config)
    return answer.parsed


@each_api
async def test_structured_output(tmp_path: Path, api: Api) -> None:
    """The SDK sends its schema to the engine, and parses the answer into an object."""
    wire = Constrained()
    async with client(tmp_path, api, reply_with('{"good": true}'), wire=wire) as (session, sdk):
        assert await _parse(api, sdk) == Verdict(good=True)
        await api.ask(sdk, api.start("Mend it."))
        assert [call.constrained for call in session.calls] == [True, False]
    assert '"good"' in wire.asked[0].schema
    async with client(tmp_path / "other", api, reply_with("{}")) as (_, sdk):
        with pytest.raises(api.error, match="structured output") as caught:
            await _parse(api, sdk)
        if api is RESPONSES:
            assert caught.value.param == "text.format"


_SCHEMA: Any = {"type": "object", "properties": {}, "additionalProperties": False}
STRICT: dict[str, Any] = {
    "chat": openai.pydantic_function_tool(Verdict, name="read"),
    "responses": {"type": "function", "name": "read", "parameters": _SCHEMA, "strict": True},
    "anthropic": {**READ, "input_schema": _SCHEMA, "strict": True},
}
"""A strict tool, as agent frameworks declare it by default."""


@pytest.mark.parametrize("api", [CHAT, RESPONSES, ANTHROPIC], ids=lambda api: api.name)
async def test_strict_tools_are_accepted(tmp_path: Path, api: Api) -> None:
    """Strict tools make no grammar, since a constrained answer could not be trained."""
    async with client(tmp_path, api, reply_with(CALLS)) as (session, sdk):
        reply = await api.ask(sdk, api.start("Mend it."), tools=[STRICT[api.name]])
        (call,) = session.calls
    assert reply.finish == "tools"
    assert [tool.strict for tool in call.tools] == [True]
    assert not call.constrained


# --------------------------------------------------------------------------- around answers
@each_api
async def test_counting_and_models(tmp_path: Path, api: Api) -> None:
    """The count equals the usage of the same prompt; models are listed and retrieved."""
    async with client(tmp_path, api, reply_with("Hello.")) as (session, sdk):
        counted = await api.count(sdk, api.start("Mend it."))
        reply = await api.ask(sdk, api.start("Mend it."))
        assert len(session.calls) == 1
        assert counted in {None, reply.prompt}
        assert await api.models(sdk) == (["scripted"], True)


HOSTED: dict[str, Any] = {
    "anthropic": {"type": "web_search_20250305", "name": "web_search"},
    "google": types.Tool(google_search=types.GoogleSearch()),
}
FULL = {"anthropic": "prompt is too long: .* tokens > 150 maximum", "google": "exceeds the maximum"}


@each_api
async def test_errors_are_the_sdks_own(tmp_path: Path, api: Api) -> None:
    """A wrong field, hosted tool, picture, long prompt or wrong key has status and message.

    The table of errors is one test, since each SDK is opened once.
    """
    async with client(tmp_path, api, reply_with("x"), window=150) as (session, sdk):
        hosted = HOSTED.get(api.name, {"type": "web_search"})
        full = FULL.get(api.name, "maximum context length")
        for match, history, options in (
            ("(?i)tokens=0", api.start("Hi"), {"limit": 0}),
            ("(?i)(web_search|googleSearch)", api.start("Hi"), {"tools": [hosted]}),
            ("only text prompts", api.start("What is it?", image=True), {}),
            (full, api.start("Hello. " * 60), {}),
        ):
            with pytest.raises(api.error, match=match) as caught:
                await api.ask(sdk, history, **options)
            assert _status(caught.value) == 400
            if api in {CHAT, RESPONSES}:
                assert "limit" not in options or caught.value.param == api.names["limit"]
                assert match != full or caught.value.code == "context_length_exceeded"
        async with api.connect(session.url, "wrong") as stranger:
            with pytest.raises(api.error) as wrong:
                await api.ask(stranger, api.start("Hi"))
        assert _status(wrong.value) == 401
        assert session.calls == ()
    if api is ANTHROPIC:
        assert wrong.value.body["error"]["type"] == "authentication_error"
        assert wrong.value.request_id
    elif api is GOOGLE:
        assert wrong.value.status == "UNAUTHENTICATED"
    else:
        assert wrong.value.code == "invalid_api_key"


def _status(error: Any) -> int:
    return error.code if isinstance(error, errors.APIError) else error.status_code


@pytest.mark.parametrize("status", [429, 503])
@each_api
async def test_a_busy_engine_is_the_dialects_overload(
    tmp_path: Path, api: Api, status: int
) -> None:
    """The error has Retry-After, also for a stream that has not begun."""
    busy = Reply([], status=status, retry_after_s=0.01)
    expected = {"anthropic": 529, "google": 503}.get(api.name, status)
    async with client(tmp_path, api, lambda *_: busy) as (_, sdk):
        for ask in (api.ask, api.stream):
            with pytest.raises(api.error) as caught:
                await ask(sdk, api.start("Hi"))
            assert _status(caught.value) == expected
            if api in {CHAT, RESPONSES}:
                assert "retry-after" in caught.value.response.headers


async def test_google_raises_errors_that_come_after_the_headers(tmp_path: Path) -> None:
    """The SDK raises for a bare error object, without ``data:``."""
    busy, tuning = Reply([], status=503), CallSettings(headers_within_s=0.0, tries=1)
    async with client(tmp_path, GOOGLE, lambda *_: busy, tuning=tuning) as (_, sdk):
        with pytest.raises(errors.ServerError) as caught:
            await GOOGLE.stream(sdk, GOOGLE.start("Hi"))
        assert caught.value.code == 503


# --------------------------------------------------------------------------- one API alone
async def test_several_choices(tmp_path: Path) -> None:
    """Each choice is a sample of its own, whole and streamed, in Chat and at Google."""
    async with client(tmp_path, CHAT, reply_with("Hello.")) as (session, sdk):
        ask: Any = {"model": "m", "messages": CHAT.start("Mend it."), "n": 3}
        whole = await sdk.chat.completions.create(**ask)
        texts = ["", "", ""]
        ask["messages"] = CHAT.start("Again.")
        async for chunk in await sdk.chat.completions.create(**ask, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert len(session.calls) == 6
    assert [choice.message.content for choice in whole.choices] == texts == ["Hello."] * 3
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage.completion_tokens == sum(len(call.sampled_ids) for call in session.calls[:3])
    async with client(tmp_path / "g", GOOGLE, reply_in_turn("One.", "Two.")) as (session, sdk):
        two = {"candidate_count": 2}
        answer = await sdk.models.generate_content(model="m", contents="Hi", config=two)
        assert len(session.calls) == 2
    texts = [candidate.content.parts[0].text for candidate in answer.candidates]
    assert sorted(texts) == ["One.", "Two."]
    assert [candidate.index for candidate in answer.candidates] == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_openais_stored_responses_are_continued(tmp_path: Path, *, stream: bool) -> None:
    """An id continues its response token for token, but not one of another session.

    A response with ``store=False`` cannot be continued either.
    """
    turns = reply_in_turn(THINKS, THINKS, "Done.")
    async with client(tmp_path, RESPONSES, turns) as (session, sdk):
        ask = RESPONSES.stream if stream else RESPONSES.ask
        options: dict[str, Any] = {"tools": True, "instructions": "Help."}
        reply = await ask(sdk, RESPONSES.start("Mend it."), **options)
        assert reply.raw.store
        for _ in range(2):
            results = [item for item in RESPONSES.echo(reply, "verbatim") if "output" in item]
            options["previous_response_id"] = reply.id
            reply = await ask(sdk, results, **options)
        assert (reply.text, reply.raw.previous_response_id) == ("Done.", options.popitem()[1])
        assert [call.parent for call in session.calls] == [None, 0, 1]
        assert exact(session.calls)
        loose = await RESPONSES.ask(sdk, RESPONSES.start("Hi"), store=False)
        for name in (loose.id, "resp_other-0"):
            with pytest.raises(openai.BadRequestError) as caught:
                await RESPONSES.ask(sdk, RESPONSES.start("Hi"), previous_response_id=name)
            assert caught.value.param == "previous_response_id"
        lost = {"type": "item_reference", "id": loose.raw.output[0].id}
        with pytest.raises(openai.BadRequestError, match="not a response of this session"):
            await RESPONSES.ask(sdk, [lost])


@anthropic.beta_async_tool
async def read(path: str) -> str:
    """Read a file.

    Args:
        path: Where it is.
    """
    return f"{path} = 1"


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_tool_runner_sends_only_what_is_new(
    tmp_path: Path, *, stream: bool
) -> None:
    """The gateway keeps the thread, with its system prompt and tools."""
    ask: Any = {"model": "m", "max_tokens": 2000, "system": "Help.", "tools": [read]}
    ask["messages"] = ANTHROPIC.start("Mend it.")
    async with client(tmp_path, ANTHROPIC, reply_in_turn(THINKS, THINKS, "Done.")) as (
        session,
        sdk,
    ):
        runner = sdk.beta.messages.tool_runner(**ask, stream=stream)
        replies = [reply async for reply in runner]
        last = await replies[-1].get_final_message() if stream else replies[-1]
        assert last.content[-1].text == "Done."
        assert [call.parent for call in session.calls] == [None, 0, 1]
        assert exact(session.calls)
        kept = session.live.transcript.parse_cache.conversations
        assert len(kept) == 3
        assert [tool.name for tool in session.calls[2].tools] == ["read"]
        thread = sdk.beta.messages.thread(**ask)
        await thread.send()
        kept.clear()
        await thread.send({"role": "user", "content": "And now?"})
        assert session.calls[-1].parent == session.calls[-2].number


class Notes(BetaAsyncAbstractMemoryTool):
    """The memory tool of the SDK, with one of its commands."""

    async def create(self, command: Any) -> str:
        """Return the text of the new file."""
        return f"{command.path}: {command.file_text}"

    view = str_replace = insert = delete = rename = create


async def test_anthropics_own_tools_are_run_by_the_client(tmp_path: Path) -> None:
    """Bash, editor and memory have a type and no schema; the SDK's runner gets their calls."""
    arguments = {"command": "create", "path": "/memories/a", "file_text": "x"}
    call = json.dumps({"name": "memory", "arguments": arguments})
    plays = reply_in_turn(f"<tool_call>\n{call}\n</tool_call>", "Done.")
    others: Any = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    ]
    async with client(tmp_path, ANTHROPIC, plays) as (session, sdk):
        runner = sdk.beta.messages.tool_runner(
            model="m", max_tokens=999, tools=[*others, Notes()], messages=ANTHROPIC.start("Hi")
        )
        last = [reply async for reply in runner][-1]
        assert last.content[-1].text == "Done."
        first, second = session.calls
    assert second.messages[0].content == "/memories/a: x"
    names = ["bash", "str_replace_based_edit_tool", "memory"]
    assert [tool.name for tool in first.tools] == names
    assert all(tool.parameters["properties"]["command"] for tool in first.tools)


async def test_openais_compaction(tmp_path: Path) -> None:
    """The summary is encrypted; the next request has it as the user's message, and branches."""
    async with client(tmp_path, RESPONSES, reply_in_turn("Done.", "All mended.", "Yes.")) as (
        session,
        sdk,
    ):
        items = RESPONSES.start("Mend it.")
        items += RESPONSES.echo(await RESPONSES.ask(sdk, items), "verbatim")
        compacted = await sdk.responses.compact(model="m", input=items)
        output = [item.model_dump(exclude_none=True, warnings=False) for item in compacted.output]
        answer = await RESPONSES.ask(sdk, [*output, {"role": "user", "content": "Is it?"}])
        calls = session.calls
    assert [item["type"] for item in output] == ["message", "compaction"]
    assert answer.text == "Yes."
    assert (calls[1].kind, calls[1].branch) == (TraceKind.COMPACTION, None)
    assert exact(calls[:2])
    assert calls[2].branch in set(Branch)
    assert "All mended." in calls[2].messages[1].content
