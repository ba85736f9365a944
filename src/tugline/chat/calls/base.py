"""Grammar of tool calls: the contract, and tags that are single ids.

A grammar reads the text of one block of calls, which is what stands between the marks that open and
close it. A tag that is one id of the vocabulary is structure only as that id: written out in
ordinary ids it is content. In the text of a block such an id is a lone surrogate, which sampled
text never contains.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tugline.chat.calls.values import Schemas
from tugline.chat.tokenizer import Tokenizer

_FIRST_SURROGATE = 0xD800
_NAMES = re.compile(r"[\w.-]+")


class ParsedCall(NamedTuple):
    """A well-formed tool call."""

    name: str
    arguments: str
    """A JSON object, as text."""
    written_id: str = ""
    """Id that the model wrote, in templates that number calls."""


class Tags:
    """Tags of a grammar that are single ids of a vocabulary."""

    def __init__(self, tokenizer: Tokenizer, tags: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self._by_id: dict[int, str] = {}
        self._by_tag: dict[str, str] = {}
        self._by_char: dict[int, str] = {}
        for tag in tags:
            token = tokenizer.convert_tokens_to_ids(tag)
            if token is not None:
                code = _FIRST_SURROGATE + len(self._by_id)
                self._by_id[token] = chr(code)
                self._by_tag[tag] = chr(code)
                self._by_char[code] = tag

    def mark(self, text: str) -> str:
        """Replace the tags in a text of the grammar."""
        for tag, char in self._by_tag.items():
            text = text.replace(tag, char)
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """Decode the ids of a block, tags replaced."""
        if self._by_id.keys().isdisjoint(ids):
            return self._tokenizer.decode_bytes(ids)
        parts: list[str] = []
        start = 0
        for at, token in enumerate(ids):
            if token in self._by_id:
                parts += (self._tokenizer.decode_bytes(ids[start:at]), self._by_id[token])
                start = at + 1
        parts.append(self._tokenizer.decode_bytes(ids[start:]))
        return "".join(parts)

    def restore(self, text: str) -> str:
        """Write the tags in a block's text as they were sampled."""
        return text.translate(self._by_char)


class Grammar(ABC):
    """How a model family writes the calls of one block."""

    tags: Tags

    @abstractmethod
    def parse(self, block: str, schemas: Schemas) -> list[ParsedCall] | None:
        """Parse a block as a whole; None if any of it is malformed."""

    @abstractmethod
    def match_opening(self, block: str) -> tuple[str, int] | None:
        """Return the name that a block begins with, and where its arguments begin."""

    def find_malformed(self, block: str, names: Iterable[str] | None) -> tuple[str, str] | None:
        """Return name and sampled argument text of a malformed block that names a declared tool.

        `names` are those of the declared tools; None accepts any. The argument text is the whole
        block if its opening is malformed, too.
        """
        opening = self.match_opening(block)
        declared = None if names is None else frozenset(names)
        if opening is not None and is_name(opening[0]):
            name, end = opening
            if declared is None or name in declared:
                return name, self.tags.restore(block[end:])
        first_line = block.strip().partition("\n")[0]
        for word in _NAMES.findall(first_line):
            if declared is not None and word in declared:
                return word, self.tags.restore(block)
        return None


def is_name(name: object) -> bool:
    """Whether a value can be the name of a tool: printable, without white space."""
    return isinstance(name, str) and name.isprintable() and len(name.split()) == 1


def write_pattern(text: str) -> str:
    """Turn a grammar's literal text into a pattern in which white space around lines may vary."""
    lines = [re.escape(line) for line in text.split("\n")]
    return r"\s*".join(lines)
