"""Token ids to pieces of an answer while they arrive.

Text and reasoning go out as soon as they are certain: an incomplete character, blank space that
may turn out to be trailing and the beginning of a stop string are held back. A tool call goes out
whole when it closes; one that is malformed, or never closes, is text as it was written. Nothing
that was sampled is lost: text after a call is text too, a line of its own.

The message of `finish` is what the pieces add up to, and it is what the renderer's own parser says
of the whole answer. A template whose marks cannot be followed is held until its end.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Mapping, Sequence
from enum import Enum, auto

from tugline.gateway.dialects.base import Piece, ReasoningDelta, TextDelta
from tugline.gateway.rendering import Rendering
from tugline.types import Ids, Message, Role, Tool, ToolCall


class _Part(Enum):
    BLANK = auto()
    """Nothing but blank space so far: reasoning may still open."""
    REASONING = auto()
    DRAFT = auto()
    """A call inside reasoning: drafted if the reasoning closes later, made if it never does."""
    TEXT = auto()
    CALL = auto()
    OVER = auto()


class _Voice:
    """Text from bytes: whole characters, without blank space at its ends, one line per segment."""

    __slots__ = ("_begun", "_bytes", "_fresh", "_held", "said")

    def __init__(self) -> None:
        self.said: list[str] = []
        self._bytes = b""
        self._held = ""
        self._begun = False
        self._fresh = True

    def characters(self, data: bytes, *, last: bool = False) -> str:
        """The whole characters that `data` completes."""
        data = self._bytes + data
        text, used = utf_8_decode(data, "replace", last)
        self._bytes = data[used:]
        return text

    def say(self, text: str) -> str:
        """What of `text` can be told now."""
        if self._fresh:
            text = text.lstrip()
            if not text:
                return ""
            self._fresh = False
            self._held = "\n" if self._begun else ""
            self._begun = True
        text = self._held + text
        ready = text.rstrip()
        self._held = text[len(ready) :]
        if ready:
            self.said.append(ready)
        return ready

    def pause(self) -> None:
        """The segment is over; its trailing blank space is not told."""
        self._fresh = True


class Decoder:
    """One answer; `call_prefix` makes its tool call ids unique within the session.

    `end` is the end of its prompt, `forced` the ids behind it that the answer goes on from.
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
        self.stopped: str | None = None
        """The stop string that ended the text."""
        self.reasoning_tokens = 0
        self._rendering, self._end, self._prefix, self._tools = rendering, end, call_prefix, tools
        self._marks = marks = rendering.markers
        self._over = frozenset(rendering.stop_ids)
        self._controls = self._over | marks.ids
        self._spellings: Mapping[int, bytes] = rendering.tokenizer.spellings or {}
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._fed = self._place = 0
        self._whole: list[int] | None = None if rendering.incremental else []
        self._part = _Part.REASONING if rendering.thinks(end) else _Part.BLANK
        self._section = marks.block == marks.call
        self._draft: list[int] = []
        self._block: list[int] = []
        self._text, self._reasoning = _Voice(), _Voice()
        self._calls: list[ToolCall] = []
        self._pieces: list[Piece] = []
        if forced is not None:
            self._walk(forced.tolist(), -len(forced))
            self._pieces.clear()
            self.reasoning_tokens = 0

    @property
    def cut(self) -> int:
        """How many sampled ids belong to the answer: all, or those up to the stop string's end."""
        return self._place if self.stopped is not None else self._fed

    def feed(self, ids: Ids) -> list[Piece]:
        """The pieces that these ids complete."""
        if self.stopped is not None:
            return []
        new: list[int] = ids.tolist()
        start = self._fed
        self._fed += len(new)
        self._pieces = pieces = list[Piece]()
        if self._whole is not None:
            self._whole += new
        elif self._part is not _Part.OVER:
            self._walk(new, start)
        return pieces

    def finish(self) -> tuple[list[Piece], Message]:
        """What is still unsaid, and the whole answer as a message."""
        self._pieces = pieces = list[Piece]()
        if self._whole is not None:
            self._parse(self._whole)
        elif self.stopped is None:
            self._settle()
        self._close_reasoning()
        self._close_text()
        return pieces, Message(
            Role.ASSISTANT,
            "".join(self._text.said),
            tool_calls=tuple(self._calls),
            reasoning="".join(self._reasoning.said) or None,
        )

    # ----------------------------------------------------------------------- ids to parts
    def _walk(self, ids: list[int], start: int) -> None:
        """Take ids, the first of which is number `start` of the sampled ones."""
        controls, singly = self._controls, bool(self._stops)
        run: list[int] = []
        for place, token in enumerate(ids, start + 1):
            if token in controls:
                if run:
                    self._plain(run)
                    run = []
                self._place = place
                self._control(token)
            else:
                run.append(token)
                if singly:
                    self._place = place
                    self._plain(run)
                    run = []
            if self._part is _Part.OVER:
                return
        if run:
            self._place = start + len(ids)
            self._plain(run)

    def _plain(self, run: list[int]) -> None:
        """Take ids that mark nothing."""
        part = self._part
        if part is _Part.TEXT:
            self._tell(run)
        elif part is _Part.REASONING:
            self.reasoning_tokens += len(run)
            self._think(run)
        elif part is _Part.CALL:
            self._block += run
        else:
            self._draft += run
            if part is _Part.BLANK and not self._blank():
                self._replay()

    def _control(self, token: int) -> None:
        """Take an id that may open or close a part."""
        if token in self._over:
            self._settle()
            self._part = _Part.OVER
        elif self._part is _Part.CALL:
            self._in_call(token)
        elif self._part is _Part.REASONING:
            self._in_reasoning(token)
        elif self._part is _Part.DRAFT:
            self._draft.append(token)
            if token == self._marks.think_end:
                self.reasoning_tokens += len(self._draft)
                self._think(self._draft[:-1])
                self._draft = []
                self._close_reasoning()
        else:
            self._in_text(token)

    def _in_call(self, token: int) -> None:
        if token != self._marks.section_end:
            self._block.append(token)
        if token == self._marks.call_end:
            self._close_call()
        elif token == self._marks.section_end:
            self._spoil()
            self._section = False

    def _in_reasoning(self, token: int) -> None:
        marks, template = self._marks, self._rendering.template
        self.reasoning_tokens += 1
        if token == marks.think_end:
            self._close_reasoning()
        elif token == marks.call and template.again:
            self._close_reasoning()
            self._open_call(token)
        elif token == marks.call and template.closes:
            self._draft = [token]
            self._part = _Part.DRAFT
        elif token != marks.think:
            self._think([token])

    def _in_text(self, token: int) -> None:
        marks, template = self._marks, self._rendering.template
        if token == marks.think and (template.again or self._blank(last=True)):
            self._draft = []
            self._close_text()
            self._part = _Part.REASONING
        elif token == marks.block and self._section:
            self._open_call(token)
        elif token in (marks.section, marks.section_end):
            self._close_text()
            self._part = _Part.TEXT
            self._section = token == marks.section or not template.strict
        else:
            self._replay()
            if token != marks.think_end or not template.again:
                self._tell([token])

    def _blank(self, *, last: bool = False) -> bool:
        """Whether nothing but blank space was sampled so far."""
        if self._part is not _Part.BLANK:
            return False
        text, _ = utf_8_decode(self._spelled(self._draft), "replace", last)
        return not text.strip()

    def _replay(self) -> None:
        """What was kept back is text, and what follows from it."""
        ids, self._draft = self._draft, []
        self._part = _Part.TEXT
        self._walk(ids, self._place - len(ids))

    def _parse(self, ids: list[int]) -> None:
        """Tell a whole answer at once, as the library reads it."""
        parsed = self._rendering.parse(ids, self._end, self._tools)
        if parsed.reasoning:
            self._emit(ReasoningDelta, self._reasoning.say(parsed.reasoning))
        if ready := self._text.say(self._watched(parsed.content)):
            self._emit(TextDelta, ready)
        if self.stopped is None:
            self._number(parsed.calls)

    # ----------------------------------------------------------------------- parts to pieces
    def _tell(self, run: list[int]) -> None:
        text = self._text.characters(self._spelled(run))
        if self._stops:
            text = self._watched(text)
        if text and (ready := self._text.say(text)):
            self._emit(TextDelta, ready)

    def _watched(self, text: str) -> str:
        """What of the text cannot belong to a stop string."""
        text = self._held + text
        found = min(((text.find(stop), stop) for stop in self._stops if stop in text), default=None)
        if found is not None:
            at, self.stopped = found
            self._part = _Part.OVER
            self._held = ""
            return text[:at]
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        kept = next(
            (n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stops)),
            0,
        )
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _think(self, run: list[int]) -> None:
        if ready := self._reasoning.say(self._reasoning.characters(self._spelled(run))):
            self._emit(ReasoningDelta, ready)

    def _close_reasoning(self) -> None:
        rest = self._reasoning.characters(b"", last=True)
        if rest and (ready := self._reasoning.say(rest)):
            self._emit(ReasoningDelta, ready)
        self._reasoning.pause()
        self._part = _Part.TEXT

    def _close_text(self) -> None:
        rest = self._held + self._text.characters(b"", last=True)
        self._held = ""
        if rest and self.stopped is None and (ready := self._text.say(rest)):
            self._emit(TextDelta, ready)
        self._text.pause()

    def _open_call(self, token: int) -> None:
        self._draft = []
        self._close_text()
        self._block = [token]
        self._part = _Part.CALL

    def _close_call(self) -> None:
        calls = self._rendering.calls(self._block, self._tools)
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
        if ready := self._text.say(written):
            self._emit(TextDelta, ready)
        self._text.pause()
        self._part = _Part.TEXT

    def _settle(self) -> None:
        """The answer is over: what was kept back is now certain."""
        if self._part is _Part.DRAFT:
            self._close_reasoning()
            self._replay()
        elif self._part is _Part.BLANK and not self._blank(last=True):
            self._replay()
        if self._part is _Part.CALL:
            self._spoil()

    def _emit(self, kind: type[TextDelta | ReasoningDelta], text: str) -> None:
        """Adjacent text of one feed is one delta."""
        last = self._pieces[-1] if self._pieces else None
        if type(last) is kind:
            self._pieces[-1] = kind(last.text + text)
        else:
            self._pieces.append(kind(text))

    def _spelled(self, run: list[int]) -> bytes:
        spellings = self._spellings
        return b"".join([spellings[token] for token in run])
