"""A streamed answer equals the whole answer, however it is split into chunks."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.tokenizer import OFFLINE, SPECIALS, make_rendering, make_tokenizer
from tugline.chat.model_call import ChoiceMode, Piece, ReasoningDelta, TextDelta, ToolChoice
from tugline.chat.stream_parser import StreamParser
from tugline.chat.templates.rendering import Rendering
from tugline.types import Ids, Message, Role, Tool, ToolCall

READ = Tool("read", "", {"type": "object", "properties": {"path": {"type": "string"}}})
TOOLS = (READ,)
TEXTS = st.text(st.sampled_from('ab \n<>{}"é界🙂'), max_size=12)
THOUGHTS = st.text(st.sampled_from("mn \né界🙂"), max_size=12)
CHUNKS = st.lists(st.integers(0, 10_000), max_size=30)
STREAMED = [name for name in OFFLINE if name != "inkling"]
TAGGED = [name for name in STREAMED if name != "llama-3"]


def prompt(name: str) -> Ids:
    """A prompt as the template writes it."""
    return make_rendering(name).render((Message(Role.USER, "hi"),), TOOLS)


def written(name: str, paths: list[str]) -> str:
    """Calls of `read` as the template itself writes them."""
    made = make_rendering(name)
    calls = tuple(
        ToolCall(f"call_0_{i}", "read", json.dumps({"path": path})) for i, path in enumerate(paths)
    )
    results = [Message(Role.TOOL, "r", tool_call_id=call.id) for call in calls]
    asked = Message(Role.USER, "hi")
    ids = made.render((asked, Message(Role.ASSISTANT, tool_calls=calls), *results), ())
    text = made.tokenizer.decode(ids.tolist())
    force = made.template.force
    opening = force.opening.strip() if force else "read<|content_invoke_tool_json|>"
    text = text[text.index(opening) :]
    ends = [made.tokenizer.decode([stop]) for stop in made.stop_ids]
    return text[: min(text.index(end) for end in ends if end in text)]


def answered(name: str, thought: str | None, text: str, calls: str) -> str:
    """An answer as the template's model would sample it."""
    made = make_rendering(name)
    marks = made.template
    if name == "inkling":
        parts = [] if thought is None else [f"<|content_thinking|>{thought}<|end_message|>"]
        parts.append(f"<|content_text|>{text}<|end_message|>")
        parts += [calls] if calls else []
        return "<|message_model|>".join(parts)
    opened = made.starts_in_reasoning(prompt(name))
    opening = "" if opened else marks.think + marks.preface
    if thought is None:
        return f"{marks.think_end}{text}{calls}" if opened else text + calls
    return f"{opening}{thought}{marks.think_end}{text}{calls}"


def finish(parser: StreamParser, *chunks: list[int]) -> Message:
    """The message that these ids make; its pieces add up to it."""
    pieces = [piece for chunk in chunks for piece in parser.feed(chunk)]
    rest, message = parser.finish()
    pieces += rest
    assert "".join(p.text for p in pieces if isinstance(p, TextDelta)) == message.content
    reasoning = "".join(p.text for p in pieces if isinstance(p, ReasoningDelta))
    assert reasoning == (message.reasoning or "")
    assert tuple(p for p in pieces if isinstance(p, ToolCall)) == message.tool_calls
    return message


def parse_whole(made: Rendering, ids: list[int], end: Ids) -> Message:
    """The message that a whole answer makes."""
    return StreamParser.parse(made, end, ids, tools=TOOLS)[1]


def parse(
    name: str, ids: list[int], cuts: list[int], stops: tuple[str, ...] = ()
) -> tuple[Message, StreamParser]:
    """The message and its parser, from chunks that end at `cuts`."""
    parser = StreamParser(make_rendering(name), prompt(name)[-64:], "0", stops=stops, tools=TOOLS)
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    return finish(parser, *(ids[start:end] for start, end in itertools.pairwise(edges))), parser


