"""Anthropic Messages on the wire: what clients send, what they are told, what is refused."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tugline.chat.dialects.anthropic import Anthropic
from tugline.chat.dialects.base import Action, HttpRequest, ParseCache
from tugline.chat.request import (
    ChoiceMode,
    Constraint,
    ConstraintKind,
    Request,
    ThreadInfo,
    ToolChoice,
)
from tugline.chat.response import ReasoningDelta, Response, TextDelta, Usage
from tugline.errors import (
    BudgetExhausted,
    ContextOverflow,
    EngineError,
    RequestError,
    TooLarge,
    TuglineError,
    Unauthorized,
)
from tugline.types import Finish, Image, Message, Role, Sampling, Tool, ToolCall, TraceKind

ANTHROPIC = Anthropic()
READ = {"name": "read", "description": "Read", "input_schema": {"type": "object"}}
PIXEL = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
CACHE = {"cache_control": {"type": "ephemeral"}}


def incoming(
    body: Any, path: str = "/messages", query: str = "beta=true", **headers: str
) -> HttpRequest:
    """A request as Claude Code posts it."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return HttpRequest("POST", "v1", path, query, named, raw)


def parse(messages: list[Any], memory: ParseCache | None = None, **more: Any) -> Request:
    """The neutral request of a body with these messages."""
    body = {"model": "m", "max_tokens": 100, "messages": messages, **more}
    return ANTHROPIC.parse(incoming(body), memory or ParseCache())


def user(content: Any) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": content}


def block(text: str, **more: Any) -> dict[str, Any]:
    """A text block."""
    return {"type": "text", "text": text, **more}


def answered(message: Message, **more: Any) -> Response:
    """A finished answer that says `message`."""
    given = {"finish": Finish.STOP, "usage": Usage(31, 7, 20, 2), **more}
    return Response(id="s1-4", model="m", created=1_700_000_000, message=message, **given)


def refused(**body: Any) -> RequestError:
    """The error that a body with these fields is answered with."""
    with pytest.raises(RequestError) as caught:
        parse(body.pop("messages", [user("Hi")]), **body)
    return caught.value


# --------------------------------------------------------------------------- routes and secrets
@pytest.mark.parametrize(
    ("method", "path", "headers", "action"),
    [
        ("POST", "/messages", {}, Action.ANSWER),
        ("POST", "/messages/count_tokens", {}, Action.COUNT),
        ("GET", "/models", {"anthropic-version": "2023-06-01"}, Action.MODELS),
        ("GET", "/models/m", {"anthropic-version": "2023-06-01"}, Action.MODEL),
        ("GET", "/models", {}, None),
        ("GET", "/messages", {}, None),
        ("POST", "/chat/completions", {}, None),
    ],
)
def test_routes(method: str, path: str, headers: dict[str, str], action: Action | None) -> None:
    """The model routes, which three dialects share, are ours with an anthropic-version only."""
    assert ANTHROPIC.match(HttpRequest(method, "v1", path, "", headers)) is action


def test_the_secret_travels_in_either_header() -> None:
    """ANTHROPIC_API_KEY arrives as x-api-key, ANTHROPIC_AUTH_TOKEN as a bearer token."""
    assert ANTHROPIC.find_secret({"x-api-key": "k"}, "") == "k"
    assert ANTHROPIC.find_secret({"authorization": "Bearer k"}, "") == "k"
    assert ANTHROPIC.find_secret({"authorization": "Basic k"}, "") is None
    assert ANTHROPIC.find_secret({}, "key=k") is None


