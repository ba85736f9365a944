"""The content blocks of Anthropic messages, parsed and built, whole and streamed.

Clients send back what they were sent: `build_block` followed by `fold_message` gives the same
message again (but for white space in a tool's input).
"""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Raw

from tugline.chat.dialects import base, decoding
from tugline.chat.model_call import (
    ContentBuilder,
    Piece,
    ReasoningDelta,
    Response,
    TextDelta,
    Usage,
    add_turn,
    join_pieces,
)
from tugline.errors import RequestError, TuglineError
from tugline.types import Finish, Message, Role, ToolCall
from tugline.web.sse import encode_event

_BILLING = "x-anthropic-billing-header:"
_UNPARSED = "__unparsedToolInput"
"""Claude Code's own form for an input that is no JSON object; used both ways."""
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'


# --------------------------------------------------------------------------- whole responses
def build_message(response_id: str, model: str, usage: Usage) -> dict[str, Any]:
    """A ``message`` object before it has content or an end."""
    return {
        "id": f"msg_{response_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": build_usage(usage),
    }


def build_block(piece: Piece) -> dict[str, Any]:
    """A block of a response: text, thinking or a tool use."""
    if isinstance(piece, TextDelta):
        return {"type": "text", "text": piece.text}
    if isinstance(piece, ReasoningDelta):
        signature = _sign(hashlib.blake2b(piece.text.encode()))
        return {"type": "thinking", "thinking": piece.text, "signature": signature}
    arguments = Raw(_build_input(piece))
    return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": arguments}


