"""OpenAI Chat on the wire: what clients send, what they are told, what is refused."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tugline.chat.dialects.base import Action, HttpRequest, ParseCache
from tugline.chat.dialects.openai_chat import OpenAIChat
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
from tugline.gateway.canonical import digest_message
from tugline.types import Finish, Image, Message, Role, Sampling, Tool, ToolCall, ToolKind

CHAT = OpenAIChat()
READ = {
    "type": "function",
    "function": {"name": "read", "description": "Read", "parameters": {"type": "object"}},
}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Mend"}}
HI = [{"role": "user", "content": "Hi"}]


def parse(
    messages: list[Any] = HI,
    *,
    memory: ParseCache | None = None,
    headers: dict[str, str] | None = None,
    **more: Any,
) -> Request:
    """The neutral request of a body with these messages."""
    body = json.dumps({"model": "m", "messages": messages, **more}).encode()
    incoming = HttpRequest("POST", "v1", "/chat/completions", "", headers or {}, body)
    return CHAT.parse(incoming, memory or ParseCache())


def answered(message: Message, **more: Any) -> Response:
    """A finished answer that says `message`."""
    given = {"finish": Finish.STOP, "usage": Usage(31, 7, 20, 2), **more}
    return Response(id="s1-4", model="m", created=1_700_000_000, message=message, **given)


def told(request: Request, *answers: Response) -> dict[str, Any]:
    """The whole reply, decoded."""
    reply: dict[str, Any] = json.loads(CHAT.encode(request, answers))
    return reply


def chunks(stream: bytes) -> list[dict[str, Any]]:
    """The data of a stream's events."""
    events = [event.removeprefix("data: ") for event in stream.decode().split("\n\n")]
    assert events[-2:] == ["[DONE]", ""]
    return [json.loads(event) for event in events[:-2]]


# --------------------------------------------------------------------------- what comes in
@pytest.mark.parametrize(
    ("method", "path", "action"),
    [
        ("POST", "/chat/completions", Action.ANSWER),
        ("GET", "/models", Action.MODELS),
        ("GET", "/models/m", Action.MODEL),
        ("GET", "/chat/completions", None),
        ("POST", "/models", None),
        ("POST", "/completions", None),
    ],
)
def test_routes(method: str, path: str, action: Action | None) -> None:
    """Chat answers, and tells of models to whoever shows no other sign."""
    assert CHAT.match(HttpRequest(method, "v1", path, "", {})) is action


def test_a_conversation_as_clients_send_it() -> None:
    """Developer role (pi), lists of parts (qwen), echoed reasoning, late system messages."""
    request = parse(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Mend "}, text("it.")]},
            {
                "role": "assistant",
                "content": None,
                "reasoning": "Hm.",
                "provider_specific_fields": {"refusal": None},
                "tool_calls": [
                    {"id": "a", "type": "function", "function": call("read", '{"p": 1}')},
                    {"id": "b", "function": {"name": "read"}},
                    {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "+x"}},
                ],
            },
            {"role": "tool", "tool_call_id": "b", "content": [text("two")]},
            {"role": "tool", "tool_call_id": "a", "content": "one"},
            {"role": "system", "content": "Tests first."},
            {"role": "assistant", "content": "Done.", "reasoning_content": "So."},
            {"role": "user", "content": "Thanks."},
        ],
        tools=[READ, PATCH],
        stream=True,
        stream_options={"include_usage": True},
        store=False,
        reasoning_effort="medium",
    )
    calls = (
        ToolCall("a", "read", '{"p": 1}'),
        ToolCall("b", "read", ""),
        ToolCall("c", "patch", '{"input":"+x"}'),
    )
    assert request.messages == (
        Message(Role.DEVELOPER, "Be brief."),
        Message(Role.USER, "Mend it."),
        Message(Role.ASSISTANT, tool_calls=calls, reasoning="Hm."),
        Message(Role.TOOL, "two", tool_call_id="b"),
        Message(Role.TOOL, "one", tool_call_id="a"),
        Message(Role.SYSTEM, "Tests first."),
        Message(Role.ASSISTANT, "Done.", reasoning="So."),
        Message(Role.USER, "Thanks."),
    )
    free = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    assert request.tools == (
        Tool("read", "Read", {"type": "object"}),
        Tool("patch", "Mend", free, ToolKind.CUSTOM),
    )
    assert (request.stream, request.usage_in_stream) == (True, True)