# --------------------------------------------------------------------------- what is understood
def test_a_request_as_claude_code_sends_it() -> None:
    """Its system blocks, the system message among the messages, deferred tools, thinking."""
    request = ANTHROPIC.parse(
        incoming(
            {
                "model": "stub-model",
                "max_tokens": 32000,
                "stream": True,
                "system": [
                    block("x-anthropic-billing-header: cc_version=2.1.329.adf; cc_entrypoint=cli;"),
                    block("You are Claude Code."),
                    block("\nBe brief.", **CACHE),
                ],
                "messages": [
                    user([block("<system-reminder>\n</system-reminder>\n"), block("Mend it.")]),
                    {"role": "system", "content": "Today is Monday."},
                ],
                "tools": [
                    READ,
                    {**READ, "name": "search", "type": "custom", "defer_loading": True},
                ],
                "metadata": {"user_id": '{"device_id":"d"}'},
                "thinking": {"type": "adaptive", "display": "updates"},
                "context_management": {
                    "edits": [{"type": "clear_thinking_20251015", "keep": "all"}]
                },
                "output_config": {"effort": "high"},
            },
            x_claude_code_session_id="s",
        ),
        ParseCache(),
    )
    assert request == Request(
        model="stub-model",
        messages=(
            Message(Role.SYSTEM, "You are Claude Code.\nBe brief."),
            Message(Role.USER, "<system-reminder>\n</system-reminder>\nMend it."),
            Message(Role.SYSTEM, "Today is Monday."),
        ),
        tools=(
            Tool("read", "Read", {"type": "object"}),
            Tool("search", "Read", {"type": "object"}),
        ),
        sampling=Sampling(max_tokens=32000),
        stream=True,
        usage_in_stream=True,
        thread=ThreadInfo("s"),
    )


def test_results_and_text_of_one_user_message_keep_their_order() -> None:
    """Parallel results as text, blocks, picture and error, then what the user says."""
    turn = [
        {"type": "thinking", "thinking": "Hm.", "signature": "AA=="},
        block("I look."),
        {"type": "tool_use", "id": "a", "name": "read", "input": {"path": "x", "n": [1, 2.5]}},
        {"type": "tool_use", "id": "b", "name": "read", "input": {}},
        {"type": "tool_use", "id": "c", "name": "find", "input": {}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "b", "content": [block("one"), PIXEL, block("two")]},
        {"type": "tool_result", "tool_use_id": "a", "content": "gone", "is_error": True},
        {
            "type": "tool_result",
            "tool_use_id": "c",
            "content": [{"type": "tool_reference", "tool_name": "grep"}],
        },
        {"type": "tool_result", "tool_use_id": "d"},
        block("Go on."),
        PIXEL,
    ]
    request = parse([user("Hi"), {"role": "assistant", "content": turn}, user(results)])
    picture = "data:image/png;base64,AA=="
    assert request.messages[1:] == (
        Message(
            Role.ASSISTANT,
            "I look.",
            (
                ToolCall("a", "read", '{"path":"x","n":[1,2.5]}'),
                ToolCall("b", "read", "{}"),
                ToolCall("c", "find", "{}"),
            ),
            reasoning="Hm.",
        ),
        Message(Role.TOOL, "one\ntwo", tool_call_id="b", images=(Image(picture, 3),)),
        Message(Role.TOOL, "gone", tool_call_id="a", failed=True),
        Message(Role.TOOL, "Tool found: grep", tool_call_id="c"),
        Message(Role.TOOL, "", tool_call_id="d"),
        Message(Role.USER, "Go on.", images=(Image(picture, 6),)),
    )


