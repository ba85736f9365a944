"""A turn is recognised through every harmless rewriting, and only through those (I1)."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from tiny import rendering, tokenizer
from tugline.chat.model_call import ThreadInfo
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.chat.tokens import TokenSequence
from tugline.errors import EngineError, Unsupported
from tugline.gateway import turns
from tugline.gateway.prefix import CallTree, Prompt
from tugline.types import Branch, EchoChange, Ids, Message, Role, Tool, ToolCall

TOOLS = (Tool("read", "Read a file", {"type": "object", "properties": {"path": {}}}),)
START = (Message(Role.SYSTEM, "You help."), Message(Role.USER, "Mend it."))
ARGUMENTS = '{"path": "a.py", "line": 1.0}'
RENDERING = rendering()


def sampled(text: str) -> Ids:
    """The ids of an answer that ends its turn."""
    return np.asarray(RENDERING.tokenizer.encode(f"{text}<|im_end|>"), np.int32)


def add_turn(
    tree: CallTree, number: int, answer: Message, messages: tuple[Message, ...] = START
) -> Prompt:
    """Ask with these messages, and record the answer."""
    plan = tree.match(messages, TOOLS)
    tree.add(plan, number, plan.tokens.extend(sampled(f"turn {number}")), answer)
    return plan


def answered(arguments: str = ARGUMENTS) -> tuple[CallTree, Prompt, Ids]:
    """A tree after one turn that called `read`."""
    tree = CallTree(RENDERING)
    plan = tree.match(START, TOOLS)
    ids = sampled(f'<tool_call>\n{{"name": "read", "arguments": {arguments}}}\n</tool_call>')
    call = ToolCall("call_0_0", "read", arguments)
    tree.add(plan, 0, plan.tokens.extend(ids), Message(Role.ASSISTANT, "", (call,)))
    return tree, plan, ids


def echo(arguments: str, call_id: str = "call_0_0") -> tuple[Message, ...]:
    """The next request's messages, with the model's turn as some harness echoes it."""
    return (
        *START,
        Message(Role.ASSISTANT, "", (ToolCall(call_id, "read", arguments),)),
        Message(Role.TOOL, "x = 1", tool_call_id=call_id),
    )


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (echo('{"path": "b.py", "line": 1.0}'), Branch.CALL_REPAIRED),
        ((*START, Message(Role.USER, "That call was wrong.")), Branch.TURN_DELETED),
        ((START[0], Message(Role.USER, "Other."), *echo(ARGUMENTS)[2:]), Branch.HISTORY_EDITED),
        (
            (*echo(ARGUMENTS), Message(Role.ASSISTANT, "Made up."), Message(Role.USER, "Go on.")),
            Branch.HARNESS_ASSISTANT,
        ),
    ],
    ids=["other arguments", "a deleted turn", "other question", "a turn we did not sample"],
)
def test_a_real_edit_branches_with_its_reason(
    messages: tuple[Message, ...], reason: Branch
) -> None:
    """What changes meaning is never stitched to what was sampled."""
    tree, first, ids = answered()
    plan = tree.match(messages, TOOLS)
    assert (plan.parent, plan.branch) == (0, reason)
    assert 0 < plan.reused <= len(first.tokens) + len(ids)


def test_unparsable_arguments_keep_their_bytes() -> None:
    """Broken JSON matches only itself."""
    tree, _, _ = answered('{"path": ')
    assert tree.match(echo('{"path": '), TOOLS).branch is None
    assert tree.match(echo('{"path":'), TOOLS).branch is Branch.CALL_REPAIRED


def test_a_rewritten_echo_continues_exactly_however_often_it_comes() -> None:
    """Spacing, order, number form, escapes and ids do not break the sequence; changes are told.

    The echo takes the answer's place in memory; what it changed is found again at a fork.
    """
    tree, first, ids = answered()
    before = [*first.tokens.to_array(), *ids]
    rewritten, rewrites = echo('{"path":"a.py","line":1}'), (EchoChange.ARGUMENTS,)
    for messages, changes in [
        (rewritten, rewrites),
        (rewritten, rewrites),
        (echo(ARGUMENTS), ()),
        (echo(ARGUMENTS, "new"), (EchoChange.IDS,)),
        (echo('{"line":1,"path":"a\\u002epy"}'), rewrites),
        (rewritten, rewrites),
    ]:
        plan = tree.match(messages, TOOLS)
        assert (plan.parent, plan.branch, plan.echo_changes) == (0, None, changes)
        assert plan.reused == len(before)
        assert np.array_equal(plan.tokens.to_array()[: len(before)], before)
        assert [message.role for message in plan.added] == [Role.TOOL]
    assert plan.turn.answer is rewritten[2]
    assert tree.match(echo('{"path":"b.py"}'), TOOLS).branch is Branch.CALL_REPAIRED


def longer(answers: int) -> tuple[CallTree, tuple[Message, ...]]:
    """A conversation of several turns with two calls each, and its history."""
    tree, messages = CallTree(RENDERING), START
    for number in range(answers):
        calls = tuple(ToolCall(f"call_{number}_{i}", "read", f'{{"path":"{i}"}}') for i in (0, 1))
        answer = Message(Role.ASSISTANT, f"Turn {number}.", calls, reasoning="Hm.")
        add_turn(tree, number, answer, messages)
        results = (Message(Role.TOOL, f"{call.id} read", tool_call_id=call.id) for call in calls)
        messages = (*messages, answer, *results)
    return tree, messages


def test_results_in_another_order_branch() -> None:
    """Parallel results that change places later on change what the model saw."""
    tree, messages = longer(1)
    add_turn(tree, 1, Message(Role.ASSISTANT, "ok"), messages)
    *front, first, second = messages
    swapped = (*front, second, first, Message(Role.ASSISTANT, "ok"), Message(Role.USER, "Go on."))
    assert tree.match(swapped, TOOLS).branch is Branch.RESULTS_REORDERED


def test_a_request_that_is_refused_halfway_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is found as if it had never been."""
    tree, messages = longer(2)
    new = (*messages, Message(Role.USER, "Go on."), Message(Role.USER, "Please."))

    def refuse(message: Message, positions: Mapping[str, int]) -> bytes:
        if message.content == "Please.":
            raise RecursionError
        return digest_message(message, positions)

    digest_message = turns.digest_message
    with monkeypatch.context() as patch:
        patch.setattr(turns, "digest_message", refuse)
        with pytest.raises(RecursionError):
            tree.match(new, TOOLS)
    found, expected = tree.match(new, TOOLS), longer(2)[0].match(new, TOOLS)
    assert (found.parent, found.branch, found.digest) == (1, None, expected.digest)
    assert found.digests == expected.digests


