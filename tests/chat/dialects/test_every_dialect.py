"""Behaviour that all dialects share, tested with neutral messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from chat.dialects.wires import (
    ALL_WIRES,
    ANTHROPIC,
    CHAT,
    COMPLETIONS,
    GOOGLE,
    RESPONSES,
    TEXT,
    WIRES,
    TalkWire,
    Wire,
    finished,
    neutral,
    sse,
)
from tugline import errors
from tugline.chat.dialects import DIALECTS
from tugline.chat.dialects.base import Action, HttpRequest
from tugline.chat.dialects.decoding import ParseCache
from tugline.chat.dialects.openai_chat import OpenAIChat
from tugline.chat.model_call import (
    ReasoningDelta,
    Request,
    TextDelta,
    ThreadInfo,
    ToolChoice,
    Usage,
)
from tugline.errors import ContextOverflow, RequestError
from tugline.types import Finish, Image, Message, Role, Tool, ToolCall

each_wire = pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
every_wire = pytest.mark.parametrize("wire", ALL_WIRES.values(), ids=ALL_WIRES)
READ, RUN = ToolCall("a", "read", '{"path":"x"}'), ToolCall("b", "read", '{"n":[1,2.5]}')
PIXEL = "data:image/png;base64,AA=="
PIECES = {"text": TextDelta, "reasoning": ReasoningDelta, "call": lambda call: ToolCall(**call)}
HERE = Path(__file__).parent
REQUESTS = yaml.safe_load((HERE / "requests.yaml").read_text(encoding="utf-8"))
TABLES = yaml.safe_load((HERE / "tables.yaml").read_text(encoding="utf-8"))
UNDERSTOOD = [json.loads(line) for line in (HERE / "understood.jsonl").read_text().splitlines()]
"""Fields or headers of a request, and the parts of the neutral request that they set."""


# --------------------------------------------------------------------------- routes and secrets
@pytest.mark.parametrize("row", TABLES["routes"], ids=lambda row: f"{row['request'][:4]}")
def test_every_route_has_one_dialect(row: dict[str, Any]) -> None:
    """A version, key or header selects the dialect of a shared route; Chat has all the rest."""
    request = HttpRequest(*row["request"])
    found = [(d.name, d.match(request)) for d in DIALECTS if d.match(request) is not None]
    owner = row["dialect"]
    assert found[:1] == ([(owner, Action[row["action"]])] if owner else [])


@every_wire
def test_the_secret_is_read_from_the_places_of_its_api(wire: Wire) -> None:
    """Every API takes a bearer token; Anthropic and Google also a header or parameter."""
    for row in TABLES["secrets"]:
        if row.get("dialect") in {None, wire.dialect.name}:
            assert wire.dialect.find_secret(row["headers"], row["query"]) == row["secret"], row


# --------------------------------------------------------------------------- requests
@each_wire
def test_a_conversation_is_the_same_in_every_dialect(wire: TalkWire) -> None:
    """Text, reasoning, parallel calls, results in another order and images are parsed alike."""
    messages = (
        Message(Role.SYSTEM, "Be brief."),
        Message(Role.USER, "Look: ", images=(Image(PIXEL, 6),)),
        Message(Role.ASSISTANT, "I look.", (READ, RUN), reasoning="Hm."),
        Message(Role.TOOL, "two", tool_call_id="b"),
        Message(Role.TOOL, "one", tool_call_id="a", images=(Image(PIXEL, 3),)),
        Message(Role.ASSISTANT, "Done."),
        Message(Role.USER, "Thanks."),
    )
    body = wire.write(messages)
    request = wire.parse({**body, "tools": wire.tools})
    assert request.messages == messages
    assert request.tools[0] == Tool("read", "Read", {"type": "object"})
    assert (request.n, request.parallel, request.tool_choice) == (1, True, ToolChoice())
    assert (request.sampling.temperature, request.thread) == (None, ThreadInfo())


@each_wire
def test_a_known_prefix_is_not_parsed_again(wire: TalkWire) -> None:
    """Messages of an earlier request are the same objects, wherever the history is in the body."""
    cache = ParseCache()
    messages = [Message(Role.SYSTEM, "s" * 4000), Message(Role.USER, "Hi")]
    for i in range(40):
        call = ToolCall(f"c{i}", "read", '{"path":"x"}')
        messages.append(Message(Role.ASSISTANT, "word " * 30, (call,)))
        messages.append(Message(Role.TOOL, "line\n" * 250, tool_call_id=call.id))
    first = wire.parse({**wire.write(messages[:-2]), "tools": wire.tools}, cache)
    body = {**wire.fields, **wire.write(messages), "tools": wire.tools}
    request = wire.request(body)
    assert len(request.body) > 60_000
    second = wire.dialect.parse(request, cache)
    assert second == wire.parse(body)
    more = wire.write([*messages, Message(Role.USER, "Go on.")])
    third = wire.dialect.parse(wire.request({"tools": wire.tools, **wire.fields, **more}), cache)
    for earlier, later in ((first, second), (second, third)):
        assert all(a is b for a, b in zip(earlier.messages, later.messages, strict=False))
        assert later.tools is earlier.tools


TURNS = st.sampled_from(
    [
        Message(Role.USER, "Hi"),
        Message(Role.ASSISTANT, "So."),
        Message(Role.ASSISTANT, "Yes.", reasoning="Hm."),
        Message(Role.ASSISTANT, "", (READ,)),
    ]
)


@each_wire
@given(
    histories=st.lists(
        st.tuples(st.lists(TURNS, min_size=1, max_size=6), st.booleans()), max_size=6
    )
)
def test_the_cache_changes_nothing(
    wire: TalkWire, histories: list[tuple[list[Message], bool]]
) -> None:
    """Whatever was parsed or refused before, a request is parsed as if it were the first."""
    cache = ParseCache()
    for history, refused in histories:
        body = wire.write([*history, Message(Role.USER, "Go on.")])
        if refused:
            (name,) = {"messages", "input", "contents"} & body.keys()
            with pytest.raises(RequestError):
                wire.parse({**body, name: [*body[name], 7]}, cache)
        assert wire.parse(body, cache) == wire.parse(body)


def test_requests_with_a_common_beginning_are_parsed_correctly() -> None:
    """The cache follows the JSON: repeated keys, white space and where items really end."""

    def parse(text: str, cache: ParseCache) -> list[str]:
        body = HttpRequest("POST", "v1", "/chat/completions", "", {}, text.encode())
        return [message.content for message in OpenAIChat().parse(body, cache).messages]

    def user(*texts: str) -> str:
        return ",".join(f'{{"role":"user","content":"{text}"}}' for text in texts)

    front = f'{{"messages":[{user("a", "b")}'
    for text, contents in (
        (f"{front}]}}", ["a", "b"]),
        (f"{front} ,\n {user('c')}]}}", ["a", "b", "c"]),
        (f'{front},{user("c")}],"messages":[{user("c")}]}}', ["c"]),
        (f'{front},{user("c")}],"messages":[{user("c", "d")}]}}', ["c", "d"]),
        (f'{front},{user("e")}],"model":"m"}}', ["a", "b", "e"]),
        (f"{front}]}}", ["a", "b"]),
    ):
        for before in (front + "]}", f"{front},{user('c')}]}}", text):
            cache = ParseCache()
            assert parse(before, cache)[-1] in "bcde"
            assert parse(text, cache) == parse(text, ParseCache()) == contents


@pytest.mark.parametrize("case", REQUESTS, ids=lambda case: case["name"])
def test_requests_are_parsed_into_neutral_requests(case: dict[str, Any]) -> None:
    """Every field of the neutral request is parsed, and equivalent bodies alike."""
    wire = ALL_WIRES[case["dialect"]]
    meant = msgspec.convert({"model": "m", **case["means"]}, Request)
    for body in case["bodies"]:
        sent = wire.request(body, case.get("path"), headers=case.get("headers", {}))
        parsed = wire.dialect.parse(sent, ParseCache())
        assert neutral(parsed) == meant
        own = case.get("own", {})
        assert {name: getattr(parsed, name) for name in own} == own


@pytest.mark.parametrize(
    "row", UNDERSTOOD, ids=lambda row: "-".join((row["dialect"], *row["means"]))
)
def test_fields_set_their_part_of_the_neutral_request(row: dict[str, Any]) -> None:
    """Tool choice, sampling, formats and threads are set; an unknown field changes nothing."""
    wire = ALL_WIRES[row["dialect"]]
    body = wire.write([Message(Role.USER, "Hi")])
    body |= {"tools": wire.tools} if isinstance(wire, TalkWire) else {}
    plain = wire.parse(body)
    fields = {**row.get("fields", {}), "a_field_of_tomorrow": {"x": 1}}
    request = wire.parse(body | fields, headers=row.get("headers", {}))
    meant = msgspec.convert({"model": "m", **row["means"]}, Request)
    parts = {name: getattr(meant, name) for name in row["means"]}
    assert neutral(request) == replace(neutral(plain), **parts)


# --------------------------------------------------------------------------- responses
@st.composite
def answers(draw: st.DrawFn, wire: TalkWire) -> Message:
    """Reasoning, text and calls in any combination."""
    calls = draw(st.lists(wire.calls, max_size=4))
    made = tuple(ToolCall(f"call_{i}", name, text) for i, (name, text) in enumerate(calls))
    return Message(Role.ASSISTANT, draw(TEXT), made, reasoning=draw(st.none() | TEXT) or None)


def values_of(call: ToolCall) -> Any:
    """Name and arguments of a call, as values where they are JSON."""
    try:
        return (call.name, json.loads(call.arguments or "{}"))
    except ValueError:
        return (call.name, call.arguments)


@each_wire
@given(data=st.data())
def test_an_echoed_answer_keeps_its_meaning(wire: TalkWire, data: st.DataObject) -> None:
    """Streamed or whole, the answer is the same, and so is its echo, however clients rewrite it."""
    message = data.draw(answers(wire))
    request = wire.hello(tools=wire.tools, **wire.more)
    answer = wire.answer(wire.whole(request, message))
    for single in (False, True):
        assert wire.collect(wire.streamed(request, message, single=single)) == answer
    rewrite = data.draw(st.sampled_from(wire.rewrites))
    body = wire.echo(answer, rewrite)
    _, back, _ = wire.parse({**body, "tools": wire.tools}).messages
    assert back.content == message.content
    assert back.reasoning == (message.reasoning if rewrite != "dropped" else None)
    assert [values_of(call) for call in back.tool_calls] == [*map(values_of, message.tool_calls)]
    if not rewrite.endswith("ids"):
        assert [call.id for call in back.tool_calls] == [call.id for call in message.tool_calls]


@pytest.mark.parametrize("case", TABLES["replies"], ids=lambda case: case["name"])
def test_a_reply_has_the_parts_and_events_of_its_api(case: dict[str, Any]) -> None:
    """A reply has the API's parts, whole, streamed and for malformed calls, and exact counts."""
    wire = WIRES[case["dialect"]]
    request = wire.hello(tools=wire.tools, **case.get("fields", {}))
    message = msgspec.convert(case["message"], Message)
    reply = wire.whole(request, message)
    assert wire.answer(reply) == case["answer"]
    assert usage_of(reply) == TABLES["usage"][case["dialect"]]
    stream = wire.streamed(request, message)
    assert wire.collect(stream) == case["answer"]
    if "events" in case:
        assert_events(stream, case["events"])


