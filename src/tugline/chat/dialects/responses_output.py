"""Build output items and response objects of the Responses API, whole and streamed.

Item ids contain the response's id and the item's index, so that an echo identifies its turn. A call
is encoded in the form of its tool's declaration if that preserves the arguments that the model
wrote (up to JSON spacing); otherwise as a plain function call, which the client answers with an
error for the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tugline.chat.dialects import openai
from tugline.chat.dialects.base import Stream, encode
from tugline.chat.dialects.decoding import decode_object
from tugline.chat.dialects.responses_input import SHELL_FIELDS, seal
from tugline.chat.model_call import (
    Piece,
    ReasoningDelta,
    Request,
    Response,
    TextDelta,
    Usage,
    split_message,
)
from tugline.errors import TuglineError
from tugline.types import Finish, ToolCall, ToolKind
from tugline.web.sse import encode_event

Item = dict[str, Any]
"""Output item, ready to be encoded."""


class Echo(msgspec.Struct, frozen=True, gc=False):
    """Part of a request that its response needs."""

    fields: msgspec.Raw = msgspec.Raw(b"{}")
    """JSON object of the fields that the response repeats."""
    sealed: bool = False
    """Whether the client requests reasoning as ``encrypted_content`` as well."""
    compact: list[msgspec.Raw] | None = None
    """User messages that the reply of ``/responses/compact`` repeats; else None."""


class ResponsesRequest(Request, frozen=True, kw_only=True, gc=False):
    """A request of this API."""

    echo: Echo = Echo()
    stored_from: int | None = None
    """Index of the first message stored under the response's id; None if nothing is stored."""


# --------------------------------------------------------------------------- parts of an item
def _build_part(kind: type[Piece], text: str) -> Item:
    if kind is TextDelta:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "summary_text", "text": text}


def _find_status(response: Response) -> str:
    """Return the status of a response, and of its last item."""
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
def build_compaction(response: Response, messages: Sequence[msgspec.Raw]) -> bytes:
    """Encode the reply of ``/responses/compact``: the user's messages and the sealed summary."""
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
    """The item that deltas extend."""

    kind: type[TextDelta | ReasoningDelta]
    location: dict[str, Any]
    """Fields that identify the item and part in an event."""
    head: bytes
    """Delta event up to its text."""
    texts: list[str] = field(default_factory=list)


_PART_EVENTS: dict[type[Piece], tuple[str, str, str, Item]] = {
    TextDelta: ("content_part", "output_text", "content_index", {"logprobs": []}),
    ReasoningDelta: ("reasoning_summary_part", "reasoning_summary_text", "summary_index", {}),
}
"""Event names of a part and of its text, the part's index field, extra fields of text events."""
_CALL_EVENTS = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
"""The streamed field and the prefix of its events, by type of item."""


