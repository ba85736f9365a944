"""Responses as output items and response objects of the Responses API, whole and streamed.

Item ids carry the response's id and the item's index, so that an echo tells which turn it is of. A
call is encoded in the form its tool was declared in if that form gives back the very arguments the
model wrote (up to JSON spacing); otherwise as a plain function call, which the client answers with
an error that the model gets to read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tugline.chat.dialects import openai
from tugline.chat.dialects.base import Stream, decode_object, encode
from tugline.chat.dialects.responses_input import SHELL_FIELDS, seal
from tugline.chat.model_call import Piece, ReasoningDelta, Request, Response, TextDelta, Usage
from tugline.errors import TuglineError
from tugline.types import Finish, Tool, ToolCall, ToolKind
from tugline.web.sse import encode_event

Item = dict[str, Any]
"""One output item, ready to be encoded."""


class Echo(msgspec.Struct):
    """The part of a request that its response needs: `Request.echo` in JSON."""

    fields: msgspec.Raw = msgspec.Raw(b"{}")
    """An object: the fields that the response repeats."""
    sealed: bool = False
    """Whether reasoning is wanted as ``encrypted_content`` too."""
    compact: list[msgspec.Raw] | None = None
    """For ``/responses/compact``: the user's messages, to be repeated; else None."""


_echo = msgspec.json.Decoder(Echo)


def decode_echo(request: Request) -> Echo:
    """Decode `Request.echo`."""
    return _echo.decode(request.echo) if request.echo else Echo()


# --------------------------------------------------------------------------- items
class Items:
    """Builds the output items of one response, in their order."""

    def __init__(self, response_id: str, tools: Sequence[Tool], *, sealed: bool) -> None:
        self._response, self._sealed = response_id, sealed
        self._tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}

    def build_reasoning(self, index: int, text: str) -> Item:
        """A finished reasoning item."""
        summary = [_summary_part(text)] if text else []
        item: Item = {"id": self._id("rs", index), "type": "reasoning", "summary": summary}
        if self._sealed:
            item["encrypted_content"] = seal(text)
        return item

    def build_message(self, index: int, text: str | None, status: str) -> Item:
        """A message; without `text` it has no content yet."""
        return {
            "id": self._id("msg", index),
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [] if text is None else [_text_part(text)],
        }

    def build_call(self, index: int, call: ToolCall) -> Item:
        """A finished call, in the form its tool was declared in."""
        tool = self._tools.get(call.name)
        kind = tool.kind if tool is not None else ToolKind.FUNCTION
        item: Item = {"status": "completed", "call_id": call.id}
        if kind is ToolKind.LOCAL_SHELL and (action := _build_action(call)) is not None:
            item |= {"type": "local_shell_call", "id": self._id("lsh", index), "action": action}
            return item
        item["name"] = call.name
        if tool is not None and tool.namespace is not None:
            item["name"] = call.name.removeprefix(f"{tool.namespace}__")
            item["namespace"] = tool.namespace
        text = openai.unwrap_input(call) if kind is ToolKind.CUSTOM else None
        if text is not None:
            return {**item, "type": "custom_tool_call", "id": self._id("ctc", index), "input": text}
        item_id = self._id("fc", index)
        return {**item, "type": "function_call", "id": item_id, "arguments": call.arguments}

    def build_all(self, response: Response) -> list[Item]:
        """Reasoning, message and calls of a whole response."""
        message, items = response.message, list[Item]()
        if message.reasoning:
            items.append(self.build_reasoning(0, message.reasoning))
        if message.content or not message.tool_calls:
            status = "completed" if message.tool_calls else _find_status(response)
            items.append(self.build_message(len(items), message.content, status))
        for call in message.tool_calls:
            items.append(self.build_call(len(items), call))
        return items

    def _id(self, prefix: str, index: int) -> str:
        return f"{prefix}_{self._response}_{index}"


def _text_part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _summary_part(text: str) -> Item:
    return {"type": "summary_text", "text": text}


def _find_status(response: Response) -> str:
    """Status of a response, and of the item that it ends in."""
    return "completed" if response.finish is Finish.STOP else "incomplete"


def _build_action(call: ToolCall) -> Item | None:
    fields = decode_object(call.arguments)
    if fields is None or not fields.keys() <= SHELL_FIELDS or not all(fields.values()):
        return None
    command = fields.get("command")
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        return None
    return {"type": "exec", "env": {}, **fields}


# --------------------------------------------------------------------------- response objects
def build_response(head: Item, fields: msgspec.Raw) -> msgspec.Raw:
    """A ``response`` object: the known fields, then those that repeat the request."""
    whole: Item = {
        "object": "response",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "usage": None,
        **head,
    }
    return msgspec.Raw(encode(whole)[:-1] + b"," + bytes(fields)[1:])


def build_outcome(response: Response, output: Sequence[Item]) -> Item:
    """The fields of a finished response."""
    status = _find_status(response)
    details = None if status == "completed" else {"reason": "max_output_tokens"}
    return {
        "id": f"resp_{response.id}",
        "created_at": response.created,
        "model": response.model,
        "status": status,
        "incomplete_details": details,
        "output": output,
        "usage": _build_usage(response.usage),
    }


def build_compaction(response: Response, messages: Sequence[msgspec.Raw]) -> bytes:
    """The reply of ``/responses/compact``: the user's messages and the sealed summary."""
    summary = seal(response.message.content or response.message.reasoning or "")
    item = {"id": f"cmp_{response.id}", "type": "compaction", "encrypted_content": summary}
    return encode(
        {
            "id": f"resp_{response.id}",
            "object": "response.compaction",
            "created_at": response.created,
            "output": [*messages, item],
            "usage": _build_usage(response.usage),
        }
    )


