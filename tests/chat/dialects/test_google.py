"""Google generateContent on the wire: what clients send, what they are told, what is refused."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tugline.chat.dialects.base import Action, HttpRequest, ParseCache
from tugline.chat.dialects.google import Google
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
    TuglineError,
    Unauthorized,
)
from tugline.types import Finish, Image, Message, Role, Sampling, Tool, ToolCall, TraceKind

GOOGLE = Google()
READ = {"name": "read", "description": "Read", "parametersJsonSchema": {"type": "object"}}
DECLARED = [{"functionDeclarations": [READ]}]
PIXEL = {"inlineData": {"mimeType": "image/png", "data": "AA=="}}
STREAM = "/models/m:streamGenerateContent"


def incoming(body: Any, path: str = STREAM, query: str = "alt=sse", **headers: str) -> HttpRequest:
    """A request as Gemini CLI posts it."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HttpRequest("POST", "v1beta", path, query, headers, raw)


def parse(contents: list[Any], memory: ParseCache | None = None, **more: Any) -> Request:
    """The neutral request of a body with these contents."""
    return GOOGLE.parse(incoming({"contents": contents, **more}), memory or ParseCache())


def user(*parts: Any) -> dict[str, Any]:
    """A user's content; text stands for a part of it."""
    told = [{"text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "parts": told}


def model(*parts: Any) -> dict[str, Any]:
    """The model's content."""
    return {**user(*parts), "role": "model"}


def call(name: str, args: Any = None, **more: Any) -> dict[str, Any]:
    """A function call part."""
    return {"functionCall": {"name": name, "args": args or {}, **more}}


def gave(name: str, response: Any, **more: Any) -> dict[str, Any]:
    """A function response part."""
    return {"functionResponse": {"name": name, "response": response, **more}}


def answered(message: Message, **more: Any) -> Response:
    """A finished answer that says `message`."""
    given = {"finish": Finish.STOP, "usage": Usage(31, 7, 20, 2), **more}
    return Response(id="s1-4", model="m", created=1_700_000_000, message=message, **given)


# --------------------------------------------------------------------------- routes and secrets
@pytest.mark.parametrize(
    ("method", "version", "path", "query", "headers", "action"),
    [
        ("POST", "v1beta", "/models/m:generateContent", "", {}, Action.ANSWER),
        ("POST", "v1", "/models/org/m:7b:streamGenerateContent", "", {}, Action.ANSWER),
        ("POST", "", "/models/m:countTokens", "", {}, Action.COUNT),
        ("POST", "v1beta", "/models/m:embedContent", "", {}, None),
        ("GET", "v1beta", "/models", "", {}, Action.MODELS),
        ("GET", "v1beta", "/models/m", "", {}, Action.MODEL),
        ("GET", "v1", "/models", "key=k", {}, Action.MODELS),
        ("GET", "v1", "/models/m", "", {"x-goog-api-key": "k"}, Action.MODEL),
        ("GET", "v1", "/models", "", {"authorization": "Bearer k"}, None),
    ],
)
def test_routes(
    method: str,
    version: str,
    path: str,
    query: str,
    headers: dict[str, str],
    action: Action | None,
) -> None:
    """The model routes, which three dialects share, are ours by version or by key."""
    assert GOOGLE.match(HttpRequest(method, version, path, query, headers)) is action


def test_the_secret_travels_in_three_places() -> None:
    """The header of the API, the query of the documentation's examples, a bearer token."""
    assert GOOGLE.find_secret({"x-goog-api-key": "k"}, "") == "k"
    assert GOOGLE.find_secret({}, "alt=sse&key=k%2B") == "k+"
    assert GOOGLE.find_secret({"authorization": "Bearer k"}, "alt=sse") == "k"
    assert GOOGLE.find_secret({}, "alt=sse") is None


# --------------------------------------------------------------------------- what is understood
def test_a_request_as_gemini_cli_sends_it() -> None:
    """The model from the path, the system prompt, functions, and its sampling."""
    request = GOOGLE.parse(
        incoming(
            {
                "contents": [user("<session_context>\n</session_context>", "Mend it.")],
                "systemInstruction": {"role": "user", "parts": [{"text": "Be brief."}]},
                "tools": DECLARED,
                "generationConfig": {
                    "temperature": 1,
                    "topP": 0.95,
                    "topK": 64,
                    "thinkingConfig": {"includeThoughts": True, "thinkingLevel": "HIGH"},
                },
                "safetySettings": [{"category": "x", "threshold": "BLOCK_NONE"}],
            },
            "/models/stub-model:streamGenerateContent",
        ),
        ParseCache(),
    )
    assert request == Request(
        model="stub-model",
        messages=(
            Message(Role.SYSTEM, "Be brief."),
            Message(Role.USER, "<session_context>\n</session_context>\nMend it."),
        ),
        tools=(Tool("read", "Read", {"type": "object"}),),
        sampling=Sampling(1.0, 0.95, 64),
        stream=True,
        usage_in_stream=True,
        echo=b"sse",
    )


def test_results_pictures_and_text_keep_their_order() -> None:
    """One value as itself, an object as JSON, an error, a picture, then what the user says."""
    request = parse(
        [
            user("Hi"),
            model({"text": "Hm.", "thought": True}, "I look.", call("read", {"n": [1]}, id="a")),
            model(call("run", id="b"), call("find", id="c"), call("list", id="d")),
            user(
                gave("run", {"error": "gone"}, id="b"),
                gave("read", {"output": "x"}, id="a", parts=[PIXEL]),
                gave("find", {"lines": [1, 2]}, id="c"),
                gave("list", {"result": "y"}, id="d"),
                "Go on.",
                PIXEL,
                {"fileData": {"fileUri": "https://x/y.png", "mimeType": "image/png"}},
                "And now.",
            ),
        ]
    )
    picture = "data:image/png;base64,AA=="
    calls = (
        ToolCall("a", "read", '{"n":[1]}'),
        ToolCall("b", "run", "{}"),
        ToolCall("c", "find", "{}"),
        ToolCall("d", "list", "{}"),
    )
    assert request.messages[1:] == (
        Message(Role.ASSISTANT, "I look.", calls, reasoning="Hm."),
        Message(Role.TOOL, "gone", tool_call_id="b", failed=True),
        Message(Role.TOOL, "x", tool_call_id="a", images=(Image(picture, 1),)),
        Message(Role.TOOL, '{"lines":[1,2]}', tool_call_id="c"),
        Message(Role.TOOL, "y", tool_call_id="d"),
        Message(
            Role.USER, "Go on.\nAnd now.", images=(Image(picture, 6), Image("https://x/y.png", 6))
        ),
    )


@pytest.mark.parametrize("known", [True, False])
def test_results_without_ids_find_their_calls_by_name_and_order(*, known: bool) -> None:
    """Clients that drop ids, or make new ones for the results, still answer the right call."""
    ids = ["a", "b", "c"] if known else [None, None, None]
    names = ["read", "run", "read"]
    calls = [
        call(name, id=one) if one else call(name) for name, one in zip(names, ids, strict=True)
    ]
    results = [
        gave("read", {"output": "1"}, id="new"),
        gave("read", {"output": "2"}),
        gave("run", {"output": "3"}),
    ]
    old = [model(call("read", id="z")), user(gave("read", {"output": "0"}, id="z"))]
    found = parse([user("Hi"), *old, model(*calls), user(*results)]).messages
    made = [one.id for one in found[3].tool_calls]
    assert len(set(made)) == 3
    assert [result.tool_call_id for result in found[4:]] == [made[0], made[2], made[1]]


def test_what_does_not_change_meaning_parses_alike() -> None:
    """Signatures, a bare end part, one turn in two contents, snake case and a system string."""
    one = parse(
        [user("Hi"), model("I look.", call("read", id="a")), user(gave("read", {"output": "x"}))],
        systemInstruction={"parts": [{"text": "Help."}]},
        generationConfig={"maxOutputTokens": 5},
        tools=DECLARED,
        toolConfig={"functionCallingConfig": {"mode": "ANY"}},
    )
    snake = {"name": "read", "description": "Read", "parameters_json_schema": {"type": "object"}}
    other = parse(
        [
            {"parts": [{"text": "Hi"}]},
            model({"text": "I look.", "thoughtSignature": "AA=="}),
            model({"function_call": {"name": "read", "id": "a"}, "thought_signature": "AA=="}),
            {
                "role": "function",
                "parts": [{"function_response": {"name": "read", "response": {"output": "x"}}}],
            },
        ],
        system_instruction="Help.",
        generation_config={"max_output_tokens": 5},
        tools=[{"function_declarations": [snake]}],
        tool_config={"function_calling_config": {"mode": "any"}},
    )
    ended = parse([user("Hi"), model("x", {"thoughtSignature": "AA=="}), user("Go on.")])
    assert one == other
    assert ended == parse([user("Hi"), model("x"), user("Go on.")])


def test_a_known_front_is_not_parsed_again() -> None:
    """What was read in an earlier request is the same objects, tools included."""
    memory = ParseCache()
    turns = [user("Hi"), model("Yes?"), user("Mend it.")]
    first = parse(turns, memory, tools=DECLARED)
    second = parse([*turns, model("Done."), user("Thanks.")], memory, tools=DECLARED)
    assert all(a is b for a, b in zip(first.messages, second.messages, strict=False))
    assert second.tools is first.tools
    assert second == parse([*turns, model("Done."), user("Thanks.")], tools=DECLARED)


def test_schemas_in_googles_spelling_become_json_schema() -> None:
    """Capital types, nullable, counts as text, at every depth; a field called type is a field."""
    declared = {
        "name": "f",
        "parameters": {
            "type": "OBJECT",
            "properties": {
                "type": {"type": "STRING", "nullable": True, "enum": ["OBJECT"]},
                "list": {
                    "type": "ARRAY",
                    "minItems": "2",
                    "items": {"anyOf": [{"type": "NUMBER"}]},
                },
            },
            "required": ["type"],
        },
    }
    request = parse([user("Hi")], tools=[{"functionDeclarations": [declared, {"name": "g"}]}])
    assert request.tools == (
        Tool(
            "f",
            "",
            {
                "type": "object",
                "properties": {
                    "type": {"type": ["string", "null"], "enum": ["OBJECT"]},
                    "list": {
                        "type": "array",
                        "minItems": 2,
                        "items": {"anyOf": [{"type": "number"}]},
                    },
                },
                "required": ["type"],
            },
        ),
        Tool("g", "", {}),
    )


@pytest.mark.parametrize(
    ("calling", "choice"),
    [
        ({}, ToolChoice()),
        ({"mode": "AUTO"}, ToolChoice()),
        ({"mode": "VALIDATED"}, ToolChoice()),
        ({"mode": "NONE"}, ToolChoice(ChoiceMode.NONE)),
        ({"mode": "ANY"}, ToolChoice(ChoiceMode.REQUIRED)),
        (
            {"mode": "ANY", "allowedFunctionNames": ["read"]},
            ToolChoice(ChoiceMode.NAMED, ("read",)),
        ),
        (
            {"mode": "ANY", "allowedFunctionNames": ["read", "run"]},
            ToolChoice(ChoiceMode.REQUIRED, ("read", "run")),
        ),
    ],
)
def test_tool_choice(calling: dict[str, Any], choice: ToolChoice) -> None:
    """Every mode of functionCallingConfig, and the names it allows."""
    tools = [{"functionDeclarations": [READ]}, {"functionDeclarations": [{"name": "run"}]}]
    config = {"functionCallingConfig": calling}
    assert parse([user("Hi")], tools=tools, toolConfig=config).tool_choice == choice


@pytest.mark.parametrize(
    ("config", "constraint"),
    [
        ({"responseMimeType": "text/plain"}, None),
        ({"responseMimeType": "application/json"}, Constraint(ConstraintKind.JSON_OBJECT)),
        (
            {"responseMimeType": "application/json", "responseSchema": {"type": "STRING"}},
            Constraint(ConstraintKind.JSON_SCHEMA, '{"type":"string"}'),
        ),
        (
            {"responseMimeType": "application/json", "responseJsonSchema": {"const": "OBJECT"}},
            Constraint(ConstraintKind.JSON_SCHEMA, '{"const":"OBJECT"}'),
        ),
    ],
)
def test_structured_output(config: dict[str, Any], constraint: Constraint | None) -> None:
    """JSON of any shape, of a schema in Google's spelling, or of a JSON schema."""
    assert parse([user("Hi")], generationConfig=config).constraint == constraint


def test_sampling() -> None:
    """What is asked for is recorded as asked, with several candidates."""
    request = parse(
        [user("Hi")],
        generationConfig={
            "candidateCount": 2,
            "maxOutputTokens": 9,
            "seed": 3,
            "stopSequences": ["END"],
            "topK": 40.0,
            "presencePenalty": 0,
            "responseModalities": ["TEXT"],
        },
    )
    assert request.n == 2
    assert request.sampling == Sampling(top_k=40, max_tokens=9, seed=3, stop=("END",))


def test_opencode_says_whose_call_it_is() -> None:
    """Its sessions and sub-agents send their ids in every dialect."""
    headers = {"x-session-id": "t", "x-parent-session-id": "s"}
    body = json.dumps({"contents": [user("Hi")]}).encode()
    request = GOOGLE.parse(HttpRequest("POST", "v1beta", STREAM, "", headers, body), ParseCache())
    assert request.thread == ThreadInfo("t", "s", TraceKind.SUBAGENT)
    assert parse([user("Hi")]).thread == ThreadInfo()


@pytest.mark.parametrize("wrapped", [True, False])
def test_counting_takes_both_forms(*, wrapped: bool) -> None:
    """A count of contents alone, or of a whole request; nothing is sampled after it."""
    body: Any = {"contents": [user("Hi"), model("Yes")], "systemInstruction": user("Help.")}
    body = {"generateContentRequest": {"model": "models/m", **body}} if wrapped else body
    counted = GOOGLE.parse(incoming(body, "/models/m:countTokens", ""), ParseCache())
    assert [message.content for message in counted.messages] == ["Help.", "Hi", "Yes"]
    assert json.loads(GOOGLE.encode_count(12)) == {"totalTokens": 12}


# --------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"contents": []}, "contents", "at least one"),
        ({"contents": "Hi"}, "contents", "array"),
        ({"contents": ["Hi"]}, "contents[0].role", "user, model or function"),
        ({"contents": [{"role": "system", "parts": []}]}, "contents[0].role", "'system'"),
        ({"contents": [{"role": "user"}]}, "contents[0].parts", "a list"),
        ({"contents": [user(3)]}, "contents[0].parts[0]", "an object"),
        ({"contents": [user("Hi"), model("The answer is")]}, "contents[1]", "begins the answer"),
        (
            {"contents": [user({"executableCode": {"code": "1"}})]},
            "contents[0].parts[0].executableCode",
            "executableCode",
        ),
        (
            {"contents": [model({"codeExecutionResult": {}})]},
            "contents[0].parts[0].codeExecutionResult",
            "codeExecutionResult",
        ),
        (
            {"contents": [user({"inlineData": {"mimeType": "audio/wav", "data": ""}})]},
            "contents[0].parts[0].inlineData.mimeType",
            "audio/wav",
        ),
        (
            {"contents": [user({"fileData": {"fileUri": "gs://x", "mimeType": "image/png"}})]},
            "contents[0].parts[0].fileData.fileUri",
            "https",
        ),
        (
            {"contents": [user({"text": "x", "inlineData": {}})]},
            "contents[0].parts[0]",
            "one of inlineData, text",
        ),
        (
            {"contents": [user("Hi"), model("x"), user(gave("read", {}, id="a"))]},
            "contents[2].parts[0].functionResponse",
            "answers no functionCall",
        ),
        ({"systemInstruction": user(PIXEL)}, "systemInstruction.parts[0].inlineData", "only text"),
        ({"cachedContent": "cachedContents/x"}, "cachedContent", "nothing is cached"),
        ({"cached_content": "cachedContents/x"}, "cachedContent", "nothing is cached"),
        ({"tools": {}}, "tools", "a list"),
        ({"tools": [{"googleSearch": {}}]}, "tools[0].googleSearch", "googleSearch"),
        ({"tools": [{"code_execution": {}}]}, "tools[0].codeExecution", "codeExecution"),
        ({"tools": [{"urlContext": {}}]}, "tools[0].urlContext", "urlContext"),
        (
            {"tools": [{"functionDeclarations": [{}]}]},
            "tools[0].functionDeclarations[0].name",
            "text",
        ),
        (
            {"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}},
            "toolConfig.functionCallingConfig.mode",
            "'SOME'",
        ),
        *(
            ({"generationConfig": {name: value}}, f"generationConfig.{name}", words)
            for name, value, words in [
                ("topP", 2, "=2"),
                ("temperature", "hot", "'hot'"),
                ("maxOutputTokens", 0, ">= 1"),
                ("candidateCount", 99, "<= 8"),
                ("presencePenalty", 0.5, "0.5"),
                ("frequencyPenalty", 0.5, "0.5"),
                ("responseLogprobs", True, "True"),
                ("responseModalities", ["TEXT", "IMAGE"], "IMAGE"),
                ("speechConfig", {"x": 1}, "cannot be honoured"),
                ("responseMimeType", "text/x.enum", "application/json"),
            ]
        ),
        (
            {"generation_config": {"presence_penalty": 0.5}},
            "generationConfig.presencePenalty",
            "0.5",
        ),
        (
            {"generationConfig": {"responseSchema": {"type": "STRING"}}},
            "generationConfig.responseMimeType",
            "application/json",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    body: dict[str, Any], param: str, words: str
) -> None:
    """The error names the field, and its text says the value or what would be right."""
    with pytest.raises(RequestError) as caught:
        parse(**{"contents": [user("Hi")], **body})
    assert caught.value.param == param
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b"{}",
        b'{"contents":[' + b"[" * 9000 + b"]" * 9000 + b"]}",
        b'{"contents":[{"parts":[{"text":"\xff"}]}]}',
        b'{"contents":[{"parts":[{"text":"\\ud800"}]}]}',
        b'{"contents":[{"parts":[{"text":"x"}]}],"tools":["\xff"]}',
        b'{"contents":[{"parts":[{"text":"x"}]}],"generationConfig":3}',
        b'{"contents":[{"parts":[{"text":"x"}]}],"toolConfig":{"functionCallingConfig":3}}',
    ],
)
def test_malformed_bodies_are_the_clients_fault(body: bytes) -> None:
    """Whatever arrives is answered with a 400, never with a crash."""
    with pytest.raises(RequestError) as caught:
        GOOGLE.parse(incoming(body), ParseCache())
    assert GOOGLE.encode_error(caught.value)[0] == 400


FULL = {
    "systemInstruction": {"parts": [{"text": "Help."}]},
    "contents": [
        user("Hi", PIXEL),
        model({"text": "Hm.", "thought": True}, call("read", {"a": 1}, id="a")),
        user(gave("read", {"output": "x"}, id="a", parts=[PIXEL])),
    ],
    "tools": [{"functionDeclarations": [READ, {"name": "f", "parameters": {"type": "OBJECT"}}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO", "allowedFunctionNames": ["read"]}},
    "generationConfig": {"topP": 1, "responseModalities": ["TEXT"], "responseSchema": None},
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
                request = GOOGLE.parse(incoming(body), ParseCache())
                assert msgspec.convert(msgspec.to_builtins(request), Request) == request


# --------------------------------------------------------------------------- what is told
@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (RequestError("no"), 400, "INVALID_ARGUMENT"),
        (BudgetExhausted("spent"), 400, "INVALID_ARGUMENT"),
        (Unauthorized("who"), 401, "UNAUTHENTICATED"),
        (EngineError("gone"), 503, "UNAVAILABLE"),
        (EngineError("refused", status=422), 500, "INTERNAL"),
        (TuglineError("bug"), 500, "INTERNAL"),
    ],
)
def test_errors_have_the_originals_shape(error: TuglineError, code: int, status: str) -> None:
    """Code, text and the google.rpc name of it."""
    told, headers, body = GOOGLE.encode_error(error)
    assert (told, headers) == (code, {})
    assert json.loads(body) == {"error": {"code": code, "message": str(error), "status": status}}


def test_error_details() -> None:
    """The field at fault, when to come back, and an overflow in the words clients look for."""
    body = GOOGLE.encode_error(RequestError("wrong", param="contents[0]"))[2]
    (detail,) = json.loads(body)["error"]["details"]
    assert detail["fieldViolations"] == [{"field": "contents[0]", "description": "wrong"}]
    body = GOOGLE.encode_error(RequestError("wrong", param="top_p"))[2]
    (detail,) = json.loads(body)["error"]["details"]
    assert detail["fieldViolations"][0]["field"] == "generationConfig.topP"
    _, headers, body = GOOGLE.encode_error(EngineError("busy", status=503, retry_after=2.0))
    (detail,) = json.loads(body)["error"]["details"]
    assert (headers["retry-after"], detail["retryDelay"]) == ("2", "2.000s")
    body = GOOGLE.encode_error(ContextOverflow("no room", prompt=210, window=200))[2]
    assert json.loads(body)["error"]["message"] == (
        "The input token count (210) exceeds the maximum number of tokens allowed (200)."
    )


def test_a_whole_answer() -> None:
    """Candidates in order, thoughts apart, a signature on the first call, and true counts."""
    calls = (ToolCall("a", "read", '{"a": 1}'), ToolCall("b", "run", ""))
    answers = [
        answered(Message(Role.ASSISTANT, "Look.", calls, reasoning="Hm.")),
        answered(Message(Role.ASSISTANT, "x"), finish=Finish.LENGTH, usage=Usage(31, 4, 20)),
    ]
    told = json.loads(GOOGLE.encode(parse([user("Hi")]), answers))
    signature = told["candidates"][0]["content"]["parts"][2].pop("thoughtSignature")
    assert signature
    assert told == {
        "candidates": [
            {
                "content": {
                    "role": "model",
                    "parts": [
                        {"text": "Hm.", "thought": True},
                        {"text": "Look."},
                        {"functionCall": {"id": "a", "name": "read", "args": {"a": 1}}},
                        {"functionCall": {"id": "b", "name": "run", "args": {}}},
                    ],
                },
                "index": 0,
                "finishReason": "STOP",
            },
            {
                "content": {"role": "model", "parts": [{"text": "x"}]},
                "index": 1,
                "finishReason": "MAX_TOKENS",
            },
        ],
        "usageMetadata": {
            "promptTokenCount": 31,
            "candidatesTokenCount": 9,
            "thoughtsTokenCount": 2,
            "totalTokenCount": 42,
            "cachedContentTokenCount": 20,
        },
        "modelVersion": "m",
        "responseId": "s1-4",
    }


def chunks(data: bytes) -> list[Any]:
    """The responses in a stream of bare data lines."""
    found = []
    for chunk in data.decode().split("\n\n")[:-1]:
        assert chunk.startswith("data: {")
        assert "\n" not in chunk
        found.append(json.loads(chunk[6:]))
    return found


def test_a_stream_is_bare_data_lines() -> None:
    """Gemini CLI fails on anything else; the last chunk has finish reason and usage."""
    stream = GOOGLE.stream(parse([user("Hi")]), "s1-4", 0)
    message = Message(Role.ASSISTANT, "Look.", (ToolCall("a", "read", '{"a": 1}'),), reasoning="H")
    assert (stream.start(Usage(31, 0)), stream.keep_alive()) == (b"", b"")
    assert stream.content_type == "text/event-stream"
    told = chunks(
        stream.add(ReasoningDelta("H"))
        + stream.add(TextDelta("Look."))
        + stream.add(message.tool_calls[0])
        + stream.finish([answered(message)])
    )
    whole = json.loads(GOOGLE.encode(parse([user("Hi")]), [answered(message)]))
    parts = [chunk["candidates"][0]["content"]["parts"] for chunk in told]
    assert [part for (part,) in parts[:-1]] == whole["candidates"][0]["content"]["parts"]
    assert parts[-1] == [{"text": ""}]
    assert [chunk["candidates"][0].get("finishReason") for chunk in told] == [None] * 3 + ["STOP"]
    assert told[-1]["usageMetadata"] == whole["usageMetadata"]
    assert {chunk["responseId"] for chunk in told} == {"s1-4"}
    assert chunks(stream.fail(EngineError("gone")))[0]["error"]["status"] == "UNAVAILABLE"


@pytest.mark.parametrize("name", ["includeThoughts", "include_thoughts"])
def test_thoughts_are_not_told_to_who_turns_them_off(name: str) -> None:
    """Neither whole nor streamed; the counts stay true."""
    request = parse([user("Hi")], generationConfig={"thinkingConfig": {name: False}})
    answer = answered(Message(Role.ASSISTANT, "Yes.", reasoning="Hm."))
    whole = json.loads(GOOGLE.encode(request, [answer]))
    assert whole["candidates"][0]["content"]["parts"] == [{"text": "Yes."}]
    assert whole["usageMetadata"]["thoughtsTokenCount"] == 2
    stream = GOOGLE.stream(request, "s1-4", 0)
    assert stream.add(ReasoningDelta("Hm.")) == b""
    assert stream.add(TextDelta("Yes.")).startswith(b"data: ")


@pytest.mark.parametrize("fault", [True, False])
def test_without_sse_a_stream_is_one_list(*, fault: bool) -> None:
    """It is valid JSON however it ends, also when nothing came before."""
    request = GOOGLE.parse(incoming({"contents": [user("Hi")]}, query=""), ParseCache())
    for pieces in ([], [TextDelta("x")], [TextDelta("x"), TextDelta("y")]):
        stream = GOOGLE.stream(request, "s1-4", 0)
        data = stream.start(Usage(31, 0)) + b"".join(stream.add(piece) for piece in pieces)
        done = [answered(Message(Role.ASSISTANT, "xy"))]
        told = json.loads(
            data + (stream.fail(EngineError("gone")) if fault else stream.finish(done))
        )
        assert len(told) == len(pieces) + 1
        assert ("error" in told[-1]) == fault
        assert stream.content_type == "application/json"


def test_models() -> None:
    """The list of models with their window, and each one by itself."""
    (one,) = json.loads(GOOGLE.encode_models(["m"], 8192, 0))["models"]
    assert one == json.loads(GOOGLE.encode_model("m", 8192, 0))
    assert (one["name"], one["inputTokenLimit"]) == ("models/m", 8192)


# --------------------------------------------------------------------------- there and back
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3).map(json.dumps) | st.text()
CALLS = st.lists(st.tuples(st.sampled_from(["read", "run"]), ARGUMENTS), max_size=4)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """An answer: reasoning, text and calls in any combination."""
    calls = tuple(ToolCall(f"c{i}", name, args) for i, (name, args) in enumerate(draw(CALLS)))
    reasoning = draw(st.none() | st.text(min_size=1))
    return Message(Role.ASSISTANT, draw(st.text()), calls, reasoning=reasoning)


def told_calls(message: Message) -> list[Any]:
    """Names and arguments, as values where they are JSON."""
    found: list[Any] = []
    for one in message.tool_calls:
        try:
            found.append((one.name, json.loads(one.arguments or "{}")))
        except ValueError:
            found.append((one.name, one.arguments))
    return found


@given(
    message=messages(),
    streamed=st.booleans(),
    thoughts=st.booleans(),
    ids=st.sampled_from(["kept", "new", "none"]),
    order=st.randoms(use_true_random=False),
)
def test_an_echoed_answer_means_the_same(
    message: Message, *, streamed: bool, thoughts: bool, ids: str, order: Any
) -> None:
    """Dropped thoughts, joined texts, new or missing ids, results in any order: nothing is lost."""
    request = parse([user("Hi")])
    answer = answered(message)
    parts = json.loads(GOOGLE.encode(request, [answer]))["candidates"][0]["content"]["parts"]
    if streamed:
        stream = GOOGLE.stream(request, "s1-4", 0)
        pieces: list[Any] = [ReasoningDelta(char) for char in message.reasoning or ""]
        pieces += [TextDelta(char) for char in message.content]
        told = [stream.add(piece) for piece in [*pieces, *message.tool_calls]]
        again = chunks(b"".join([*told, stream.finish([answer])]))
        parts = [part for chunk in again for part in chunk["candidates"][0]["content"]["parts"]]
    parts = [part for part in parts if thoughts or not part.get("thought")]
    calls = [part["functionCall"] for part in parts if "functionCall" in part]
    for i, one in enumerate(calls):
        one["id"] = {"kept": one["id"], "new": f"{one['name']}_17_{i}", "none": None}[ids]
    results = [gave(one["name"], {"output": str(i)}, id=one["id"]) for i, one in enumerate(calls)]
    if ids != "none":
        order.shuffle(results)
    back = parse([user("Hi"), model(*parts), user(*results, "Go on.")]).messages
    assert back[1].content == message.content
    assert back[1].reasoning == (message.reasoning if thoughts else None)
    assert told_calls(back[1]) == told_calls(message)
    numbers = {one.id: str(i) for i, one in enumerate(back[1].tool_calls)}
    assert sorted(numbers.values()) == sorted(result.content for result in back[2:-1])
    assert all(numbers[str(r.tool_call_id)] == r.content for r in back[2:-1])


TURNS = st.sampled_from(
    [
        user("Hi"),
        model("So."),
        model({"text": "Hm.", "thought": True}, call("read")),
        model(call("read", id="a")),
        model(call("read"), call("read", {"path": "x"})),
    ]
)


@given(histories=st.lists(st.lists(TURNS, min_size=1, max_size=6), max_size=8))
def test_memory_changes_nothing(histories: list[list[Any]]) -> None:
    """Whatever was asked before in a session, a request is read as if it were the first."""
    memory = ParseCache()
    for history in histories:
        counted = incoming({"contents": history}, "/models/m:countTokens", "")
        assert GOOGLE.parse(counted, memory) == GOOGLE.parse(counted, ParseCache())