def text(words: str) -> dict[str, str]:
    """A text part."""
    return {"type": "text", "text": words}


def call(name: str, arguments: str) -> dict[str, str]:
    """The function of a tool call."""
    return {"name": name, "arguments": arguments}


def test_pictures_keep_their_place() -> None:
    """In what the user says and in what a tool answers, with their detail."""
    picture = {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64,AA", "detail": "low"},
    }
    messages = [
        {"role": "user", "content": [text("Look: "), picture, text("well?")]},
        {"role": "tool", "tool_call_id": "a", "content": [picture]},
    ]
    image = Image("data:image/png;base64,AA", 6, "low")
    assert parse(messages).messages == (
        Message(Role.USER, "Look: well?", images=(image,)),
        Message(Role.TOOL, "", tool_call_id="a", images=(Image(image.url, 0, "low"),)),
    )


@pytest.mark.parametrize(
    ("more", "asked"),
    [
        ({"temperature": 0, "top_p": 0.5, "top_k": 7}, Sampling(0.0, 0.5, 7)),
        ({"max_tokens": 5}, Sampling(max_tokens=5)),
        ({"max_tokens": 5, "max_completion_tokens": 9, "seed": 3}, Sampling(max_tokens=9, seed=3)),
        ({"stop": "\n", "top_k": -1}, Sampling(stop=("\n",), top_k=0)),
        ({"stop": ["a", "", "b"]}, Sampling(stop=("a", "b"))),
        ({"stop": None, "temperature": None}, Sampling()),
    ],
)
def test_sampling_is_what_was_asked(more: dict[str, Any], asked: Sampling) -> None:
    """Each way of asking, the newer name of the limit before the older one."""
    assert parse(**more).sampling == asked


AUTO, NONE, MUST = ChoiceMode.AUTO, ChoiceMode.NONE, ChoiceMode.REQUIRED


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice(NONE)),
        ("required", ToolChoice(MUST)),
        (
            {"type": "function", "function": {"name": "read"}},
            ToolChoice(ChoiceMode.NAMED, ("read",)),
        ),
        ({"type": "custom", "custom": {"name": "patch"}}, ToolChoice(ChoiceMode.NAMED, ("patch",))),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [READ]}}, ("read",)),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [READ, PATCH]},
            },
            ToolChoice(MUST),
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [PATCH]}},
            ToolChoice(ChoiceMode.NAMED, ("patch",)),
        ),
    ],
)
def test_tool_choice(choice: Any, wanted: ToolChoice | tuple[str, ...]) -> None:
    """Every form of it; to allow every tool is to restrict nothing."""
    found = parse(tools=[READ, PATCH], tool_choice=choice).tool_choice
    assert found == (ToolChoice(AUTO, wanted) if isinstance(wanted, tuple) else wanted)


def test_formats_calls_and_choices() -> None:
    """Structured output keeps the schema's own text; one call at a time; several answers."""
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    assert parse(response_format=schema).constraint == Constraint(
        ConstraintKind.JSON_SCHEMA, '{"type": "object"}', "n"
    )
    assert parse(response_format={"type": "json_object"}).constraint == Constraint(
        ConstraintKind.JSON_OBJECT
    )
    assert parse(response_format={"type": "text"}).constraint is None
    assert (parse(n=3).n, parse(n=None).n) == (3, 1)
    assert (parse().parallel, parse(parallel_tool_calls=False).parallel) == (True, False)