@pytest.mark.parametrize("case", TABLES["streams"], ids=lambda case: case["name"])
def test_a_stream_has_the_events_of_its_api(case: dict[str, Any]) -> None:
    """The events are the API's in any order of choices, also with keep-alives in between."""
    wire = WIRES[case["dialect"]]
    request = wire.hello(tools=wire.tools, **case.get("fields", {}))
    stream = wire.dialect.stream(request, "s1-4", 17)
    sent = stream.start(Usage(31, 0))
    for step in case["steps"]:
        if step == "keep_alive":
            sent += stream.keep_alive()
        else:
            piece = next(make(step[name]) for name, make in PIECES.items() if name in step)
            sent += stream.add(piece, step.get("choice", 0))
    done = [
        finished(msgspec.convert(one["message"], Message), finish=Finish(one.get("finish", "stop")))
        for one in case["finish"]
    ]
    assert_events(sent + stream.finish(done), case["events"])


def assert_events(stream: bytes, expected: list[dict[str, Any]]) -> None:
    """These events and no others, each with these fields."""
    found = sse(stream)
    assert [event | fields for event, fields in zip(found, expected, strict=True)] == found


@pytest.mark.parametrize(
    ("finish", "stop", "calls", "reasons"),
    [
        (Finish.STOP, None, (), ("end_turn", "STOP", "stop", "completed")),
        (Finish.STOP, "END", (), ("stop_sequence", "STOP", "stop", "completed")),
        (Finish.STOP, None, (READ,), ("tool_use", "STOP", "tool_calls", "completed")),
        (Finish.LENGTH, None, (READ,), ("max_tokens", "MAX_TOKENS", "length", "incomplete")),
        (Finish.ABORT, None, (), ("max_tokens", "MAX_TOKENS", "length", "incomplete")),
    ],
)
def test_finish_reasons_are_those_of_the_api(
    finish: Finish, stop: str | None, calls: tuple[ToolCall, ...], reasons: tuple[str, ...]
) -> None:
    """Finish, stop string and calls decide the reason; a truncated answer is marked as such."""
    message = Message(Role.ASSISTANT, "x", calls)
    for wire, reason in zip(WIRES.values(), reasons, strict=True):
        reply = wire.whole(wire.hello(), message, finish=finish, stop=stop)
        assert wire.reason(reply) == reason
        stream = wire.streamed(wire.hello(), message, finish=finish, stop=stop)
        assert f'"{reason}"' in stream.decode()
        if wire is ANTHROPIC:
            assert reply["stop_sequence"] == stop


