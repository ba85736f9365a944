"""Calls in tags of which only a part is an id of the vocabulary (DSML).

The text is split at the tags that open and close a call. A closing tag ends a call if the call then
parses as a whole.
"""

import bisect
import re
from collections.abc import Sequence
from itertools import pairwise

from tugline.chat.calls.base import ParsedCall
from tugline.chat.calls.tagged import TaggedCalls
from tugline.chat.model_call import TextDelta
from tugline.chat.parsing.output import AnswerOutput, CallReader
from tugline.chat.templates.answers import AnswerSyntax

CLOSINGS_TRIED = 16
"""Number of closing tags that are tried as the end of one call."""


def find_between(positions: Sequence[int], start: int, end: int) -> int | None:
    """Return the first of the ascending `positions` after `start` and before `end`."""
    at = bisect.bisect_right(positions, start)
    return positions[at] if at < len(positions) and positions[at] < end else None


class TextTags:
    """Rest of an answer from its first tag on."""

    def __init__(self, syntax: AnswerSyntax, output: AnswerOutput, reader: CallReader) -> None:
        self._tokenizer = syntax.tokenizer
        self._output = output
        self._reader = reader
        table = syntax.template.grammar
        tags = syntax.grammar.tags
        opening, _, closing = table.function if isinstance(table, TaggedCalls) else ("", "", "")
        self._opening = tags.mark(opening)
        self._closing = tags.mark(closing)
        self._guard = syntax.markers.guarded
        self._after_guard = closing.partition(syntax.template.guard_mark)[2]
        self._section = re.compile(tags.mark(syntax.template.section_tags))
        self._ids: list[int] = []
        self._seen = 0
        """Number of those ids that hold no closing tag."""
        self._text = ""
        self._closed: list[int] = []
        """Positions in the text after closing tags that did not end a call."""
        self._has_call = False

    def add(self, ids: list[int]) -> None:
        """Add ids; emit the calls that they close, and the text before them."""
        self._ids += ids
        while (end := self._find_closing()) is not None:
            self._text += self._reader.decode(self._ids[:end])
            self._ids = self._ids[end:]
            self._seen = 0
            self._take_calls()

    def finish(self) -> None:
        """Emit the rest."""
        self._text += self._reader.decode(self._ids)
        self._ids = []
        self._emit_until(len(self._text))

    def _find_closing(self) -> int | None:
        """Return the number of ids up to the end of the first closing tag, if it is complete."""
        while True:
            try:
                guard = self._ids.index(self._guard, self._seen)
            except ValueError:
                return None
            end = guard + 1
            text = ""
            while self._after_guard.startswith(text) and text != self._after_guard:
                if end == len(self._ids):
                    return None
                end += 1
                text = self._tokenizer.decode_bytes(self._ids[guard + 1 : end])
                if text.startswith(self._after_guard):
                    return end
            self._seen = guard + 1

    def _list_openings(self, end: int) -> list[int]:
        found = re.finditer(re.escape(self._opening), self._text[:end])
        return [match.start() for match in found]

    def _take_calls(self) -> None:
        """Emit the calls that the closing tag at the end of the text completes."""
        end = self._text.rfind(self._closing) + len(self._closing)
        if end < len(self._closing) or end in self._closed[-1:]:
            return  # the tag is another one
        openings = self._list_openings(end) if len(self._closed) < CLOSINGS_TRIED else []
        if openings:
            for start in dict.fromkeys((openings[0], openings[-1])):
                calls = self._reader.parse(self._text[start:end])
                if calls is not None:
                    self._has_call = True
                    self._emit_until(start)
                    self._output.add_calls(calls)
                    self._text = self._text[end - start :]
                    return
        self._closed.append(end)

    def _emit_until(self, end: int) -> None:
        """Emit the text before `end`: each call up to its first closing tag, text around it."""
        text = self._text
        edges = [*self._list_openings(end), end]
        outside = text[: edges[0]]
        for start, after in pairwise(edges):
            closed = find_between(self._closed, start, after + 1)
            stop = after if closed is None else closed
            self._add_block(outside, text[start:stop], closed=closed is not None)
            outside = text[stop:after]
        self._write(outside)
        self._text = text[end:]
        self._closed = []

    def _add_block(self, before: str, block: str, *, closed: bool) -> None:
        """Emit the text before a block, then its calls, or the block as malformed."""
        calls = self._reader.parse(block) if closed else None
        if calls is None:
            raw = self._reader.take_rest(block)
            calls = [] if raw is None else [self._cut_closing(raw)]
        self._has_call = self._has_call or bool(calls)
        self._write(before if calls else before + block)
        self._output.add_calls(calls)

    def _cut_closing(self, raw: ParsedCall) -> ParsedCall:
        """Leave out the closing tag of a malformed call."""
        closing = self._reader.restore(self._closing)
        return raw._replace(arguments=raw.arguments.removesuffix(closing))

    def _write(self, text: str) -> None:
        """Write text; tags of a section with calls are not text."""
        if self._has_call:
            text = self._section.sub("", text)
        if text:
            self._output.write(TextDelta, self._reader.restore(text))
