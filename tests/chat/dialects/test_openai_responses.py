"""Particulars of OpenAI Responses: tools as items, ends of answers, compaction."""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses import CompactedResponse
from openai.types.responses import Response as SdkResponse

from chat.dialects.wires import WIRES, finished, sse
from tugline.chat.dialects.decoding import ParseCache
from tugline.chat.model_call import Request, TextDelta, Usage
from tugline.errors import EngineError
from tugline.types import Finish, Message, Role, ToolCall, TraceKind

WIRE = WIRES["openai_responses"]
RESPONSES = WIRE.dialect
TOOLS = WIRE.tools
READ, PATCH, _, AGENTS = TOOLS


def parse(
    items: Any = "Hi", *, cache: ParseCache | None = None, path: str | None = None, **more: Any
) -> Request:
    """The neutral request of a body with this input."""
    return WIRE.parse({"input": items, **more}, cache, path=path)


def user(text: str) -> dict[str, Any]:
    """A user's message in its shortest form."""
    return {"role": "user", "content": text}


# --------------------------------------------------------------------------- requests


def test_tools_that_come_as_an_item() -> None:
    """Tools of an item, as Codex sends them, are added to those of the request."""
    added = {"type": "additional_tools", "role": "developer", "tools": [AGENTS, PATCH]}
    cache = ParseCache()
    request = parse([added, user("Hi")], tools=[READ], cache=cache)
    assert [tool.name for tool in request.tools] == ["read", "agents__spawn", "patch"]
    assert request.messages == (Message(Role.USER, "Hi"),)
    again = parse([added, user("Hi"), user("Ho")], tools=[READ], cache=cache)
    assert again.tools is request.tools
    assert [tool.name for tool in parse([added, user("Hi")]).tools] == ["agents__spawn", "patch"]


# --------------------------------------------------------------------------- replies
def test_a_reply_is_the_sdks_and_repeats_its_request() -> None:
    """The official SDK's model validates a response strictly, also the last of a stream."""
    repeated = {"tools": TOOLS[:2], "instructions": "Be brief.", "metadata": {"k": "v"}}
    request = parse(temperature=0.5, text={"format": {"type": "text"}}, **repeated)
    calls = (ToolCall("a", "read", '{"p": 1}'), ToolCall("b", "patch", '{"input": "+x"}'))
    message = Message(Role.ASSISTANT, "Look.", calls, reasoning="Hm.")
    whole = WIRE.whole(request, message)
    reply = SdkResponse.model_validate(whole)
    assert (reply.output_text, reply.id, reply.incomplete_details) == ("Look.", "resp_s1-4", None)
    assert (reply.temperature, reply.tool_choice, reply.store) == (0.5, "auto", True)
    assert whole.items() >= repeated.items()
    first, *_, last = sse(WIRE.streamed(request, message))
    assert (first["response"]["status"], last["response"]) == ("in_progress", whole)


def test_a_cut_answer_is_incomplete() -> None:
    """The response and its last message are incomplete; reasoning is sealed only on request."""
    cut = Message(Role.ASSISTANT, "Loo", reasoning="Hm.")
    reply = WIRE.whole(parse(), cut, finish=Finish.LENGTH)
    assert reply["status"] == "incomplete"
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item.get("status") for item in reply["output"]] == [None, "incomplete"]
    assert "encrypted_content" not in reply["output"][0]
    last = sse(WIRE.streamed(parse(), cut, finish=Finish.LENGTH))[-1]
    assert (last["type"], last["response"]) == ("response.incomplete", reply)


def test_text_after_a_call_is_a_message_of_its_own() -> None:
    """Items end in the order in which they began; their echo is one turn again."""
    request, call = parse(tools=TOOLS), ToolCall("a", "read", "{}")
    stream = RESPONSES.stream(request, "s1-4", 17)
    pieces = (TextDelta("One."), call, TextDelta("\nTwo."))
    sent = stream.start(Usage(31, 0)) + b"".join(stream.add(piece) for piece in pieces)
    message = Message(Role.ASSISTANT, "One.\nTwo.", (call,))
    output = sse(sent + stream.finish([finished(message)]))[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    assert parse([user("Hi"), *output]).messages[1] == message


def test_a_failing_stream_ends_in_both_ways() -> None:
    """A failing stream has an error event and a failed response."""
    stream = RESPONSES.stream(parse(), "s1-4", 17)
    sent = stream.start(Usage(31, 0)) + stream.add(TextDelta("Loo"))
    *_, error, failed = sse(sent + stream.fail(EngineError("gone")))
    assert (error["type"], error["code"], error["message"]) == ("error", "server_error", "gone")
    assert error["param"] is None
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "gone"}
    assert stream.keep_alive().startswith(b":")


def test_compaction_round_trip() -> None:
    """The model is asked for a summary; its item is later read as the user's."""
    items = [{"role": "developer", "content": "Rules."}, user("Mend it.")]
    items += [{"role": "assistant", "content": "Done."}]
    more = {"tools": TOOLS, "stream": True, "instructions": "Be brief."}
    request = parse(items, path="/responses/compact", **more)
    assert request.thread.kind is TraceKind.COMPACTION
    assert (request.tools, request.stream) == ((), False)
    assert request.messages[-1].role is Role.USER
    assert request.messages[-2] == Message(Role.ASSISTANT, "Done.")
    reply = WIRE.whole(request, Message(Role.ASSISTANT, "It is mended."))
    kept, summary = reply["output"]
    CompactedResponse.model_validate({**reply, "output": [summary]})
    assert (kept["role"], kept["type"], kept["id"]) == ("user", "message", "msg_kept_1")
    assert kept["content"] == [{"type": "input_text", "text": "Mend it."}]
    assert "mended" not in json.dumps(summary)
    again = parse([*reply["output"], user("Go on.")]).messages
    assert [message.role for message in again] == [Role.USER] * 3
    assert again[1].content.endswith("It is mended.")


def test_a_text_of_the_client_before_a_response_is_its_own_message() -> None:
    """A text without an id is not an item of the response behind it, or of another text."""
    own = {"type": "message", "role": "assistant", "content": "I sum up."}
    response = [
        {
            "type": "reasoning",
            "id": "rs_s1-1_0",
            "summary": [{"type": "summary_text", "text": "Hm"}],
        },
        {"type": "message", "id": "msg_s1-1_1", "role": "assistant", "content": "Done."},
    ]
    answer = Message(Role.ASSISTANT, "Done.", reasoning="Hm")
    text = Message(Role.ASSISTANT, "I sum up.")
    for items, expected in (
        ([own, *response], [text, answer]),
        ([own, response[1]], [text, Message(Role.ASSISTANT, "Done.")]),
        ([*response, own], [answer, text]),
        ([own, own], [text, text]),
    ):
        assert list(WIRES["openai_responses"].hello(input=items).messages) == expected