def usage_of(reply: dict[str, Any]) -> Any:
    """The token counts of a reply."""
    return reply.get("usage", reply.get("usageMetadata"))


@every_wire
def test_usage_counts_are_exact(wire: Wire) -> None:
    """A whole reply has its counts; a stream at its end, with OpenAI's APIs only on request."""
    message = Message(Role.ASSISTANT, "x", reasoning="Hm.")
    request = wire.hello(stream_options={"include_usage": True})
    usage = usage_of(wire.whole(request, message))
    assert usage == TABLES["usage"][wire.dialect.name]
    stream = wire.streamed(request, message)
    assert json.dumps(usage, separators=(",", ":")) in stream.decode()
    chunked = wire in (CHAT, COMPLETIONS)
    assert stream.endswith(b"data: [DONE]\n\n") is chunked
    assert (b"usage" not in wire.streamed(wire.hello(), message)) is chunked


@pytest.mark.parametrize("name", TABLES["counts"])
def test_a_count_has_the_shape_of_its_api(name: str) -> None:
    """A token count, by which clients decide when to compact their history, is as in its API."""
    assert json.loads(WIRES[name].dialect.encode_count(12)) == TABLES["counts"][name]


@every_wire
def test_the_list_of_models_has_the_window(wire: Wire) -> None:
    """The list and the page of the model alone have the window."""
    page = json.loads(wire.dialect.encode_models(["m"], 8192, 17))
    (model,) = page.get("data", page.get("models"))
    assert model == json.loads(wire.dialect.encode_model("m", 8192, 17))
    assert "m" in (model.get("id"), model.get("baseModelId"))
    assert 8192 in model.values()


