"""Incremental parser of answers: token ids to text, reasoning and tool calls as they arrive.

Text and reasoning are emitted as soon as they are certain. A tool call is emitted whole when it
closes. Nothing that was sampled vanishes: what is not part of a well-formed call is text as it was
written, or a malformed call with its sampled argument text. Text after a call is emitted on a new
line. Calls are recognized only if the request declares tools; a well-formed call of another tool
than those is a call.

The message of `StreamParser.finish` is the concatenation of all pieces, however the ids were
chunked.

The parser is a state machine: `StreamParser` splits ids at the template's marks, a `State`
interprets them and returns the next state, and `AnswerOutput` collects the pieces.
"""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Self

from tugline.chat.model_call import Piece
from tugline.chat.parsing.channels import ChannelHeader
from tugline.chat.parsing.output import AnswerOutput, CallReader
from tugline.chat.parsing.states import Parser, Reasoning, Start, State, Text, WrittenReasoning
from tugline.chat.templates.answers import AnswerSyntax
from tugline.types import Ids, MalformedCalls, Message, Tool


class StreamParser(Parser):
    """Parser of one answer; `call_prefix` makes its tool call ids unique within the session.

    `end` holds the last ids of the prompt, `forced` the forced first ids of the answer. After a
    prompt without a template, `end` is None, and the answer is plain text without marks. `tools`
    are the declared ones; None accepts calls of any tool. Forbidden calls are counted, and are
    text. Text ends before a stop string.
    """

    def __init__(  # noqa: PLR0913 - the prompt, the request and a setting
        self,
        syntax: AnswerSyntax,
        end: Ids | None,
        call_prefix: str,
        *,
        stops: Sequence[str] = (),
        forced: Ids | None = None,
        tools: Sequence[Tool] | None = None,
        malformed: MalformedCalls = MalformedCalls.TEXT,
        forbidden: bool = False,
    ) -> None:
        takes_calls = end is not None and (tools is None or len(tools) > 0)
        watched = tuple(stop for stop in stops if stop)
        output = AnswerOutput(syntax, call_prefix, watched, guarded=takes_calls)
        output.text.verbatim = end is None
        reader = CallReader(syntax, tools, malformed, forbidden=forbidden)
        super().__init__(syntax, output, reader, takes_calls=takes_calls)
        self._stop_ids = frozenset(syntax.stop_ids)
        self._marks = self._stop_ids if end is None else syntax.marks
        self._guard = syntax.markers.guarded if takes_calls else -1
        self._single = bool(watched) and syntax.incremental
        self._fed = 0
        self._held: list[int] = []
        """Ids of a vocabulary that cannot be decoded id by id, parsed at the end."""
        self._position = 0
        """Number of sampled ids parsed."""
        self._ended = False
        self._state: State = Text(self) if end is None else self._begin(end)
        if forced is not None:
            self._walk(forced.tolist(), -len(forced))
            output.take_pieces()
            output.reasoning_tokens = 0

    @classmethod
    def parse(
        cls,
        syntax: AnswerSyntax,
        end: Ids | None,
        sampled: Sequence[int],
        *,
        tools: Sequence[Tool] | None = None,
        malformed: MalformedCalls = MalformedCalls.TEXT,
    ) -> tuple[Self, Message]:
        """Parse a whole answer; return the parser and the message."""
        parser = cls(syntax, end, "0", tools=tools, malformed=malformed)
        parser.feed(list(sampled))
        return parser, parser.finish()[1]

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text."""
        return self.output.text.matched_stop

    @property
    def reasoning_tokens(self) -> int:
        """Sampled tokens that are reasoning."""
        return self.output.reasoning_tokens

    @property
    def malformed(self) -> MalformedCalls | None:
        """How malformed calls were delivered; None if there were none."""
        return self.reader.malformed

    @property
    def forbidden_calls(self) -> int:
        """Number of forbidden calls, which became text."""
        return self.reader.forbidden_calls

    @property
    def length(self) -> int:
        """Number of sampled ids in the answer: all, or those up to the stop string's end."""
        return self._fed if self.matched_stop is None else self._position

    def feed(self, ids: list[int]) -> list[Piece]:
        """Add sampled ids; return the pieces that they complete."""
        start = self._fed
        self._fed += len(ids)
        if self.syntax.incremental:
            self._walk(ids, start)
        else:
            self._held += ids
        return self.output.take_pieces()

    def finish(self) -> tuple[list[Piece], Message]:
        """End the answer; return the remaining pieces, and the whole answer as a message."""
        self._walk(self._held, 0)
        if not self._ended:
            self._state.finish()
        self._position -= self.output.unread
        self.close()
        self.output.finish_text()
        return self.output.take_pieces(), self.output.build_message()

    def close(self) -> None:
        """End the parser without the rest of the answer; a closed parser takes no more ids."""
        with contextlib.suppress(AttributeError):
            del self._state  # it refers to the parser

    def replay(self, ids: list[int]) -> State:
        """Parse held-back ids, which turned out to be text, and return the resulting state."""
        self._state = Text(self)
        self._walk(ids, self._position - len(ids))
        return self._state

    # ----------------------------------------------------------------------- ids
    def _begin(self, end: Ids) -> State:
        markers = self.syntax.markers
        reasons = self.syntax.starts_in_reasoning(end)
        if reasons and not markers.reasons:
            return WrittenReasoning(self, [])
        state: State = Reasoning(self) if reasons else Start(self)
        if not markers.bodies:
            return state
        opened = len(end) > 0 and int(end[-1]) in markers.bodies
        return state if opened else ChannelHeader(self, [])

    def _walk(self, ids: list[int], start: int) -> None:
        """Parse ids; the first is the sampled id number `start`."""
        for first, last in self._split(ids):
            if self._ended:
                return
            if ids[first] in self._marks:
                self._position = start + first
                self._take_mark(ids[first], start + last)
            else:
                self._position = start + last
                self._state = self._state.add(ids[first:last])
            self._ended = self._ended or self.matched_stop is not None

    def _take_mark(self, token: int, position: int) -> None:
        if token in self._stop_ids:
            self._state.end(token)
            self._ended = True
            return
        self._state = self._state.decide()
        if self.matched_stop is None:
            self._position = position
            hold = token == self._guard
            self._state = self._state.hold(token) if hold else self._mark(token)

    def _mark(self, token: int) -> State:
        """Handle a mark; in the body of a channel's message only headers and ends are marks."""
        markers = self.syntax.markers
        if not markers.bodies or isinstance(self._state, ChannelHeader):
            return self._state.mark(token)
        if token not in markers.headers and token != markers.body_end:
            return self._state.add([token])
        self._state.close(token)
        self.output.finish_text()
        return ChannelHeader(self, [token] if token in markers.headers else [])

    def _split(self, ids: list[int]) -> Iterator[tuple[int, int]]:
        """Yield ranges of ids to parse at once: single marks, and the ids between them.

        With stop strings every id is a range of its own, so that `length` is exact.
        """
        if self._single or len(ids) == 1:
            yield from pairwise(range(len(ids) + 1))
            return
        end = 0
        for mark in filter(self._marks.__contains__, ids):
            at = ids.index(mark, end)
            if at > end:
                yield end, at
            end = at + 1
            yield at, end
        if end < len(ids):
            yield end, len(ids)