def _build_usage(usage: Usage) -> Item:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.reused, "cache_write_tokens": 0},
        "output_tokens": usage.sampled,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.sampled,
    }


# --------------------------------------------------------------------------- streams
@dataclass(slots=True)
class _Open:
    """The item that deltas go to."""

    kind: type[TextDelta | ReasoningDelta]
    place: dict[str, Any]
    """The fields that name the item and part of an event."""
    head: bytes
    """A delta event up to its text."""
    texts: list[str] = field(default_factory=list)


_CALL_EVENTS = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
"""The field that is streamed, and the prefix of its events."""


class ResponseStream(Stream):
    """One response as events, in their order, numbered.

    One item is open at a time; a call comes whole. The fields that all deltas of an item share are
    encoded once.
    """

    def __init__(self, request: Request, response_id: str, created: int) -> None:
        echo = decode_echo(request)
        self._fields = echo.fields
        self._head = {"id": f"resp_{response_id}", "created_at": created, "model": request.model}
        self._items = Items(response_id, request.tools, sealed=echo.sealed)
        self._output: list[Item] = []
        self._sequence = 0
        self._open: _Open | None = None

    def start(self, usage: Usage) -> bytes:
        """``response.created`` and ``response.in_progress``."""
        head = {**self._head, "status": "in_progress", "output": []}
        response = build_response(head, self._fields)
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def add(self, piece: Piece, index: int = 0) -> bytes:
        """Deltas of the open item, or of a new one; a call closes the open one."""
        if isinstance(piece, ToolCall):
            return self._close_item("completed") + self._add_call(piece)
        start = b""
        if self._open is None or self._open.kind is not type(piece):
            start = self._close_item("completed") + self._open_item(type(piece))
        return start + self._delta(piece.text)

    def finish(self, responses: Sequence[Response]) -> bytes:
        """The end of the open item, then the whole response, in which is a message or a call."""
        response = responses[0]
        status = _find_status(response)
        last = b""
        has_text = self._open is not None and self._open.kind is TextDelta
        if not has_text and all(item["type"] == "reasoning" for item in self._output):
            last = self._close_item("completed") + self._open_item(TextDelta)
        last += self._close_item(status)
        outcome = build_outcome(response, self._output)
        head = {**outcome, "created_at": self._head["created_at"]}
        return last + self._event(f"response.{status}", response=build_response(head, self._fields))

    def fail(self, error: TuglineError) -> bytes:
        """An ``error`` event for clients that look for it, and the failed response."""
        fields = openai.build_error(error, {})
        head = {
            **self._head,
            "status": "failed",
            "output": self._output,
            "error": {"code": fields["code"], "message": fields["message"]},
        }
        event = {name: fields[name] for name in ("code", "message", "param")}
        return self._event("error", **event) + self._event(
            "response.failed", response=build_response(head, self._fields)
        )

    # ----------------------------------------------------------------------- items
    def _open_item(self, kind: type[TextDelta | ReasoningDelta]) -> bytes:
        index = len(self._output)
        extra: dict[str, Any] = {}
        if kind is TextDelta:
            item = self._items.build_message(index, None, "in_progress")
            part, about, extra = _text_part(""), {"content_index": 0}, {"logprobs": []}
            added, delta = "response.content_part.added", "response.output_text.delta"
        else:
            item = {**self._items.build_reasoning(index, ""), "status": "in_progress"}
            part, about = _summary_part(""), {"summary_index": 0}
            added = "response.reasoning_summary_part.added"
            delta = "response.reasoning_summary_text.delta"
        place = {"item_id": item["id"], "output_index": index, **about}
        fixed = encode({"type": delta, **place, **extra})[:-1]
        self._open = _Open(kind, place, b"event: %b\ndata: %b" % (delta.encode(), fixed))
        return self._event("response.output_item.added", output_index=index, item=item) + (
            self._event(added, **place, part=part)
        )

    def _delta(self, text: str) -> bytes:
        if self._open is None:
            return b""
        self._open.texts.append(text)
        number = self._number()
        return b'%b,"delta":%b,"sequence_number":%d}\n\n' % (self._open.head, encode(text), number)

    def _close_item(self, status: str) -> bytes:
        if self._open is None:
            return b""
        closed, self._open = self._open, None
        text, index, place = "".join(closed.texts), len(self._output), closed.place
        if closed.kind is TextDelta:
            item = self._items.build_message(index, text, status)
            events = self._event("response.output_text.done", **place, text=text, logprobs=[])
            events += self._event("response.content_part.done", **place, part=_text_part(text))
        else:
            item = self._items.build_reasoning(index, text)
            events = self._event("response.reasoning_summary_text.done", **place, text=text)
            part = _summary_part(text)
            events += self._event("response.reasoning_summary_part.done", **place, part=part)
        return events + self._finish_item(item)

    def _add_call(self, call: ToolCall) -> bytes:
        index = len(self._output)
        item = self._items.build_call(index, call)
        name, kind = _CALL_EVENTS.get(item["type"], ("", ""))
        started = {**item, "status": "in_progress", **({name: ""} if name else {})}
        events = self._event("response.output_item.added", output_index=index, item=started)
        if name:
            place = {"item_id": item["id"], "output_index": index}
            events += self._event(f"{kind}.delta", **place, delta=item[name])
            events += self._event(f"{kind}.done", **place, **{name: item[name]})
        return events + self._finish_item(item)

    def _finish_item(self, item: Item) -> bytes:
        self._output.append(item)
        index = len(self._output) - 1
        return self._event("response.output_item.done", output_index=index, item=item)

    # ----------------------------------------------------------------------- events
    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number(), **fields}
        return encode_event(encode(data), kind)

    def _number(self) -> int:
        number = self._sequence
        self._sequence += 1
        return number
