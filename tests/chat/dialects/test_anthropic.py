"""Particulars of Anthropic Messages: Claude Code's requests, order of blocks, events."""

from __future__ import annotations

import json
from typing import Any

from chat.dialects.wires import WIRES, finished, sse
from tugline.chat.dialects.decoding import ParseCache
from tugline.chat.model_call import ReasoningDelta, Request, TextDelta, ThreadInfo, Usage
from tugline.types import Image, Message, Role, Sampling, Tool, ToolCall

WIRE = WIRES["anthropic"]
ANTHROPIC = WIRE.dialect
(READ,) = WIRE.tools
PIXEL = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
CACHE = {"cache_control": {"type": "ephemeral"}}


def parse(messages: list[Any], **more: Any) -> Request:
    """The neutral request of a body with these messages."""
    return WIRE.parse({"messages": messages, **more})


def user(content: Any) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": content}


def block(text: str, **more: Any) -> dict[str, Any]:
    """A text block."""
    return {"type": "text", "text": text, **more}


# --------------------------------------------------------------------------- what is understood
def test_a_request_as_claude_code_sends_it() -> None:
    """Its system blocks, the system message among the messages, deferred tools, thinking."""
    body = {
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
        "tools": [READ, {**READ, "name": "search", "type": "custom", "defer_loading": True}],
        "metadata": {"user_id": '{"device_id":"d"}'},
        "thinking": {"type": "adaptive", "display": "updates"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    request = WIRE.parse(body, headers={"x-claude-code-session-id": "s"})
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
        thread=ThreadInfo("s"),
    )


def test_results_and_text_of_one_user_message_keep_their_order() -> None:
    """Parallel results as text, blocks, picture and error, then what the user says."""
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
    turn = [{"type": "tool_use", "id": name, "name": "read", "input": {}} for name in "abcd"]
    request = parse([user("Hi"), {"role": "assistant", "content": turn}, user(results)])
    picture = "data:image/png;base64,AA=="
    assert request.messages[2:] == (
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


def test_counting_needs_no_limit_and_takes_any_last_message() -> None:
    """count_tokens shares the reading of a request, but nothing is sampled after it."""
    body = {"model": "m", "messages": [user("Hi"), {"role": "assistant", "content": "Yes"}]}
    counted = ANTHROPIC.parse(WIRE.request(body, "/messages/count_tokens"), ParseCache())
    assert counted.messages[-1] == Message(Role.ASSISTANT, "Yes")
    assert json.loads(ANTHROPIC.encode_count(12)) == {"input_tokens": 12}


# --------------------------------------------------------------------------- responses
def test_a_stream_has_every_event_in_order() -> None:
    """Blocks are numbered, opened and closed; counts are true from the first event on."""
    request = parse([user("Hi")], stream=True)
    stream = ANTHROPIC.stream(request, "s1-4", 0)
    call = ToolCall("a", "read", '{"a": 1}')
    message = Message(Role.ASSISTANT, "Look.", (call,), reasoning="Hm.")
    assert stream.keep_alive().startswith(b":"), "before message_start only a comment may come"
    events = sse(
        stream.start(Usage(31, 0))
        + stream.add(ReasoningDelta("H"))
        + stream.keep_alive()
        + stream.add(ReasoningDelta("m."))
        + stream.add(TextDelta("Look."))
        + stream.add(call)
        + stream.finish([finished(message)])
    )
    assert [event["type"] for event in events] == [
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
    start = events[0]["message"]
    assert (start["id"], start["usage"]["input_tokens"]) == ("msg_s1-4", 31)
    assert events[-2]["usage"] == WIRE.whole(request, message)["usage"]
