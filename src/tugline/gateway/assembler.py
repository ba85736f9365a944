"""An observed engine's own text, reasoning and tool calls, as pieces and as one message.

The counterpart of `Decoder` where the engine parses its answers itself. A tool call is passed on
when it is complete: when the next one begins, or at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tugline.chat.engines.base import CallDelta, Delta
from tugline.chat.response import Piece, ReasoningDelta, TextDelta
from tugline.types import Message, Role, ToolCall


@dataclass(slots=True)
class _Open:
    index: int
    name: str = ""
    arguments: str = ""


class Assembler:
    """One answer; `call_prefix` makes its tool call ids unique within the session."""

    def __init__(self, call_prefix: str) -> None:
        self._prefix = call_prefix
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._open: _Open | None = None

    def feed(self, delta: Delta) -> list[Piece]:
        """What this part of the reply completes."""
        pieces: list[Piece] = []
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
            pieces.append(ReasoningDelta(delta.reasoning))
        if delta.text:
            self._text.append(delta.text)
            pieces.append(TextDelta(delta.text))
        for part in delta.calls:
            pieces += self._take(part)
        return pieces

    def finish(self) -> tuple[list[Piece], Message]:
        """What is still unsaid, and the whole answer as a message."""
        pieces = self._close()
        return pieces, Message(
            Role.ASSISTANT,
            "".join(self._text),
            tool_calls=tuple(self._calls),
            reasoning="".join(self._reasoning) or None,
        )

    def _take(self, part: CallDelta) -> list[Piece]:
        pieces: list[Piece] = []
        if self._open is None or self._open.index != part.index:
            pieces = self._close()
            self._open = _Open(part.index)
        self._open.name += part.name
        self._open.arguments += part.arguments
        return pieces

    def _close(self) -> list[Piece]:
        if self._open is None:
            return []
        number = f"call_{self._prefix}_{len(self._calls)}"
        call = ToolCall(number, self._open.name, self._open.arguments or "{}")
        self._calls.append(call)
        self._open = None
        return [call]


def told(pieces: Sequence[Piece]) -> Message | None:
    """The message that these pieces of an answer make so far; None if they say nothing."""
    text = "".join([one.text for one in pieces if isinstance(one, TextDelta)])
    reasoning = "".join([one.text for one in pieces if isinstance(one, ReasoningDelta)])
    calls = tuple(one for one in pieces if isinstance(one, ToolCall))
    if not (text or reasoning or calls):
        return None
    return Message(Role.ASSISTANT, text, tool_calls=calls, reasoning=reasoning or None)
