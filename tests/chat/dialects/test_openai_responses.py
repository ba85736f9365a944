"""Particulars of OpenAI Responses: folding of items, kinds of calls, events, compaction."""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses import CompactedResponse
from openai.types.responses import Response as SdkResponse

from chat.dialects.wires import WIRES, finished, sse
from tugline.chat.dialects.decoding import ParseCache
from tugline.chat.dialects.responses_input import seal
from tugline.chat.model_call import Request, TextDelta, Usage
from tugline.errors import EngineError
from tugline.types import Finish, Image, Message, Role, Tool, ToolCall, ToolKind, TraceKind

WIRE = WIRES["openai_responses"]
RESPONSES = WIRE.dialect
TOOLS = WIRE.tools
READ, PATCH, SHELL, AGENTS = TOOLS
SEALED = {"include": ["reasoning.encrypted_content"]}


def parse(
    items: Any = "Hi", *, cache: ParseCache | None = None, path: str | None = None, **more: Any
) -> Request:
    """The neutral request of a body with this input."""
    return WIRE.parse({"input": items, **more}, cache, path=path)


def user(text: str) -> dict[str, Any]:
    """What the user says, in its shortest form."""
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    """What the model said."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "content": content, **more}


def thought(text: str, **more: Any) -> dict[str, Any]:
    """What the model thought."""
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}], **more}


def called(name: str, call_id: str, arguments: str = "{}", **more: Any) -> dict[str, Any]:
    """A call of the model."""
    call = {"type": "function_call", "name": name, "call_id": call_id, "arguments": arguments}
    return {**call, **more}


def result(call_id: str, output: Any) -> dict[str, Any]:
    """What a tool answered."""
    return {"type": "function_call_output", "call_id": call_id, "output": output}


# --------------------------------------------------------------------------- what comes in


def test_a_request_as_codex_sends_it() -> None:
    """Developer items, pictures, ids on everything, echoed reasoning, no instructions."""
    text = [{"type": "input_text", "text": "Rules."}, {"type": "input_text", "text": "Skills."}]
    url = "data:image/png;base64,AA"
    picture = {"type": "input_image", "image_url": url, "detail": "low"}
    items = [
        {"type": "message", "role": "developer", "content": text, "id": "msg_0199-ab"},
        {"type": "message", "role": "user", "content": [text[0], picture]},
        {**thought("Hm."), "id": "rs_s1-0_0", "content": None, "encrypted_content": seal("Hm.")},
        said("Look.", id="msg_s1-0_1", status="completed"),
        called("read", "call_0_0", '{"p": 1}', id="fc_s1-0_2"),
        called("spawn", "call_0_1", id="fc_s1-0_3", namespace="agents"),
        {**result("call_0_1", "two"), "id": "fco_1"},
        result("call_0_0", [{"type": "input_text", "text": "one"}, picture]),
        {"role": "developer", "content": "Be quick."},
    ]
    request = parse(
        items,
        tools=[READ, AGENTS],
        stream=True,
        store=False,
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"summary": "auto"},
        client_metadata={"x": "y"},
        prompt_cache_key="k",
        **SEALED,
    )
    calls = (ToolCall("call_0_0", "read", '{"p": 1}'), ToolCall("call_0_1", "agents__spawn", "{}"))
    assert request.messages == (
        Message(Role.DEVELOPER, "Rules.\nSkills."),
        Message(Role.USER, "Rules.", images=(Image(url, 6, "low"),)),
        Message(Role.ASSISTANT, "Look.", tool_calls=calls, reasoning="Hm."),
        Message(Role.TOOL, "two", tool_call_id="call_0_1"),
        Message(Role.TOOL, "one", tool_call_id="call_0_0", images=(Image(url, 3, "low"),)),
        Message(Role.DEVELOPER, "Be quick."),
    )
    about = "Helpers.\n\nStart one"
    assert request.tools == (
        Tool("read", "Read", {"type": "object"}),
        Tool("agents__spawn", about, {}, namespace="agents"),
    )
    assert request.stream


def test_instructions_come_first() -> None:
    """Before a text as before items; mini-swe-agent sends nulls for what it does not have."""
    call = called("read", "a", id=None, namespace=None, caller=None, phase=None)
    request = parse([user("Hi"), call, result("a", "1")], instructions="Be brief.")
    system, hi = Message(Role.SYSTEM, "Be brief."), Message(Role.USER, "Hi")
    read = Message(Role.ASSISTANT, tool_calls=(ToolCall("a", "read", "{}"),))
    assert request.messages[:3] == (system, hi, read)
    assert parse("Hi", instructions="Be brief.").messages == (system, hi)


def test_two_turns_with_nothing_between_are_kept_apart() -> None:
    """Codex keeps what it got of a cut stream and asks again; the ids tell whose an item is."""
    cut = [thought("Hm.", id="rs_s1-0_0"), said("Loo", id="msg_s1-0_1")]
    more = [thought("So.", id="rs_s1-1_0"), called("read", "c", id="fc_s1-1_1")]
    first, second = parse([user("Hi"), *cut, *more, result("c", "x")]).messages[1:3]
    assert first == Message(Role.ASSISTANT, "Loo", reasoning="Hm.")
    read = ToolCall("c", "read", "{}")
    assert second == Message(Role.ASSISTANT, tool_calls=(read,), reasoning="So.")
    nameless = [thought("Hm.", id="rs_s1-0_0"), said("Loo"), called("read", "c", id="fc_s1-0_2")]
    assert len(parse([user("Hi"), *nameless]).messages) == 2


def test_where_reasoning_is_found() -> None:
    """Sealed, as raw reasoning text or as a summary; an empty item is nothing."""
    raw = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Raw."}]}
    for item, text in (
        ({"type": "reasoning", "summary": [], "encrypted_content": seal("Ünd.")}, "Ünd."),
        ({**raw, "summary": []}, "Raw."),
        (thought("Sum.", encrypted_content="gAAAA"), "Sum."),
    ):
        assert parse([user("Hi"), item]).messages[1].reasoning == text
    assert len(parse([user("Hi"), thought("")]).messages) == 1


def test_freeform_and_shell_calls_come_back_as_arguments() -> None:
    """Their outputs, too, even where an output names its call by the item's id."""
    action = {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": 9, "user": None}
    items = [
        user("Hi"),
        {"type": "custom_tool_call", "name": "patch", "call_id": "a", "input": "+x"},
        {"type": "local_shell_call", "id": "lsh_s1-0_1", "call_id": "b", "action": action},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "ok"},
        {"type": "local_shell_call_output", "id": "lsh_s1-0_1", "output": "{}"},
    ]
    request = parse(items, tools=[PATCH, SHELL])
    patch = ToolCall("a", "patch", '{"input":"+x"}')
    shell = ToolCall("b", "local_shell", '{"command":["ls"],"timeout_ms":9}')
    assert request.messages[1:] == (
        Message(Role.ASSISTANT, tool_calls=(patch, shell)),
        Message(Role.TOOL, "ok", tool_call_id="a"),
        Message(Role.TOOL, "{}", tool_call_id="b"),
    )
    assert [tool.kind for tool in request.tools] == [ToolKind.CUSTOM, ToolKind.LOCAL_SHELL]


