"""Parse and build the content blocks of Anthropic messages, whole and streamed.

Clients echo blocks as received: `fold_message` of the result of `build_block` gives the same
message (except for white space in a tool's input).
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
"""Claude Code's key for an input that is not a JSON object, used in both directions."""
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'


# --------------------------------------------------------------------------- whole responses
def build_message(response_id: str, model: str, usage: Usage) -> dict[str, Any]:
    """Build a ``message`` object without content and stop reason."""
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
    """Build a block of a response: text, thinking or a tool use."""
    if isinstance(piece, TextDelta):
        return {"type": "text", "text": piece.text}
    if isinstance(piece, ReasoningDelta):
        signature = _sign(hashlib.blake2b(piece.text.encode()))
        return {"type": "thinking", "thinking": piece.text, "signature": signature}
    arguments = Raw(_build_input(piece))
    return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": arguments}


def build_usage(usage: Usage) -> dict[str, Any]:
    """Build token counts; reused tokens count as input, not as a cache read.

    Clients add up the three input counts, so that their sum must be the prompt's length.
    """
    return {
        "input_tokens": usage.prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": usage.sampled,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def build_end(response: Response) -> dict[str, str | None]:
    """Build Anthropic's stop reason and stop sequence."""
    reason = "tool_use" if response.message.tool_calls else "end_turn"
    if response.finish is not Finish.STOP:
        reason = "max_tokens"
    elif response.stop is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": response.stop}


def _sign(digest: hashlib.blake2b) -> str:
    """Encode a thinking block's signature; clients require and echo one, which is not checked."""
    return base64.b64encode(digest.digest()).decode()


def _build_input(call: ToolCall) -> bytes:
    """Return the arguments as a JSON object, as clients require, in the model's formatting."""
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
    """Encoder of a response as server-sent events: numbered blocks between start and stop.

    Claude Code merges turns whose ``message.id`` is missing or repeated, and retries without
    streaming if a start event is missing; so all events of the original API are sent (I4).
    """

    def __post_init__(self) -> None:
        self._index = -1
        self._kind: type[Piece] | None = None
        """Kind of the open block."""
        self._digest = hashlib.blake2b()
        self._started = False

    def start(self, usage: Usage) -> bytes:
        """Encode ``message_start`` with the exact prompt count, and a ping as in the original."""
        self._started = True
        message = build_message(self.response_id, self.request.model, usage)
        return _event("message_start", {"message": message}) + _PING

    def add(self, piece: Piece, index: int = 0) -> bytes:
        """Encode a delta, after a block start if the kind changes; a tool use is a whole block."""
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
        """Encode the stop reason with the final counts, and ``message_stop``."""
        response = responses[0]
        fields = {"delta": build_end(response), "usage": build_usage(response.usage)}
        end = _event("message_delta", fields)
        return self._close() + end + _event("message_stop", {})

    def fail(self, error: TuglineError) -> bytes:
        """Encode an ``error`` event."""
        return encode_event(base.encode(self.dialect.build_error(error)), "error")

    def keep_alive(self) -> bytes:
        """Return a ping, or a comment before ``message_start``, which must be the first event."""
        return _PING if self._started else super().keep_alive()

    def _open(self, kind: type[Piece], block: dict[str, Any]) -> bytes:
        if self._kind is kind:
            return b""
        closed = self._close()
        self._index += 1
        self._kind = kind
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
    role = decoding.require(item, "role", str, where)
    path = f"{where}.content"
    content = item.get("content")
    if role == "system":
        messages.append(Message(Role.SYSTEM, _parse_system(content, path)))
    elif role == "user":
        messages.extend(_parse_user(_list_blocks(content, path), path))
    elif role == "assistant":
        pieces = decoding.parse_list(_list_blocks(content, path), path, _parse_piece)
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
    """Parse a system prompt, without Claude Code's billing block, which always differs."""
    builder = ContentBuilder()
    for i, block in enumerate(_list_blocks(content, where)):
        path = f"{where}[{i}]"
        if decoding.require(block, "type", str, path) != "text":
            raise _unknown(block, path, "a system prompt may hold only text blocks")
        text = decoding.require(block, "text", str, path)
        if not text.startswith(_BILLING):
            builder.add_text(text)
    return builder.text


def _parse_user(blocks: list[Any], where: str) -> Iterator[Message]:
    """Parse tool results and the content between them, in the given order."""
    builder = ContentBuilder()
    for i, block in enumerate(blocks):
        path = f"{where}[{i}]"
        if decoding.require(block, "type", str, path) == "tool_result":
            if not builder.empty:
                yield builder.build(Role.USER)
                builder = ContentBuilder()
            yield _parse_result(block, path)
        else:
            _add_block(builder, block, path)
    if not builder.empty or not blocks:
        yield builder.build(Role.USER)


def _parse_result(block: dict[str, Any], where: str) -> Message:
    builder = ContentBuilder()
    path = f"{where}.content"
    for i, part in enumerate(_list_blocks(block.get("content") or [], path)):
        _add_block(builder, part, f"{path}[{i}]")
    call_id = decoding.require(block, "tool_use_id", str, where)
    return builder.build(Role.TOOL, call_id, failed=block.get("is_error") is True)


def _add_block(builder: ContentBuilder, block: Any, where: str) -> None:
    """Add a block of a user message or a tool result."""
    kind = decoding.require(block, "type", str, where)
    source = block.get("source")
    if kind == "text":
        builder.add_text(decoding.require(block, "text", str, where))
    elif kind == "image":
        builder.add_image(_parse_image(block, where))
    elif kind == "tool_reference":  # result of Claude Code's search for deferred tools
        builder.add_text(f"Tool found: {decoding.require(block, 'tool_name', str, where)}")
    elif kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        builder.add_text(decoding.require(source, "data", str, f"{where}.source"))
    else:
        raise _unknown(block, where, "use text, images and plain-text documents")


def _parse_image(block: Any, where: str) -> str:
    source = decoding.require(block, "source", dict, where)
    where = f"{where}.source"
    kind = decoding.require(source, "type", str, where)
    if kind == "base64":
        media_type = decoding.require(source, "media_type", str, where)
        return f"data:{media_type};base64,{decoding.require(source, 'data', str, where)}"
    if kind == "url":
        return decoding.require(source, "url", str, where)
    raise decoding.invalid(kind, f"{where}.type", "must be base64 or url")


def _parse_piece(block: Any, where: str) -> Piece:
    """Parse a block of an assistant message."""
    kind = decoding.require(block, "type", str, where)
    if kind == "text":
        return TextDelta(decoding.require(block, "text", str, where))
    if kind == "thinking":
        return ReasoningDelta(decoding.require(block, "thinking", str, where))
    if kind != "tool_use":
        raise _unknown(
            block, where, "an assistant message consists of text, thinking and tool_use blocks"
        )
    arguments = _parse_input(decoding.require(block, "input", dict, where))
    name = decoding.require(block, "name", str, where)
    return ToolCall(decoding.require(block, "id", str, where), name, arguments)


def _unknown(block: dict[str, Any], where: str, advice: str) -> RequestError:
    msg = f"{where} is a block of type {block.get('type')!r}, which is not supported; {advice}"
    return RequestError(msg, param=where)
