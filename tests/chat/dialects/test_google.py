"""Particulars of Google's generateContent: Gemini CLI's requests, ids of calls, bare streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chat.dialects.wires import WIRES, finished, sse
from tugline.chat.model_call import Request, TextDelta, Usage
from tugline.errors import EngineError, RequestError
from tugline.types import Finish, Image, Message, Role, Sampling, Tool, ToolCall

WIRE = WIRES["google"]
GOOGLE = WIRE.dialect
DECLARED = WIRE.tools
PIXEL = {"inlineData": {"mimeType": "image/png", "data": "AA=="}}


def parse(contents: list[Any], **more: Any) -> Request:
    """The neutral request of a body with these contents."""
    return WIRE.parse({"contents": contents, **more})


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


# --------------------------------------------------------------------------- what is understood
def test_a_request_as_gemini_cli_sends_it() -> None:
    """The model from the path, the system prompt, functions, and its sampling."""
    body = {
        "contents": [user("<session_context>\n</session_context>", "Mend it.")],
        "systemInstruction": {"role": "user", "parts": [{"text": "Be brief."}]},
        "tools": DECLARED,
        "generationConfig": {
            "temperature": 1,
            "topP": 0.95,
            "topK": 64,
            "candidateCount": 2,
            "thinkingConfig": {"includeThoughts": True, "thinkingLevel": "HIGH"},
        },
        "safetySettings": [{"category": "x", "threshold": "BLOCK_NONE"}],
    }
    request = WIRE.parse(body, path="/models/stub-model:streamGenerateContent")
    assert request == Request(
        model="stub-model",
        messages=(
            Message(Role.SYSTEM, "Be brief."),
            Message(Role.USER, "<session_context>\n</session_context>\nMend it."),
        ),
        tools=(Tool("read", "Read", {"type": "object"}),),
        sampling=Sampling(1.0, 0.95, 64),
        n=2,
        stream=True,
        echo=b"sse",
    )


def test_results_pictures_and_text_keep_their_order() -> None:
    """An error, one value as itself, an object as JSON, a picture, then what the user says."""
    calls = [call(name, id=name) for name in ("run", "read", "find", "list")]
    results = (
        gave("run", {"error": "gone"}, id="run"),
        gave("read", {"output": "x"}, id="read", parts=[PIXEL]),
        gave("find", {"lines": [1, 2]}, id="find"),
        gave("list", {"result": "y"}, id="list"),
    )
    file = {"fileData": {"fileUri": "https://x/y.png", "mimeType": "image/png"}}
    last = user(*results, "Go on.", PIXEL, file, "And now.")
    picture, other = "data:image/png;base64,AA==", "https://x/y.png"
    assert parse([user("Hi"), model(*calls), last]).messages[2:] == (
        Message(Role.TOOL, "gone", tool_call_id="run", failed=True),
        Message(Role.TOOL, "x", tool_call_id="read", images=(Image(picture, 1),)),
        Message(Role.TOOL, '{"lines":[1,2]}', tool_call_id="find"),
        Message(Role.TOOL, "y", tool_call_id="list"),
        Message(Role.USER, "Go on.\nAnd now.", images=(Image(picture, 6), Image(other, 6))),
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


def test_schemas_in_googles_spelling_become_json_schema() -> None:
    """Capital types, nullable, counts as text, at every depth; a field called type is a field."""
    kind = {"type": "STRING", "nullable": True, "enum": ["OBJECT"]}
    many = {"type": "ARRAY", "minItems": "2", "items": {"anyOf": [{"type": "NUMBER"}]}}
    properties = {"type": kind, "list": many}
    schema = {"type": "OBJECT", "properties": properties, "required": ["type"]}
    functions = [{"name": "f", "parameters": schema}, {"name": "g"}]
    first, second = parse([user("Hi")], tools=[{"functionDeclarations": functions}]).tools
    kind = {"type": ["string", "null"], "enum": ["OBJECT"]}
    many = {"type": "array", "minItems": 2, "items": {"anyOf": [{"type": "number"}]}}
    properties = {"type": kind, "list": many}
    expected = {"type": "object", "properties": properties, "required": ["type"]}
    assert (first, second) == (Tool("f", "", expected), Tool("g", "", {}))


@pytest.mark.parametrize("wrapped", [True, False])
def test_counting_takes_both_forms(*, wrapped: bool) -> None:
    """A count of contents alone, or of a whole request; nothing is sampled after it."""
    body: Any = {"contents": [user("Hi"), model("Yes")], "systemInstruction": user("Help.")}
    body = {"generateContentRequest": {"model": "models/m", **body}} if wrapped else body
    counted = WIRE.parse(body, path="/models/m:countTokens")
    assert [message.content for message in counted.messages] == ["Help.", "Hi", "Yes"]
    assert json.loads(GOOGLE.encode_count(12)) == {"totalTokens": 12}


# --------------------------------------------------------------------------- what is told


def test_error_details() -> None:
    """The field at fault, and when to come back."""
    body = GOOGLE.encode_error(RequestError("wrong", param="contents[0]"))[2]
    (detail,) = json.loads(body)["error"]["details"]
    assert detail["fieldViolations"] == [{"field": "contents[0]", "description": "wrong"}]
    _, headers, body = GOOGLE.encode_error(EngineError("busy", status=503, retry_after=2.0))
    (detail,) = json.loads(body)["error"]["details"]
    assert (headers["retry-after"], detail["retryDelay"]) == ("2", "2.000s")


def test_a_whole_answer() -> None:
    """Candidates in order, thoughts apart, a signature on the first call, and true counts."""
    calls = (ToolCall("a", "read", '{"a": 1}'), ToolCall("b", "run", ""))
    answers = [
        finished(Message(Role.ASSISTANT, "Look.", calls, reasoning="Hm.")),
        finished(Message(Role.ASSISTANT, "x"), finish=Finish.LENGTH, usage=Usage(31, 4, 20)),
    ]
    report = json.loads(GOOGLE.encode(parse([user("Hi")]), answers))
    first, second = report["candidates"]
    parts = first["content"]["parts"]
    assert parts[2].pop("thoughtSignature")
    assert parts == [
        {"text": "Hm.", "thought": True},
        {"text": "Look."},
        call("read", {"a": 1}, id="a"),
        call("run", id="b"),
    ]
    assert second == {"content": model("x"), "index": 1, "finishReason": "MAX_TOKENS"}
    assert (first["index"], first["content"]["role"]) == (0, "model")
    usage = report["usageMetadata"]
    counts = (usage["candidatesTokenCount"], usage["thoughtsTokenCount"], usage["totalTokenCount"])
    assert counts == (9, 2, 31 + 7 + 4)
    assert (report["modelVersion"], report["responseId"]) == ("m", "s1-4")


def test_a_stream_is_bare_data_lines() -> None:
    """Gemini CLI fails on anything else; the last chunk has finish reason and usage."""
    streamed = WIRE.streamed(parse([user("Hi")]), Message(Role.ASSISTANT, "a\nb"))
    assert all(line.startswith(b"data: {") for line in streamed.split(b"\n\n")[:-1])
    stream = GOOGLE.stream(parse([user("Hi")]), "s1-4", 0)
    message = Message(Role.ASSISTANT, "Look.", (ToolCall("a", "read", '{"a": 1}'),), reasoning="H")
    assert (stream.start(Usage(31, 0)), stream.keep_alive()) == (b"", b"")
    assert stream.content_type == "text/event-stream"
    told = sse(WIRE.streamed(parse([user("Hi")]), message))
    whole = json.loads(GOOGLE.encode(parse([user("Hi")]), [finished(message)]))
    parts = [chunk["candidates"][0]["content"]["parts"] for chunk in told]
    assert [part for (part,) in parts[:-1]] == whole["candidates"][0]["content"]["parts"]
    assert parts[-1] == [{"text": ""}]
    assert [chunk["candidates"][0].get("finishReason") for chunk in told] == [None] * 3 + ["STOP"]
    assert told[-1]["usageMetadata"] == whole["usageMetadata"]
    assert {chunk["responseId"] for chunk in told} == {"s1-4"}
    end = stream.fail(EngineError("gone"))
    assert end.startswith(b"{")  # in a data line, Gemini CLI takes it for the end
    assert sse(end)[0]["error"]["status"] == "UNAVAILABLE"


@pytest.mark.parametrize("fault", [True, False])
def test_without_sse_a_stream_is_one_list(*, fault: bool) -> None:
    """It is valid JSON however it ends, also when nothing came before."""
    request = WIRE.parse({"contents": [user("Hi")]}, query="")
    for pieces in ([], [TextDelta("x")], [TextDelta("x"), TextDelta("y")]):
        stream = GOOGLE.stream(request, "s1-4", 0)
        data = stream.start(Usage(31, 0)) + b"".join(stream.add(piece) for piece in pieces)
        done = [finished(Message(Role.ASSISTANT, "xy"))]
        report = json.loads(
            data + (stream.fail(EngineError("gone")) if fault else stream.finish(done))
        )
        assert len(report) == len(pieces) + 1
        assert ("error" in report[-1]) == fault
        assert stream.content_type == "application/json"
