"""Turns are matched despite harmless rewriting of the history, and only then (I1)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from support.tokenizer import make_rendering, make_tokenizer
from tugline.chat.model_call import ThreadInfo
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.chat.tokens import TokenSequence
from tugline.errors import EngineError, Unsupported
from tugline.gateway import turns
from tugline.gateway.model_call import Prompt
from tugline.gateway.prefix import CallTree
from tugline.gateway.turns import Conversation
from tugline.types import Branch, EchoChange, Ids, Message, Role, Tool, ToolCall

TOOLS = (Tool("read", "Read a file", {"type": "object", "properties": {"path": {}}}),)
START = (Message(Role.SYSTEM, "You help."), Message(Role.USER, "Mend it."))
ARGUMENTS = '{"path": "a.py", "line": 1.0}'
RENDERING = make_rendering()


def sampled(text: str) -> Ids:
    """The ids of an answer that ends its turn."""
    return np.asarray(RENDERING.tokenizer.encode(f"{text}<|im_end|>"), np.int32)


def match(tree: CallTree, messages: tuple[Message, ...], *more: Any) -> Prompt:
    """The prompt of these messages, whether or not they extend a turn."""
    found = tree.extend(messages, *more)
    return tree.branch(found, more[0]) if isinstance(found, Conversation) else found


def add_turn(
    tree: CallTree, number: int, answer: Message, messages: tuple[Message, ...] = START
) -> Prompt:
    """Ask with these messages, and record the answer."""
    plan = match(tree, messages, TOOLS)
    tree.add(plan, number, plan.tokens.extend(sampled(f"turn {number}")), answer)
    return plan


def make_tool_turn(arguments: str = ARGUMENTS) -> tuple[CallTree, Prompt, Ids]:
    """A tree after one turn that called `read`."""
    tree = CallTree(RENDERING)
    plan = match(tree, START, TOOLS)
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
    """A changed meaning never continues sampled tokens."""
    tree, first, ids = make_tool_turn()
    plan = match(tree, messages, TOOLS)
    assert (plan.parent, plan.branch) == (0, reason)
    assert 0 < plan.reused <= len(first.tokens) + len(ids)


def test_invalid_json_arguments_are_matched_by_the_id_of_their_call() -> None:
    """Arguments without a value match by the call's id; with another id only the same bytes do."""
    tree, _, _ = make_tool_turn('{"path": ')
    for arguments, changes in (('{"path": ', ()), ("{}", (EchoChange.ARGUMENTS,))):
        prompt = match(tree, echo(arguments), TOOLS)
        assert (prompt.branch, prompt.echo_changes) == (None, changes)
    assert match(tree, echo("{}", "new"), TOOLS).branch is Branch.CALL_REPAIRED


def test_rewritten_echoes_continue_exactly() -> None:
    """Spacing, order, number form, escapes and ids do not branch; changes are reported.

    The echo replaces the answer in memory; its changes are still known at a later branch.
    """
    tree, first, ids = make_tool_turn()
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
        plan = match(tree, messages, TOOLS)
        assert (plan.parent, plan.branch, plan.echo_changes) == (0, None, changes)
        assert plan.reused == len(before)
        assert np.array_equal(plan.tokens.to_array()[: len(before)], before)
        assert [message.role for message in plan.added] == [Role.TOOL]
    assert plan.turn.answer is rewritten[2]
    assert match(tree, echo('{"path":"b.py"}'), TOOLS).branch is Branch.CALL_REPAIRED


def make_history(answers: int) -> tuple[CallTree, tuple[Message, ...]]:
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
    """Parallel results that change places differ from what the model saw."""
    tree, messages = make_history(1)
    add_turn(tree, 1, Message(Role.ASSISTANT, "ok"), messages)
    *front, first, second = messages
    swapped = (*front, second, first, Message(Role.ASSISTANT, "ok"), Message(Role.USER, "Go on."))
    assert match(tree, swapped, TOOLS).branch is Branch.RESULTS_REORDERED