@pytest.mark.parametrize("name", OFFLINE)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), cuts=CHUNKS)
def test_pieces_add_up_to_the_message(name: str, data: st.DataObject, cuts: list[int]) -> None:
    """For any ids the stream equals the message, and chunks do not change it."""
    special = st.sampled_from(SPECIALS[name].split())
    call = st.just(written(name, ["a.txt"]))
    spoiled = call.map(lambda text: text[: 2 * len(text) // 3])
    parts = data.draw(st.lists(TEXTS | special | call | spoiled, max_size=6))
    ids = make_rendering(name).tokenizer.encode("".join(parts))
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    assert parse(name, ids, cuts)[0] == parse(name, ids, [])[0]


@pytest.mark.parametrize("name", OFFLINE)
@settings(max_examples=25, deadline=None)
@given(
    thought=st.none() | THOUGHTS,
    text=st.text(st.sampled_from("ab \né界🙂"), max_size=12),
    paths=st.lists(st.text(st.sampled_from("a/é界"), min_size=1), max_size=2),
    cuts=CHUNKS,
)
def test_an_answer_is_parsed_into_its_parts(
    name: str, thought: str | None, text: str, paths: list[str], cuts: list[int]
) -> None:
    """A well-formed answer is parsed into reasoning, text and calls."""
    made = make_rendering(name)
    if name == "llama-3":
        thought, text, paths = None, "" if paths else text, paths[:1]
    if not made.markers.reasons and name != "inkling":
        thought = None
    calls = written(name, paths) if paths else ""
    ids = [*made.tokenizer.encode(answered(name, thought, text, calls)), made.stop_ids[0]]
    message, parser = parse(name, ids, cuts)
    assert message.content == text.strip()
    assert message.reasoning == ((thought or "").strip() or None)
    arguments = [json.loads(call.arguments) for call in message.tool_calls]
    assert arguments == [{"path": path} for path in paths]
    assert all(call.name == "read" for call in message.tool_calls)
    if made.incremental and made.markers.reasons and name != "deepseek-v4":
        inside = len(made.tokenizer.encode(thought or ""))
        assert parser.reasoning_tokens - inside in (0, len(made.template.preface))


@pytest.mark.parametrize("name", OFFLINE)
def test_forbidden_calls_are_text(name: str) -> None:
    """Each forbidden call is counted and stays as it was written, after the other text."""
    made = make_rendering(name)
    thought = "Hm" if made.markers.reasons or name == "inkling" else None
    text, paths = ("", ["a"]) if name == "llama-3" else ("Yes", ["a", "b"])
    calls = written(name, paths)
    ids = [*made.tokenizer.encode(answered(name, thought, text, calls)), made.stop_ids[0]]
    parser = StreamParser(made, prompt(name)[-64:], "0", tools=TOOLS, forbidden=True)
    message = finish(parser, *([one] for one in ids))
    assert (message.tool_calls, parser.forbidden_calls) == ((), len(paths))
    assert message.reasoning == thought
    marks = map(re.escape, (made.template.section, made.template.section_end))
    sections = "|".join([*marks, r"\s"])
    kept = re.sub(sections, "", message.content)
    assert kept.startswith(text)
    assert kept.endswith(re.sub(sections, "", calls))
    assert len(kept) == len(text + re.sub(sections, "", calls)) or name == "inkling"


@pytest.mark.parametrize("name", OFFLINE)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_an_answer_without_a_template_is_text(name: str, data: st.DataObject) -> None:
    """Markup and white space stay as they are, up to a stop id or a stop string."""
    made = make_rendering(name)
    special = st.sampled_from(SPECIALS[name].split())
    text = "".join(data.draw(st.lists(TEXTS | special | st.sampled_from(" \n"), max_size=6)))
    ids = made.tokenizer.encode(text)
    for end, stops in ((made.stop_ids[0], ()), (made.tokenizer.encode("#")[0], ("#",))):
        ids = [one for one in ids if one not in made.stop_ids]
        expected = made.tokenizer.decode(ids)
        parser = StreamParser(made, None, "0", stops=stops)
        half = len(ids) // 2
        message = finish(parser, ids[:half], [*ids[half:], end, *ids])
        assert message == Message(
            Role.ASSISTANT, expected.partition(stops[0])[0] if stops else expected
        )


@pytest.mark.parametrize("name", STREAMED)
def test_an_answer_is_emitted_while_it_is_sampled(name: str) -> None:
    """Text is emitted with its last id, a call with its end mark; nothing waits for the end."""
    made = make_rendering(name)
    thought = "deep" if made.markers.reasons else None
    parser = StreamParser(made, prompt(name)[-64:], "0", tools=TOOLS)

    def feed(text: str) -> list[Piece]:
        return parser.feed(made.tokenizer.encode(text))

    pieces = feed(answered(name, thought, "Look", ""))
    assert pieces == [ReasoningDelta("deep")] * (thought is not None) + [TextDelta("Look")]
    assert feed(" out") == [TextDelta(" out")]
    if made.template.call_end:
        assert [type(one) for one in feed(written(name, ["a", "b"]))] == [ToolCall, ToolCall]
        assert parser.finish()[0] == []


@pytest.mark.parametrize("name", TAGGED)
@settings(max_examples=25, deadline=None)
@given(
    parts=st.lists(st.sampled_from(["word", "call"]), max_size=5), broken=st.booleans(), cuts=CHUNKS
)
def test_no_text_is_lost(name: str, parts: list[str], cuts: list[int], *, broken: bool) -> None:
    """Text around calls, and a call that never closes, stay in the message."""
    made = make_rendering(name)
    call = written(name, ["a.txt"])
    text = "".join("zz" if part == "word" else call for part in parts)
    if broken and made.template.call_end:
        text += call.replace("read", "z")[: call.index(made.template.call_end)]
    ids = made.tokenizer.encode(answered(name, None, "", text))
    message, _ = parse(name, ids, cuts)
    assert message.content.count("z") == text.count("z")
    assert len(message.tool_calls) == parts.count("call")


@pytest.mark.parametrize("name", OFFLINE)
@settings(max_examples=25, deadline=None)
@given(
    text=st.text(st.sampled_from("abc \n"), min_size=1, max_size=30),
    stops=st.lists(st.text(st.sampled_from("abc "), min_size=1, max_size=4), max_size=3),
    cuts=CHUNKS,
)
def test_text_ends_before_a_stop_string(
    name: str, text: str, stops: list[str], cuts: list[int]
) -> None:
    """The text ends where the first stop string begins; `length` counts the ids up to its end."""
    made = make_rendering(name)
    text = f"x{text}"
    ids = made.tokenizer.encode(answered(name, None, text, ""))
    message, parser = parse(name, ids, cuts, tuple(stops))
    seen = text if made.incremental else text.strip()
    ends = [(seen.find(stop) + len(stop), seen.find(stop)) for stop in stops if stop in seen]
    if not ends:
        assert (parser.matched_stop, parser.length) == (None, len(ids))
        assert message.content == text.strip()
        return
    end, start = min(ends) if made.incremental else min((at, at) for _, at in ends)
    assert message.content == seen[:start].strip()
    assert parser.matched_stop in stops
    if made.incremental:
        assert parser.matched_stop == seen[start:end]
        assert made.tokenizer.decode(ids[: parser.length]).endswith(text[:end])
    else:
        whole = parse_whole(made, ids[: parser.length], prompt(name))
        assert message.content in whole.content


def test_a_stop_string_is_not_looked_for_in_reasoning_or_calls() -> None:
    """A stop string ends an answer only in its text."""
    text = '<think>STOP</think>ab<tool_call>\n{"name": "read", "arguments": {"path": "STOP"}}\n'
    ids = make_rendering().tokenizer.encode(text + "</tool_call>")
    message, parser = parse("qwen3", ids, [], ("STOP",))
    assert parser.matched_stop is None
    assert message.content == "ab"
    assert len(message.tool_calls) == 1


@pytest.mark.parametrize("name", [name for name in OFFLINE if make_rendering(name).template.force])
@pytest.mark.parametrize("named", [False, True])
def test_a_forced_call_is_completed_by_what_is_sampled(name: str, *, named: bool) -> None:
    """The ids that force a call are the beginning of the call, not text."""
    made = make_rendering(name)
    choice = ToolChoice(ChoiceMode.NAMED, ("read",)) if named else ToolChoice(ChoiceMode.REQUIRED)
    forced = made.force_tool_call(choice)
    force = made.template.force
    if named and force.after is None:
        assert forced is None
        return
    whole = written(name, ["a.txt"])
    beginning = force.opening + ("read" + (force.after or "") if named else "")
    assert whole.startswith(beginning.strip())
    ids = [*made.tokenizer.encode(whole.removeprefix(beginning.lstrip())), made.stop_ids[0]]
    parser = StreamParser(made, prompt(name)[-64:], "0", forced=forced, tools=TOOLS)
    message = finish(parser, ids)
    [call] = message.tool_calls
    assert (call.id, call.name, json.loads(call.arguments)) == (
        "call_0_0", "read", {"path": "a.txt"}
    )  # fmt: skip
    assert (message.content, message.reasoning, parser.length) == ("", None, len(ids))


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        ('{"n": 123456789012345678901234567890}', True),
        ('{"s": "\\ud800"}', True),
        ('{"n": NaN}', False),
        (f'{{"n": {"9" * 5000}}}', True),
        ("[" * 100_000, False),
        ('{}, "name": "\\ud800"', False),
        ('{}, "name": 5', False),
        ('{}, "name": ""', False),
    ],
    ids=["big", "surrogate", "nan", "monster", "deep", "unprintable", "number", "nameless"],
)
def test_no_arguments_break_the_parser(arguments: str, *, call: bool) -> None:
    """Any arguments of a model result in a call or in text, never in an exception."""
    text = f'<tool_call>\n{{"name": "read", "arguments": {arguments}}}\n</tool_call>'
    message, _ = parse("qwen3", make_rendering().tokenizer.encode(text), [])
    assert (len(message.tool_calls), message.content) == ((1, "") if call else (0, text))
    for one in message.tool_calls:
        one.arguments.encode()


