"""Prompts are extended exactly, from their last ids, in every template."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.tokenizer import (
    OFFLINE,
    SPECIALS,
    make_merging_tokenizer,
    make_rendering,
    make_tokenizer,
)
from tugline.chat.model_call import ChoiceMode, ToolChoice
from tugline.chat.templates.base import CONFIGS, template
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.chat.tokens import count_shared
from tugline.errors import ConfigError, Unsupported
from tugline.types import Ids, Image, Message, Role, Tool, ToolCall

READ = Tool("read", "Reads.", {"type": "object", "properties": {"path": {"type": "string"}}})
TOOLS = (READ,)
HELLO = Message(Role.USER, "hello " * 30)
RESULT = Message(Role.TOOL, "It says: 界", tool_call_id="call_0_0")


def called(count: int = 1, turn: int = 0) -> Message:
    """An answer with calls."""
    calls = (ToolCall(f"call_{turn}_{i}", "read", '{"path": "a.txt"}') for i in range(count))
    return Message(Role.ASSISTANT, tool_calls=tuple(calls), reasoning="Let me see. " * 20)


def text_of(made: Rendering, ids: Ids) -> str:
    """Decoded ids."""
    return made.tokenizer.decode(ids.tolist())


def test_every_template_of_the_library_is_known_by_name() -> None:
    """The registry has each typed configuration; the error for an unknown name lists them."""
    assert set(SPECIALS) == set(CONFIGS)
    with pytest.raises(ConfigError, match=r"renderer='qwen2' must be one of .*glm-4\.5.*qwen3\.5"):
        Rendering(make_tokenizer(), "qwen2")
    with pytest.raises(ConfigError, match=r"thinking_retention='some'.*all, tool_cycle, template"):
        Rendering(make_tokenizer(), "qwen3", thinking_retention="some")
    with pytest.raises(ConfigError, match="cannot be created for byte-level"):
        Rendering(make_tokenizer(("<|im_start|>",)), "qwen3")


def test_a_published_model_is_known_by_its_exact_name() -> None:
    """A published name has its template; that of a fine-tuned model is not guessed."""
    made = Rendering.for_model(make_tokenizer(), "Qwen/Qwen3-8B")
    assert made.name == "qwen3"
    assert Rendering.for_model(make_tokenizer(), "me/Qwen3-8B") is None


def test_equal_conversations_render_once() -> None:
    """The samples of a group share their first prompt; the cache is bounded."""
    made = Rendering(make_tokenizer(), "qwen3")
    first = made.render((HELLO,), TOOLS)
    again = made.render((msgspec.structs.replace(HELLO),), (msgspec.structs.replace(READ),))
    assert again is first
    assert not first.flags.writeable
    for number in range(70):
        made.render((Message(Role.USER, str(number)),), TOOLS)
    assert made.render((HELLO,), TOOLS) is not first
    assert made.render((HELLO,), ()).tolist() != first.tolist()


SYSTEM = Message(Role.SYSTEM, "You help.")
SUMMARY = Message(Role.ASSISTANT, "So far: one file read.")


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", OFFLINE)
def test_a_last_message_of_the_assistant_is_a_closed_turn(name: str, tools: Any) -> None:
    """The turn is rendered as before another message, and the model's answer opened behind it."""
    made, hello = make_rendering(name), HELLO.content.strip()
    opening = text_of(made, made.render((SYSTEM, HELLO), tools)).rpartition(hello)[2]
    for history in ([SYSTEM], [SYSTEM, HELLO], [HELLO], [], [SYSTEM, HELLO, SUMMARY, HELLO]):
        whole = text_of(made, made.render((*history, SUMMARY), tools))
        closed = text_of(made, made.render((*history, SUMMARY, HELLO), tools))
        end, next_end = (text.rpartition(SUMMARY.content)[2] for text in (whole, closed))
        opened = end[count_shared(end, next_end) :]
        assert opened
        assert opening.endswith(opened)