def test_a_refused_request_leaves_the_tree_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request is matched as if the refused one had not been made."""
    tree, messages = make_history(2)
    new = (*messages, Message(Role.USER, "Go on."), Message(Role.USER, "Please."))

    def refuse(message: Message, positions: Mapping[str, int]) -> bytes:
        if message.content == "Please.":
            raise RecursionError
        return digest_message(message, positions)

    digest_message = turns.digest_message
    with monkeypatch.context() as patch:
        patch.setattr(turns, "digest_message", refuse)
        with pytest.raises(RecursionError):
            match(tree, new, TOOLS)
    matched, expected = match(tree, new, TOOLS), match(make_history(2)[0], new, TOOLS)
    assert (matched.parent, matched.branch, matched.digest) == (1, None, expected.digest)
    assert matched.digests == expected.digests


def test_a_history_replaced_by_a_summary_is_a_compaction() -> None:
    """The task is the same, and a summary replaces the answers."""
    tree, _ = make_history(3)
    summary = Message(Role.USER, "So far: three files read.")
    plan = match(tree, (*START, summary), TOOLS)
    assert (plan.branch, plan.turn) == (Branch.COMPACTED, None)
    assert plan.parent is not None


def test_an_unrelated_request_is_a_new_thread() -> None:
    """The first request of a sub-agent shares nothing with the thread but the session."""
    tree, _ = make_history(2)
    other = (Message(Role.SYSTEM, "You search."), Message(Role.USER, "Find it."))
    assert match(tree, other, TOOLS, ThreadInfo("thread-2")).branch is Branch.NEW_THREAD
    assert match(tree, other, TOOLS).branch is Branch.NEW_THREAD


def test_deleting_a_failed_turn_extends_the_turn_before() -> None:
    """The turn before is extended exactly; the dropped answer stays a branch of it."""
    tree, messages = make_history(2)
    plan = add_turn(tree, 2, Message(Role.ASSISTANT, "garbled"), messages)
    again = match(tree, (*messages, Message(Role.USER, "Tool call error.")), TOOLS)
    assert (again.parent, again.branch) == (1, Branch.TURN_DELETED)
    assert again.reused == len(plan.turn.tokens if plan.turn else ())


@pytest.mark.parametrize(
    ("echoed", "changes"),
    [
        (Message(Role.ASSISTANT, "Hi.", reasoning="Hm."), ()),
        (Message(Role.ASSISTANT, "Hi."), (EchoChange.REASONING,)),
        (Message(Role.ASSISTANT, "Hi.\n", reasoning="Hm."), (EchoChange.TEXT,)),
    ],
    ids=["verbatim", "thoughts dropped", "blank space"],
)
def test_changes_of_an_echo_are_recorded(echoed: Message, changes: tuple[EchoChange, ...]) -> None:
    """A harmless change continues exactly, and is recorded."""
    tree = CallTree(RENDERING)
    add_turn(tree, 0, Message(Role.ASSISTANT, "Hi.", reasoning="Hm."))
    after = match(tree, (*START, echoed, Message(Role.USER, "Go on.")), TOOLS)
    assert (after.branch, after.parent, after.echo_changes) == (None, 0, changes)


def test_equal_answers_are_distinguished_by_call_ids() -> None:
    """Equal samples of one prompt are each continued from their own ids."""
    tree = CallTree(RENDERING)
    for number in (0, 1):
        call = ToolCall(f"call_{number}_0", "read", ARGUMENTS)
        add_turn(tree, number, Message(Role.ASSISTANT, "", (call,)))
    for number in (0, 1):
        assert match(tree, echo(ARGUMENTS, f"call_{number}_0"), TOOLS).parent == number


def test_a_history_that_ends_in_an_own_answer_is_extended() -> None:
    """The answer is closed, and the next one is opened right after its exact ids."""
    tree, first, ids = make_tool_turn()
    for number in (1, 2):
        plan = match(tree, (*echo(ARGUMENTS)[: 2 + number],), TOOLS)
        if number == 1:
            opening = RENDERING.tokenizer.decode(plan.tokens.to_array()[-22:].tolist())
            assert opening.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert (plan.parent, plan.branch, plan.reused) == (0, None, len(first.tokens) + len(ids))
        assert [message.role for message in plan.added] == [Role.TOOL] * (number - 1)


def test_a_history_that_ends_in_an_own_open_answer_forks() -> None:
    """An answer that was cut has no id that closes it; the template closes it."""
    tree = CallTree(RENDERING)
    plan = match(tree, START, TOOLS)
    answer = Message(Role.ASSISTANT, "Hi th")
    cut = np.asarray(RENDERING.tokenizer.encode("Hi th"), np.int32)
    tree.add(plan, 0, plan.tokens.extend(cut), answer)
    again = match(tree, (*START, answer), TOOLS)
    assert (again.parent, again.branch) == (0, Branch.RENDERER_REFUSED)


def test_text_left_out_of_an_answer_with_calls_is_no_edit() -> None:
    """The calls must be the answer's own, by ids and values; the text then stays in the prompt."""
    tree, messages = make_history(2)
    (*before, answer, first, second) = messages
    bare = msgspec.structs.replace(answer, content="", reasoning=None)
    plan = match(tree, (*before, bare, first, second), TOOLS)
    assert (plan.parent, plan.branch) == (1, None)
    assert plan.echo_changes == (EchoChange.REASONING, EchoChange.TEXT)
    third = Message(Role.ASSISTANT, "Done.")
    tree.add(plan, 2, plan.tokens.extend(sampled("Done.")), third)
    more = (*before, bare, first, second, third, Message(Role.USER, "Go on."))
    assert (match(tree, more, TOOLS).parent, match(tree, more, TOOLS).branch) == (2, None)
    calls = answer.tool_calls
    other = msgspec.structs.replace(calls[1], arguments='{"path":"9"}')
    foreign = tuple(msgspec.structs.replace(call, id=f"own_{call.id}") for call in calls)
    for changed in ((calls[0], other), foreign, calls[:1]):
        edited = msgspec.structs.replace(bare, tool_calls=changed)
        assert match(tree, (*before, edited, first, second), TOOLS).branch is Branch.CALL_REPAIRED


