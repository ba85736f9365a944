"""Drawn tools and calls: parameters of every kind of schema, with values that it allows."""

from __future__ import annotations

import json
import string
from typing import Any

from hypothesis import strategies as st

from tugline.types import Tool, ToolCall

Drawn = tuple[Tool, dict[str, Any]]
"""A tool, and arguments that its schema allows."""

TAGS = (
    "<parameter=a>", "</parameter>", "<function=f>", "</function>", "</arg_value>", "<arg_key>",
    '<parameter name="a">', "</invoke>", "```", "<tool_call>", "</tool_call>", "<|im_end|>",
    "\n</parameter>\n", "\n</parameter>\n<function=f>\n", "</parameter><function=f>",
)  # fmt: skip
CODE = ("    return 1\n", "\n\nx = {'a': 1}\n", "  ", "\n", "\t", " True", "None ", "if a:\n\n")
_LIKE_JSON = ("10001", "null", "True", "true", "1.5", "[]", '{"k": 1}', '"quoted"', "NaN", "1e999")
_WORDS = st.text(st.sampled_from(string.ascii_letters + "é界🙂 \n\"\\<>{}[]:,'"), max_size=12)
TEXTS = st.one_of(_WORDS, _WORDS, _WORDS, st.sampled_from(CODE), st.sampled_from(_LIKE_JSON)) | (
    st.lists(_WORDS | st.sampled_from(TAGS), max_size=4).map("".join)
)
_PLAIN = st.text(string.ascii_letters, min_size=1, max_size=6)
INTEGERS = st.integers(-3, 20) | st.integers(-(10**30), 10**30)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | INTEGERS
VALUES = st.recursive(
    st.none() | st.booleans() | INTEGERS | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_PLAIN, inner, max_size=3),
    max_leaves=6,
)
_OBJECTS = st.dictionaries(_PLAIN, VALUES, max_size=3)
KEYS = st.sampled_from(
    ["path", "old_string", "n", "limit", "a b", "é", "x.y", "x>y", 'q"r', "type", "$id", "name"]
)

_TEXT: dict[str, Any] = {"type": "string"}
_SCHEMAS: list[tuple[dict[str, Any], st.SearchStrategy[Any]]] = [
    (_TEXT, TEXTS),
    (_TEXT, TEXTS),
    (_TEXT, TEXTS),
    ({"type": "string", "minLength": 1}, TEXTS.filter(bool)),
    ({"type": "integer"}, INTEGERS),
    ({"type": "number"}, NUMBERS),
    ({"type": "boolean"}, st.booleans()),
    ({"type": "null"}, st.none()),
    ({"type": "array", "items": _TEXT}, st.lists(TEXTS, max_size=3)),
    ({"type": "array"}, st.lists(VALUES, max_size=3)),
    ({"type": "object", "properties": {"k": {"type": "integer"}}}, _OBJECTS.filter(
        lambda value: isinstance(value.get("k", 0), int) and value.get("k") is not True
        and value.get("k") is not False
    )),
    ({"type": "object", "additionalProperties": True}, _OBJECTS),
    ({"anyOf": [_TEXT, {"type": "null"}]}, TEXTS),
    ({"type": ["string", "null"]}, TEXTS),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, INTEGERS | st.none()),
    ({"type": ["array", "null"]}, st.lists(VALUES, max_size=2) | st.none()),
    ({"oneOf": [{"type": "boolean"}, {"type": "integer"}]}, INTEGERS | st.booleans()),
    ({"enum": ["a", "b c", "10"]}, st.sampled_from(["a", "b c", "10"])),
    ({"type": "string", "enum": ["true", "x"]}, st.sampled_from(["true", "x"])),
    ({"enum": ["a", 1, None, True]}, st.sampled_from(["a", 1, None, True])),
    ({"const": 5}, st.just(5)),
    ({"const": "5"}, st.just("5")),
    ({"$ref": "#/$defs/text"}, TEXTS),
    ({"$ref": "#/$defs/count"}, INTEGERS),
    ({"allOf": [{"$ref": "#/$defs/count"}, {"minimum": -(10**40)}]}, INTEGERS),
    ({"not": {"type": "string"}}, VALUES.filter(lambda value: not isinstance(value, str))),
]  # fmt: skip
_DEFINITIONS = {"text": _TEXT, "count": {"type": "integer"}}
_AMBIGUOUS: list[tuple[dict[str, Any], st.SearchStrategy[Any]]] = [
    ({}, VALUES),
    ({"anyOf": [_TEXT, {"type": "integer"}]}, TEXTS | INTEGERS),
    ({"type": ["string", "null", "object"]}, TEXTS | st.none() | _OBJECTS),
]


@st.composite
def drawn_tools(draw: st.DrawFn) -> Drawn:
    """A tool and its arguments; few schemas allow both a string and the value it looks like."""
    properties: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for key in draw(st.lists(KEYS, max_size=3, unique=True)):
        unclear = draw(st.integers(0, 99)) == 61
        schema, values = draw(st.sampled_from(_AMBIGUOUS if unclear else _SCHEMAS))
        properties[key] = schema
        if draw(st.integers(0, 9)):
            arguments[key] = draw(values)
    name = draw(st.sampled_from(["read", "str_replace", "mcp__fs-1.read", "a"]))
    parameters = {"type": "object", "properties": properties, "$defs": _DEFINITIONS}
    return Tool(name, "", parameters), arguments


def make_call(number: int, drawn: Drawn) -> ToolCall:
    """The call of a drawn tool."""
    tool, arguments = drawn
    return ToolCall(f"call_0_{number}", tool.name, json.dumps(arguments))
