"""Calls whose parameters are in tags, with values that are written as they are.

A closing tag ends a value only if the rest of the block then parses as a whole, so a value may hold
tags. Which tags do so is found from the end of the block, in one pass. A value holds no other call:
no opening tag that is an id, and, where line breaks differ from those of the template, no closing
tag before the opening of a function.
"""

import bisect
import re
from collections.abc import Iterable

import msgspec

from tugline.chat.calls.base import Grammar, ParsedCall, Tags, is_name, write_pattern
from tugline.chat.calls.values import Schemas, encode_text, is_json, join_object
from tugline.chat.tokenizer import Tokenizer

_BLANK = re.compile(r"\s*")


class TaggedCalls(msgspec.Struct, frozen=True, tag="tagged"):
    """Table entry of a family that writes parameters in tags."""

    function: tuple[str, str, str]
    """Texts before a tool's name, after it, and at the end of its call."""
    parameter: tuple[str, str, str]
    """Texts before a parameter's name, after it, and after its value."""
    typed: bool = False
    """Whether a parameter says that its value is a text, or else JSON (DSML)."""
    tags: tuple[str, ...] = ()
    """Tags that may be single ids."""

    def bind(self, tokenizer: Tokenizer) -> Grammar:
        """Bind the grammar to a vocabulary."""
        return _TaggedGrammar(self, Tags(tokenizer, self.tags))


class _TaggedGrammar(Grammar):
    def __init__(self, table: TaggedCalls, tags: Tags) -> None:
        self.tags = tags
        self._typed = table.typed
        function = [tags.mark(text) for text in table.function]
        parameter = [tags.mark(text) for text in table.parameter]
        self._line_break = parameter[2].startswith("\n")
        self._value_end = parameter[2].strip("\n")
        self._parameter = parameter
        key_start = re.escape(parameter[0])
        name_end = write_pattern(function[1].strip("\n"))
        name = rf"(?P<name>(?:(?!{name_end or key_start})[^\n])*){name_end}"
        self._open = re.compile(rf"\s*{re.escape(function[0])}{name}")
        self._close = re.compile(rf"\s*{re.escape(function[2])}")
        self._closes = function[2] != ""
        self._breaks_lines = function[1].endswith("\n")
        other = re.escape(function[0]) or rf"[^\s<]+\s*{key_start}"
        after_value = rf"{re.escape(self._value_end)}\s*{other}"
        ids = [each for each in (key_start, after_value) if tags.restore(each) != each]
        self._other_call = re.compile("|".join(ids or ["(?!)"]))
        """Beginning of another call in ids, which no written value holds."""
        self._other_text = re.compile("|".join(dict.fromkeys([*ids, after_value])))

    def parse(self, block: str, schemas: Schemas) -> list[ParsedCall] | None:
        calls = self._parse(block, schemas, strict=True)
        return self._parse(block, schemas, strict=False) if calls is None else calls

    def _parse(self, block: str, schemas: Schemas, *, strict: bool) -> list[ParsedCall] | None:
        """Parse a block whose line breaks are those of the template, if `strict`, or may differ."""
        reader = _BlockReader(block, self, schemas.list_keys(), strict=strict)
        calls: list[ParsedCall] = []
        at = 0
        while not _BLANK.fullmatch(block, at):
            opening = self._open.match(block, at)
            name = opening["name"].strip() if opening else ""
            if opening is None or not is_name(name) or not reader.continues(opening.end()):
                return None
            parameters, at = reader.read_parameters(opening.end())
            if parameters is None:
                return None
            arguments = {
                key: self._encode_value(name, key, text, kind, schemas)
                for key, (text, kind) in parameters.items()
            }
            calls.append(ParsedCall(name, join_object(arguments)))
        return calls or None

    def match_opening(self, block: str) -> tuple[str, int] | None:
        opening = self._open.match(block)
        return (opening["name"].strip(), opening.end()) if opening else None

    def _encode_value(
        self, name: str, key: str, text: str, kind: str | None, schemas: Schemas
    ) -> str:
        text = self.tags.restore(text)
        if not self._typed:
            return schemas.encode_value(name, self.tags.restore(key), text)
        return text.strip() if kind == "false" and is_json(text) else encode_text(text)

    def write_key_pattern(self, keys: Iterable[str], *, strict: bool) -> re.Pattern[str]:
        """Write the pattern of a parameter's opening.

        `keys` are declared names; those with the characters of a tag are matched as they are.
        """
        start, end, _ = self._parameter
        stop = '"' if self._typed else end.strip("\n").partition("\n")[0]
        odd = sorted((key for key in keys if stop in key or "\n" in key), key=len, reverse=True)
        others = rf"(?:(?!{re.escape(stop)})[^\n])*"
        names = "|".join([*map(re.escape, odd), others])
        after = write_pattern(end.rstrip("\n"))
        if self._typed:
            after = after.replace(r"\{kind\}", "(?P<kind>true|false)")
        line_break = ""
        if end.endswith("\n"):
            line_break = r"\n" if strict else r"\n?"
        space = r"\n" if strict and self._breaks_lines else r"\s*"
        return re.compile(rf"{space}{re.escape(start)}(?P<key>{names}){after}{line_break}")

    def find_value_ends(self, block: str, *, strict: bool) -> list[int]:
        """Return where the tags that may end a value begin, in descending order."""
        tag = re.escape(self._value_end)
        pattern = rf"(?<=\n){tag}" if strict and self._line_break else tag
        return [match.start() for match in re.finditer(pattern, block)][::-1]

    def skip_value_end(self, at: int) -> int:
        """Return where a tag that begins at `at` ends."""
        return at + len(self._value_end)

    def holds_call(self, block: str, start: int, end: int, *, strict: bool) -> bool:
        """Whether the value between two positions holds the beginning of another call.

        With line breaks around values, as the template writes them, ordinary text is never one.
        """
        exact = strict and self._line_break
        pattern = self._other_call if exact else self._other_text
        return pattern.search(block, start, end) is not None

    def cut_line_break(self, text: str) -> str:
        """Remove the line break that the template writes after a value."""
        return text.removesuffix("\n") if self._line_break else text

    def skip_function_end(self, block: str, at: int) -> int | None:
        """Return where a call without further parameters ends; None if it does not end at `at`."""
        if not self._closes:
            return len(block) if _BLANK.fullmatch(block, at) else None
        closing = self._close.match(block, at)
        return closing.end() if closing else None

    def skip_opening(self, block: str, at: int) -> int | None:
        """Return where the opening of another call ends; None if none is at `at`."""
        opening = self._open.match(block, at)
        return opening.end() if opening and is_name(opening["name"].strip()) else None


