"""Keep contents apart from the template around them.

A content is all that is not the template's own text: messages, names, descriptions, schemas, and
arguments. An added token that is written in a content, such as ``<|im_end|>`` in a file that an
agent reads, is text. `ContentTokenizer.escape` puts a random key into it. The library renders the
content with the key, and encodes with `ContentTokenizer.encode`, which recognizes an added token
only where no key is inside or directly after it, and then removes the keys. A token that the end of
a content forms with the text after it is escaped as well.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from os.path import commonprefix
from typing import Any

from tugline.chat.tokenizer import Tokenizer

SPECIAL_TOKENS = ("text", "tokens")
"""Encodings of an added token inside a content: as text, or as its id."""


class ContentTokenizer:
    """Tokenizer of the library, which tells added tokens of the template from those of contents."""

    def __init__(self, tokenizer: Tokenizer, *, escapes: bool = True) -> None:
        """Without `escapes`, an added token is its id everywhere."""
        self._tokenizer = tokenizer
        self.name_or_path = tokenizer.name_or_path
        self.unk_token_id = tokenizer.unk_token_id
        self.eos_token_id = tokenizer.eos_token_id
        self.decode = tokenizer.decode
        self.convert_tokens_to_ids = tokenizer.convert_tokens_to_ids
        tokens = tokenizer.control_tokens
        self._escapes = escapes and bool(tokens)
        if not self._escapes:
            return
        self._digits = f"{secrets.randbelow(10**16):016}"
        self._key = f"\ufdd0{self._digits}"
        mark = f"\ufdd1{self._digits}"
        # Functions, because `re` hashes the whole pattern to look up a replacement text.
        self._add_mark: Callable[[re.Match[str]], str] = lambda match: mark + match[0]
        self._add_key: Callable[[re.Match[str]], str] = lambda match: match[0] + self._key
        self._encode_marked = tokenizer.require_mark(tokens, mark)
        ordered = sorted(tokens)
        self._of_template = re.compile(f"(?:{_match_any(ordered)})(?!{self._key})")
        self._start = re.compile(_match_first(ordered))
        """First character of an added token."""
        self._longest = max(map(len, tokens))
        self._heads = {token[:size] for token in tokens for size in range(1, len(token))}
        self._tails = {token[size:] for token in tokens for size in range(1, len(token))}
        self._first = re.compile(f"[{re.escape(''.join({token[0] for token in tokens}))}]")
        self._last = re.compile(f"[{re.escape(''.join({token[-1] for token in tokens}))}]")
        self._tags = {tag[1] for token in tokens if (tag := re.fullmatch("</?(.+)>", token))}
        """Contents that would be tokens inside angle brackets."""

    # ----------------------------------------------------------------------- for the library
    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encode a text of the template and contents."""
        if not self._escapes or self._digits not in text:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        text = text.replace(rf"\ufdd0{self._digits}", self._key)  # as JSON and `repr` write it
        marked = self._of_template.sub(self._add_mark, text)
        return self._encode_marked(marked.replace(self._key, ""))

    # ----------------------------------------------------------------------- contents
    def escape(self, text: str) -> str:
        """Escape the added tokens in a content; without any, return it unchanged."""
        bare = text.strip() if self._escapes else ""
        if not bare:
            return text
        starts = self._may_end_token(bare)
        if self._may_start_token(bare) or bare in self._tags:
            end = len(text.rstrip())
            text = text[:end] + self._key + text[end:]
        if starts:
            second = len(text) - len(text.lstrip()) + 1
            text = text[:second] + self._key + text[second:]
        return self._start.sub(self._add_key, text)

    def has_tokens(self, texts: Iterable[str]) -> bool:
        """Whether any of `texts` is changed by `escape`."""
        return any(self.escape(text) != text for text in texts)

    def escape_all(self, value: Any, names: frozenset[str]) -> Any:
        """Escape the texts in a JSON value, keys included, except `names` of a format."""
        if isinstance(value, str):
            return value if value in names else self.escape(value)
        if isinstance(value, list):
            return [self.escape_all(item, names) for item in value]
        if isinstance(value, dict):
            escape = self.escape_all
            return {escape(key, names): escape(item, names) for key, item in value.items()}
        return value

    def escape_answer(self, text: str, think: str, think_end: str) -> str:
        """Escape an assistant's text, except the marks around reasoning at its start."""
        marks = re.escape(think), re.escape(think_end)
        match = re.match(rf"(\s*{marks[0]})(.*?)({marks[1]})", text, re.DOTALL)
        if match is None or not (think and think_end):
            return self.escape(text)
        rest = self.escape(text[match.end() :])
        return match[1] + self.escape(match[2]) + match[3] + rest

    def remove_keys(self, text: str) -> str:
        """Remove the keys from a text, such as a message of the library."""
        if not self._escapes:
            return text
        return text.replace(rf"\ufdd0{self._digits}", "").replace(self._key, "")

    def _may_start_token(self, text: str) -> bool:
        """Whether the end of `text` may be the start of an added token."""
        if not self._first.search(text, max(len(text) - self._longest, 0)):
            return False
        return any(text[-size:] in self._heads for size in range(1, self._longest))

    def _may_end_token(self, text: str) -> bool:
        """Whether the start of `text` may be the end of an added token."""
        if not self._last.search(text, 0, self._longest):
            return False
        return any(text[:size] in self._tails for size in range(1, self._longest))


def _match_first(texts: Sequence[str]) -> str:
    """Return a pattern of the first character of each of `texts`, which is fast to search."""
    branches = []
    for first in dict.fromkeys(word[0] for word in texts):
        rests = [word[1:] for word in texts if word[0] == first]
        more = "" if "" in rests else f"(?={_match_any(rests)})"
        branches.append(re.escape(first) + more)
    return "|".join(branches)


def _match_any(texts: Sequence[str]) -> str:
    """Return a pattern of `texts`, the longest first, as a tree of their common starts."""
    branches = []
    for first in dict.fromkeys(word[0] for word in texts):
        group = [word for word in texts if word[0] == first]
        shared = commonprefix(group)  # noqa: RUF071 - of texts, not of paths
        rests = [word[len(shared) :] for word in group]
        more = _match_any([rest for rest in rests if rest])
        optional = "?" if more and "" in rests else ""
        branches.append(re.escape(shared) + (f"(?:{more}){optional}" if more else ""))
    return "|".join(branches)
