"""Argument values: JSON text kept as it was sampled, and text that only a schema tells from JSON.

Some families write ``10`` for the text and for the number. The tool's schema decides: the value is
text where the schema allows this text, else the number if it allows that.
"""

import json
import re
from collections.abc import Sequence
from json import JSONDecodeError
from typing import Any, NamedTuple

import msgspec

from tugline.types import Tool

_TEXT_OR_SPACE = re.compile(r'("(?:[^"\\]|\\.)*")|\s+')
_MAX_DEPTH = 24
"""Depth of a schema at which everything is allowed, so that no schema exhausts the stack."""
_SPACE = re.compile(r"[ \t\n\r]*")
_CONSTANTS = {"True": ("true", True), "False": ("false", False), "None": ("null", None)}
"""How Python writes what JSON writes otherwise; some templates write values as Python does."""
_BRANCHES = ("allOf", "anyOf", "oneOf")
_ANY_TEXT = object()
"""Stands for texts in general when a schema is asked what it allows."""


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(
    parse_constant=_refuse_constant, parse_int=str, parse_float=str, object_pairs_hook=tuple
)
"""Decoder that finds where values end: numbers are texts of any size, objects tuples of pairs."""
_JSON_ERRORS = (ValueError, RecursionError)


# --------------------------------------------------------------------------- JSON
class Member(NamedTuple):
    """Value of a key in a JSON object."""

    text: str
    """The value's JSON text."""
    value: Any
    """The value: numbers are texts, and objects tuples of pairs."""

    @property
    def is_object(self) -> bool:
        """Whether the value is an object in which no key is repeated or empty."""
        keys = [key for key, _ in self.value] if isinstance(self.value, tuple) else [""]
        return all(keys) and len(set(keys)) == len(keys)


def split_object(text: str, at: int = 0) -> tuple[dict[str, Member], int] | None:
    """Split the JSON object at `at` into its members.

    Also returns where the object ends. None if it is malformed, or if a key is repeated or empty.
    """
    members: dict[str, Member] = {}
    try:
        at = _skip(text, at, "{")
        separator = "}" if text[at : at + 1] == "}" else ","
        while separator == ",":
            key, end = _DECODER.raw_decode(text, at)
            if text[at] != '"' or not key or key in members:
                return None
            at = _skip(text, end, ":")
            value, end = _DECODER.raw_decode(text, at)
            members[key] = Member(text[at:end], value)
            at = _SPACE.match(text, end).end()  # type: ignore[union-attr] # matches always
            separator = text[at : at + 1]
            if separator == ",":
                at = _skip(text, at, ",")
    except _JSON_ERRORS:
        return None
    return (members, at + 1) if separator == "}" else None


def _skip(text: str, at: int, mark: str) -> int:
    """Return the position after `mark` and the white space around it. Raises `ValueError`."""
    start = _SPACE.match(text, at).end()  # type: ignore[union-attr] # matches always
    if not text.startswith(mark, start):
        raise JSONDecodeError(f"expected {mark}", text, start)
    return _SPACE.match(text, start + 1).end()  # type: ignore[union-attr] # matches always


def is_json(text: str) -> bool:
    """Whether `text` is one JSON value."""
    try:
        _DECODER.decode(text)
    except _JSON_ERRORS:
        return False
    return True


def starts_with_json(text: str) -> bool:
    """Whether `text` begins with a JSON value; anything may follow."""
    try:
        _DECODER.raw_decode(text.lstrip())
    except _JSON_ERRORS:
        return False
    return True


def strip_space(text: str) -> str:
    """Remove white space between the parts of JSON; texts and numbers stay as they are."""
    try:
        return msgspec.json.format(text, indent=-1)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        # Halves of surrogate pairs, and more depth than msgspec reads.
        return _TEXT_OR_SPACE.sub(lambda match: match[1] or "", text)


def encode_text(text: str) -> str:
    """Encode a text as JSON."""
    return json.dumps(text, ensure_ascii=False)


def join_object(members: dict[str, str]) -> str:
    """Join keys and the JSON text of their values to an object."""
    return "{" + ",".join(f"{encode_text(key)}:{value}" for key, value in members.items()) + "}"


# --------------------------------------------------------------------------- text or JSON
class Schemas:
    """Parameter schemas of the declared tools, by name."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._roots: dict[str, Any] = {tool.name: tool.parameters for tool in tools}

    def encode_value(self, tool: str, key: str, text: str) -> str:
        """Encode an argument that was written without quotes as JSON.

        Text where the schema allows this text, else JSON that it allows. If it allows neither: text
        where it allows any text, else JSON.
        """
        literal = _read_literal(text)
        if literal is None:
            return encode_text(text)
        encoded, value = literal
        root = self._roots.get(tool)
        schema = _find_property(root, key, root, _MAX_DEPTH, set())
        if _Check(text, root).allows(schema):
            return encode_text(text)
        if _Check(value, root).allows(schema) or not _Check(_ANY_TEXT, root).allows(schema):
            return encoded
        return encode_text(text)

    def list_keys(self) -> set[str]:
        """List the names of the parameters that the tools declare."""
        keys: set[str] = set()
        for root in self._roots.values():
            properties = root.get("properties") if isinstance(root, dict) else None
            keys.update(properties if isinstance(properties, dict) else ())
        return keys


def _read_literal(text: str) -> tuple[str, Any] | None:
    """Return the JSON text and the value of a written number, constant, list or object."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except _JSON_ERRORS:
        # An integer of thousands of digits is JSON, but Python does not read it.
        return (text.strip(), 1 << 64) if is_json(text) else None
    return text.strip(), value