def test_opencode_says_whose_call_it_is() -> None:
    """Its session, and for a sub-agent the session that waits."""
    assert parse().thread == ThreadInfo()
    own = parse(headers={"x-session-id": "ses_1", "x-session-affinity": "ses_1"}).thread
    assert own == ThreadInfo("ses_1")
    both = parse(headers={"x-session-id": "ses_2", "x-parent-session-id": "ses_1"}).thread
    assert (both.id, both.parent, both.kind) == ("ses_2", "ses_1", "subagent")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": list("abcde")}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "function", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
            "messages[0].function_call",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "tools[0].function.strict",
        ),
        (
            {"tools": [{"type": "custom", "custom": {"name": "p", "format": {"type": "grammar"}}}]},
            "tools[0].custom.format.type",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    """The error names the field and says something about what would be right."""
    with pytest.raises(RequestError) as caught:
        parse(**more)
    assert caught.value.param == param
    assert param.rpartition(".")[2].partition("[")[0] in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"messages":[{"role":"\xff"}]}', b"5"])
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    """Never anything but a `RequestError`."""
    with pytest.raises(RequestError):
        CHAT.parse(HttpRequest("POST", "v1", "/chat/completions", "", {}, body), ParseCache())


def test_a_known_front_is_not_parsed_again() -> None:
    """What was read in an earlier request is the same objects, and 64 kB cost next to nothing."""
    memory = ParseCache()
    turns: list[Any] = [{"role": "system", "content": "s" * 8000}]
    for number in range(40):
        calls = [{"id": f"c{number}", "type": "function", "function": call("read", '{"p": 1}')}]
        turns.append({"role": "assistant", "content": "word " * 30, "tool_calls": calls})
        turns.append({"role": "tool", "tool_call_id": f"c{number}", "content": "line\n" * 250})
    first = parse(turns[:-2], memory=memory, tools=[READ])
    body = json.dumps({"model": "m", "messages": turns, "tools": [READ]}).encode()
    incoming = HttpRequest("POST", "v1", "/chat/completions", "", {}, body)
    assert len(body) > 60_000
    second = CHAT.parse(incoming, memory)
    assert all(a is b for a, b in zip(first.messages, second.messages, strict=False))
    assert second.tools is first.tools
    took = []
    for _ in range(20):
        start = time.perf_counter()
        CHAT.parse(incoming, memory)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.001


# --------------------------------------------------------------------------- what goes out
def test_a_whole_answer() -> None:
    """Reasoning, text, both kinds of calls, and counts."""
    request = parse(tools=[READ, PATCH])
    calls = (
        ToolCall("a", "read", '{"p": 1}'),
        ToolCall("b", "patch", '{"input": "+x"}'),
        ToolCall("c", "patch", "+x"),
    )
    message = Message(Role.ASSISTANT, "Look.", tool_calls=calls, reasoning="Hm.")
    reply = told(request, answered(message))
    assert reply["id"] == "chatcmpl-s1-4"
    assert reply["usage"] == {
        "prompt_tokens": 31,
        "completion_tokens": 7,
        "total_tokens": 38,
        "prompt_tokens_details": {"cached_tokens": 20},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "Look.",
        "refusal": None,
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": call("read", '{"p": 1}')},
            {"id": "b", "type": "custom", "custom": {"name": "patch", "input": "+x"}},
            {"id": "c", "type": "function", "function": call("patch", "+x")},
        ],
    }


@pytest.mark.parametrize(
    ("finish", "calls", "reason"),
    [
        (Finish.STOP, (), "stop"),
        (Finish.STOP, (ToolCall("a", "read", "{}"),), "tool_calls"),
        (Finish.LENGTH, (ToolCall("a", "read", "{}"),), "length"),
        (Finish.ABORT, (), "length"),
    ],
)
def test_finish_reasons(finish: Finish, calls: tuple[ToolCall, ...], reason: str) -> None:
    """An answer that was cut says so, whatever it holds."""
    answer = answered(Message(Role.ASSISTANT, "x", tool_calls=calls), finish=finish)
    assert told(parse(), answer)["choices"][0]["finish_reason"] == reason


