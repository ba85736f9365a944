"""Particulars of OpenAI Chat: forms of messages, custom tools, several choices, usage."""

from __future__ import annotations

from typing import Any

from chat.dialects.wires import WIRES, finished, sse
from tugline.chat.model_call import ReasoningDelta, Request, TextDelta, Usage
from tugline.types import Finish, Image, Message, Role, Tool, ToolCall, ToolKind

WIRE = WIRES["openai_chat"]
CHAT = WIRE.dialect
READ, PATCH = WIRE.tools
HI = [{"role": "user", "content": "Hi"}]


def parse(messages: list[Any] = HI, **more: Any) -> Request:
    """The neutral request of a body with these messages."""
    return WIRE.parse({"messages": messages, **more})


# --------------------------------------------------------------------------- what comes in


def test_a_conversation_as_clients_send_it() -> None:
    """Developer role (pi), parts and pictures (qwen), echoed reasoning, late system messages."""
    url = {"url": "data:image/png;base64,AA", "detail": "low"}
    picture = {"type": "image_url", "image_url": url}
    request = parse(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [text("Mend "), picture, text("it.")]},
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
            {"role": "tool", "tool_call_id": "b", "content": [text("two"), picture]},
            {"role": "system", "content": "Tests first."},
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
        Message(Role.USER, "Mend it.", images=(Image(url["url"], 5, "low"),)),
        Message(Role.ASSISTANT, tool_calls=calls, reasoning="Hm."),
        Message(Role.TOOL, "two", tool_call_id="b", images=(Image(url["url"], 3, "low"),)),
        Message(Role.SYSTEM, "Tests first."),
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


# --------------------------------------------------------------------------- what goes out
def test_a_garbled_call_of_a_custom_tool_is_told_as_a_function() -> None:
    """Its arguments as they are; a good one is told as the free text that it is."""
    calls = (ToolCall("b", "patch", '{"input": "+x"}'), ToolCall("c", "patch", "+x"))
    reply = WIRE.whole(parse(tools=[READ, PATCH]), Message(Role.ASSISTANT, tool_calls=calls))
    assert WIRE.answer(reply)["tool_calls"] == [
        {"id": "b", "type": "custom", "custom": {"name": "patch", "input": "+x"}},
        {"id": "c", "type": "function", "function": call("patch", "+x")},
    ]


def test_a_stream_of_several_answers() -> None:
    """Roles first, deltas of each choice, a call's name before its arguments, usage at the end."""
    request = parse(n=2, tools=[READ, PATCH], stream=True, stream_options={"include_usage": True})
    stream = CHAT.stream(request, "s1-4", 17)
    read, patch = ToolCall("a", "read", '{"p": 1}'), ToolCall("b", "patch", '{"input": "+x"}')
    one = finished(Message(Role.ASSISTANT, "Hé", tool_calls=(read, patch), reasoning="Hm."))
    two = finished(Message(Role.ASSISTANT, "Zw"), finish=Finish.LENGTH)
    sent = stream.start(Usage(31, 0)) + stream.keep_alive() + stream.add(ReasoningDelta("Hm."))
    sent += stream.add(TextDelta("Zw"), 1) + stream.add(TextDelta("Hé"))
    sent += stream.add(read) + stream.add(patch) + stream.finish([one, two])
    assert sent.endswith(b"data: [DONE]\n\n")
    events = sse(sent)
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
    events = sse(stream.start(Usage(31, 0)) + stream.finish([finished(Message(Role.ASSISTANT))]))
    assert not any("usage" in event for event in events)