def test_what_does_not_change_meaning_parses_alike() -> None:
    """Cache marks, text as string or block, and one turn in two messages, as clients vary them."""
    use = {"type": "tool_use", "id": "a", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
    one = parse(
        [user("Hi"), {"role": "assistant", "content": [block("I look."), use]}, user([result])],
        system="Help.",
    )
    marked = {**result, "content": [block("x")], **CACHE}
    other = parse(
        [
            user([block("Hi", **CACHE)]),
            {"role": "assistant", "content": "I look."},
            {"role": "assistant", "content": [{**use, **CACHE}]},
            user([marked]),
        ],
        system=[block("Help.", **CACHE)],
    )
    assert one == other


def test_a_known_front_is_not_parsed_again() -> None:
    """What was read in an earlier request is the same objects, and 64 kB cost next to nothing."""
    memory = ParseCache()
    turns = [user("Hi")]
    for i in range(100):
        use = {"type": "tool_use", "id": f"c{i}", "name": "read", "input": {"path": "x" * 200}}
        result = {"type": "tool_result", "tool_use_id": f"c{i}", "content": "y" * 400}
        turns += [{"role": "assistant", "content": [use]}, user([result])]
    first = parse(turns, memory, tools=[READ], system="Help.")
    longer = incoming(
        {
            "model": "m",
            "max_tokens": 100,
            "messages": [*turns, {"role": "assistant", "content": "So."}, user("Go on.")],
            "tools": [READ],
            "system": "Help.",
        }
    )
    assert len(longer.body) > 64_000
    second = ANTHROPIC.parse(longer, memory)
    anew = ANTHROPIC.parse(longer, ParseCache())
    assert second == anew
    assert all(a is b for a, b in zip(first.messages, second.messages, strict=False))
    assert second.tools is first.tools
    known = min(timed(longer, memory) for _ in range(5))
    assert known < min(timed(longer, ParseCache()) for _ in range(5))


def timed(asked: HttpRequest, memory: ParseCache) -> float:
    """Seconds that one parse takes."""
    began = time.perf_counter()
    ANTHROPIC.parse(asked, memory)
    return time.perf_counter() - began


@pytest.mark.parametrize(
    ("asked", "choice", "parallel"),
    [
        ({"type": "auto"}, ToolChoice(), True),
        ({"type": "any"}, ToolChoice(ChoiceMode.REQUIRED), True),
        ({"type": "tool", "name": "read"}, ToolChoice(ChoiceMode.NAMED, ("read",)), True),
        ({"type": "none"}, ToolChoice(ChoiceMode.NONE), True),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            ToolChoice(ChoiceMode.REQUIRED),
            False,
        ),
    ],
)
def test_tool_choice(asked: dict[str, Any], choice: ToolChoice, *, parallel: bool) -> None:
    """Every form of tool_choice, and that one answer may be held to one call."""
    request = parse([user("Hi")], tools=[READ], tool_choice=asked)
    assert (request.tool_choice, request.parallel) == (choice, parallel)


def test_sampling_and_structured_output() -> None:
    """What is asked for is recorded as asked; a schema reaches the engine as it was written."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    request = parse(
        [user("Hi")],
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stop_sequences=["END"],
        output_config={"format": {"type": "json_schema", "schema": schema}},
        service_tier="auto",
        a_field_of_tomorrow={"x": 1},
    )
    assert request.sampling == Sampling(0.5, 0.9, 40, 100, stop=("END",))
    assert request.constraint == Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.parametrize(
    ("headers", "native"),
    [
        ({}, ThreadInfo()),
        ({"x-claude-code-session-id": "s"}, ThreadInfo("s")),
        (
            {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"},
            ThreadInfo("a", "s", TraceKind.SUBAGENT),
        ),
        (
            {
                "x-claude-code-session-id": "s",
                "x-claude-code-agent-id": "b",
                "x-claude-code-parent-agent-id": "a",
            },
            ThreadInfo("b", "a", TraceKind.SUBAGENT),
        ),
        ({"x-session-id": "s"}, ThreadInfo("s")),
        (
            {"x-session-id": "t", "x-parent-session-id": "s"},
            ThreadInfo("t", "s", TraceKind.SUBAGENT),
        ),
    ],
)
def test_the_harness_says_whose_call_it_is(headers: dict[str, str], native: ThreadInfo) -> None:
    """Claude Code's agents, nested ones too, and opencode's sessions."""
    body = {"model": "m", "max_tokens": 1, "messages": [user("Hi")]}
    asked = HttpRequest("POST", "", "/messages", "", headers, json.dumps(body).encode())
    assert ANTHROPIC.parse(asked, ParseCache()).thread == native


def test_counting_needs_no_limit_and_takes_any_last_message() -> None:
    """count_tokens shares the reading of a request, but nothing is sampled after it."""
    body = {"model": "m", "messages": [user("Hi"), {"role": "assistant", "content": "Yes"}]}
    counted = ANTHROPIC.parse(incoming(body, "/messages/count_tokens"), ParseCache())
    assert counted.messages[-1] == Message(Role.ASSISTANT, "Yes")
    assert json.loads(ANTHROPIC.encode_count(12)) == {"input_tokens": 12}


# --------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0"),
        ({"max_tokens": None}, "max_tokens", "required"),
        ({"max_tokens": "many"}, "max_tokens", "'many'"),
        ({"temperature": -1}, "temperature", ">= 0"),
        ({"top_p": 2}, "top_p", "<= 1"),
        ({"stop_sequences": "END"}, "stop_sequences", "array"),
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": "Hi"}, "messages", "array"),
        ({"messages": ["Hi"]}, "messages[0]", "an object"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role", "None must be text"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role", "'tool'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "=3"),
        (
            {"messages": [{"role": "assistant", "content": "The answer is"}]},
            "messages[0]",
            "begins the answer",
        ),
        (
            {"messages": [user([{"type": "document", "source": {"type": "base64"}}])]},
            "messages[0].content[0]",
            "'document'",
        ),
        (
            {"messages": [user([{"type": "image", "source": {"type": "file", "file_id": "f"}}])]},
            "messages[0].content[0].source.type",
            "base64 or url",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]},
            "messages[0].content[0]",
            "'redacted_thinking'",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
            "messages[0].content[0]",
            "'server_tool_use'",
        ),
        ({"system": [PIXEL]}, "system[0]", "only text"),
        ({"tools": {}}, "tools", "a list"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema", "an object"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0].type",
            "web_search",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "bash_20250124"),
        ({"tools": [{**READ, "strict": True}]}, "tools[0].strict", "read"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers", "mcp_servers"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type", "auto, any, tool, none"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0]",
            "clear_tool_uses_20250919",
        ),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": 1}]}},
            "context_management.edits[0]",
            "keep='all'",
        ),
        (
            {"output_config": {"format": {"type": "grammar"}}},
            "output_config.format",
            "json_schema",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    body: dict[str, Any], param: str, words: str
) -> None:
    """The error names the field, and its text says the value or what would be right."""
    error = refused(**body)
    assert error.param == param
    assert words in str(error)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"model":"m"}',
        b'{"model":"m","max_tokens":1,"messages":[' + b"[" * 9000 + b"]" * 9000 + b"]}",
        b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"\xff"}]}',
        b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}],"tools":["\xff"]}',
    ],
)
def test_malformed_bodies_are_the_clients_fault(body: bytes) -> None:
    """Whatever arrives is answered with a 400, never with a crash."""
    with pytest.raises(RequestError) as caught:
        ANTHROPIC.parse(incoming(body), ParseCache())
    assert ANTHROPIC.encode_error(caught.value)[0] == 400


FULL = {
    "model": "m",
    "max_tokens": 5,
    "system": [block("Help.", **CACHE)],
    "messages": [
        user([block("Hi"), PIXEL]),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "AA=="},
                {"type": "tool_use", "id": "a", "name": "read", "input": {"a": 1}},
            ],
        },
        user([{"type": "tool_result", "tool_use_id": "a", "content": [block("x")]}]),
    ],
    "tools": [{**READ, "type": "custom"}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
}
"""A request with a little of everything."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside `value`."""
    if not isinstance(value, dict | list):
        return [path]
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    return [path, *(way for key, each in inner for way in places(each, (*path, key)))]


