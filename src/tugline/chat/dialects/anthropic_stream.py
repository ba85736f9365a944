"""A streamed Anthropic answer: numbered blocks that open and close, between start and stop.

Claude Code merges turns whose ``message.id`` is missing or repeated, and asks again without
streaming when a start event is missing; so every event is there, in the original's order (I4).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tugline.chat.dialects.anthropic_blocks import signed, tool_input
from tugline.chat.response import Piece, ReasoningDelta, Response, TextDelta, Usage
from tugline.errors import TuglineError
from tugline.types import Finish, ToolCall

_PING = b'event: ping\ndata: {"type": "ping"}\n\n'


def usage_of(usage: Usage) -> dict[str, Any]:
    """Counts whose sum is the true prompt: what was reused counts as input, not as a cache read.

    Clients add the three up, so nothing is gained by telling our reuse as Anthropic's cache.
    """
    return {
        "input_tokens": usage.prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": usage.sampled,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def stop_reason(answer: Response) -> str:
    """Why the answer ended, in Anthropic's words."""
    if answer.finish is not Finish.STOP:
        return "max_tokens"
    if answer.stop is not None:
        return "stop_sequence"
    return "tool_use" if answer.message.tool_calls else "end_turn"


class MessageStream:
    """One answer as server-sent events."""

    content_type = "text/event-stream"

    def __init__(
        self,
        model: str,
        response_id: str,
        error: Callable[[TuglineError], bytes],
        *,
        thinking: bool,
    ) -> None:
        """`error` writes the body of a failure, which is also its event."""
        self._model, self._id, self._error = model, f"msg_{response_id}", error
        self._thinking = thinking
        self._block = -1
        self._kind: type[Piece] | None = None
        self._digest = hashlib.blake2b()
        self._opened = False

    def start(self, usage: Usage) -> bytes:
        """``message_start`` with the true prompt count, and a ping as in the original."""
        self._opened = True
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(usage),
        }
        return _event("message_start", {"message": message}) + _PING

    def add(self, piece: Piece, index: int = 0) -> bytes:
        """A delta, with the start of its block where it is the first; a tool use is one block."""
        if isinstance(piece, ToolCall):
            block = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            written = tool_input(piece).decode()
            return (
                self._begin(ToolCall, block)
                + self._delta({"type": "input_json_delta", "partial_json": written})
                + self._end()
            )
        if isinstance(piece, TextDelta):
            begin = self._begin(TextDelta, {"type": "text", "text": ""})
            return begin + self._delta({"type": "text_delta", "text": piece.text})
        if not self._thinking:
            return b""
        blank = {"type": "thinking", "thinking": "", "signature": ""}
        begin = self._begin(ReasoningDelta, blank)
        self._digest.update(piece.text.encode())
        return begin + self._delta({"type": "thinking_delta", "thinking": piece.text})

    def finish(self, answers: Sequence[Response]) -> bytes:
        """The stop reason with the final counts, and ``message_stop``."""
        answer = answers[0]
        delta = {"stop_reason": stop_reason(answer), "stop_sequence": answer.stop}
        end = _event("message_delta", {"delta": delta, "usage": usage_of(answer.usage)})
        return self._end() + end + _event("message_stop", {})

    def fail(self, error: TuglineError) -> bytes:
        """An ``error`` event."""
        return b"event: error\ndata: " + self._error(error) + b"\n\n"

    def keep_alive(self) -> bytes:
        """A ping; a comment before ``message_start``, which must be the first event."""
        return _PING if self._opened else b": keep-alive\n\n"

    def _begin(self, kind: type[Piece], block: dict[str, Any]) -> bytes:
        if self._kind is kind:
            return b""
        ended = self._end()
        self._block, self._kind = self._block + 1, kind
        start = {"index": self._block, "content_block": block}
        return ended + _event("content_block_start", start)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._block, "delta": delta})

    def _end(self) -> bytes:
        if self._kind is None:
            return b""
        signature = b""
        if self._kind is ReasoningDelta:
            told = {"type": "signature_delta", "signature": signed(self._digest)}
            signature, self._digest = self._delta(told), hashlib.blake2b()
        self._kind = None
        return signature + _event("content_block_stop", {"index": self._block})


def _event(kind: str, data: dict[str, Any]) -> bytes:
    body = msgspec.json.encode({"type": kind, **data})
    return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"
