"""States of the parser: text, reasoning, sections and blocks of calls.

A state interprets the ids and marks that come next, and returns the state after them.
"""

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import Self

from tugline.chat.calls.base import ParsedCall
from tugline.chat.model_call import ReasoningDelta, TextDelta
from tugline.chat.parsing.output import AnswerOutput, CallReader, Delta
from tugline.chat.parsing.text_tags import CLOSINGS_TRIED, TextTags, find_between
from tugline.chat.templates.answers import THINK_END_TEXT, THINK_TEXT, AnswerSyntax


class Parser(ABC):
    """What states share: the answer, the reading of calls, and where calls may open."""

    def __init__(
        self, syntax: AnswerSyntax, output: AnswerOutput, reader: CallReader, *, takes_calls: bool
    ) -> None:
        self.syntax, self.output, self.reader = syntax, output, reader
        self.takes_calls = takes_calls
        """Whether calls are recognized, which needs declared tools."""
        self.in_section = syntax.markers.block == syntax.markers.call
        """Whether a call may open here: some templates require a section around calls."""
        self.section_used = False
        """Whether a section with calls is open."""
        self.section_ids: list[int] = []
        """Mark of a section before its first call; text if no call of it is well-formed."""

    def add_calls(self, calls: list[ParsedCall]) -> None:
        """Add calls; the section around them, if there is one, is no text."""
        self.section_used = self.section_used or bool(self.section_ids)
        self.section_ids = []
        self.output.add_calls(calls)

    def add_rest(self, block: str, written: list[int]) -> None:
        """Add a malformed or forbidden block: as a call, or as the text that it was written as."""
        call = self.reader.take_rest(block)
        if call is not None:
            self.add_calls([call])
        else:
            text = self.syntax.tokenizer.decode([*self.section_ids, *written])
            self.section_ids = []
            self.output.finish_text()
            self.output.write(TextDelta, text)

    @abstractmethod
    def replay(self, ids: list[int]) -> "State":
        """Parse held-back ids, which turned out to be text, and return the resulting state."""


class State(ABC):
    """Interpretation of the next ids. Methods return the next state."""

    def __init__(self, parser: Parser) -> None:
        self.parser = parser
        self.output = parser.output
        self.marks = parser.syntax.markers
        self.template = parser.syntax.template

    @abstractmethod
    def add(self, ids: list[int]) -> "State":
        """Handle ids that are not marks."""

    @abstractmethod
    def mark(self, token: int) -> "State":
        """Handle a mark that is not a stop id."""

    def decide(self) -> "State":
        """Interpret held-back ids, because a mark follows."""
        return self

    def hold(self, token: int) -> "State":
        """Handle the id within a tag of a call."""
        return self.mark(token)

    def end(self, token: int) -> None:
        """Handle a stop id, with which the answer ends."""
        self.finish()

    def close(self, token: int) -> None:
        """Handle the mark that ends the body of a channel's message."""
        self.finish()

    def finish(self) -> None:  # noqa: B027 - most states hold nothing back
        """Emit held-back ids at the end of the answer."""

    def decode(self, ids: list[int]) -> str:
        """Decode ids to the text that they were written as."""
        return self.parser.syntax.tokenizer.decode(ids)

    def open_call(self, token: int) -> "State":
        """Handle the mark that opens a tool call."""
        self.output.finish_text()
        return Call(self.parser, [token])


class Collecting(State):
    """Base of states that hold ids back until their meaning is known."""

    def __init__(self, parser: Parser, ids: list[int]) -> None:
        super().__init__(parser)
        self._ids = ids

    def add(self, ids: list[int]) -> State:
        self._ids += ids
        return self

    def mark(self, token: int) -> State:
        return self.add([token])


class Emitting(State):
    """Base of states that emit ids as they come."""

    kind: Delta

    def add(self, ids: list[int]) -> State:
        self.output.add(self.kind, ids)
        return self

    def hold(self, token: int) -> State:
        taken = self.output.parts[self.kind].take_guarded()
        self.output.finish_text()
        return TaggedRest(self.parser, [*self.parser.syntax.tokenizer.encode(taken), token])


