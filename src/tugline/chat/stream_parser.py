"""Incremental parser of answers: token ids to text, reasoning and tool calls as they arrive.

Text and reasoning are emitted as soon as they are certain. A tool call is emitted whole when it
closes; a malformed or unclosed one is emitted as the text it was written as. No sampled text is
lost: text after a call is emitted on a new line.

The message of `StreamParser.finish` is the concatenation of all pieces, and equals the renderer's
own parse of the whole answer. If an answer cannot be parsed by marks, the rest is parsed at its
end.

The parser is a state machine: `StreamParser` splits ids at the template's marks, a `_State`
interprets them and returns the next state, and `_Output` collects the pieces.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from tugline.chat.model_call import Piece, ReasoningDelta, TextDelta
from tugline.chat.templates.base import DSML_CALL, DSML_SECTION
from tugline.chat.templates.rendering import Parsed, Rendering
from tugline.chat.tokenizer import Detokenizer
from tugline.types import Ids, Message, Role, Tool, ToolCall

Delta = type[TextDelta | ReasoningDelta]
_RECIPIENT = re.compile(r"to=functions\.[^\s<]")


class _Output:
    """The answer so far, and its pieces not yet returned."""

    def __init__(self, rendering: Rendering, call_prefix: str, stops: tuple[str, ...]) -> None:
        token_bytes: Mapping[int, bytes] = rendering.tokenizer.token_bytes or {}
        guard = rendering.template.guard_text
        self.text = Detokenizer(token_bytes, stops=stops, guard=guard)
        self.reasoning = Detokenizer(token_bytes, guard=guard)
        self.parts: dict[Delta, Detokenizer] = {
            ReasoningDelta: self.reasoning,
            TextDelta: self.text,
        }
        self.reasoning_tokens = 0
        self._calls: list[ToolCall] = []
        self._call_prefix = call_prefix
        self._pieces: list[Piece] = []

    def take_pieces(self) -> list[Piece]:
        """Return the pieces since the last call; adjacent text is one delta."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def add(self, kind: Delta, ids: list[int]) -> None:
        """Add ids of text or reasoning; ids after a stop string are ignored."""
        if kind is ReasoningDelta:
            self.reasoning_tokens += len(ids)
        self._emit(kind, self.parts[kind].feed(ids))

    def write(self, kind: Delta, text: str) -> None:
        """Add a whole segment of text or reasoning."""
        self._emit(kind, self.parts[kind].write(text))

    def add_calls(self, calls: Sequence[tuple[str, str]]) -> None:
        """Add tool calls, each a name and JSON arguments."""
        for name, arguments in calls:
            call = ToolCall(f"call_{self._call_prefix}_{len(self._calls)}", name, arguments)
            self._calls.append(call)
            self._pieces.append(call)

    def finish_text(self) -> None:
        """End the current segment of reasoning or text."""
        for kind, part in self.parts.items():
            self._emit(kind, part.finish_text())

    def build_message(self) -> Message:
        """Return the whole answer."""
        text, reasoning = "".join(self.text.emitted), "".join(self.reasoning.emitted)
        return Message(Role.ASSISTANT, text, tuple(self._calls), reasoning=reasoning or None)

    def _emit(self, kind: Delta, text: str) -> None:
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if type(last) is kind:
            self._pieces[-1] = kind(last.text + text)
        else:
            self._pieces.append(kind(text))


