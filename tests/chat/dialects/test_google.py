"""Particulars of Google's generateContent: Gemini CLI's requests, ids of calls, bare streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chat.dialects.wires import WIRES, finished, sse
from tugline.chat.model_call import Request, TextDelta, Usage
from tugline.errors import EngineError, RequestError
from tugline.types import Finish, Message, Role, ToolCall

WIRE = WIRES["google"]
GOOGLE = WIRE.dialect


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
    """Gemini CLI fails on anything else; an error is told without even that."""
    request = parse([user("Hi")])
    streamed = WIRE.streamed(request, Message(Role.ASSISTANT, "a\nb"))
    assert all(line.startswith(b"data: {") for line in streamed.split(b"\n\n")[:-1])
    stream = GOOGLE.stream(request, "s1-4", 0)
    assert (stream.start(Usage(31, 0)), stream.content_type) == (b"", "text/event-stream")
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