def test_tools_that_come_as_an_item() -> None:
    """Codex sends them so for models that it knows; they join the request's own."""
    added = {"type": "additional_tools", "role": "developer", "tools": [AGENTS, PATCH]}
    cache = ParseCache()
    request = parse([added, user("Hi")], tools=[READ], cache=cache)
    assert [tool.name for tool in request.tools] == ["read", "agents__spawn", "patch"]
    assert request.messages == (Message(Role.USER, "Hi"),)
    again = parse([added, user("Hi"), user("Ho")], tools=[READ], cache=cache)
    assert again.tools is request.tools
    assert [tool.name for tool in parse([added, user("Hi")]).tools] == ["agents__spawn", "patch"]


# --------------------------------------------------------------------------- what goes out
FULL = Message(
    Role.ASSISTANT,
    "Look.",
    tool_calls=(
        ToolCall("a", "read", '{"p": 1}'),
        ToolCall("b", "patch", '{"input": "+x"}'),
        ToolCall("c", "local_shell", '{"command": ["ls"]}'),
        ToolCall("d", "agents__spawn", "{}"),
        ToolCall("e", "patch", "+x"),
        ToolCall("f", "local_shell", '{"command": "ls"}'),
    ),
    reasoning="Hm.",
)
DONE = {"status": "completed"}
PART = {"type": "output_text", "text": "Look.", "annotations": [], "logprobs": []}
FULL_ITEMS = [
    {**thought("Hm."), "id": "rs_s1-4_0", "encrypted_content": seal("Hm.")},
    {"type": "message", "id": "msg_s1-4_1", "role": "assistant", "content": [PART], **DONE},
    called("read", "a", '{"p": 1}', id="fc_s1-4_2", **DONE),
    {
        "type": "custom_tool_call",
        "id": "ctc_s1-4_3",
        "call_id": "b",
        "name": "patch",
        "input": "+x",
        **DONE,
    },
    {
        "type": "local_shell_call",
        "id": "lsh_s1-4_4",
        "call_id": "c",
        "action": {"type": "exec", "env": {}, "command": ["ls"]},
        **DONE,
    },
    called("spawn", "d", id="fc_s1-4_5", namespace="agents", **DONE),
    called("patch", "e", "+x", id="fc_s1-4_6", **DONE),
    called("local_shell", "f", '{"command": "ls"}', id="fc_s1-4_7", **DONE),
]
"""Free text and shell commands that the model garbled are told as plain calls."""