@pytest.mark.parametrize("name", OFFLINE)
@pytest.mark.parametrize("merges", ["none", "words", "lines"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_end_of_a_prompt_is_enough_to_extend_it(
    name: str, merges: str, data: st.DataObject
) -> None:
    """The last 64 ids of a prompt give the extension that the library makes from all of them.

    This holds for anything sampled, any results and any merges of a vocabulary with what is around
    them, and also the second time, when the shape of the tail is known.
    """
    made = _merging(name, merges)
    history = [HELLO, Message(Role.ASSISTANT, "Yes."), HELLO][: data.draw(st.sampled_from((1, 3)))]
    prompt = made.render(history, TOOLS)
    template, specials = made.template, SPECIALS[name].split()
    pieces = ["x", "ab", " ", "\n", "\n\n", "1", "{", "}", "\t", "é", "<", "<|", "user", *specials]
    pieces += [special[:-1] for special in specials] + [special[1:] for special in specials]
    words = st.lists(st.sampled_from(pieces), max_size=6).map("".join)
    parts = [template.think_end, template.think, template.call, f"{template.call_end}x", "w " * 40]
    text = "".join(data.draw(st.lists(words | st.sampled_from(parts), max_size=6)))
    stop = data.draw(st.sampled_from([[], *([one] for one in made.stop_ids)]))
    sampled = np.asarray([*made.tokenizer.encode(text), *stop], np.int32)
    roles = data.draw(st.lists(st.sampled_from((Role.TOOL, Role.USER)), min_size=1, max_size=3))
    for _ in range(3):
        ids = [f"call_0_{i}" if role is Role.TOOL else None for i, role in enumerate(roles)]
        tail = [
            Message(role, data.draw(words), tool_call_id=one)
            for role, one in zip(roles, ids, strict=True)
        ]
        extension = made.render_extension(prompt[-64:], sampled, tail, TOOLS)
        expected = _extend_by_library(made, prompt.tolist(), sampled.tolist(), tail)
        assert (None if extension is None else extension.tolist()) == expected


@pytest.mark.parametrize("name", OFFLINE)
def test_an_answer_that_ends_a_prompt_is_followed_by_another(name: str) -> None:
    """The ids of an answer with its stop id stay, and the template's follow.

    An answer without one is not extended, nor one that the next role closes.
    """
    made = make_rendering(name)
    prompt = made.render((HELLO,), TOOLS)
    whole = made.render((HELLO, SUMMARY), TOOLS)
    answer = made.tokenizer.encode(SUMMARY.content)
    assert made.render_extension(prompt[-64:], np.asarray(answer, np.int32), (), TOOLS) is None
    extensions = [
        made.render_extension(prompt[-64:], np.asarray([*answer, stop], np.int32), (), TOOLS)
        for stop in made.stop_ids
    ]
    found = [ids for ids in extensions if ids is not None]
    assert all(whole.tolist()[-len(ids) :] == ids.tolist() for ids in found)
    closes_by_role = name.startswith("glm") or name == "inkling"
    assert len(found) == (0 if closes_by_role else 1)


def _extend_by_library(
    made: Rendering, prompt: list[int], sampled: list[int], tail: list[Message]
) -> list[int] | None:
    serialized = made._serialize_tail(prompt, np.asarray(sampled, np.int32), tail)
    messages = made._library.escape(serialized)
    tools = made._serialize_tools(TOOLS)
    try:
        whole = made._renderer.bridge_to_next_turn(prompt, sampled, messages, tools=tools)
    except (ValueError, TypeError):  # a full render says what is wrong
        return None
    known = prompt + sampled
    if whole is None or whole.token_ids[: len(known)] != known:
        return None
    closed = bool(sampled) and sampled[-1] in made.stop_ids
    gap = made.tokenizer.encode(made.template.gap) if closed else []
    return gap + whole.token_ids[len(known) :]


@functools.cache
def _merging(name: str, merges: str) -> Rendering:
    if merges == "none":
        return make_rendering(name)
    made = make_merging_tokenizer(SPECIALS[name].split(), across_words=merges == "lines")
    return Rendering(made, name)


def test_a_known_shape_is_extended_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library renders only the first tail of a shape, not others with different texts."""
    made = Rendering(make_merging_tokenizer(SPECIALS["qwen3"].split()), "qwen3")
    prompt = made.render((HELLO,), TOOLS)
    sampled = np.asarray([*made.tokenizer.encode("</think>Yes."), made.stop_ids[0]], np.int32)
    first = made.render_extension(prompt, sampled, (RESULT,), TOOLS)
    bridge = made._bridge
    monkeypatch.setattr(made, "_bridge", None)
    other = Message(Role.TOOL, "Another", tool_call_id="call_0_0")
    second = made.render_extension(prompt, sampled, (other,), TOOLS)
    assert text_of(made, second) == text_of(made, first).replace(RESULT.content, "Another")
    assert second.tolist() == bridge(prompt, sampled, (other,), TOOLS).tolist()


@pytest.mark.parametrize("name", OFFLINE)
@pytest.mark.parametrize("calls", [1, 2])
def test_an_extension_equals_a_full_render(name: str, calls: int) -> None:
    """Tool results continue an answer exactly as in a render of the whole conversation."""
    if name == "llama-3" and calls > 1:
        pytest.skip("its template knows single calls only")
    made = make_rendering(name)
    answer = called(calls)
    results = [
        Message(Role.TOOL, f"Result {one.id}: 界", tool_call_id=one.id) for one in answer.tool_calls
    ]
    prompt = made.render((HELLO,), TOOLS)
    whole = made.render((HELLO, answer, *results), TOOLS).tolist()
    shared = next(i for i, token in enumerate([*prompt.tolist(), -1]) if token != whole[i])
    end = next(i for i in range(shared, len(whole)) if whole[i] in made.stop_ids) + 1
    sampled = np.asarray(whole[shared:end], np.int32)
    extension = made.render_extension(np.asarray(whole[:shared]), sampled, results, TOOLS)
    assert [*whole[:end], *extension.tolist()] == whole


@pytest.mark.parametrize("retention", ["all", "tool_cycle", "template"])
def test_reasoning_is_kept_as_long_as_was_chosen(retention: str) -> None:
    """Reasoning stays for ever, or within tool calls as in Qwen3's template."""
    made = make_rendering("qwen3", retention)
    prompt = made.render((HELLO,), TOOLS)
    ids = made.tokenizer.encode("<think>a</think>b<|im_end|>")
    sampled = np.asarray(ids, np.int32)
    kept_by_user = made.render_extension(prompt, sampled, (HELLO,), TOOLS) is not None
    kept_by_tool = made.render_extension(prompt, sampled, (RESULT,), TOOLS) is not None
    assert (kept_by_user, kept_by_tool) == (retention == "all", True)


@pytest.mark.parametrize("name", OFFLINE)
def test_late_system_messages_keep_their_place(name: str) -> None:
    """Late system messages are neither left out nor moved, whatever role they are given."""
    made = make_rendering(name)
    answer = Message(Role.ASSISTANT, "ANSWER")
    messages = [
        Message(Role.SYSTEM, "SYSTEM"),
        Message(Role.DEVELOPER, "DEVELOPER"),
        Message(Role.USER, "QUESTION"),
        answer,
        Message(Role.DEVELOPER, "LATE"),
        Message(Role.USER, "LAST"),
    ]
    text = text_of(made, made.render(messages, ()))
    words = ["SYSTEM", "DEVELOPER", "QUESTION", "ANSWER", "LATE", "LAST"]
    assert sorted(words, key=text.rindex) == words
    prompt = made.render(messages[:3], ())
    sampled = np.asarray(made.tokenizer.encode("ab"), np.int32)
    extension = made.render_extension(prompt, sampled, messages[4:], ())
    more = text_of(made, extension)
    assert more[more.index("LATE") :] == text[text.index("LATE") :]


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "qwen3-vl"])
def test_images_are_refused_by_name(name: str) -> None:
    """An image is an error that names images; it is not dropped silently."""
    picture = Message(Role.USER, "See", images=(Image("data:image/png;base64,AA"),))
    with pytest.raises(Unsupported, match="images") as caught:
        make_rendering(name).render((picture,), ())
    assert caught.value.param == "messages"