@pytest.fixture
def harmony(monkeypatch: pytest.MonkeyPatch) -> Rendering:
    """A template with channels, without downloading its vocabulary."""
    monkeypatch.setattr("renderers.gpt_oss.load_harmony_encoding", lambda _: None)
    return Rendering(make_tokenizer(SPECIALS["gpt-oss"].split()), "gpt-oss")


def test_channels_are_separated_by_their_headers(harmony: Rendering) -> None:
    """Analysis is reasoning, final and commentary are text, a recipient makes a call."""
    end = np.asarray(
        harmony.tokenizer.encode("<|start|>assistant<|channel|>analysis<|message|>"), np.int32
    )
    text = (
        "I think<|end|><|start|>assistant<|channel|>commentary<|message|>Now<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.read <|constrain|>json<|message|>"
        '{"path":"a"}<|call|>'
    )
    ids = harmony.tokenizer.encode(text)
    for size in (1, 3, len(ids)):
        parser = StreamParser(harmony, end, "0")
        message = finish(parser, *(ids[at : at + size] for at in range(0, len(ids), size)))
        assert (message.reasoning, message.content) == ("I think", "Now")
        assert message.tool_calls == (ToolCall("call_0_0", "read", '{"path":"a"}'),)
    forced = harmony.force_tool_call(ToolChoice(ChoiceMode.NAMED, ("read",)))
    parser = StreamParser(harmony, end, "0", forced=forced)
    rest = harmony.tokenizer.encode('{"path":"a"}<|call|>')
    assert finish(parser, rest).tool_calls == message.tool_calls
    bare = harmony.tokenizer.encode("<|channel|>final<|message|>Hi<|return|>")
    assert finish(StreamParser(harmony, end[:10], "0"), bare).content == "Hi"