def test_a_history_replaced_by_a_summary_is_a_compaction() -> None:
    """The task stays, the answers are gone, a summary stands in their place."""
    tree, _ = longer(3)
    summary = Message(Role.USER, "So far: three files read.")
    plan = tree.match((*START, summary), TOOLS)
    assert (plan.branch, plan.turn) == (Branch.COMPACTED, None)
    assert plan.parent is not None


def test_another_thread_of_the_session_is_named_as_such() -> None:
    """A sub-agent's first request has nothing in common but the session."""
    tree, _ = longer(2)
    other = (Message(Role.SYSTEM, "You search."), Message(Role.USER, "Find it."))
    assert tree.match(other, TOOLS, ThreadInfo("thread-2")).branch is Branch.NEW_THREAD
    assert tree.match(other, TOOLS).branch is Branch.NEW_THREAD


def test_a_deleted_failed_turn_goes_on_from_the_turn_before() -> None:
    """The parent is extended exactly; the answer that the harness dropped stays a branch of it."""
    tree, messages = longer(2)
    plan = add_turn(tree, 2, Message(Role.ASSISTANT, "garbled"), messages)
    again = tree.match((*messages, Message(Role.USER, "Tool call error.")), TOOLS)
    assert (again.parent, again.branch) == (1, Branch.TURN_DELETED)
    assert again.reused == len(plan.turn.tokens if plan.turn else ())


@pytest.mark.parametrize(
    ("echoed", "heals"),
    [
        (Message(Role.ASSISTANT, "Hi.", reasoning="Hm."), ()),
        (Message(Role.ASSISTANT, "Hi."), (EchoChange.REASONING,)),
        (Message(Role.ASSISTANT, "Hi.\n", reasoning="Hm."), (EchoChange.TEXT,)),
    ],
    ids=["verbatim", "thoughts dropped", "blank space"],
)
def test_what_was_healed_is_recorded(echoed: Message, heals: tuple[EchoChange, ...]) -> None:
    """A harmless change continues exactly, and is told."""
    tree = CallTree(RENDERING)
    add_turn(tree, 0, Message(Role.ASSISTANT, "Hi.", reasoning="Hm."))
    after = tree.match((*START, echoed, Message(Role.USER, "Go on.")), TOOLS)
    assert (after.branch, after.parent, after.echo_changes) == (None, 0, heals)