@pytest.mark.parametrize("name", ["kimi-k2", "kimi-k2.5"])
def test_kimi_numbers_its_calls(name: str) -> None:
    """Call ids of the dialects are replaced by those that the model writes."""
    made = make_rendering(name)
    again = msgspec.structs.replace(RESULT, tool_call_id="call_1_0")
    text = text_of(made, made.render((HELLO, called(), RESULT, called(1, 1), again), ()))
    assert text.count("functions.read:0") == 2
    assert text.count("functions.read:1") == 2
    prompt = made.render((HELLO,), ())
    two = "".join(
        f"<|tool_call_begin|>functions.{one}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        for one in ("read:7", "edit:8")
    )
    answer = f"</think><|tool_calls_section_begin|>{two}<|tool_calls_section_end|><|im_end|>"
    sampled = np.asarray(made.tokenizer.encode(answer), np.int32)
    results = (Message(Role.TOOL, "B", tool_call_id="call_0_1"), RESULT)
    extension = made.render_extension(prompt, sampled, results, ())
    more = text_of(made, extension)
    assert "Return of functions.edit:8\nB" in more
    assert "Return of functions.read:7\nIt says" in more


class _Harmony:
    """Renders one message as harmony does, with any vocabulary."""

    def __init__(self, made: Tokenizer) -> None:
        self._made = made

    def render(self, message: Any) -> list[int]:
        who = message.author.name or message.author.role.value
        return self._made.encode(f"<|start|>{who}<|message|>{message.content[0].text}<|end|>")