class Text(Emitting):
    """Text between reasoning and calls."""

    kind: Delta = TextDelta
    at_start = False

    def mark(self, token: int) -> State:
        marks = self.marks
        parser = self.parser
        if token == marks.think and (self.template.reopens_reasoning or self.at_start):
            self.output.finish_text()
            self.output.reasoning.skip(self.template.preface)
            return Reasoning(parser)
        if not parser.takes_calls:
            return self.add_mark(token)
        if token == marks.block and parser.in_section:
            return self.open_call(token)
        if token == marks.section:
            self.output.finish_text()
            return Section(parser, [token])
        if token == marks.section_end and parser.section_used:
            self.output.finish_text()
            parser.section_used = False
            parser.in_section = not self.template.strict_section
            return Text(parser)
        return self.add_mark(token)

    def add_mark(self, token: int) -> State:
        """Handle a mark without meaning here as text."""
        return self.add([token])


class Start(Text):
    """Start of an answer, only white space so far; reasoning may still open."""

    at_start = True

    def __init__(self, parser: Parser) -> None:
        super().__init__(parser)
        self._pending: list[int] = []

    def add(self, ids: list[int]) -> State:
        self._pending += ids
        return self._decide(last=False)

    def add_mark(self, token: int) -> State:
        return self.parser.replay([*self._pending, token])

    def decide(self) -> State:
        return self._decide(last=True)

    def finish(self) -> None:
        state = self._decide(last=True)
        if state is not self:
            state.finish()

    def _decide(self, *, last: bool) -> State:
        """Check whether text has begun, or an answer that can only be parsed as a whole."""
        if not self._pending:
            return self
        text = self.decode(self._pending).lstrip()
        if not last:
            text = text.rstrip("\ufffd")
        prefix = "" if self.marks.reasons else self.template.hold_prefix
        if prefix and text.startswith(prefix):
            kind = WrittenReasoning if prefix == THINK_TEXT else WholeCall
            return kind(self.parser, self._pending)
        if text and (last or not prefix.startswith(text)):
            return self.parser.replay(self._pending)
        return self


class Reasoning(Emitting):
    """Reasoning, up to a closing mark."""

    kind: Delta = ReasoningDelta

    def __init__(self, parser: Parser) -> None:
        super().__init__(parser)
        self._empty = True

    def add(self, ids: list[int]) -> State:
        self._empty = False
        return super().add(ids)

    def mark(self, token: int) -> State:
        marks = self.marks
        template = self.template
        if token == marks.think_end:
            self.output.finish_text()
            return Text(self.parser)
        if token == marks.call and self.parser.takes_calls:
            if template.reopens_reasoning:
                return self.open_call(token)
            if template.call_ends_reasoning:
                return DraftCall(self.parser, [token])
        if token == marks.think and self._empty:
            return self  # opened by the prompt, and again by the model
        return self.add([token])


class DraftCall(Collecting):
    """A call inside reasoning: a draft if the reasoning closes later, else a real call."""

    def mark(self, token: int) -> State:
        if token != self.marks.think_end:
            return self.add([token])
        self.output.add(ReasoningDelta, self._ids)
        self.output.finish_text()
        return Text(self.parser)

    def finish(self) -> None:
        self.output.finish_text()
        self.parser.replay(self._ids).finish()


class WrittenReasoning(Collecting):
    """Reasoning between marks that are ordinary text in this vocabulary; parsed at the end."""

    def finish(self) -> None:
        text = self.decode(self._ids)
        start = len(text) - len(text.lstrip().removeprefix(THINK_TEXT))
        end = text.find(THINK_END_TEXT)
        if end >= 0:
            after = self._count_ids(text[: end + len(THINK_END_TEXT)])
            rest = self.decode(self._ids[:after])[end + len(THINK_END_TEXT) :]
        else:
            calls = (self.marks.call, self.marks.section)
            found = (at for at, token in enumerate(self._ids) if token in calls)
            after = next(found, len(self._ids)) if self.parser.takes_calls else len(self._ids)
            end = len(self.decode(self._ids[:after]))
            rest = ""
        self.output.reasoning_tokens += after
        self.output.write(ReasoningDelta, text[start:end])
        self.output.write(TextDelta, rest)
        self.parser.replay(self._ids[after:]).finish()

    def _count_ids(self, text: str) -> int:
        """Return the number of ids that hold `text`."""
        count = min(len(text), len(self._ids))
        low = 0
        while low < count:
            middle = (low + count) // 2
            if self.decode(self._ids[:middle]).startswith(text):
                count = middle
            else:
                low = middle + 1
        return count