class StreamParser:
    """Parser of one answer; `call_prefix` makes its tool call ids unique within the session.

    `end` holds the last ids of the prompt, `forced` the forced first ids of the answer. After a
    prompt without a template, `end` is None, and the answer is plain text without marks. `tools`
    declare which arguments are text, for templates without JSON; None if calls are forbidden, and
    so are text as they were written. Text ends before a stop string.
    """

    def __init__(
        self,
        rendering: Rendering,
        end: Ids | None,
        call_prefix: str,
        *,
        stops: Sequence[str] = (),
        forced: Ids | None = None,
        tools: Sequence[Tool] | None = (),
    ) -> None:
        watched = tuple(stop for stop in stops if stop)
        self.rendering, self.tools = rendering, tools or ()
        self.calls_allowed = tools is not None
        self.forbidden_calls = 0
        self.output = _Output(rendering, call_prefix, watched)
        self.output.text.verbatim = end is None
        self.in_section = rendering.markers.block == rendering.markers.call
        """Whether a call may open here: some templates require a section around calls."""
        self._stop_ids = frozenset(rendering.stop_ids)
        self._marks = self._stop_ids if end is None else rendering.marks
        self._guard = rendering.markers.guarded
        self._single = bool(watched)
        self._fed = 0
        self._position = 0
        """Number of sampled ids parsed."""
        self._ended = False
        self._state = _Text(self) if end is None else self._begin(end)
        if forced is not None:
            self._walk(forced.tolist(), -len(forced))
            self.output.take_pieces()
            self.output.reasoning_tokens = 0

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text."""
        return self.output.text.matched_stop

    @property
    def reasoning_tokens(self) -> int:
        """Sampled tokens that are reasoning."""
        return self.output.reasoning_tokens

    @property
    def length(self) -> int:
        """Number of sampled ids in the answer: all, or those up to the stop string's end."""
        return self._fed if self.matched_stop is None else self._position

    def feed(self, ids: list[int]) -> list[Piece]:
        """Add sampled ids; return the pieces that they complete."""
        start, self._fed = self._fed, self._fed + len(ids)
        self._walk(ids, start)
        return self.output.take_pieces()

    def finish(self) -> tuple[list[Piece], Message]:
        """End the answer; return the remaining pieces, and the whole answer as a message."""
        if not self._ended:
            self._state.finish()
        del self._state  # break the reference cycle with the parser
        self.output.finish_text()
        return self.output.take_pieces(), self.output.build_message()

    def replay(self, ids: list[int]) -> _State:
        """Parse held-back ids, which turned out to be text, and return the resulting state."""
        self._state = _Text(self)
        self._walk(ids, self._position - len(ids))
        return self._state

    def parse_calls(self, block: list[int]) -> Sequence[tuple[str, str]]:
        """Parse a closed block of calls; empty if it is malformed, or calls are forbidden."""
        return self.permit(self.rendering.parse_calls(block, self.tools))

    def permit(self, calls: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
        """Return `calls`; none, after counting them, if calls are forbidden."""
        if self.calls_allowed:
            return calls
        self.forbidden_calls += len(calls)
        return ()

    def cut_back(self, count: int) -> None:
        """End the answer `count` ids earlier."""
        self._position -= count

    def _begin(self, end: Ids) -> _State:
        rendering, markers = self.rendering, self.rendering.markers
        reasons = rendering.starts_in_reasoning(end)
        if not rendering.incremental or (reasons and not markers.reasons):
            return _Held(self, [], end)
        state = _Reasoning(self) if reasons else _Start(self, end)
        if markers.channels is None:
            return state
        opened = len(end) and end[-1] == markers.channels.message
        return state if opened else _ChannelHeader(self, [])

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
            self._ended = self._state.end(token)
            return
        self._state = self._state.decide()
        if self.matched_stop is None:
            self._position = position
            hold = token == self._guard
            self._state = self._state.hold(token) if hold else self._mark(token)

    def _mark(self, token: int) -> _State:
        """Handle a mark; in the body of a channel's message only start and end are marks."""
        channels = self.rendering.markers.channels
        if channels is None or isinstance(self._state, _ChannelHeader):
            return self._state.mark(token)
        if token not in (channels.start, channels.end):
            return self._state.add([token])
        self._state.finish()
        self.output.finish_text()
        return _ChannelHeader(self, [token] if token == channels.start else [])

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


# --------------------------------------------------------------------------- states
class _State(ABC):
    """Interpretation of the next ids. Methods return the next state."""

    def __init__(self, parser: StreamParser) -> None:
        self.parser = parser
        self.output = parser.output
        self.marks = parser.rendering.markers
        self.template = parser.rendering.template

    @abstractmethod
    def add(self, ids: list[int]) -> _State:
        """Handle ids that are not marks."""

    @abstractmethod
    def mark(self, token: int) -> _State:
        """Handle a mark that is not a stop id."""

    def decide(self) -> _State:
        """Interpret held-back ids, because a mark follows."""
        return self

    def hold(self, token: int) -> _State:
        """Handle the mark after which the rest can only be parsed as a whole."""
        return self.mark(token)

    def end(self, token: int) -> bool:
        """Handle a stop id; return whether the answer ends with it."""
        self.finish()
        return True

    def finish(self) -> None:  # noqa: B027 - most states hold nothing back
        """Emit held-back ids at the end of the answer."""

    def open_call(self, token: int) -> _State:
        """Handle the mark that opens a tool call."""
        self.output.finish_text()
        return _Call(self.parser, [token])


class _Collecting(_State):
    """Base of states that hold ids back until their meaning is known."""

    def __init__(self, parser: StreamParser, ids: list[int]) -> None:
        super().__init__(parser)
        self._ids = ids

    def add(self, ids: list[int]) -> _State:
        self._ids += ids
        return self

    def mark(self, token: int) -> _State:
        return self.add([token])


class _Emitting(_State):
    """Base of states that emit ids as they come."""

    kind: Delta

    def add(self, ids: list[int]) -> _State:
        self.output.add(self.kind, ids)
        return self

    def hold(self, token: int) -> _State:
        taken = self.output.parts[self.kind].take_guarded()
        self.output.finish_text()
        ids = [*self.parser.rendering.tokenizer.encode(taken), token]
        return _Held(self.parser, ids, self.reopen())

    def reopen(self) -> Ids | None:
        """Return the prompt end to assume for the rest; None if no reasoning is open."""
        return None


class _Text(_Emitting):
    """Text between reasoning and calls."""

    kind: Delta = TextDelta
    at_start = False

    def mark(self, token: int) -> _State:
        marks, template, parser = self.marks, self.template, self.parser
        if token == marks.think and (template.reopens_reasoning or self.at_start):
            self.output.finish_text()
            self.output.reasoning.skip(template.preface)
            return _Reasoning(parser)
        if token == marks.block and parser.in_section:
            return self.open_call(token)
        if token in (marks.section, marks.section_end):
            self.output.finish_text()
            parser.in_section = token == marks.section or not template.strict_section
            return _Text(parser)
        return self.add_mark(token)

    def add_mark(self, token: int) -> _State:
        """Handle a mark without meaning here as text."""
        if token != self.marks.think_end or not self.template.reopens_reasoning:
            self.add([token])
        return self


class _Start(_Text):
    """Start of an answer, only white space so far; reasoning may still open."""

    at_start = True

    def __init__(self, parser: StreamParser, end: Ids) -> None:
        super().__init__(parser)
        self._end = end
        self._pending: list[int] = []

    def add(self, ids: list[int]) -> _State:
        self._pending += ids
        return self._decide(last=False)

    def add_mark(self, token: int) -> _State:
        return self.parser.replay([*self._pending, token])

    def decide(self) -> _State:
        return self._decide(last=True)

    def finish(self) -> None:
        state = self._decide(last=True)
        if state is not self:
            state.finish()

    def _decide(self, *, last: bool) -> _State:
        """Check whether text has begun, or an answer that can only be parsed as a whole."""
        if not self._pending:
            return self
        text = self.parser.rendering.tokenizer.decode(self._pending).lstrip()
        if not last:
            text = text.rstrip("\ufffd")
        prefix = "" if self.marks.reasons else self.template.hold_prefix
        if prefix and text.startswith(prefix):
            return _Held(self.parser, self._pending, self._end)
        if text and (last or not prefix.startswith(text)):
            return self.parser.replay(self._pending)
        return self


class _Reasoning(_Emitting):
    """Reasoning, up to a closing mark."""

    kind: Delta = ReasoningDelta

    def mark(self, token: int) -> _State:
        marks, template = self.marks, self.template
        if token == marks.think_end:
            self.output.finish_text()
            return _Text(self.parser)
        if token == marks.call and template.reopens_reasoning:
            return self.open_call(token)
        if token == marks.call and template.call_ends_reasoning:
            return _DraftCall(self.parser, [token])
        if token != marks.think:
            self.add([token])
        return self

    def reopen(self) -> Ids | None:
        return np.asarray([self.marks.think], np.int32)


class _DraftCall(_Collecting):
    """A call inside reasoning: a draft if the reasoning closes later, else a real call."""

    def mark(self, token: int) -> _State:
        if token != self.marks.think_end:
            return self.add([token])
        self.output.add(ReasoningDelta, [t for t in self._ids if t != self.marks.think])
        self.output.finish_text()
        return _Text(self.parser)

    def finish(self) -> None:
        self.output.finish_text()
        self.parser.replay(self._ids).finish()


class _Call(_Collecting):
    """Interior of a tool call."""

    def mark(self, token: int) -> _State:
        if token == self.marks.section_end:
            self.finish()
            self.parser.in_section = not self.template.strict_section
            return _Text(self.parser)
        self._ids.append(token)
        if token != self.marks.call_end:
            return self
        calls = self.parser.parse_calls(self._ids)
        self.output.add_calls(calls)
        if not calls:
            self.finish()
        return _Text(self.parser)

    def end(self, token: int) -> bool:
        if token == self.marks.call_end:
            self.mark(token)
        else:
            self.finish()
        return True

    def finish(self) -> None:
        """Emit a malformed or unclosed call as the text it was written as."""
        self.output.write(TextDelta, self.parser.rendering.tokenizer.decode(self._ids))


class _Held(_Collecting):
    """Rest of an answer, parsed at its end: by the library, or as DSML if `end` is None."""

    def __init__(self, parser: StreamParser, ids: list[int], end: Ids | None) -> None:
        super().__init__(parser, ids)
        self._end = end

    def end(self, token: int) -> bool:
        self._ids.append(token)
        return False

    def finish(self) -> None:
        if self._end is None:
            self._parse_dsml()
        else:
            self._parse(self._end)

    def _parse_dsml(self) -> None:
        rendering = self.parser.rendering
        text = self._decode()
        end = 0
        for match in DSML_CALL.finditer(text):
            calls = self.parser.parse_calls(rendering.tokenizer.encode(match[0]))
            if calls:
                self._write(text[end : match.start()])
                self.output.add_calls(calls)
                end = match.end()
        self._write(text[end:])

    def _decode(self) -> str:
        """Decode the ids up to a stop id."""
        rendering = self.parser.rendering
        stops = (at for at, token in enumerate(self._ids) if token in rendering.stop_ids)
        return rendering.tokenizer.decode(self._ids[: next(stops, len(self._ids))])

    def _decode_behind_reasoning(self, parsed: Parsed) -> str:
        """Decode the text and the calls of an answer as they were written."""
        text = self._decode()
        if parsed.reasoning:
            text = text.rpartition(parsed.reasoning)[2]
            text = text.removeprefix(self.template.think_end)
        return text[max(0, text.find(parsed.content)) :]

    def _write(self, text: str) -> None:
        written = DSML_SECTION.sub("", text) if self.parser.calls_allowed else text
        self.output.write(TextDelta, written)

    def _parse(self, end: Ids) -> None:
        rendering, tools, output = self.parser.rendering, self.parser.tools, self.output
        parsed = rendering.parse(self._ids, end, tools)
        calls = self.parser.permit(parsed.calls)
        forbidden = len(calls) < len(parsed.calls)
        content = self._decode_behind_reasoning(parsed) if forbidden else parsed.content
        if parsed.reasoning:
            output.reasoning_tokens += len(rendering.tokenizer.encode(parsed.reasoning))
            output.write(ReasoningDelta, parsed.reasoning)
        output.write(TextDelta, output.text.cut_at_stop(content))
        stop = output.text.matched_stop
        if stop is None:
            output.add_calls(calls)
            return

        def has_stop(count: int) -> bool:
            return stop in rendering.parse(self._ids[:count], end, tools).content

        needed = bisect_left(range(len(self._ids)), True, key=has_stop)
        self.parser.cut_back(len(self._ids) - needed)


class _ChannelHeader(_Collecting):
    """Header of a message, which declares its body as reasoning, text or a call (harmony)."""

    def mark(self, token: int) -> _State:
        channels = self.marks.channels
        if channels is not None and token == channels.start:
            self._ids = []
        self.add([token])
        if channels is None or token != channels.message:
            return self
        header = self.parser.rendering.tokenizer.decode(self._ids)
        if _RECIPIENT.search(header):
            return _Call(self.parser, self._ids)
        reasons = "<|channel|>analysis" in header
        return _Reasoning(self.parser) if reasons else _Text(self.parser)