def test_results_name_their_tool_where_the_template_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """In harmony results are messages of the tool, with the names of the calls."""
    vocabulary = make_tokenizer(SPECIALS["gpt-oss"].split())
    monkeypatch.setattr("renderers.gpt_oss.load_harmony_encoding", lambda _: _Harmony(vocabulary))
    made = Rendering(vocabulary, "gpt-oss")
    end = "<|start|>assistant<|channel|>analysis<|message|>"
    answer = (
        "So<|end|><|start|>assistant<|channel|>commentary to=functions.read <|constrain|>json"
        "<|message|>{}<|call|>"
    )
    before, sampled = (np.asarray(vocabulary.encode(one), np.int32) for one in (end, answer))
    extension = made.render_extension(before, sampled, (RESULT,), TOOLS)
    assert text_of(made, extension) == f"<|start|>functions.read<|message|>It says: 界<|end|>{end}"


def test_a_tool_choice_that_cannot_be_kept_is_not_forced() -> None:
    """A call is forced only where its prefix is certain."""
    made = make_rendering("qwen3")
    assert made.force_tool_call(ToolChoice()) is None
    assert made.force_tool_call(ToolChoice(ChoiceMode.NONE)) is None
    assert made.force_tool_call(ToolChoice(ChoiceMode.REQUIRED, ("a", "b"))) is None
    assert make_rendering("inkling").force_tool_call(ToolChoice(ChoiceMode.REQUIRED)) is None
    ids = made.force_tool_call(ToolChoice(ChoiceMode.NAMED, ("read",)))
    text = '<think>\n\n</think>\n\n<tool_call>\n{"name": "read", "arguments": '
    assert text_of(made, ids) == text


def test_the_table_of_templates_in_the_docs_is_correct() -> None:
    """Each row of docs/templates.md agrees with its template."""
    page = Path(__file__).parents[3] / "docs" / "templates.md"
    rows = {
        cells[0].strip("`"): cells[1:]
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `") and (cells := [cell.strip() for cell in line[1:-1].split("|")])
    }
    assert set(rows) == set(CONFIGS)
    for name, row in rows.items():
        what, vocabulary = template(name), make_tokenizer(SPECIALS[name].split())
        marks = what.markers(vocabulary)
        held = what.guard_mark or ("" if marks.reasons else what.hold_prefix)
        streams = f"yes, but not after `{held}`" if held else "yes"
        forced = "any or one" if what.force and what.force.after is not None else "any"
        assert row == [
            streams,
            forced if what.force else "no",
            "in its place" if what.late_system else "a user's",
            "yes" if marks.call >= 0 else "no",
            "yes" if marks.call_end >= 0 else "no",
        ], name