class WholeCall(Collecting):
    """An answer that is one call and nothing else, or text (Llama 3)."""

    def finish(self) -> None:
        reader = self.parser.reader
        block = reader.decode(self._ids)
        calls = reader.parse(block) if self.parser.takes_calls else None
        if calls is not None and reader.declares(calls[0].name):
            self.parser.add_calls(calls)
        elif self.parser.takes_calls and (reader.is_cut_off(block) or reader.forbids(block)):
            self.parser.add_rest(block, self._ids)
        else:
            self.parser.replay(self._ids).finish()


class Section(Collecting):
    """Opened section of calls, before its first call; text if none comes."""

    def mark(self, token: int) -> State:
        parser = self.parser
        if token == self.marks.block:
            parser.in_section = True
            if self.decode(self._ids[1:]).strip():
                self.finish()  # text is between the mark and the call
            else:
                parser.section_ids = self._ids
            return self.open_call(token)
        self.finish()
        return Text(parser).mark(token)

    def finish(self) -> None:
        self.output.add(TextDelta, self._ids)


class Call(Collecting):
    """Block of calls between the marks that open and close it.

    A closing mark ends the block if the block then parses as a whole. Until then it is held back;
    it is malformed if another block opens, or the answer ends.
    """

    def __init__(self, parser: Parser, ids: list[int]) -> None:
        super().__init__(parser, ids)
        self._opened = [0]
        """Positions of opening marks; the first is the block's own."""
        self._closed: list[int] = []
        """Positions of closing marks, after which the block did not parse."""

    def mark(self, token: int) -> State:
        at = len(self._ids)
        if token == self.marks.section_end:
            self.finish()
            return Text(self.parser).mark(token)
        if token == self.marks.block and self._closed:
            self.finish()
            return Call(self.parser, [token])
        self._ids.append(token)
        if token == self.marks.block:
            self._opened.append(at)
        if token != self.marks.call_end:
            return self
        if len(self._closed) < CLOSINGS_TRIED:
            for start in dict.fromkeys((0, self._opened[-1])):
                calls = self._parse(start, at)
                if calls is not None:
                    self._emit_until(start)
                    self.parser.add_calls(calls)
                    return Text(self.parser)
        self._closed.append(at)
        return self

    def end(self, token: int) -> None:
        if token == self.marks.call_end:
            self.mark(token).finish()
        else:
            self.finish()

    def finish(self) -> None:
        self._emit_until(len(self._ids))

    def _parse(self, start: int, end: int) -> list[ParsedCall] | None:
        reader = self.parser.reader
        return reader.parse(reader.decode(self._ids[start + 1 : end]))

    def _emit_until(self, end: int) -> None:
        """Emit the ids before `end`: each block up to its first closing mark, text after it."""
        ids = self._ids
        reader = self.parser.reader
        edges = [at for at in self._opened if at < end]
        for start, after in pairwise([*edges, end]):
            closed = find_between(self._closed, start, after)
            stop = after if closed is None else closed + 1
            calls = None if closed is None else self._parse(start, closed)
            if calls is None:
                block = reader.decode(ids[start + 1 : after if closed is None else closed])
                self.parser.add_rest(block, ids[start:stop])
            else:
                self.parser.add_calls(calls)
            self.output.add(TextDelta, ids[stop:after])
            self.output.finish_text()


class TaggedRest(State):
    """Rest of an answer from its first tag on, where tags are text with one id (DSML)."""

    def __init__(self, parser: Parser, ids: list[int]) -> None:
        super().__init__(parser)
        self._tags = TextTags(parser.syntax, parser.output, parser.reader)
        self._tags.add(ids)

    def add(self, ids: list[int]) -> Self:
        self._tags.add(ids)
        return self

    def mark(self, token: int) -> Self:
        return self.add([token])

    def finish(self) -> None:
        self._tags.finish()