class _BlockReader:
    """Reader of one block, which knows the tags after which the rest parses as a whole."""

    def __init__(
        self, block: str, grammar: _TaggedGrammar, keys: Iterable[str], *, strict: bool
    ) -> None:
        self._block, self._grammar = block, grammar
        self._strict = strict
        self._key = grammar.write_key_pattern(keys, strict=strict)
        self._valid: list[int] = []
        """Negated starts of the tags that may end a value, so in ascending order."""
        for start in grammar.find_value_ends(block, strict=strict):
            if self.continues(grammar.skip_value_end(start)):
                self._valid.append(-start)

    def continues(self, at: int) -> bool:
        """Whether the block parses from `at`, inside a call and between its parameters."""
        block = self._block
        grammar = self._grammar
        while True:
            key = self._key.match(block, at)
            if key:
                return self._find_value_end(key.end()) is not None
            end = grammar.skip_function_end(block, at)
            if end is None:
                return False
            if _BLANK.fullmatch(block, end):
                return True
            opening = grammar.skip_opening(block, end)
            if opening is None:
                return False
            at = opening

    def read_parameters(self, at: int) -> tuple[dict[str, tuple[str, str | None]] | None, int]:
        """Read the parameters of a call that parses, and return where it ends.

        Each is a text and whether it is declared as one; None if one is repeated or nameless.
        """
        block = self._block
        grammar = self._grammar
        parameters: dict[str, tuple[str, str | None]] = {}
        while key := self._key.match(block, at):
            end = self._find_value_end(key.end())
            name = grammar.tags.restore(key["key"])
            if end is None or not name or name in parameters:
                return None, at
            text = grammar.cut_line_break(block[key.end() : end])
            parameters[name] = text, key.groupdict().get("kind")
            at = grammar.skip_value_end(end)
        return parameters, grammar.skip_function_end(block, at) or at

    def _find_value_end(self, start: int) -> int | None:
        """Return the first tag from `start` on that may end a value."""
        at = bisect.bisect_right(self._valid, -start) - 1
        end = -self._valid[at] if at >= 0 else None
        if end is None:
            return None
        if self._grammar.holds_call(self._block, start, end, strict=self._strict):
            return None
        return end