# --------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("dialect", "row"),
    [(name, row) for name, rows in TABLES["errors"].items() for row in rows],
    ids=lambda part: part if isinstance(part, str) else f"{part['error']}-{part['status']}",
)
def test_errors_have_the_original_shape(dialect: str, row: dict[str, Any]) -> None:
    """Status, text and type are the API's; clients do not retry where that cannot help."""
    wire, options = ALL_WIRES[dialect], row.get("with", {})
    error = getattr(errors, row["error"])("no", **options)
    found, headers, body = wire.dialect.encode_error(error)
    inner = json.loads(body)["error"]
    assert (found, inner["message"]) == (row["status"], "no")
    assert row["value"] in {*map(str, inner.values())}
    assert headers.get("x-should-retry") == row.get("retry")
    assert headers.get("retry-after") == ("2" if "retry_after" in options else None)
    if wire in (CHAT, RESPONSES, COMPLETIONS):
        assert inner["param"] == options.get("param")
    stream = wire.dialect.stream(wire.hello(), "s1-4", 17)
    (event, *_) = sse(stream.fail(error))
    assert event.get("error", event)["message"] == "no"


@pytest.mark.parametrize("row", TABLES["overflows"], ids=lambda row: row["dialect"])
def test_an_overflow_is_worded_as_clients_expect_it(row: dict[str, Any]) -> None:
    """The message has the words on which an API's clients, such as Claude Code, compact."""
    prompt, window = row["counts"]
    error = ContextOverflow("no room", prompt=prompt, window=window)
    body = ALL_WIRES[row["dialect"]].dialect.encode_error(error)[2]
    assert json.loads(body)["error"]["message"] == row["words"]


@every_wire
def test_a_neutral_field_has_the_name_of_the_dialect(wire: Wire) -> None:
    """Errors name ``top_p`` and ``messages`` as the API does."""
    names = {"google": "contents", "openai_responses": "input", "openai_completions": "prompt"}
    body = wire.dialect.encode_error(ContextOverflow("no", param="messages"))[2].decode()
    assert f'"{names.get(wire.dialect.name, "messages")}"' in body or wire is ANTHROPIC
    body = wire.dialect.encode_error(RequestError("no", param="top_p"))[2].decode()
    assert ("generationConfig.topP" in body) == (wire is GOOGLE)


@every_wire
def test_a_comment_keeps_a_stream_alive(wire: Wire) -> None:
    """A comment may come before the first event; Gemini CLI accepts none."""
    stream = wire.dialect.stream(wire.hello(), "s1-4", 17)
    assert stream.keep_alive() == (b"" if wire is GOOGLE else b": keep-alive\n\n")
    assert stream.start(Usage(31, 0)) or wire is GOOGLE
    assert b"data" in stream.add(TextDelta("x"))
