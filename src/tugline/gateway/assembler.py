"""Pieces and messages of an answer that the engine parsed itself (observed and text mode)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tugline.chat.engines.base import CallDelta, Delta
from tugline.chat.response import Piece, ReasoningDelta, TextDelta
from tugline.types import Message, Role, ToolCall


@dataclass(slots=True)
class _OpenCall:
    index: int
    name: str = ""
    arguments: str = ""


class ToolCallAssembler:
    """Joins the parts of tool calls that an observing engine streams.

    A call is passed on when it is complete: when the next one begins, or at the end.
    """

    def __init__(self, id_prefix: str) -> None:
        """`id_prefix` makes the ids of tool calls unique within the session."""
        self._prefix, self._count = id_prefix, 0
        self._open: _OpenCall | None = None

    def feed(self, delta: Delta) -> list[Piece]:
        """The pieces that this part of the reply completes."""
        pieces: list[Piece] = []
        if delta.reasoning:
            pieces.append(ReasoningDelta(delta.reasoning))
        if delta.text:
            pieces.append(TextDelta(delta.text))
        for part in delta.calls:
            pieces += self._add(part)
        return pieces

    def finish(self) -> list[Piece]:
        """The call that is still open."""
        if self._open is None:
            return []
        done, self._open = self._open, None
        self._count += 1
        number = f"{self._prefix}{self._count - 1}"
        return [ToolCall(number, done.name, done.arguments or "{}")]

    def _add(self, part: CallDelta) -> list[Piece]:
        pieces: list[Piece] = []
        if self._open is None or self._open.index != part.index:
            pieces = self.finish()
            self._open = _OpenCall(part.index)
        self._open.name += part.name
        self._open.arguments += part.arguments
        return pieces


def join_pieces(pieces: Sequence[Piece]) -> Message | None:
    """The message that `pieces` add up to; None if they are empty."""
    text = "".join([piece.text for piece in pieces if isinstance(piece, TextDelta)])
    reasoning = "".join([piece.text for piece in pieces if isinstance(piece, ReasoningDelta)])
    calls = tuple(piece for piece in pieces if isinstance(piece, ToolCall))
    if not (text or reasoning or calls):
        return None
    return Message(Role.ASSISTANT, text, tool_calls=calls, reasoning=reasoning or None)
