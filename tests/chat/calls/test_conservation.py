"""Nothing sampled vanishes: it is in a well-formed call, in a malformed call, or it is text."""

# ruff: noqa: RUF001  # the marks as the model writes them

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.tokenizer import OFFLINE, SPECIALS, make_rendering, make_tokenizer
from tugline.chat.stream_parser import StreamParser
from tugline.chat.templates.answers import AnswerSyntax
from tugline.chat.templates.base import template
from tugline.chat.templates.rendering import Rendering
from tugline.types import MalformedCalls, Message, Role, Tool, ToolCall

EXAMPLES = int(os.environ.get("TUGLINE_CALL_EXAMPLES", "50"))
TEMPLATES = sorted([*OFFLINE, "gpt-oss"])
READ = Tool("read", "", {"type": "object", "properties": {"path": {"type": "string"}}})
EDIT = Tool("edit", "", {"type": "object", "properties": {"old": {"type": "string"}}})
TOOLS = (READ, EDIT)
_HARMONY = (
    "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
)


class _GptOss(AnswerSyntax):
    """The answers of gpt-oss, over a small vocabulary, without rendering."""

    def __init__(self) -> None:
        vocabulary = make_tokenizer(SPECIALS["gpt-oss"].split())
        stops = [vocabulary.convert_tokens_to_ids(stop) for stop in ("<|return|>", "<|call|>")]
        super().__init__(vocabulary, "gpt-oss", [stop for stop in stops if stop is not None])


def find_syntax(name: str) -> AnswerSyntax:
    """The syntax of a template's answers."""
    return _GptOss() if name == "gpt-oss" else make_rendering(name)


def write(name: str, *calls: tuple[str, dict[str, str]]) -> str:
    """Calls as the template writes them, as text from the mark that opens them."""
    if name == "gpt-oss":
        return "".join(_HARMONY.format(tool, json.dumps(arguments)) for tool, arguments in calls)
    made = make_rendering(name)
    made_calls = tuple(
        ToolCall(f"call_0_{at}", tool, json.dumps(arguments))
        for at, (tool, arguments) in enumerate(calls)
    )
    results = [Message(Role.TOOL, "r", tool_call_id=call.id) for call in made_calls]
    asked = Message(Role.USER, "hi")
    ids = made.render((asked, Message(Role.ASSISTANT, tool_calls=made_calls), *results), ())
    text = made.tokenizer.decode(ids.tolist())
    force = template(name).force
    start = text.index(force.opening.strip() if force else f"{calls[0][0]}<|content_invoke")
    ends = [made.tokenizer.decode([stop]) for stop in made.stop_ids]
    found = [text.find(end, start) for end in ends]
    return text[start : min(at for at in found if at >= 0)]


def parse(
    name: str,
    text: str,
    *,
    malformed: MalformedCalls = MalformedCalls.TEXT,
    tools: tuple[Tool, ...] = TOOLS,
) -> Message:
    """The message of an answer that continues a prompt without open reasoning."""
    syntax = find_syntax(name)
    before = {"gpt-oss": "<|start|>assistant", "inkling": "<|message_model|>"}
    end = np.asarray(syntax.tokenizer.encode(before.get(name, "x")), np.int32)
    ids = syntax.tokenizer.encode(text)
    return StreamParser.parse(syntax, end, ids, tools=tools, malformed=malformed)[1]


def find_missing(text: str, message: Message) -> list[str]:
    """Return the planted words of an answer that are nowhere in its message."""
    calls = "".join(call.name + call.arguments for call in message.tool_calls)
    whole = f"{message.content} {message.reasoning or ''} {calls}"
    return [word for word in re.findall(r"Z[0-9]+Y", text) if word not in whole]


def squeeze(text: str) -> str:
    """Text without white space."""
    return "".join(text.split())


# --------------------------------------------------------------------------- mutated answers
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), malformed=st.sampled_from(MalformedCalls))
def test_every_planted_word_of_a_mutated_answer_is_in_its_message(
    name: str, data: st.DataObject, malformed: MalformedCalls
) -> None:
    """Each word of an answer with damaged tags is in its text, its calls or its reasoning."""
    calls = [("read", {"path": "Z1Y"}), ("edit", {"old": "Z2Y\nZ3Y"})]
    text = f"Z4Y {write(name, *calls[: 1 if name == 'llama-3' else 2])} Z5Y"
    special = [token for token in SPECIALS[name].split() if token in text]
    pieces = re.split(rf"({'|'.join(map(re.escape, special)) or 'Z'}|\n|[<>{{}}\":])", text)
    for number in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(pieces) - 1))
        how = data.draw(st.sampled_from(["drop", "twice", "insert", "cut", "swap"]))
        if how == "drop" and not re.search(r"Z\d", pieces[at]):
            pieces[at] = ""
        elif how == "twice":
            pieces.insert(at, pieces[at])
        elif how == "insert":
            mark = data.draw(st.sampled_from([*SPECIALS[name].split(), "", "\n"]))
            pieces.insert(at, f"{mark}Z{10 + number}Y")
        elif how == "cut":
            pieces = pieces[: max(at, 1)]
        else:
            other = data.draw(st.integers(0, len(pieces) - 1))
            pieces[at], pieces[other] = pieces[other], pieces[at]
    stops = [find_syntax(name).tokenizer.decode([stop]) for stop in find_syntax(name).stop_ids]
    sampled = "".join(pieces)
    for stop in stops:  # the answer ends at a stop id
        sampled = sampled.partition(stop)[0] + (stop if stop == "<|call|>" else "")
    message = parse(name, sampled, malformed=malformed)
    assert find_missing(sampled, message) == []
    marks = f"{template(name).think}|{template(name).think_end}|<[|]channel[|]>|<[|]start"
    if not (message.tool_calls or message.reasoning or re.search(marks, sampled)):
        assert template(name).channels or squeeze(message.content) == squeeze(sampled)