def test_the_sdk_accepts_a_reply() -> None:
    """The official SDK's model of a response, validated strictly."""
    request = parse(tools=[READ, PATCH], temperature=0.5, text={"format": {"type": "text"}})
    message = Message(Role.ASSISTANT, "Look.", FULL.tool_calls[:2], reasoning="Hm.")
    reply = SdkResponse.model_validate(WIRE.whole(request, message))
    assert reply.output_text == "Look."
    assert (reply.temperature, reply.tool_choice, reply.store) == (0.5, "auto", True)


def test_a_cut_answer_is_incomplete() -> None:
    """The response and its last message, streamed too; reasoning is sealed only if asked for."""
    cut = Message(Role.ASSISTANT, "Loo", reasoning="Hm.")
    reply = WIRE.whole(parse(), cut, finish=Finish.LENGTH)
    assert reply["status"] == "incomplete"
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item.get("status") for item in reply["output"]] == [None, "incomplete"]
    assert "encrypted_content" not in reply["output"][0]
    last = sse(WIRE.streamed(parse(), cut, finish=Finish.LENGTH))[-1]
    assert (last["type"], last["response"]) == ("response.incomplete", reply)


def test_the_events_of_a_stream() -> None:
    """All of them, in order, numbered, each saying which item it is about; a whole reply at last.

    The response repeats what its request holds.
    """
    repeated = {"tools": TOOLS, "instructions": "Be brief.", "metadata": {"k": "v"}}
    request = parse(stream=True, **repeated, **SEALED)
    found = sse(WIRE.streamed(request, FULL))
    item = ["response.output_item.added", "response.output_item.done"]
    arguments = ["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    free = ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
    call = [item[0], *arguments, item[1]]
    assert [event["type"] for event in found] == [
        "response.created",
        "response.in_progress",
        item[0],
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        item[1],
        item[0],
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        item[1],
        *call,
        *[item[0], *free, item[1]],
        *item,
        *call,
        *call,
        *call,
        "response.completed",
    ]
    done = [event["item"] for event in found if event["type"] == item[1]]
    assert done == FULL_ITEMS == found[-1]["response"]["output"]
    assert found[0]["response"]["status"] == "in_progress"
    for event in found[2:-1]:
        about = event.get("item_id") or event["item"]["id"]
        assert about == FULL_ITEMS[event["output_index"]]["id"]
    text = next(event for event in found if event["type"] == "response.output_text.delta")
    assert (text["delta"], text["content_index"], text["logprobs"]) == ("Look.", 0, [])
    whole = WIRE.whole(request, FULL)
    assert found[-1]["response"] == whole
    assert whole.items() >= repeated.items()
    assert (whole["id"], whole["incomplete_details"]) == ("resp_s1-4", None)


def test_text_after_a_call_is_a_message_of_its_own() -> None:
    """Items end in the order in which they began; their echo is one turn again."""
    request, call = parse(tools=TOOLS), ToolCall("a", "read", "{}")
    stream = RESPONSES.stream(request, "s1-4", 17)
    pieces = (TextDelta("One."), call, TextDelta("\nTwo."))
    sent = stream.start(Usage(31, 0)) + b"".join(stream.add(piece) for piece in pieces)
    message = Message(Role.ASSISTANT, "One.\nTwo.", (call,))
    output = sse(sent + stream.finish([finished(message)]))[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    assert parse([user("Hi"), *output, result("a", "x")]).messages[1] == message


def test_a_failing_stream_ends_in_both_ways() -> None:
    """An error event, for those who look for it, and a failed response."""
    stream = RESPONSES.stream(parse(), "s1-4", 17)
    sent = stream.start(Usage(31, 0)) + stream.add(TextDelta("Loo"))
    *_, error, failed = sse(sent + stream.fail(EngineError("gone")))
    assert (error["type"], error["code"], error["message"]) == ("error", "server_error", "gone")
    assert error["param"] is None
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "gone"}
    assert stream.keep_alive().startswith(b":")


def test_compaction_there_and_back() -> None:
    """The model is asked for a summary; its item is later read as the user's."""
    items = [{"role": "developer", "content": "Rules."}, user("Mend it."), said("Done.")]
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
