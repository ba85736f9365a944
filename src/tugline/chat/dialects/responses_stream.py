"""A streamed answer of the Responses API: every event in its order, numbered.

One item is open at a time; a call comes whole. What all deltas of an item share is encoded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tugline.chat.dialects import openai
from tugline.chat.dialects.responses_output import (
    Item,
    Items,
    echo_of,
    final,
    outcome,
    response,
    text_part,
)
from tugline.chat.request import Request
from tugline.chat.response import Piece, ReasoningDelta, Response, TextDelta, Usage
from tugline.errors import TuglineError
from tugline.types import ToolCall

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Open:
    """The item that deltas go to."""

    kind: type[TextDelta | ReasoningDelta]
    place: dict[str, Any]
    """The fields that tell which item and part an event is about."""
    head: bytes
    """A delta event up to its text."""
    texts: list[str] = field(default_factory=list)


class ResponseStream:
    """Encodes one answer; see `Stream`."""

    content_type = openai.EVENT_STREAM

    def __init__(self, request: Request, response_id: str, created: int) -> None:
        echo = echo_of(request)
        self._fields = echo.fields
        self._head = {"id": f"resp_{response_id}", "created_at": created, "model": request.model}
        self._items = Items(response_id, request.tools, sealed=echo.sealed)
        self._output: list[Item] = []
        self._sequence = 0
        self._open: _Open | None = None

    def start(self, usage: Usage) -> bytes:
        """``response.created`` and ``response.in_progress``."""
        begun = response({**self._head, "status": "in_progress", "output": []}, self._fields)
        created = self._event("response.created", response=begun)
        return created + self._event("response.in_progress", response=begun)

    def add(self, piece: Piece, index: int = 0) -> bytes:
        """Deltas of the open item, or of a new one; a call closes what is open."""
        if isinstance(piece, ToolCall):
            return self._end("completed") + self._call(piece)
        start = b""
        if self._open is None or self._open.kind is not type(piece):
            start = self._end("completed") + self._begin(type(piece))
        return start + self._delta(piece.text)

    def finish(self, answers: Sequence[Response]) -> bytes:
        """The end of what is open, then the whole response; there is a message or a call in it."""
        answer = answers[0]
        last = b""
        talks = self._open is not None and self._open.kind is TextDelta
        if not talks and all(item["type"] == "reasoning" for item in self._output):
            last = self._end("completed") + self._begin(TextDelta)
        last += self._end(final(answer))
        head = {**outcome(answer, self._output), "created_at": self._head["created_at"]}
        whole = response(head, self._fields)
        return last + self._event(f"response.{final(answer)}", response=whole)

    def fail(self, error: TuglineError) -> bytes:
        """An ``error`` event for clients that look for it, and the failed response."""
        about = openai.error_object(error)
        head = {
            **self._head,
            "status": "failed",
            "output": self._output,
            "error": {"code": about["code"], "message": about["message"]},
        }
        told = {name: about[name] for name in ("code", "message", "param")}
        return self._event("error", **told) + self._event(
            "response.failed", response=response(head, self._fields)
        )

    def keep_alive(self) -> bytes:
        """A comment."""
        return openai.KEEP_ALIVE

    # ----------------------------------------------------------------------- items
    def _begin(self, kind: type[TextDelta | ReasoningDelta]) -> bytes:
        index = len(self._output)
        if kind is TextDelta:
            item = self._items.message(index, None, "in_progress")
            part, about = text_part(""), {"content_index": 0}
            added, delta = "response.content_part.added", "response.output_text.delta"
            extra: dict[str, Any] = {"logprobs": []}
        else:
            item = {**self._items.reasoning(index, ""), "status": "in_progress"}
            part, about = {"type": "summary_text", "text": ""}, {"summary_index": 0}
            added, delta = (
                "response.reasoning_summary_part.added",
                "response.reasoning_summary_text.delta",
            )
            extra = {}
        place = {"item_id": item["id"], "output_index": index, **about}
        fixed = _encode({"type": delta, **place, **extra})[:-1]
        head = b"event: %b\ndata: %b" % (delta.encode(), fixed)
        self._open = _Open(kind, place, head)
        return self._event("response.output_item.added", output_index=index, item=item) + (
            self._event(added, **place, part=part)
        )

    def _delta(self, text: str) -> bytes:
        if self._open is None:
            return b""
        self._open.texts.append(text)
        number = self._number()
        return b'%b,"delta":%b,"sequence_number":%d}\n\n' % (self._open.head, _encode(text), number)

    def _end(self, status: str) -> bytes:
        if self._open is None:
            return b""
        done, self._open = self._open, None
        text, index = "".join(done.texts), len(self._output)
        if done.kind is TextDelta:
            item = self._items.message(index, text, status)
            told = self._event(
                "response.output_text.done", **done.place, text=text, logprobs=[]
            ) + self._event("response.content_part.done", **done.place, part=text_part(text))
        else:
            item = self._items.reasoning(index, text)
            part = {"type": "summary_text", "text": text}
            told = self._event(
                "response.reasoning_summary_text.done", **done.place, text=text
            ) + self._event("response.reasoning_summary_part.done", **done.place, part=part)
        return told + self._done(item)

    def _call(self, call: ToolCall) -> bytes:
        item, index = self._items.call(len(self._output), call), len(self._output)
        name, kind = {
            "function_call": ("arguments", "response.function_call_arguments"),
            "custom_tool_call": ("input", "response.custom_tool_call_input"),
        }.get(item["type"], ("", ""))
        begun = {**item, "status": "in_progress", **({name: ""} if name else {})}
        told = self._event("response.output_item.added", output_index=index, item=begun)
        if name:
            place = {"item_id": item["id"], "output_index": index}
            told += self._event(f"{kind}.delta", **place, delta=item[name])
            told += self._event(f"{kind}.done", **place, **{name: item[name]})
        return told + self._done(item)

    def _done(self, item: Item) -> bytes:
        self._output.append(item)
        index = len(self._output) - 1
        return self._event("response.output_item.done", output_index=index, item=item)

    # ----------------------------------------------------------------------- events
    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number(), **fields}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(data))

    def _number(self) -> int:
        number = self._sequence
        self._sequence += 1
        return number
