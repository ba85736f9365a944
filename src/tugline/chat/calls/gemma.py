"""Calls of Gemma 4: ``call:name{key:value}``, with texts between quotation marks of their own."""

import re

import msgspec

from tugline.chat.calls.base import Grammar, ParsedCall, Tags, is_name
from tugline.chat.calls.values import Schemas, encode_text, is_json, join_object
from tugline.chat.tokenizer import Tokenizer

_QUOTE = '<|"|>'
_LITERAL = re.compile(r"[^,\[\]{}]+")
_SPACE = re.compile(r"\s*")
_KEYS_TRIED = 8
"""Number of colons that are tried as the end of a key; keys are not quoted."""
_MAX_DEPTH = 100
_Found = tuple[str, int] | None


class GemmaCalls(msgspec.Struct, frozen=True, tag="gemma"):
    """Table entry of Gemma 4."""

    def bind(self, tokenizer: Tokenizer) -> Grammar:
        """Bind the grammar to a vocabulary."""
        return _GemmaGrammar(Tags(tokenizer, (_QUOTE,)))


class _GemmaGrammar(Grammar):
    def __init__(self, tags: Tags) -> None:
        self.tags = tags
        self.quote = tags.mark(_QUOTE)
        self._open = re.compile(r"\s*call:(?P<name>[^{\n]*)(?=\{)")

    def parse(self, block: str, schemas: Schemas) -> list[ParsedCall] | None:
        opening = self._open.match(block)
        if opening is None or not is_name(opening["name"]):
            return None
        found = _Reader(block, self).read_object(opening.end(), 0)
        if found is None or not _SPACE.fullmatch(block, found[1]):
            return None
        return [ParsedCall(opening["name"], found[0])]

    def match_opening(self, block: str) -> tuple[str, int] | None:
        opening = self._open.match(block)
        return (opening["name"], opening.end()) if opening else None


class _Reader:
    """Recursive reader; each method returns JSON text and the position after it, or None."""

    def __init__(self, text: str, grammar: _GemmaGrammar) -> None:
        self._text = text
        self._tags = grammar.tags
        self._quote = grammar.quote
        self._values: dict[int, _Found] = {}
        """Values by position: several keys may be tried before one."""

    def read_object(self, at: int, depth: int) -> _Found:
        """Read ``{key:value,...}``; None if a key is repeated, or empty at the top."""
        members: dict[str, str] = {}
        at += 1
        if self._text.startswith("}", at):
            return "{}", at + 1
        while True:
            found = self._read_member(at, depth)
            if found is None:
                return None
            key, value, at = found
            if key in members or not (key or depth):
                return None
            members[key] = value
            separator = self._text[at : at + 1]
            at += 1
            if separator == "}":
                return join_object(members), at
            if separator != ",":
                return None

    def _read_member(self, at: int, depth: int) -> tuple[str, str, int] | None:
        """Read a key and its value; the key ends at the first colon before a value."""
        colon = at - 1
        for _ in range(_KEYS_TRIED):
            colon = self._text.find(":", colon + 1)
            if colon < 0:
                return None
            value = self._read_value(colon + 1, depth + 1)
            if value is not None and self._text[value[1] : value[1] + 1] in ("}", ","):
                return self._read_key(self._text[at:colon]), *value
        return None

    def _read_key(self, text: str) -> str:
        quoted = len(text) >= 2 * len(self._quote) and text.startswith(self._quote)
        if quoted and text.endswith(self._quote):
            text = text[len(self._quote) : -len(self._quote)]
        return self._tags.restore(text)

    def _read_value(self, at: int, depth: int) -> _Found:
        if depth > _MAX_DEPTH:
            return None
        if at not in self._values:
            self._values[at] = None
            self._values[at] = self._read_new_value(at, depth)
        return self._values[at]

    def _read_new_value(self, at: int, depth: int) -> _Found:
        text = self._text
        if text.startswith(self._quote, at):
            return self._read_text(at + len(self._quote))
        if text.startswith("{", at):
            return self.read_object(at, depth)
        if text.startswith("[", at):
            return self._read_list(at + 1, depth)
        literal = _LITERAL.match(text, at)
        if literal is None or not is_json(literal[0]):
            return None
        return literal[0].strip(), literal.end()

    def _read_text(self, start: int) -> _Found:
        """Read a text up to the first quotation mark that a separator or an end follows."""
        end = start
        while (end := self._text.find(self._quote, end)) >= 0:
            after = end + len(self._quote)
            if self._text[after : after + 1] in (",", "}", "]", ":"):
                return encode_text(self._tags.restore(self._text[start:end])), after
            end = after
        return None

    def _read_list(self, at: int, depth: int) -> _Found:
        values: list[str] = []
        if self._text.startswith("]", at):
            return "[]", at + 1
        while True:
            found = self._read_value(at, depth + 1)
            if found is None:
                return None
            value, at = found
            values.append(value)
            separator = self._text[at : at + 1]
            at += 1
            if separator == "]":
                return f"[{','.join(values)}]", at
            if separator != ",":
                return None
