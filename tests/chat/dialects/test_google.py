"""Particulars of Google's generateContent: details of errors, candidates, bare streams."""

from __future__ import annotations

import json

import pytest

from chat.dialects.wires import WIRES, finished, sse
from tugline.chat.model_call import TextDelta, Usage
from tugline.errors import EngineError, RequestError
from tugline.types import Finish, Message, Role

WIRE = WIRES["google"]
GOOGLE = WIRE.dialect


def test_errors_name_the_field_and_when_to_retry() -> None:
    """The details of an error have the field at fault and when to come back."""
    body = GOOGLE.encode_error(RequestError("wrong", param="contents[0]"))[2]
    (detail,) = json.loads(body)["error"]["details"]
    assert detail["fieldViolations"] == [{"field": "contents[0]", "description": "wrong"}]
    _, headers, body = GOOGLE.encode_error(EngineError("busy", status=503, retry_after=2.0))
    (detail,) = json.loads(body)["error"]["details"]
    assert (headers["retry-after"], detail["retryDelay"]) == ("2", "2.000s")


def test_candidates_are_in_order_and_counted_together() -> None:
    """Each candidate has its index and finish reason."""
    answers = [
        finished(Message(Role.ASSISTANT, "Look.", reasoning="Hm.")),
        finished(Message(Role.ASSISTANT, "x"), finish=Finish.LENGTH, usage=Usage(31, 4, 20)),
    ]
    report = json.loads(GOOGLE.encode(WIRE.hello(), answers))
    first, second = report["candidates"]
    content = {"role": "model", "parts": [{"text": "x"}]}
    assert second == {"content": content, "index": 1, "finishReason": "MAX_TOKENS"}
    assert (first["index"], first["content"]["role"]) == (0, "model")
    usage = report["usageMetadata"]
    counts = (usage["candidatesTokenCount"], usage["thoughtsTokenCount"], usage["totalTokenCount"])
    assert counts == (9, 2, 31 + 7 + 4)
    assert (report["modelVersion"], report["responseId"]) == ("m", "s1-4")


def test_a_stream_is_bare_data_lines() -> None:
    """Gemini CLI accepts nothing but data lines; an error is bare JSON without ``data:``."""
    request = WIRE.hello()
    streamed = WIRE.streamed(request, Message(Role.ASSISTANT, "a\nb"))
    assert all(line.startswith(b"data: {") for line in streamed.split(b"\n\n")[:-1])
    stream = GOOGLE.stream(request, "s1-4", 0)
    assert (stream.start(Usage(31, 0)), stream.content_type) == (b"", "text/event-stream")
    end = stream.fail(EngineError("gone"))
    assert end.startswith(b"{")  # in a data line, Gemini CLI takes it for the end
    assert sse(end)[0]["error"]["status"] == "UNAVAILABLE"


@pytest.mark.parametrize("fault", [True, False])
def test_without_sse_a_stream_is_one_list(*, fault: bool) -> None:
    """The list is valid JSON however it ends, also without any pieces."""
    request = WIRE.parse(WIRE.write([Message(Role.USER, "Hi")]), query="")
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