def test_any_field_may_be_anything() -> None:
    """Each value in turn replaced by each kind of JSON: read or refused, never a crash."""
    for path in places(FULL):
        for wrong in (None, True, 3, -1.5, "", "x", [], ["x"], [None], {}, {"type": "x"}, [{}]):
            body: Any = json.loads(json.dumps(FULL))
            at = body
            for key in path[:-1]:
                at = at[key]
            if path:
                at[path[-1]] = wrong
            else:
                body = wrong
            with contextlib.suppress(RequestError):
                request = ANTHROPIC.parse(incoming(body), ParseCache())
                assert msgspec.convert(msgspec.to_builtins(request), Request) == request


# --------------------------------------------------------------------------- what is told
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("no"), 400, "invalid_request_error"),
        (BudgetExhausted("spent", status=404), 404, "not_found_error"),
        (Unauthorized("who"), 401, "authentication_error"),
        (TooLarge("much"), 413, "request_too_large"),
        (EngineError("gone"), 529, "overloaded_error"),
        (EngineError("busy", status=503, retry_after=2.0), 529, "overloaded_error"),
        (EngineError("refused", status=422), 500, "api_error"),
        (TuglineError("bug"), 500, "api_error"),
    ],
)
def test_errors_have_the_originals_shape(error: TuglineError, status: int, kind: str) -> None:
    """Status, type and text; a retry that cannot help is not asked for."""
    told, headers, body = ANTHROPIC.encode_error(error)
    found = json.loads(body)
    assert (told, found["type"], found["error"]) == (
        status,
        "error",
        {"type": kind, "message": str(error)},
    )
    assert found["request_id"] == headers["request-id"]
    useless = status < 500 or "refused" in str(error)
    assert headers.get("x-should-retry") == ("false" if useless else None)
    assert headers.get("retry-after") == ("2" if "busy" in str(error) else None)


