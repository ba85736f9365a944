"""A turn is recognised through every harmless rewriting, and only through those (I1)."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny import rendering
from tugline.gateway.conversation import Conversation, Plan
from tugline.types import Branch, Ids, Message, Role, Tool, ToolCall

TOOLS = (Tool("read", "Read a file", {"type": "object", "properties": {"path": {}}}),)
START = (Message(Role.SYSTEM, "You help."), Message(Role.USER, "Mend it."))
ARGUMENTS = '{"path": "a.py", "line": 1.0}'
RENDERING = rendering()


def sampled(text: str) -> Ids:
    """The ids of an answer that ends its turn."""
    return np.asarray(RENDERING.tokenizer.encode(f"{text}<|im_end|>"), np.int32)


def answered(arguments: str = ARGUMENTS) -> tuple[Conversation, Plan, Ids]:
    """A conversation after one turn that called `read`."""
    conversation = Conversation(RENDERING)
    plan = conversation.plan(START, TOOLS)
    ids = sampled(f'<tool_call>\n{{"name": "read", "arguments": {arguments}}}\n</tool_call>')
    call = ToolCall("call_0_0", "read", arguments)
    conversation.record(plan, 0, ids, Message(Role.ASSISTANT, "", (call,)))
    return conversation, plan, ids


def echo(arguments: str, call_id: str = "call_0_0") -> tuple[Message, ...]:
    """The next request's messages, with the model's turn as some harness echoes it."""
    return (
        *START,
        Message(Role.ASSISTANT, "", (ToolCall(call_id, "read", arguments),)),
        Message(Role.TOOL, "x = 1", tool_call_id=call_id),
    )


@pytest.mark.parametrize(
    ("arguments", "call_id"),
    [
        (ARGUMENTS, "call_0_0"),
        ('{"path":"a.py","line":1}', "call_0_0"),
        ('{"line":1,"path":"a.py"}', "call_0_0"),
        ('{"path":"a\\u002epy","line":1}', "another-id"),
    ],
    ids=["verbatim", "compact, as pi does", "keys moved", "escaped, id re-issued"],
)
def test_a_rewritten_echo_continues_exactly(arguments: str, call_id: str) -> None:
    """Spacing, key order, number form and ids of tool calls do not break the sequence."""
    conversation, first, ids = answered()
    plan = conversation.plan(echo(arguments, call_id), TOOLS)
    before = np.concatenate((first.prompt, ids))
    assert (plan.parent, plan.branch) == (0, None)
    assert plan.reused == len(before)
    assert np.array_equal(plan.prompt[: len(before)], before)
    assert [message.role for message in plan.added] == [Role.TOOL]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (echo('{"path": "b.py", "line": 1.0}'), Branch.HISTORY_EDITED),
        ((START[0], Message(Role.USER, "Other."), *echo(ARGUMENTS)[2:]), Branch.HISTORY_EDITED),
        (
            (*echo(ARGUMENTS), Message(Role.ASSISTANT, "Made up."), Message(Role.USER, "Go on.")),
            Branch.HARNESS_ASSISTANT,
        ),
    ],
    ids=["other arguments", "other question", "a turn we did not sample"],
)
def test_a_real_edit_branches_with_its_reason(
    messages: tuple[Message, ...], reason: Branch
) -> None:
    """What changes meaning is never stitched to what was sampled."""
    conversation, first, ids = answered()
    plan = conversation.plan(messages, TOOLS)
    assert (plan.parent, plan.branch) == (0, reason)
    assert 0 < plan.reused <= len(first.prompt) + len(ids)


def test_other_tools_branch() -> None:
    """Tools stand at the front of the prompt, so changing them changes everything."""
    conversation, _, _ = answered()
    plan = conversation.plan(echo(ARGUMENTS), (Tool("bash", "Run", {}),))
    assert plan.branch is Branch.TOOLS_CHANGED


def test_unparsable_arguments_keep_their_bytes() -> None:
    """Broken JSON matches only itself."""
    conversation, _, _ = answered('{"path": ')
    assert conversation.plan(echo('{"path": '), TOOLS).branch is None
    assert conversation.plan(echo('{"path":'), TOOLS).branch is Branch.HISTORY_EDITED


def test_the_same_question_again_starts_anew() -> None:
    """A repeated first request is a twin, not a continuation."""
    conversation, first, _ = answered()
    plan = conversation.plan(START, TOOLS)
    assert np.array_equal(plan.prompt, first.prompt)
    assert plan.branch is Branch.HISTORY_EDITED


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(value=st.dictionaries(st.text(max_size=6), JSON, max_size=4), data=st.data())
def test_any_json_round_trip_is_seen_through(value: dict[str, object], data: st.DataObject) -> None:
    """Whatever the arguments hold, re-serialising them does not fork the trace."""
    conversation, _, _ = answered(json.dumps(value, ensure_ascii=False))
    keys = data.draw(st.permutations(sorted(value)))
    shuffled = json.dumps({key: value[key] for key in keys}, separators=(",", ":"))
    assert conversation.plan(echo(shuffled), TOOLS).branch is None