def test_equal_answers_are_told_apart_by_their_call_ids() -> None:
    """Two samples of one prompt that say the same are continued each from its own ids."""
    tree = CallTree(RENDERING)
    for number in (0, 1):
        call = ToolCall(f"call_{number}_0", "read", ARGUMENTS)
        add_turn(tree, number, Message(Role.ASSISTANT, "", (call,)))
    for number in (0, 1):
        assert tree.match(echo(ARGUMENTS, f"call_{number}_0"), TOOLS).parent == number


def test_a_prefill_is_refused_by_name() -> None:
    """An assistant message at the end that the model did not give cannot be continued."""
    with pytest.raises(Unsupported, match="the last message is the assistant's"):
        CallTree(RENDERING).match((*START, Message(Role.ASSISTANT, "Sure:")), TOOLS)


def test_text_without_exact_mode_is_refused_by_name() -> None:
    """Where the engine renders the prompts, and where ids cannot be decoded one by one."""
    joined = Rendering(tokenizer(), "qwen3")
    joined.tokenizer.token_bytes = None
    for tree in (CallTree(None), CallTree(joined)):
        with pytest.raises(Unsupported, match="needs exact mode") as caught:
            tree.match_text("Hi", ThreadInfo())
        assert caught.value.param == "prompt"


def test_a_text_gets_what_the_tokenizer_adds_to_texts() -> None:
    """Such as the mark of a beginning, as engines do for text completions; ids get nothing."""
    backend = tokenizers.Tokenizer.from_str(tokenizer().to_json())
    begin = backend.token_to_id("<|im_start|>")
    backend.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", begin)]
    )
    tree = CallTree(Rendering(Tokenizer(backend, "begins"), "qwen3"))
    plain = RENDERING.tokenizer.encode("Hi<|im_end|>")
    text = tree.match_text("Hi<|im_end|>", ThreadInfo())
    assert text.tokens.to_array().tolist() == [begin, *plain]
    assert tree.match_text(plain, ThreadInfo()).tokens.to_array().tolist() == plain


def raw(tokens: TokenSequence) -> bytes:
    """The ids as an engine writes them."""
    return b"".join(tokens.to_json(b"[", b"]"))


def test_observed_ids_that_extend_the_parent_are_exact() -> None:
    """Without a rendering the engine's prompt decides; a changed one is a branch with its place."""
    tree = CallTree(None)
    plan = tree.set_observed(tree.match(START, TOOLS), b"[1, 2, 3]")
    tokens = plan.tokens.extend(np.array([4, 5], np.int32))
    tree.add(plan, 0, tokens, Message(Role.ASSISTANT, "Hi."))
    history = (*START, Message(Role.ASSISTANT, "Hi."), Message(Role.USER, "Go on."))
    same = tree.set_observed(tree.match(history, TOOLS), b"[1,2,3,4,5,6,7]")
    assert (same.branch, same.reused, len(same.tokens)) == (None, 5, 7)
    other = tree.set_observed(tree.match(history, TOOLS), b"[1,2,3,9,5,6,7]")
    assert (other.branch, other.reused) == (Branch.ENGINE_RERENDERED, 3)
    assert raw(other.tokens) == b"[1,2,3,9,5,6,7]"
    for wrong in (b'["1"]', b"[-1]", b"[2147483648]", b"[[1]]", b"[1,2,3,4,5,-6]"):
        with pytest.raises(EngineError, match="ids that cannot be read"):
            tree.set_observed(tree.match(history, TOOLS), wrong)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(value=st.dictionaries(st.text(max_size=6), JSON, max_size=4), data=st.data())
def test_any_json_round_trip_is_seen_through(value: dict[str, object], data: st.DataObject) -> None:
    """Whatever the arguments hold, re-serialising them does not fork the trace."""
    tree, _, _ = answered(json.dumps(value, ensure_ascii=False))
    keys = data.draw(st.permutations(sorted(value)))
    shuffled = json.dumps({key: value[key] for key in keys}, separators=(",", ":"))
    assert tree.match(echo(shuffled), TOOLS).branch is None