def test_several_answers_are_choices() -> None:
    """Each with its own reason; the prompt is counted once."""
    one = answered(Message(Role.ASSISTANT, "One."))
    two = answered(Message(Role.ASSISTANT, "Two."), finish=Finish.LENGTH)
    reply = told(parse(n=2), one, two)
    said = [(c["index"], c["message"]["content"], c["finish_reason"]) for c in reply["choices"]]
    assert said == [(0, "One.", "stop"), (1, "Two.", "length")]
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (31, 14)


def test_a_stream_of_several_answers() -> None:
    """Roles first, deltas of each choice, a call's name before its arguments, usage at the end."""
    request = parse(n=2, tools=[READ, PATCH], stream=True, stream_options={"include_usage": True})
    stream = CHAT.stream(request, "s1-4", 17)
    read, patch = ToolCall("a", "read", '{"p": 1}'), ToolCall("b", "patch", '{"input": "+x"}')
    one = answered(Message(Role.ASSISTANT, "Hé", tool_calls=(read, patch), reasoning="Hm."))
    two = answered(Message(Role.ASSISTANT, "Zw"), finish=Finish.LENGTH)
    sent = stream.start(Usage(31, 0)) + stream.keep_alive() + stream.add(ReasoningDelta("Hm."))
    sent += stream.add(TextDelta("Zw"), 1) + stream.add(TextDelta("Hé"))
    sent += stream.add(read) + stream.add(patch) + stream.finish([one, two])
    comment = stream.keep_alive().decode()
    assert comment.startswith(":")
    events = chunks(sent.replace(comment.encode(), b""))
    assert {e["id"] for e in events} == {"chatcmpl-s1-4"}
    assert {e["created"] for e in events} == {17}
    usage = events.pop()
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 45)
    assert all(event["usage"] is None for event in events)
    deltas = [(c["index"], c["delta"], c["finish_reason"]) for e in events for c in e["choices"]]
    custom = {"name": "patch", "input": ""}
    first = {"index": 0, "id": "a", "type": "function", "function": call("read", "")}
    second = {"index": 1, "id": "b", "type": "custom", "custom": custom}
    assert deltas == [
        (0, {"role": "assistant", "content": ""}, None),
        (1, {"role": "assistant", "content": ""}, None),
        (0, {"reasoning_content": "Hm."}, None),
        (1, {"content": "Zw"}, None),
        (0, {"content": "Hé"}, None),
        (0, {"tool_calls": [first]}, None),
        (0, {"tool_calls": [{"index": 0, "function": {"arguments": '{"p": 1}'}}]}, None),
        (0, {"tool_calls": [second]}, None),
        (0, {"tool_calls": [{"index": 1, "custom": {"input": "+x"}}]}, None),
        (0, {}, "tool_calls"),
        (1, {}, "length"),
    ]


def test_usage_is_streamed_only_when_asked_for() -> None:
    """As the API does; clients that did not ask may not expect an event without choices."""
    stream = CHAT.stream(parse(stream=True), "s1-4", 17)
    events = chunks(stream.start(Usage(31, 0)) + stream.finish([answered(Message(Role.ASSISTANT))]))
    assert not any("usage" in event for event in events)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "retry"),
    [
        (RequestError("no", param="n"), 400, "invalid_request_error", None, "false"),
        (ContextOverflow("no"), 400, "invalid_request_error", "context_length_exceeded", "false"),
        (BudgetExhausted("no", status=401), 401, "invalid_request_error", None, "false"),
        (Unauthorized("no"), 401, "invalid_request_error", "invalid_api_key", "false"),
        (TooLarge("no"), 413, "invalid_request_error", None, "false"),
        (EngineError("no", status=429, retry_after=3), 429, "rate_limit_error", None, None),
        (EngineError("no", status=503), 503, "server_error", "server_error", None),
        (EngineError("no", status=400), 502, "server_error", None, "false"),
        (EngineError("no"), 502, "server_error", None, None),
        (TuglineError("no"), 500, "server_error", None, None),
    ],
)
def test_errors(
    error: TuglineError, status: int, kind: str, code: str | None, retry: str | None
) -> None:
    """Status, type and code as OpenAI has them; a retry that is useless is told not to happen."""
    found, headers, body = CHAT.encode_error(error)
    inner = json.loads(body)["error"]
    assert (found, inner["type"], inner["message"]) == (status, kind, "no")
    assert code is None or inner["code"] == code
    assert headers.get("x-should-retry") == retry
    assert inner["param"] == getattr(error, "param", None)
    assert headers.get("retry-after") == ("3" if status == 429 else None)
    stream = CHAT.stream(parse(), "s1-4", 17)
    assert json.loads(stream.fail(error).removeprefix(b"data: "))["error"] == inner