def test_an_overflow_is_worded_as_claude_code_expects_it() -> None:
    """It compacts on "prompt is too long"; the numbers are the true ones where known."""
    body = ANTHROPIC.encode_error(ContextOverflow("no room", prompt=210, window=200))[2]
    assert json.loads(body)["error"]["message"] == "prompt is too long: 210 tokens > 200 maximum"
    body = ANTHROPIC.encode_error(ContextOverflow("no room"))[2]
    assert json.loads(body)["error"]["message"] == "prompt is too long: no room"


@pytest.mark.parametrize(
    ("more", "calls", "reason", "sequence"),
    [
        ({}, (), "end_turn", None),
        ({}, (ToolCall("a", "read", "{}"),), "tool_use", None),
        ({"finish": Finish.LENGTH}, (ToolCall("a", "read", "{}"),), "max_tokens", None),
        ({"finish": Finish.ABORT}, (), "max_tokens", None),
        ({"stop": "END"}, (), "stop_sequence", "END"),
    ],
)
def test_why_an_answer_ended(
    more: dict[str, Any], calls: tuple[ToolCall, ...], reason: str, sequence: str | None
) -> None:
    """Finish, stop string and calls in Anthropic's words, whole and streamed alike."""
    answer = answered(Message(Role.ASSISTANT, "x", calls), **more)
    request = parse([user("Hi")])
    whole = json.loads(ANTHROPIC.encode(request, [answer]))
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    delta = events(ANTHROPIC.stream(request, "s1-4", 0).finish([answer]))[0][1]["delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": sequence}


def events(data: bytes) -> list[tuple[str, Any]]:
    """The server-sent events in `data`."""
    found = []
    for chunk in data.decode().split("\n\n")[:-1]:
        name, body = chunk.split("\n")
        assert name.startswith("event: ")
        assert body.startswith("data: ")
        found.append((name[7:], json.loads(body[6:])))
    return found


def test_a_stream_has_every_event_in_order() -> None:
    """Blocks are numbered, opened and closed; counts are true from the first event on."""
    request = parse([user("Hi")], stream=True)
    stream = ANTHROPIC.stream(request, "s1-4", 0)
    message = Message(
        Role.ASSISTANT, "Look.", (ToolCall("a", "read", '{"a": 1}'),), reasoning="Hm."
    )
    assert stream.keep_alive().startswith(b":"), "before message_start only a comment may come"
    told = events(
        stream.start(Usage(31, 0))
        + stream.add(ReasoningDelta("H"))
        + stream.keep_alive()
        + stream.add(ReasoningDelta("m."))
        + stream.add(TextDelta("Look."))
        + stream.add(message.tool_calls[0])
        + stream.finish([answered(message)])
    )
    assert [name for name, _ in told] == [
        "message_start",
        "ping",
        *("content_block_start", "content_block_delta"),
        "ping",
        *("content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    assert all(name == data["type"] for name, data in told)
    start = told[0][1]["message"]
    assert (start["id"], start["usage"]["input_tokens"]) == ("msg_s1-4", 31)
    whole = json.loads(ANTHROPIC.encode(request, [answered(message)]))
    assert told[-2][1]["usage"] == whole["usage"]
    assert whole["usage"] == {
        "input_tokens": 31,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 2},
    }
    assert rebuilt(told) == whole["content"]


def rebuilt(told: list[tuple[str, Any]]) -> list[Any]:
    """The content that a client puts together from a stream."""
    content: list[Any] = []
    inputs: dict[int, str] = {}
    for name, data in told:
        if name == "content_block_start":
            assert data["index"] == len(content)
            content.append(data["content_block"])
        elif name == "content_block_delta":
            kind, delta = data["delta"].pop("type"), data["delta"]
            if kind == "input_json_delta":
                at = data["index"]
                inputs[at] = inputs.get(at, "") + delta["partial_json"]
                continue
            for field, text in delta.items():
                content[data["index"]][field] += text
    for at, text in inputs.items():
        content[at]["input"] = json.loads(text)
    return content


def test_thinking_is_not_told_to_who_turns_it_off() -> None:
    """Neither whole nor streamed; the counts stay true."""
    request = parse([user("Hi")], thinking={"type": "disabled"})
    answer = answered(Message(Role.ASSISTANT, "Yes.", reasoning="Hm."))
    whole = json.loads(ANTHROPIC.encode(request, [answer]))
    assert [part["type"] for part in whole["content"]] == ["text"]
    assert whole["usage"]["output_tokens"] == 7
    stream = ANTHROPIC.stream(request, "s1-4", 0)
    assert stream.add(ReasoningDelta("Hm.")) == b""
    told = stream.add(TextDelta("Yes.")) + stream.finish([answer])
    assert rebuilt(events(told)) == whole["content"]


def test_a_fault_in_a_stream_is_an_error_event() -> None:
    """After the headers an engine's failure is told in the same words as before them."""
    stream = ANTHROPIC.stream(parse([user("Hi")]), "s1-4", 0)
    ((name, data),) = events(stream.fail(EngineError("gone")))
    assert name == data["type"] == "error"
    assert data["error"] == {"type": "overloaded_error", "message": "gone"}


def test_models() -> None:
    """One page of models with their window, and each one by itself."""
    page = json.loads(ANTHROPIC.encode_models(["m"], 8192, 0))
    assert page["data"] == [json.loads(ANTHROPIC.encode_model("m", 8192, 0))]
    assert page["data"][0] | {"id": "m", "max_input_tokens": 8192} == page["data"][0]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "m", "m")