# --------------------------------------------------------------------------- named cases
LAST_TAGS = {"deepseek-v4": "</｜DSML｜invoke>", "inkling": "<|end_message|>", "llama-3": "}"}
"""Tags that end a call, where no mark of the template does."""


def drop_end(name: str, text: str) -> str:
    """The call without its last tag, and without what follows it."""
    return text[: text.rindex(LAST_TAGS.get(name) or template(name).call_end)]


def join_blocks(name: str, text: str) -> str:
    """Two calls in one block: the marks between them are left out."""
    what = template(name)
    between = re.escape(what.call_end) + r"\s*" + re.escape(what.call)
    return re.sub(between, "", text) if what.call and what.call_end else text


CASES: dict[str, Callable[[str, str], str]] = {
    "unclosed": drop_end,
    "two in one block": join_blocks,
    "cut": lambda _, text: text[: text.rindex("Z1Y") + 3],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_damaged_call_is_never_a_call_with_less(name: str, case: str) -> None:
    """A damaged call is text as it was written, or a call with the arguments as sampled."""
    calls = [("read", {"path": "Z1Y"})]
    if case == "two in one block" and name not in ("llama-3", "gpt-oss"):
        calls.append(("edit", {"old": "Z2Y"}))
    sampled = CASES[case](name, write(name, *calls))
    as_text, as_calls = (parse(name, sampled, malformed=each) for each in MalformedCalls)
    assert find_missing(sampled, as_text) == find_missing(sampled, as_calls) == []
    if case != "two in one block":
        assert as_text.tool_calls == ()
        assert squeeze(sampled) in squeeze(as_text.content)
        [call] = as_calls.tool_calls
        assert (call.name, as_calls.content) == ("read", "")
        assert "Z1Y" in call.arguments
    else:
        assert len(as_text.tool_calls) in (0, len(calls))


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_declared_tools_every_answer_is_text(name: str) -> None:
    """Text that looks like a call is sent as it was written, as by the hosted APIs."""
    sampled = write(name, ("read", {"path": "Z1Y"}))
    message = parse(name, sampled, tools=())
    assert message.tool_calls == ()
    stripped = sampled.replace("<|call|>", "").replace("<|end_message|>", "")
    assert squeeze(message.content) == squeeze(stripped)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "llama-3"])
def test_a_call_of_an_undeclared_tool_is_a_call(name: str) -> None:
    """A well-formed call of an undeclared tool is left to the harness; a malformed one is text."""
    sampled = write(name, ("read", {"path": "Z1Y"}))
    [call] = parse(name, sampled, tools=(EDIT,)).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("read", {"path": "Z1Y"})
    broken = parse(name, CASES["cut"](name, sampled), tools=(EDIT,), malformed=MalformedCalls.RAW)
    assert (broken.tool_calls, find_missing(sampled, broken)) == ((), [])


REPEATED = {
    "qwen3": '<tool_call>\n{"name": "read", "arguments": {"path": "Z1Y", "path": "Z2Y"}}\n'
    "</tool_call>",
    "qwen3.5": "<tool_call>\n<function=read>\n<parameter=path>\nZ1Y\n</parameter>\n"
    "<parameter=path>\nZ2Y\n</parameter>\n</function>\n</tool_call>",
    "glm-4.5": "<tool_call>read\n<arg_key>path</arg_key>\n<arg_value>Z1Y</arg_value>\n"
    "<arg_key>path</arg_key>\n<arg_value>Z2Y</arg_value>\n</tool_call>",
    "gemma4": '<|tool_call>call:read{path:<|"|>Z1Y<|"|>,path:<|"|>Z2Y<|"|>}<tool_call|>',
    "llama-3": '{"name": "read", "parameters": {"path": "Z1Y", "path": "Z2Y"}}',
}


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("nameless", [False, True])
def test_a_repeated_or_nameless_parameter_makes_the_call_malformed(
    name: str, *, nameless: bool
) -> None:
    """The whole call stays text, so that neither of two values is dropped."""
    sampled = REPEATED[name]
    if nameless:
        head, _, tail = sampled.rpartition("path")
        sampled = head + tail
    message = parse(name, sampled)
    assert (message.tool_calls, message.content) == ((), sampled)