def test_models() -> None:
    """A list of one, and the one alone."""
    listed = json.loads(CHAT.encode_models(["m"], 4096, 17))
    assert listed["object"] == "list"
    assert listed["data"] == [json.loads(CHAT.encode_model("m", 4096, 17))]
    assert listed["data"][0]["id"] == "m"


# --------------------------------------------------------------------------- there and back
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(WORDS, VALUES, max_size=3).map(json.dumps)
INPUTS = WORDS.map(lambda words: json.dumps({"input": words}))
CALLS = st.lists(
    st.tuples(st.just("read"), ARGUMENTS) | st.tuples(st.just("patch"), INPUTS | WORDS | ARGUMENTS),
    max_size=3,
)


@given(content=WORDS, reasoning=st.none() | WORDS, calls=CALLS, data=st.data())
def test_an_echoed_answer_means_what_was_said(
    content: str, reasoning: str | None, calls: list[tuple[str, str]], data: st.DataObject
) -> None:
    """Verbatim, with compact arguments or without reasoning, from a stream or whole."""
    made = tuple(ToolCall(f"call_{i}", *made) for i, made in enumerate(calls))
    message = Message(Role.ASSISTANT, content, tool_calls=made, reasoning=reasoning or None)
    request = parse(tools=[READ, PATCH])
    if data.draw(st.booleans(), label="streamed"):
        echo = collected(request, message)
    else:
        echo = told(request, answered(message))["choices"][0]["message"]
    rewrite = data.draw(st.sampled_from(["verbatim", "compact", "dropped", "renamed"]))
    if rewrite == "compact":
        for one in echo.get("tool_calls", []):
            compacted(one)
    elif rewrite == "dropped":
        echo.pop("reasoning_content", None)
    elif rewrite == "renamed" and reasoning:
        echo["reasoning"] = echo.pop("reasoning_content")
    back = parse([*HI, echo, {"role": "user", "content": "Go on."}]).messages[1]
    assert digest_message(back, {}) == digest_message(message, {})
    assert [c.id for c in back.tool_calls] == [c.id for c in made]
    if rewrite in {"verbatim", "renamed"}:
        assert (back.content, back.reasoning) == (message.content, message.reasoning)


def compacted(one: dict[str, Any]) -> None:
    """A call with its arguments written as JavaScript would, if they are JSON."""
    if one["type"] == "function":
        try:
            value = json.loads(one["function"]["arguments"])
        except ValueError:
            return
        one["function"]["arguments"] = json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def collected(request: Request, message: Message) -> dict[str, Any]:
    """A message put together from its stream, as a client does."""
    stream = CHAT.stream(request, "s1-4", 17)
    sent = stream.start(Usage(31, 0))
    if message.reasoning:
        sent += stream.add(ReasoningDelta(message.reasoning))
    sent += stream.add(TextDelta(message.content))
    sent += b"".join(stream.add(call) for call in message.tool_calls)
    echo: dict[str, Any] = {"role": "assistant", "content": ""}
    for event in chunks(sent + stream.finish([answered(message)])):
        delta = event["choices"][0]["delta"]
        echo["content"] += delta.get("content", "")
        if "reasoning_content" in delta:
            echo["reasoning_content"] = delta["reasoning_content"]
        for part in delta.get("tool_calls", []):
            calls = echo.setdefault("tool_calls", [])
            if part["index"] == len(calls):
                calls.append(part)
            else:
                kind = calls[part["index"]]["type"]
                field = "input" if kind == "custom" else "arguments"
                calls[part["index"]][kind][field] += part[kind][field]
    return echo