class ResponseStream(Stream):
    """Encoder of a response as ordered, numbered events.

    One item is open at a time; a call is sent whole. Fields shared by all deltas of an item are
    encoded once.
    """

    request: ResponsesRequest

    def __post_init__(self) -> None:
        self._echo = self.request.echo
        self._tools = {tool.name: tool for tool in self.request.tools}
        self._output: list[Item] = []
        self._sequence = 0
        self._open: _Open | None = None

    def start(self, usage: Usage) -> bytes:
        """Encode ``response.created`` and ``response.in_progress``."""
        response = self._build("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def add(self, piece: Piece, index: int = 0) -> bytes:
        """Encode deltas of the open item or a new one; a call closes the open item."""
        if isinstance(piece, ToolCall):
            return self._close_item("completed") + self._add_call(piece)
        start = b""
        if self._open is None or self._open.kind is not type(piece):
            start = self._close_item("completed") + self._open_item(type(piece))
        return start + self._delta(piece.text)

    def finish(self, responses: Sequence[Response]) -> bytes:
        """Encode the end of the open item, and the whole response, with a message or a call."""
        last = self._end_items(responses[0])
        kind = f"response.{_find_status(responses[0])}"
        return last + self._event(kind, response=self._build_end(responses[0]))

    def _end_items(self, response: Response) -> bytes:
        last = b""
        has_text = self._open is not None and self._open.kind is TextDelta
        if not has_text and all(item["type"] == "reasoning" for item in self._output):
            last = self._close_item("completed") + self._open_item(TextDelta)
        return last + self._close_item(_find_status(response))

    def fail(self, error: TuglineError) -> bytes:
        """Encode an ``error`` event, for clients that need one, and the failed response."""
        fields = self.dialect.build_error(error)["error"]
        event = {name: fields[name] for name in ("code", "message", "param")}
        summary = {name: fields[name] for name in ("code", "message")}
        failed = self._build("failed", error=summary)
        return self._event("error", **event) + self._event("response.failed", response=failed)

    # ----------------------------------------------------------------------- response objects
    def build_whole(self, response: Response) -> bytes:
        """Encode the response object of an answer that was not streamed."""
        for piece in split_message(response.message):
            self.add(piece)
        self._end_items(response)
        return bytes(self._build_end(response))

    def _build(self, status: str, **fields: Any) -> msgspec.Raw:
        """Encode a ``response`` object: its own fields, then those repeated from the request."""
        whole: Item = {
            "object": "response",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "id": f"resp_{self.response_id}",
            "created_at": self.created,
            "model": self.request.model,
            "status": status,
            "output": self._output,
            **fields,
        }
        return msgspec.Raw(encode(whole)[:-1] + b"," + bytes(self._echo.fields)[1:])

    def _build_end(self, response: Response) -> msgspec.Raw:
        status = _find_status(response)
        details = None if status == "completed" else {"reason": "max_output_tokens"}
        usage = _build_usage(response.usage)
        return self._build(status, model=response.model, incomplete_details=details, usage=usage)

    # ----------------------------------------------------------------------- items
    def _build_item(self, piece: TextDelta | ReasoningDelta, status: str = "completed") -> Item:
        """Build the next item, finished; `status` applies to a message."""
        part = _build_part(type(piece), piece.text)
        if isinstance(piece, TextDelta):
            head = {"id": self._item_id("msg"), "type": "message", "status": status}
            return {**head, "role": "assistant", "content": [part]}
        item: Item = {"id": self._item_id("rs"), "type": "reasoning", "summary": [part]}
        return {**item, "encrypted_content": seal(piece.text)} if self._echo.sealed else item

    def _build_call(self, call: ToolCall) -> Item:
        """Build a call in the form of its tool's declaration."""
        tool = self._tools.get(call.name)
        kind = tool.kind if tool is not None else ToolKind.FUNCTION
        item: Item = {"status": "completed", "call_id": call.id}
        if kind is ToolKind.LOCAL_SHELL and (action := _build_action(call)) is not None:
            shell = {"type": "local_shell_call", "id": self._item_id("lsh"), "action": action}
            return item | shell
        item["name"] = call.name
        if tool is not None and tool.namespace is not None:
            item["name"] = call.name.removeprefix(f"{tool.namespace}__")
            item["namespace"] = tool.namespace
        text = openai.unwrap_input(call) if kind is ToolKind.CUSTOM else None
        if text is not None:
            return {**item, "type": "custom_tool_call", "id": self._item_id("ctc"), "input": text}
        item_id = self._item_id("fc")
        return {**item, "type": "function_call", "id": item_id, "arguments": call.arguments}

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self.response_id}_{len(self._output)}"

    def _open_item(self, kind: type[TextDelta | ReasoningDelta]) -> bytes:
        part, text, index_field, extra = _PART_EVENTS[kind]
        index = len(self._output)
        content = "content" if kind is TextDelta else "summary"
        item = {**self._build_item(kind("")), content: [], "status": "in_progress"}
        location = {"item_id": item["id"], "output_index": index, index_field: 0}
        delta = f"response.{text}.delta"
        fixed = encode({"type": delta, **location, **extra})[:-1]
        self._open = _Open(kind, location, b"event: %b\ndata: %b" % (delta.encode(), fixed))
        added = self._event("response.output_item.added", output_index=index, item=item)
        return added + self._event(f"response.{part}.added", **location, part=_build_part(kind, ""))

    def _delta(self, text: str) -> bytes:
        if self._open is None:
            return b""
        self._open.texts.append(text)
        number = self._number()
        return b'%b,"delta":%b,"sequence_number":%d}\n\n' % (self._open.head, encode(text), number)

    def _close_item(self, status: str) -> bytes:
        if self._open is None:
            return b""
        closed = self._open
        self._open = None
        part, name, _, extra = _PART_EVENTS[closed.kind]
        text = "".join(closed.texts)
        item = self._build_item(closed.kind(text), status)
        done = self._event(f"response.{name}.done", **closed.location, text=text, **extra)
        built = _build_part(closed.kind, text)
        done += self._event(f"response.{part}.done", **closed.location, part=built)
        return done + self._finish_item(item)

    def _add_call(self, call: ToolCall) -> bytes:
        index = len(self._output)
        item = self._build_call(call)
        name, kind = _CALL_EVENTS.get(item["type"], ("", ""))
        started = {**item, "status": "in_progress", **({name: ""} if name else {})}
        events = self._event("response.output_item.added", output_index=index, item=started)
        if name:
            location = {"item_id": item["id"], "output_index": index}
            events += self._event(f"{kind}.delta", **location, delta=item[name])
            events += self._event(f"{kind}.done", **location, **{name: item[name]})
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