# --------------------------------------------------------------------------- there and back
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3).map(json.dumps) | st.text()
CALLS = st.lists(st.tuples(st.sampled_from(["read", "run"]), ARGUMENTS), max_size=3)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """An answer: reasoning, text and calls in any combination."""
    calls = tuple(ToolCall(f"c{i}", name, args) for i, (name, args) in enumerate(draw(CALLS)))
    reasoning = draw(st.none() | st.text(min_size=1))
    return Message(Role.ASSISTANT, draw(st.text()), calls, reasoning=reasoning)


def meaning(message: Message) -> Any:
    """A message with its arguments as values, where they are JSON."""
    return (
        message.role,
        message.content,
        message.reasoning,
        [_call(c) for c in message.tool_calls],
    )


def _call(call: ToolCall) -> Any:
    try:
        value = json.loads(call.arguments or "{}")
    except ValueError:
        return (call.id, call.name, call.arguments)
    return (call.id, call.name, value)


@given(message=messages(), streamed=st.booleans(), flip=st.booleans(), cached=st.booleans())
def test_an_echoed_answer_means_the_same(
    message: Message, *, streamed: bool, flip: bool, cached: bool
) -> None:
    """Told whole or streamed, sent back with other spacing and moved marks: nothing is lost."""
    request = parse([user("Hi")])
    answer = answered(message)
    content = json.loads(ANTHROPIC.encode(request, [answer]))["content"]
    if streamed:
        stream = ANTHROPIC.stream(request, "s1-4", 0)
        pieces: list[Any] = [ReasoningDelta(char) for char in message.reasoning or ""]
        pieces += [TextDelta(char) for char in message.content]
        told = [stream.add(piece) for piece in [*pieces, *message.tool_calls]]
        again = rebuilt(events(b"".join([*told, stream.finish([answer])])))
        assert again == content
    if cached and content:
        content[-1] |= CACHE
    if flip and len(content) == 1 and content[0]["type"] == "text":
        content = content[0]["text"]
    back = parse([user("Hi"), {"role": "assistant", "content": content}, user("Go on.")])
    assert meaning(back.messages[1]) == meaning(message)


TURNS = st.sampled_from(
    [
        user("Hi"),
        user([block("Hi")]),
        {"role": "assistant", "content": "So."},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, block("Yes.")]},
        {"role": "system", "content": "It is Monday."},
    ]
)


@given(histories=st.lists(st.lists(TURNS, min_size=1, max_size=6), max_size=8))
def test_memory_changes_nothing(histories: list[list[Any]]) -> None:
    """Whatever was asked before in a session, a request is read as if it were the first."""
    memory = ParseCache()
    for history in histories:
        body = {"model": "m", "messages": history}
        counted = incoming(body, "/messages/count_tokens")
        assert ANTHROPIC.parse(counted, memory) == ANTHROPIC.parse(counted, ParseCache())
