"""Token ids to pieces of an answer while they arrive.

Text and reasoning go out as soon as they are certain: an incomplete character and blank space that
may turn out to be trailing are held back. A tool call goes out whole when it closes. The
renderer's parse of the complete answer has the final word; what was streamed is always a prefix of
it, and `finish` sends the rest.
"""

from __future__ import annotations

from enum import Enum, auto

from tugline.gateway.dialects.base import Piece, ReasoningDelta, TextDelta
from tugline.gateway.rendering import Rendering
from tugline.types import Ids, Message, Role, ToolCall

_INCOMPLETE = "\ufffd"


class _Part(Enum):
    TEXT = auto()
    REASONING = auto()
    CALL = auto()
    AFTER = auto()
    """Between and behind tool calls, where the parser ignores text."""


class Decoder:
    """One answer; `call_prefix` makes its tool call ids unique within the session."""

    def __init__(self, rendering: Rendering, prompt: Ids, call_prefix: str) -> None:
        self._rendering = rendering
        self._prompt = prompt
        self._prefix = call_prefix
        self._stop = frozenset(rendering.stop_ids)
        self._part = _Part.TEXT
        self._all: list[int] = []
        self._pending: list[int] = []
        self._call_start = 0
        self._sent = {_Part.TEXT: "", _Part.REASONING: ""}
        self._held = ""
        self._calls: list[ToolCall] = []

    def feed(self, ids: Ids) -> list[Piece]:
        """The pieces that these ids complete."""
        pieces: list[Piece] = []
        marks = self._rendering.markers
        for token in ids.tolist():
            self._all.append(token)
            if token in self._stop:
                continue
            if token == marks.call and self._part is not _Part.CALL:
                self._enter(_Part.CALL, pieces)
                self._call_start = len(self._all) - 1
            elif token == marks.call_end and self._part is _Part.CALL:
                self._close_call(pieces)
                self._part = _Part.AFTER
            elif token == marks.think and self._part is _Part.TEXT and not self._sent[_Part.TEXT]:
                self._enter(_Part.REASONING, pieces)
            elif token == marks.think_end and self._part is _Part.REASONING:
                self._enter(_Part.TEXT, pieces)
            elif self._part in self._sent:
                self._pending.append(token)
        self._flush(pieces)
        return pieces

    def finish(self) -> tuple[list[Piece], Message]:
        """What is still unsaid, and the whole answer as a message."""
        parsed = self._rendering.parse(self._all, self._prompt)
        pieces: list[Piece] = []
        reasoning = (parsed.reasoning or "").strip()
        if rest := _rest(reasoning, self._sent[_Part.REASONING]):
            pieces.append(ReasoningDelta(rest))
        if rest := _rest(parsed.content, self._sent[_Part.TEXT]):
            pieces.append(TextDelta(rest))
        for name, arguments in parsed.calls[len(self._calls) :]:
            pieces.append(self._numbered(name, arguments))
        text = self._sent[_Part.TEXT] + _rest(parsed.content, self._sent[_Part.TEXT])
        return pieces, Message(
            Role.ASSISTANT,
            text,
            tool_calls=tuple(self._calls),
            reasoning=reasoning or None,
        )

    def _enter(self, part: _Part, pieces: list[Piece]) -> None:
        self._flush(pieces)
        self._pending.clear()
        self._held = ""
        self._part = part

    def _close_call(self, pieces: list[Piece]) -> None:
        for name, arguments in self._rendering.parse(self._all[self._call_start :]).calls:
            pieces.append(self._numbered(name, arguments))

    def _numbered(self, name: str, arguments: str) -> ToolCall:
        call = ToolCall(f"call_{self._prefix}_{len(self._calls)}", name, arguments)
        self._calls.append(call)
        return call

    def _flush(self, pieces: list[Piece]) -> None:
        if not self._pending or self._part not in self._sent:
            return
        text = self._rendering.tokenizer.decode(self._pending)
        if text.endswith(_INCOMPLETE):
            return
        self._pending.clear()
        sent = self._sent[self._part]
        text = self._held + text
        if not sent:
            text = text.lstrip()
        ready = text.rstrip()
        self._held = text[len(ready) :]
        if ready:
            self._sent[self._part] = sent + ready
            kind = TextDelta if self._part is _Part.TEXT else ReasoningDelta
            pieces.append(kind(ready))


def _rest(whole: str, sent: str) -> str:
    """What of `whole` was not sent; nothing if the stream ran ahead of the parser."""
    return whole[len(sent) :] if whole.startswith(sent) else ""
