"""Calls whose arguments are a JSON object: plain, after a name, or in a fenced block."""

import json
import re

import msgspec

from tugline.chat.calls.base import Grammar, ParsedCall, Tags, is_name, write_pattern
from tugline.chat.calls.values import Schemas, split_object, strip_space
from tugline.chat.tokenizer import Tokenizer

_NAME = r'[^\s"{}\ud800-\udfff]*'


class JsonCalls(msgspec.Struct, frozen=True, tag="json"):
    """Table entry of a family that writes arguments as JSON."""

    head: str = ""
    """Text before the object; ``{name}`` and ``{number}`` stand for the call's."""
    tail: str = ""
    """Text after the object."""
    name_key: str = ""
    """Key of the tool's name in the object; empty if `head` has it and the object is the
    arguments."""
    arguments_key: str = ""
    """Key of the arguments in the object."""
    tags: tuple[str, ...] = ()
    """Tags in `head` and `tail` that may be single ids."""

    def bind(self, tokenizer: Tokenizer) -> Grammar:
        """Bind the grammar to a vocabulary."""
        return _JsonGrammar(self, Tags(tokenizer, self.tags))


class _JsonGrammar(Grammar):
    def __init__(self, table: JsonCalls, tags: Tags) -> None:
        self.tags = tags
        self._table = table
        head = write_pattern(tags.mark(table.head))
        head = head.replace(r"\{name\}", rf"(?P<name>{_NAME})").replace(r"\{number\}", r"\d+")
        self._head = re.compile(rf"\s*{head}\s*")
        self._tail = re.compile(rf"\s*{write_pattern(tags.mark(table.tail))}\s*")
        name = re.escape(table.name_key)
        arguments = re.escape(table.arguments_key)
        self._keys = re.compile(
            rf'\{{\s*"{name}"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"{arguments}"\s*:\s*'
        )
        self._named = re.compile(rf'"{name}"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")')

    def parse(self, block: str, schemas: Schemas) -> list[ParsedCall] | None:
        head = self._head.match(block)
        found = split_object(block, head.end()) if head else None
        if head is None or found is None:
            return None
        members, end = found
        if not self._tail.fullmatch(block, end):
            return None
        table = self._table
        name = head.groupdict().get("name")
        arguments = block[head.end() : end]
        if table.name_key:
            if members.keys() != {table.name_key, table.arguments_key}:
                return None
            written = name
            name = _read_text(members[table.name_key].text)
            member = members[table.arguments_key]
            if (written and written != name) or not member.is_object:
                return None
            arguments = member.text
        if name is None or not is_name(name):
            return None
        written_id = head[0].strip() if "{number}" in table.head else ""
        arguments = strip_space(self.tags.restore(arguments))
        return [ParsedCall(name, arguments, self._cut_id(written_id))]

    def match_opening(self, block: str) -> tuple[str, int] | None:
        head = self._head.match(block)
        if not self._table.name_key:
            return (head["name"], head.end()) if head else None
        start = head.end() if head else 0
        keys = self._keys.match(block, start)
        named = keys or self._named.search(block, start)
        name = _read_text(named["name"]) if named else None
        written = head.groupdict().get("name") if head else None
        if name is not None:
            agrees = not written or written == name
            return name, keys.end() if keys and agrees else 0
        return (written, start) if written else None

    def _cut_id(self, head: str) -> str:
        """Return the id in a head, which ends before the first tag."""
        end = next((at for at, char in enumerate(head) if "\ud800" <= char <= "\udfff"), len(head))
        tagged = min((head.find(tag) for tag in self._table.tags if tag in head), default=end)
        return head[: min(end, tagged)]


def _read_text(encoded: str) -> str | None:
    try:
        value = json.loads(encoded)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