def test_an_answer_that_replaces_the_history_is_its_summary() -> None:
    """A sampled answer as the only message is a compaction; a text not sampled is the client's."""
    tree, messages = make_history(2)
    ask = Message(Role.USER, "Sum up.")
    summary = Message(Role.ASSISTANT, "So far: two files read.")
    add_turn(tree, 2, summary, (*messages, ask))
    assert match(tree, (START[0], summary), TOOLS).branch is Branch.COMPACTED
    other = msgspec.structs.replace(summary, content="I read files.")
    assert match(tree, (START[0], other), TOOLS).branch is Branch.HARNESS_ASSISTANT


def test_text_prompts_need_exact_mode() -> None:
    """Text prompts are refused if the engine renders, or if ids cannot be decoded one by one."""
    joined = Rendering(make_tokenizer(), "qwen3")
    joined.tokenizer.token_bytes = None
    for tree in (CallTree(None), CallTree(joined)):
        with pytest.raises(Unsupported, match="requires exact mode") as caught:
            tree.match_text("Hi", ThreadInfo())
        assert caught.value.param == "prompt"


def test_text_prompts_get_the_special_tokens_of_the_tokenizer() -> None:
    """A text prompt gets a begin-of-text token, as engines add it; ids stay as they are."""
    backend = tokenizers.Tokenizer.from_str(make_tokenizer().to_json())
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
    """A prompt reported by the engine extends its parent, or branches where it was changed."""
    tree = CallTree(None)
    plan = tree.set_observed(match(tree, START, TOOLS), b"[1, 2, 3]")
    tokens = plan.tokens.extend(np.array([4, 5], np.int32))
    tree.add(plan, 0, tokens, Message(Role.ASSISTANT, "Hi."))
    history = (*START, Message(Role.ASSISTANT, "Hi."), Message(Role.USER, "Go on."))
    same = tree.set_observed(match(tree, history, TOOLS), b"[1,2,3,4,5,6,7]")
    assert (same.branch, same.reused, len(same.tokens)) == (None, 5, 7)
    other = tree.set_observed(match(tree, history, TOOLS), b"[1,2,3,9,5,6,7]")
    assert (other.branch, other.reused) == (Branch.ENGINE_RERENDERED, 3)
    assert raw(other.tokens) == b"[1,2,3,9,5,6,7]"
    for wrong in (b'["1"]', b"[-1]", b"[2147483648]", b"[[1]]", b"[1,2,3,4,5,-6]"):
        with pytest.raises(EngineError, match="token ids that cannot be decoded"):
            tree.set_observed(match(tree, history, TOOLS), wrong)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(value=st.dictionaries(st.text(max_size=6), JSON, max_size=4), data=st.data())
def test_reserialized_arguments_do_not_branch(
    value: dict[str, object], data: st.DataObject
) -> None:
    """Arguments written in another order or spacing are the same, whatever their values."""
    tree, _, _ = make_tool_turn(json.dumps(value, ensure_ascii=False))
    keys = data.draw(st.permutations(sorted(value)))
    shuffled = json.dumps({key: value[key] for key in keys}, separators=(",", ":"))
    assert match(tree, echo(shuffled), TOOLS).branch is None
