"""Marks of special calls in the spans of traces."""

from __future__ import annotations

import pytest

from support.calls import make_call
from tugline.plugins import find
from tugline.traces.base import is_malformed
from tugline.types import Branch, Call, Finish, MalformedCalls, Message, Role, Tool, ToolCall

READ = Tool("read", "", {"type": "object"})


def act(number: int, parent: int | None, *made: tuple[str, str], **changes: object) -> Call:
    """A call whose answer makes tool calls; its prompt extends that of the parent's number."""
    tools = tuple(ToolCall(f"{number}", name, arguments) for name, arguments in made)
    prompt = [7] * (3 * number + 1)
    fields = {"answer": Message(Role.ASSISTANT, "", tools), "parent": parent, "tools": (READ,)}
    return make_call(number, prompt, [7, 7], **(fields | changes))


@pytest.mark.parametrize("builder", ["prefix_merging", "per_request"])
def test_spans_have_the_marks_of_their_calls(builder: str) -> None:
    """Repeats count along the conversation; an answer may be malformed and truncated."""
    same = ("read", '{"path": "a"}')
    other = ("read", '{"path": "b"}')
    calls = [
        act(0, None, same),
        act(1, 0, same),
        act(2, 1, same, finish=Finish.LENGTH),
        act(3, 2, other),
        act(4, 3, ("read", "[]")),
        act(5, 0, same, branch=Branch.HISTORY_EDITED),
        act(6, 5),
        act(7, 6),
        act(8, 2, same, branch=Branch.NEW_THREAD),
    ]
    traces, _, _ = find("builder", builder)().build(calls)
    spans = {span.call: span for trace in traces for span in trace.spans}
    assert [spans[n].repeats for n in range(9)] == [0, 1, 2, 0, 0, 1, 0, 0, 0]
    assert [n for n in spans if spans[n].malformed] == [4]
    assert [n for n in spans if spans[n].truncated] == [2]


@pytest.mark.parametrize(
    ("changes", "malformed"),
    [
        ({}, False),
        ({"malformed": MalformedCalls.RAW}, True),
        ({"answer": Message(Role.ASSISTANT, "", (ToolCall("0", "write", "{}"),))}, True),
        ({"answer": Message(Role.ASSISTANT, "", (ToolCall("0", "read", "\ud800"),))}, True),
        ({"answer": Message(Role.ASSISTANT, "<tool_call>read")}, True),
        ({"answer": Message(Role.ASSISTANT, "<tool_call>read"), "tools": ()}, False),
        ({"answer": None}, False),
    ],
)
def test_malformed_answers_are_found(changes: dict[str, object], *, malformed: bool) -> None:
    """Of a call without tools, only what the gateway recorded counts."""
    assert is_malformed(act(0, None, ("read", "{}"), **changes)) == malformed