@pytest.mark.parametrize(
    ("sampled", "call"),
    [
        ('{"name": "read", "parameters": {"path": "a"}}', True),
        (' {"name": "read", "parameters": {}}\n', True),
        ('{"name": "other", "parameters": {"path": "a"}}', False),
        ('{"name": "read", "parameters": {"path": "a"}} and more', False),
        ('{"name": "read", "parameters": {"path": "a"}, "why": "b"}', False),
        ('{"name": "read", "answer": 5}', False),
        ('{"name": "read"}', False),
        ("{}", False),
    ],
)
def test_json_of_llama_is_a_call_only_as_a_whole(sampled: str, *, call: bool) -> None:
    """Only a declared tool and nothing else is a call; all other JSON is an answer in JSON."""
    for malformed in MalformedCalls:
        message = parse("llama-3", sampled, malformed=malformed)
        assert (len(message.tool_calls), message.content) == (
            (1, "") if call else (0, sampled.strip())
        )


@pytest.mark.parametrize(
    "sampled",
    [
        "<|channel|>commentary to=functions.read <|constrain|>json<|message|>{}<|call|>",
        " to=functions.read<|channel|>commentary<|message|>{}<|end|>",
        "<|channel|>final<|message|>So<|channel|>commentary to=functions.read<|message|>{}<|call|>",
        "So<|end|>assistant<|channel|>commentary to=functions.read json<|message|>{}<|end|>",
    ],
)
def test_calls_of_gpt_oss_need_neither_start_nor_call(sampled: str) -> None:
    """Calls without ``<|start|>``, and closed by ``<|end|>``, are calls."""
    [call] = parse("gpt-oss", sampled).tool_calls
    assert (call.name, call.arguments) == ("read", "{}")


def test_a_value_may_hold_the_tags_of_its_format() -> None:
    """A closing tag ends a value only if the rest then parses as a whole."""
    value = "a\n</parameter>\n<parameter=old>\nb</function>"
    call = f"<function=read>\n<parameter=path>\n{value}\n</parameter>\n</function>"
    [parsed] = parse("qwen3.5", f"<tool_call>\n{call}\n</tool_call>").tool_calls
    assert json.loads(parsed.arguments) == {"path": "a", "old": "b</function>"}
    value = "x</tool_call>\n</parameter>\ny"
    call = f"<function=read>\n<parameter=path>\n{value}\n</parameter>\n</function>"
    [parsed] = parse("qwen3.5", f"<tool_call>\n{call}\n</tool_call>").tool_calls
    assert json.loads(parsed.arguments) == {"path": value}


def test_a_good_call_after_a_bad_one_is_a_call() -> None:
    """The bad call is text in its place, or a call with the arguments as sampled."""
    good = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
    for bad in (good.replace("}}", "}"), good.removesuffix("\n</tool_call>").replace("}", "")):
        message = parse("qwen3", f"Hm.\n{bad}\n{good}")
        assert message.content == f"Hm.\n{bad}"
        assert [call.arguments for call in message.tool_calls] == ['{"path":"a"}']
        message = parse("qwen3", f"Hm.\n{bad}\n{good}", malformed=MalformedCalls.RAW)
        assert message.content == "Hm."
        assert [call.name for call in message.tool_calls] == ["read", "read"]


@pytest.mark.parametrize("unit", ["<tool_call>", "</tool_call>", "<tool_call></tool_call>x"])
def test_thousands_of_tags_are_parsed_at_once(unit: str) -> None:
    """An answer of thousands of tags is text as it was sampled, within the time limit."""
    made: Rendering = make_rendering("qwen3.5")
    parameter = "<parameter=path>\n</parameter>\n"
    many = "<tool_call>" * 20_000 + unit + "</tool_call>" * 20_000
    for text in (
        many,
        unit * 5000,
        f"<tool_call><function=read>{parameter * 5000}</tool_call>" + unit,
    ):
        message = parse(made.name, text, tools=TOOLS)
        assert squeeze(text) == squeeze(message.content)


def test_tags_in_a_value_without_the_line_breaks_of_the_template_are_text() -> None:
    """A list in JSON may hold a closing and an opening tag."""
    value = ["</parameter><parameter=a>"]
    call = f"<function=read>\n<parameter=path>\n{json.dumps(value)}\n</parameter>\n</function>"
    [parsed] = parse("qwen3.5", f"<tool_call>\n{call}\n</tool_call>").tool_calls
    assert parsed.arguments == json.dumps({"path": json.dumps(value)}, separators=(",", ":"))
