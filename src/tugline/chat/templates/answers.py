"""Syntax of a template's answers, bound to a vocabulary: marks, headers and grammar of calls."""

import re
from collections.abc import Sequence
from enum import Enum

import numpy as np

from tugline.chat.calls.base import Grammar
from tugline.chat.templates.base import Markers, Template, template
from tugline.chat.tokenizer import Tokenizer
from tugline.chat.tokens import END
from tugline.types import Ids, Mask

THINK_TEXT = "<think>"
THINK_END_TEXT = "</think>"
"""Marks of reasoning in vocabularies where they are not single ids."""


class Body(Enum):
    """What the body of a message in channels is."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class AnswerSyntax:
    """What answers of one template are made of, in one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, name: str, stop_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.template: Template = template(name)
        self.grammar: Grammar = self.template.grammar.bind(tokenizer)
        self.stop_ids: tuple[int, ...] = tuple(stop_ids)
        self.markers: Markers = self.template.markers(tokenizer)
        self.marks = self.markers.ids.union(self.stop_ids) - {-1}
        """Ids of marks, which are not text."""
        channels = self.template.channels
        self.start_id = tokenizer.convert_tokens_to_ids(channels.start) if channels else None
        """Id that begins a message in channels."""
        self._is_mark = np.zeros(max(self.marks, default=0) + 2, np.bool_)
        self._is_mark[list(self.marks)] = True
        self._headers = [
            (body, re.compile(pattern))
            for body, pattern in (
                (Body.REASONING, channels.reasoning if channels else ""),
                (Body.TEXT, channels.text if channels else ""),
                (Body.CALL, channels.call if channels else ""),
            )
        ]

    @property
    def incremental(self) -> bool:
        """Whether ids can be decoded while they are sampled, not only at the answer's end."""
        return self.tokenizer.token_bytes is not None

    def find_marks(self, ids: Ids) -> Mask:
        """Return a mask of the `ids` that are `marks`."""
        mask: Mask = self._is_mark.take(ids, mode="clip")
        return mask

    def read_header(self, header: str) -> tuple[Body, str] | None:
        """Return what a header with its mark declares, and the name of a call; None if nothing."""
        for body, pattern in self._headers:
            if match := pattern.fullmatch(header.strip()):
                names = match.groupdict()
                return body, names.get("name") or names.get("early") or ""
        return None

    def starts_in_reasoning(self, end: Ids) -> bool:
        """Whether an answer to a prompt that ends in `end` begins inside reasoning."""
        ids: list[int] = end[-END:].tolist()
        markers = self.markers
        if markers.bodies:
            return self._opens_reasoning(ids)
        start = 0
        for at in range(len(ids) - 1, -1, -1):
            if ids[at] == markers.think:
                return True
            if ids[at] == markers.think_end:
                return False
            if ids[at] in self.stop_ids:
                start = at + 1
                break
        if markers.reasons or self.template.hold_prefix != THINK_TEXT:
            return False
        text = self.tokenizer.decode(ids[start:])
        return text.rfind(THINK_TEXT) > text.rfind(THINK_END_TEXT)

    def _opens_reasoning(self, ids: list[int]) -> bool:
        if not ids or ids[-1] not in self.markers.bodies:
            return False
        starts = [at for at, token in enumerate(ids) if token in self.markers.headers]
        header = self.tokenizer.decode(ids[starts[-1] if starts else 0 :])
        found = self.read_header(header)
        return found is not None and found[0] is Body.REASONING