def _find_property(schema: Any, key: str, root: Any, depth: int, seen: set[int]) -> Any:
    """Return the schema of a property, also one of a branch or a reference; True if undeclared."""
    if not isinstance(schema, dict) or not depth or id(schema) in seen:
        return True
    seen.add(id(schema))
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return properties[key]
    branches = [_resolve(schema["$ref"], root)] if "$ref" in schema else []
    for name in _BRANCHES:
        branches += _list_branches(schema, name)
    found = [_find_property(branch, key, root, depth - 1, seen) for branch in branches]
    found = [each for each in found if each is not True]
    if found:
        return {"anyOf": found}
    others = schema.get("additionalProperties")
    return others if isinstance(others, dict) else True


def _list_branches(schema: dict[str, Any], name: str) -> list[Any]:
    branches = schema.get(name)
    return branches if isinstance(branches, list) else []


def _resolve(reference: Any, root: Any) -> Any:
    """Return what a reference within the schema points to; True if nothing is there."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    found = root
    for step in filter(None, reference[1:].split("/")):
        key = step.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return True if found is None else found


# --------------------------------------------------------------------------- what a schema allows
class _Check:
    """Check whether JSON schemas allow one value.

    Looks at types, constants, lengths and branches, not at patterns or inside lists and objects:
    enough to tell a text from another value. What it does not understand allows everything.
    """

    def __init__(self, value: Any, root: Any) -> None:
        self._value, self._root = value, root
        self._known: dict[int, bool] = {}
        """Results by the identity of a schema: references may loop, and each is checked once."""

    def allows(self, schema: Any, depth: int = _MAX_DEPTH) -> bool:
        """Whether `schema` allows the value."""
        if not isinstance(schema, dict) or not depth:
            return schema is not False
        known = self._known.get(id(schema))
        if known is None:
            self._known[id(schema)] = True
            own = self._allows_type(schema) and self._allows_constant(schema)
            known = own and self._allows_branches(schema, depth - 1)
            self._known[id(schema)] = known
        return known

    def _allows_type(self, schema: dict[str, Any]) -> bool:
        declared = schema.get("type")
        names = declared if isinstance(declared, list) else [declared]
        known = {name.lower() for name in names if isinstance(name, str)}
        if known and schema.get("nullable") is True:
            known.add("null")
        if known and known.isdisjoint(_list_types(self._value)):
            return False
        if not isinstance(self._value, str):
            return True
        longest = schema.get("maxLength")
        shortest = schema.get("minLength")
        too_long = isinstance(longest, int) and len(self._value) > longest
        too_short = isinstance(shortest, int) and len(self._value) < shortest
        return not (too_long or too_short)

    def _allows_constant(self, schema: dict[str, Any]) -> bool:
        listed = schema.get("enum")
        constants = listed if isinstance(listed, list) else None
        if "const" in schema:
            constants = [schema["const"]]
        if constants is None:
            return True
        if self._value is _ANY_TEXT:
            return any(isinstance(constant, str) for constant in constants)
        boolean = isinstance(self._value, bool)
        return any(each == self._value and isinstance(each, bool) is boolean for each in constants)

    def _allows_branches(self, schema: dict[str, Any], depth: int) -> bool:
        def allowed(branch: Any) -> bool:
            return self.allows(branch, depth)

        all_of, any_of, one_of = (_list_branches(schema, name) for name in _BRANCHES)
        if "$ref" in schema and not allowed(_resolve(schema["$ref"], self._root)):
            return False
        if not all(map(allowed, all_of)) or (any_of and not any(map(allowed, any_of))):
            return False
        matches = sum(map(allowed, one_of))
        if self._value is _ANY_TEXT:
            return matches > 0 or not one_of
        if one_of and matches != 1:
            return False
        if "not" in schema and allowed(schema["not"]):
            return False
        if "if" not in schema:
            return True
        return allowed(schema.get("then" if allowed(schema["if"]) else "else", True))


def _list_types(value: Any) -> set[str]:
    """List the types of JSON schema that a value has."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"integer", "number"} if value.is_integer() else {"number"}
    if isinstance(value, list):
        return {"array"}
    if isinstance(value, dict):
        return {"object"}
    return {"null"} if value is None else {"string"}