def build_usage(usage: Usage) -> dict[str, Any]:
    """Counts whose sum is the true prompt: reused tokens count as input, not as a cache read.

    Clients add the three up, so nothing is gained by reporting our reuse as Anthropic's cache.
    """
    return {
        "input_tokens": usage.prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": usage.sampled,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def build_end(response: Response) -> dict[str, str | None]:
    """Why the response ended, in Anthropic's words."""
    reason = "tool_use" if response.message.tool_calls else "end_turn"
    if response.finish is not Finish.STOP:
        reason = "max_tokens"
    elif response.stop is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": response.stop}


def _sign(digest: hashlib.blake2b) -> str:
    """A thinking block's signature: clients demand one and send it back; nobody checks it."""
    return base64.b64encode(digest.digest()).decode()


def _build_input(call: ToolCall) -> bytes:
    """The arguments as the JSON object that clients rely on, in the model's own spelling."""
    arguments = call.arguments.strip() or "{}"
    if decoding.decode_object(arguments) is not None:
        return arguments.encode()
    return base.encode({_UNPARSED: {"raw": call.arguments, "len": len(call.arguments)}})


def _parse_input(value: dict[str, Any]) -> str:
    unparsed = value.get(_UNPARSED)
    if isinstance(unparsed, dict) and isinstance(unparsed.get("raw"), str):
        return str(unparsed["raw"])
    return base.encode(value).decode()


# --------------------------------------------------------------------------- streamed responses
class MessageStream(base.Stream):
    """One response as server-sent events: numbered blocks between start and stop.

    Claude Code merges turns whose ``message.id`` is missing or repeated, and asks again without
    streaming when a start event is missing; so all of the original's events are there (I4).
    """

    def __post_init__(self) -> None:
        self._index = -1
        self._kind: type[Piece] | None = None
        """Of the open block."""
        self._digest = hashlib.blake2b()
        self._started = False

    def start(self, usage: Usage) -> bytes:
        """``message_start`` with the true prompt count, and a ping as in the original."""
        self._started = True
        message = build_message(self.response_id, self.request.model, usage)
        return _event("message_start", {"message": message}) + _PING

    def add(self, piece: Piece, index: int = 0) -> bytes:
        """A delta, with the start of its block where it is the first; a tool use is one block."""
        if isinstance(piece, ToolCall):
            block = {**build_block(piece), "input": {}}
            delta = {"type": "input_json_delta", "partial_json": _build_input(piece).decode()}
            return self._open(ToolCall, block) + self._delta(delta) + self._close()
        if isinstance(piece, TextDelta):
            begin = self._open(TextDelta, {"type": "text", "text": ""})
            return begin + self._delta({"type": "text_delta", "text": piece.text})
        if not self.request.reasoning:
            return b""
        blank = {"type": "thinking", "thinking": "", "signature": ""}
        begin = self._open(ReasoningDelta, blank)
        self._digest.update(piece.text.encode())
        return begin + self._delta({"type": "thinking_delta", "thinking": piece.text})

    def finish(self, responses: Sequence[Response]) -> bytes:
        """The stop reason with the final counts, and ``message_stop``."""
        response = responses[0]
        fields = {"delta": build_end(response), "usage": build_usage(response.usage)}
        end = _event("message_delta", fields)
        return self._close() + end + _event("message_stop", {})

    def fail(self, error: TuglineError) -> bytes:
        """An ``error`` event."""
        return encode_event(base.encode(self.dialect.build_error(error)), "error")

    def keep_alive(self) -> bytes:
        """A ping; a comment before ``message_start``, which must be the first event."""
        return _PING if self._started else super().keep_alive()

    def _open(self, kind: type[Piece], block: dict[str, Any]) -> bytes:
        if self._kind is kind:
            return b""
        closed = self._close()
        self._index, self._kind = self._index + 1, kind
        start = {"index": self._index, "content_block": block}
        return closed + _event("content_block_start", start)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        signature = b""
        if self._kind is ReasoningDelta:
            signature = self._delta({"type": "signature_delta", "signature": _sign(self._digest)})
            self._digest = hashlib.blake2b()
        self._kind = None
        return signature + _event("content_block_stop", {"index": self._index})


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return encode_event(base.encode({"type": kind, **data}), kind)


# --------------------------------------------------------------------------- requests
def fold_message(messages: list[Message], item: Any, index: int) -> None:
    """Fold ``[system, *messages]`` into neutral messages; see `ParseCache.fold`."""
    if index == 0:
        text = "" if item is None else _parse_system(item, "system")
        messages.extend([Message(Role.SYSTEM, text)] if text else [])
        return
    where = f"messages[{index - 1}]"
    role, place = decoding.require(item, "role", str, where), f"{where}.content"
    content = item.get("content")
    if role == "system":
        messages.append(Message(Role.SYSTEM, _parse_system(content, place)))
    elif role == "user":
        messages.extend(_parse_user(_list_blocks(content, place), place))
    elif role == "assistant":
        pieces = decoding.parse_list(_list_blocks(content, place), place, _parse_piece)
        add_turn(messages, join_pieces(pieces) or Message(Role.ASSISTANT))
    else:
        raise decoding.invalid(role, f"{where}.role", "must be user, assistant or system")


def _list_blocks(content: Any, where: str) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return content
    raise decoding.invalid(content, where, "must be text or a list of blocks")


def _parse_system(content: Any, where: str) -> str:
    """A system prompt without Claude Code's billing block, which differs in every request."""
    builder = ContentBuilder()
    for i, block in enumerate(_list_blocks(content, where)):
        place = f"{where}[{i}]"
        if decoding.require(block, "type", str, place) != "text":
            raise _unknown(block, place, "only text blocks stand in a system prompt")
        text = decoding.require(block, "text", str, place)
        if not text.startswith(_BILLING):
            builder.add_text(text)
    return builder.text


def _parse_user(blocks: list[Any], where: str) -> Iterator[Message]:
    """Tool results and the content between them, in the order given."""
    builder = ContentBuilder()
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        if decoding.require(block, "type", str, place) == "tool_result":
            if not builder.empty:
                yield builder.build(Role.USER)
                builder = ContentBuilder()
            yield _parse_result(block, place)
        else:
            _add_block(builder, block, place)
    if not builder.empty or not blocks:
        yield builder.build(Role.USER)


def _parse_result(block: dict[str, Any], where: str) -> Message:
    builder = ContentBuilder()
    place = f"{where}.content"
    for i, part in enumerate(_list_blocks(block.get("content") or [], place)):
        _add_block(builder, part, f"{place}[{i}]")
    call_id = decoding.require(block, "tool_use_id", str, where)
    return builder.build(Role.TOOL, call_id, failed=block.get("is_error") is True)


def _add_block(builder: ContentBuilder, block: Any, where: str) -> None:
    """Add a block of a user, or of a tool result."""
    kind = decoding.require(block, "type", str, where)
    source = block.get("source")
    if kind == "text":
        builder.add_text(decoding.require(block, "text", str, where))
    elif kind == "image":
        builder.add_image(_parse_image(block, where))
    elif kind == "tool_reference":  # Claude Code's search for tools it did not declare at first
        builder.add_text(f"Tool found: {decoding.require(block, 'tool_name', str, where)}")
    elif kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        builder.add_text(decoding.require(source, "data", str, f"{where}.source"))
    else:
        raise _unknown(block, where, "text, images and plain-text documents are understood")


def _parse_image(block: Any, where: str) -> str:
    source, where = decoding.require(block, "source", dict, where), f"{where}.source"
    kind = decoding.require(source, "type", str, where)
    if kind == "base64":
        media_type = decoding.require(source, "media_type", str, where)
        return f"data:{media_type};base64,{decoding.require(source, 'data', str, where)}"
    if kind == "url":
        return decoding.require(source, "url", str, where)
    raise decoding.invalid(kind, f"{where}.type", "must be base64 or url")


def _parse_piece(block: Any, where: str) -> Piece:
    """A block of an assistant."""
    kind = decoding.require(block, "type", str, where)
    if kind == "text":
        return TextDelta(decoding.require(block, "text", str, where))
    if kind == "thinking":
        return ReasoningDelta(decoding.require(block, "thinking", str, where))
    if kind != "tool_use":
        raise _unknown(block, where, "text, thinking and tool_use are what was answered here")
    arguments = _parse_input(decoding.require(block, "input", dict, where))
    name = decoding.require(block, "name", str, where)
    return ToolCall(decoding.require(block, "id", str, where), name, arguments)


def _unknown(block: dict[str, Any], where: str, advice: str) -> RequestError:
    msg = f"{where} is a block of type {block.get('type')!r}, which cannot be honoured; {advice}"
    return RequestError(msg, param=where)
