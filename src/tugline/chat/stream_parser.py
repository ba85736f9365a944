"""Token ids to pieces of an answer while they arrive.

Text and reasoning go out as soon as they are certain. A tool call goes out whole when it closes;
one that is malformed, or never closes, is text as it was written. Nothing that was sampled is lost:
text after a call is text too, a line of its own.

The message of `finish` is what the pieces add up to, and it is what the renderer's own parser says
of the whole answer. Where a template's marks cannot be followed, the rest is held until its end.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from enum import Enum, auto

import numpy as np

from tugline.chat.detokenizer import Detokenizer
from tugline.chat.response import Piece, ReasoningDelta, TextDelta
from tugline.chat.templates import dsml
from tugline.chat.templates.base import Channels
from tugline.chat.templates.plain import written
from tugline.chat.templates.rendering import Rendering
from tugline.types import Ids, Message, Role, Tool, ToolCall

_RECIPIENT = re.compile(r"to=functions\.[^\s<]")
_NOWHERE = np.empty(0, np.int32)


class _Part(Enum):
    BLANK = auto()
    """Nothing but blank space so far: reasoning may still open."""
    HEADER = auto()
    """Before the body of a message in a template of channels."""
    REASONING = auto()
    DRAFT = auto()
    """A call inside reasoning: drafted if the reasoning closes later, made if it never does."""
    TEXT = auto()
    CALL = auto()
    HELD = auto()
    """What follows is read when the answer is over."""
    OVER = auto()


class StreamParser:
    """One answer; `call_prefix` makes its tool call ids unique within the session.

    `end` is the end of its prompt, `forced` the ids behind it that the answer goes on from.
    `tools` tell templates without JSON which arguments are texts. Text ends before a stop string.
    """

    def __init__(
        self,
        rendering: Rendering,
        end: Ids,
        call_prefix: str,
        *,
        stops: Sequence[str] = (),
        forced: Ids | None = None,
        tools: Sequence[Tool] = (),
    ) -> None:
        self.matched_stop: str | None = None
        """The stop string that ended the text."""
        self.reasoning_tokens = 0
        self._rendering, self._prefix, self._tools = rendering, call_prefix, tools
        self._end: Ids | None = end
        self._template, self._marks = rendering.template, rendering.markers
        self._over = frozenset(rendering.stop_ids)
        self._controls = self._over | self._marks.ids
        token_bytes: Mapping[int, bytes] = rendering.tokenizer.token_bytes or {}
        guard, watched = self._template.guard, tuple(stop for stop in stops if stop)
        self._text = Detokenizer(token_bytes, stops=watched, guard=guard)
        self._reasoning = Detokenizer(token_bytes, guard=guard)
        self._singly = bool(watched)
        self._fed = self._place = 0
        self._part = self._beginning(end)
        self._section = self._marks.block == self._marks.call
        self._draft: list[int] = []
        self._block: list[int] = []
        self._calls: list[ToolCall] = []
        self._pieces: list[Piece] = []
        if forced is not None:
            self._walk(forced.tolist(), -len(forced))
            self._pieces = []
            self.reasoning_tokens = 0

    @property
    def length(self) -> int:
        """How many sampled ids belong to the answer: all, or those up to the stop string's end."""
        return self._place if self.matched_stop is not None else self._fed

    def feed(self, ids: Ids) -> list[Piece]:
        """The pieces that these ids complete."""
        new: list[int] = ids.tolist()
        start = self._fed
        self._fed += len(new)
        self._pieces = pieces = list[Piece]()
        if self._part is not _Part.OVER:
            self._walk(new, start)
        return pieces

    def finish(self) -> tuple[list[Piece], Message]:
        """What is still unsaid, and the whole answer as a message."""
        self._pieces = pieces = list[Piece]()
        self._settle()
        self._close()
        return pieces, Message(
            Role.ASSISTANT,
            "".join(self._text.said),
            tool_calls=tuple(self._calls),
            reasoning="".join(self._reasoning.said) or None,
        )

    # ----------------------------------------------------------------------- ids to parts
    def _beginning(self, end: Ids) -> _Part:
        thinks = self._rendering.starts_in_reasoning(end)
        channels = self._marks.channels
        if not self._rendering.incremental or (thinks and not self._marks.reasons):
            return _Part.HELD
        if channels is not None and (not len(end) or end[-1] != channels.message):
            return _Part.HEADER
        return _Part.REASONING if thinks else _Part.BLANK

    def _walk(self, ids: list[int], start: int) -> None:
        """Take ids, the first of which is number `start` of the sampled ones."""
        controls = self._controls
        if self._singly:
            self._walk_singly(ids, start)
            return
        behind = 0
        for place in [at for at, token in enumerate(ids) if token in controls]:
            if place > behind:
                self._plain(ids[behind:place])
            behind = place + 1
            self._place = start + behind
            self._control(ids[place])
            if self._part is _Part.OVER:
                return
        if behind < len(ids):
            self._place = start + len(ids)
            self._plain(ids[behind:])

    def _walk_singly(self, ids: list[int], start: int) -> None:
        """The same, so that a stop string's place is known to the id."""
        for place, token in enumerate(ids, start + 1):
            self._place = place
            if token in self._controls:
                self._control(token)
            else:
                self._plain([token])
            if self._part is _Part.OVER:
                return

    def _plain(self, run: list[int]) -> None:
        """Take ids that mark nothing."""
        part = self._part
        if part is _Part.TEXT:
            self._tell(run)
        elif part is _Part.REASONING:
            self._think(run)
        elif part in (_Part.CALL, _Part.HEADER):
            self._block += run
        else:
            self._draft += run
            if part is _Part.BLANK:
                self._begin()

    def _begin(self, *, last: bool = False) -> None:
        """See whether text has begun, or what can only be read as a whole."""
        if self._part is not _Part.BLANK or not self._draft:
            return
        text = self._rendering.tokenizer.decode(self._draft).lstrip()
        if not last:
            text = text.rstrip("\ufffd")
        held = "" if self._marks.reasons else self._template.held
        if held and text.startswith(held):
            self._part = _Part.HELD
        elif text and (last or not held.startswith(text)):
            self._replay()

    def _control(self, token: int) -> None:
        """Take an id that may open or close a part."""
        self._begin(last=True)
        part, marks = self._part, self._marks
        if part is _Part.HELD:
            self._draft.append(token)
        elif token in self._over:
            if part is _Part.CALL and token == marks.call_end:
                self._in_call(token)
            self._settle()
            self._part = _Part.OVER
        elif marks.channels is not None:
            self._in_channels(token, marks.channels)
        elif token == marks.guarded and part is not _Part.CALL:
            self._hold(token)
        elif part is _Part.CALL:
            self._in_call(token)
        elif part is _Part.REASONING:
            self._in_reasoning(token)
        elif part is _Part.DRAFT:
            self._in_draft(token)
        else:
            self._in_text(token)

    def _in_call(self, token: int) -> None:
        if token != self._marks.section_end:
            self._block.append(token)
        if token == self._marks.call_end:
            self._close_call()
        elif token == self._marks.section_end:
            self._spoil()
            self._section = not self._template.strict

    def _in_reasoning(self, token: int) -> None:
        marks, template = self._marks, self._template
        if token == marks.think_end:
            self._close()
        elif token == marks.call and template.again:
            self._open_call(token)
        elif token == marks.call and template.closes:
            self._draft, self._part = [token], _Part.DRAFT
        elif token != marks.think:
            self._think([token])

    def _in_draft(self, token: int) -> None:
        self._draft.append(token)
        if token == self._marks.think_end:
            self._think([one for one in self._draft[:-1] if one != self._marks.think])
            self._draft = []
            self._close()

    def _in_text(self, token: int) -> None:
        marks, template = self._marks, self._template
        if token == marks.think and (template.again or self._part is _Part.BLANK):
            self._draft = []
            self._close()
            self._reasoning.skip(template.preface)
            self._part = _Part.REASONING
        elif token == marks.block and self._section:
            self._open_call(token)
        elif token in (marks.section, marks.section_end):
            self._draft = []
            self._close()
            self._section = token == marks.section or not template.strict
        else:
            self._replay()
            if token != marks.think_end or not template.again:
                self._tell([token])

    def _in_channels(self, token: int, marks: Channels) -> None:
        """Messages whose headers say whether they are thought, text or a call."""
        if self._part is _Part.HEADER:
            if token == marks.start:
                self._block = []
            self._block.append(token)
            if token == marks.message:
                header = self._rendering.tokenizer.decode(self._block)
                thought = "<|channel|>analysis" in header
                self._part = _Part.REASONING if thought else _Part.TEXT
                if _RECIPIENT.search(header):
                    self._part = _Part.CALL
        elif token in (marks.start, marks.end):
            self._settle()
            self._close()
            self._block = [token] if token == marks.start else []
            self._part = _Part.HEADER
        else:
            self._plain([token])

    def _hold(self, token: int) -> None:
        """From a mark on that only the whole answer explains; what it begins with comes along."""
        thought = self._part is _Part.REASONING
        taken = self._reasoning.taken() if thought else self._text.taken()
        self._close()
        self._end = np.asarray([self._marks.think], np.int32) if thought else None
        self._draft = [*self._rendering.tokenizer.encode(taken), token]
        self._part = _Part.HELD

    def _replay(self) -> None:
        """What was kept back is text, and what follows from it."""
        ids, self._draft = self._draft, []
        self._part = _Part.TEXT
        self._walk(ids, self._place - len(ids))

    # ----------------------------------------------------------------------- parts to pieces
    def _tell(self, run: list[int]) -> None:
        self._emit(TextDelta, self._text.tell(run))
        if self._text.stopped is not None:
            self.matched_stop, self._part = self._text.stopped, _Part.OVER

    def _think(self, run: list[int]) -> None:
        self.reasoning_tokens += len(run)
        self._emit(ReasoningDelta, self._reasoning.tell(run))

    def _close(self) -> None:
        """The reasoning, or the text, is over; what follows is text."""
        self._emit(ReasoningDelta, self._reasoning.close())
        self._emit(TextDelta, self._text.close())
        self._part = _Part.TEXT

    def _open_call(self, token: int) -> None:
        self._draft = []
        self._close()
        self._block = [token]
        self._part = _Part.CALL

    def _close_call(self) -> None:
        calls = self._rendering.parse_calls(self._block, self._tools)
        if not calls:
            self._spoil()
        self._number(calls)
        self._part = _Part.TEXT

    def _number(self, calls: Sequence[tuple[str, str]]) -> None:
        for name, arguments in calls:
            call = ToolCall(f"call_{self._prefix}_{len(self._calls)}", name, arguments)
            self._calls.append(call)
            self._pieces.append(call)

    def _spoil(self) -> None:
        """A call that is none is text as it was written."""
        written = self._rendering.tokenizer.decode(self._block)
        self._emit(TextDelta, self._text.write(written))
        self._part = _Part.TEXT

    def _settle(self) -> None:
        """The answer is over: what was kept back is now certain."""
        if self._part is _Part.BLANK:
            self._begin(last=True)
        elif self._part is _Part.DRAFT:
            self._close()
            self._replay()
        if self._part is _Part.CALL:
            self._spoil()
        if self._part is _Part.HELD:
            self._read(self._draft)
            self._part = _Part.OVER

    def _read(self, ids: list[int]) -> None:
        """Tell what was held, as the library reads it."""
        if self._end is None:
            over = next((i for i, token in enumerate(ids) if token in self._over), len(ids))
            for part in dsml.read(self._rendering.tokenizer.decode(ids[:over])):
                if isinstance(part, str):
                    self._emit(TextDelta, self._text.write(part))
                else:
                    self._number([(part[0], written(part[1]))])
            return
        parsed = self._rendering.parse(ids, self._end, self._tools)
        if parsed.reasoning:
            self.reasoning_tokens += len(self._rendering.tokenizer.encode(parsed.reasoning))
            self._emit(ReasoningDelta, self._reasoning.write(parsed.reasoning))
        self._emit(TextDelta, self._text.write(self._text.watch(parsed.content)))
        self.matched_stop = stop = self._text.stopped
        if stop is None:
            self._number(parsed.calls)
            return

        def stops(count: int) -> bool:
            return stop in self._rendering.parse(ids[:count], self._end, self._tools).content

        self._place = self._fed - len(ids) + bisect_left(range(len(ids)), True, key=stops)

    def _emit(self, kind: type[TextDelta | ReasoningDelta], text: str) -> None:
        """Adjacent text of one feed is one delta."""
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if type(last) is kind:
            self._pieces[-1] = kind(last.text + text)
        else:
            self._pieces.append(kind(text))
