"""The content blocks of Anthropic messages, read and written.

Both directions stand side by side because a client sends back what it was sent: `answer_blocks`
followed by `step` gives the same message again (but for blank space in a tool's input).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw

from tugline.chat.dialects.reading import Prose, need
from tugline.errors import RequestError
from tugline.types import Message, Role, ToolCall

_BILLING = "x-anthropic-billing-header:"
_UNPARSED = "__unparsedToolInput"
"""Claude Code's own form for an input that is no JSON object; used both ways, so it heals."""


# --------------------------------------------------------------------------- written
def answer_blocks(message: Message, *, thinking: bool) -> list[dict[str, Any]]:
    """The blocks of one answer: thinking where it is wanted, text, tool uses."""
    blocks: list[dict[str, Any]] = []
    if message.reasoning and thinking:
        signature = signed(hashlib.blake2b(message.reasoning.encode()))
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": signature})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    return blocks + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": Raw(tool_input(call))}
        for call in message.tool_calls
    ]


def signed(digest: hashlib.blake2b) -> str:
    """A thinking block's signature: clients demand one and send it back; nobody checks it."""
    return base64.b64encode(digest.digest()).decode()


def tool_input(call: ToolCall) -> bytes:
    """The arguments as the JSON object that clients rely on, in the model's own spelling."""
    arguments = call.arguments.strip() or "{}"
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return arguments.encode()
    except (ValueError, RecursionError):
        pass
    unparsed = {"raw": call.arguments, "len": len(call.arguments)}
    return msgspec.json.encode({_UNPARSED: unparsed})


def _arguments(value: dict[str, Any]) -> str:
    unparsed = value.get(_UNPARSED)
    if isinstance(unparsed, dict) and isinstance(unparsed.get("raw"), str):
        return str(unparsed["raw"])
    return msgspec.json.encode(value).decode()


# --------------------------------------------------------------------------- read
def step(messages: list[Message], item: Any, index: int) -> None:
    """Fold ``[system, *messages]`` into neutral messages; see `ParseCache.fold`."""
    if index == 0:
        text = "" if item is None else _instructions(item, "system")
        messages.extend([Message(Role.SYSTEM, text)] if text else [])
        return
    where = f"messages[{index - 1}]"
    role = need(item, "role", str, where)
    where, content = f"{where}.content", item.get("content")
    if role == "system":
        messages.append(Message(Role.SYSTEM, _instructions(content, where)))
    elif role == "user":
        messages.extend(_user(_blocks(content, where), where))
    elif role == "assistant":
        turn = _assistant(_blocks(content, where), where)
        if messages and messages[-1].role is Role.ASSISTANT:
            messages[-1] = _merged(messages[-1], turn)
        else:
            messages.append(turn)
    else:
        msg = f"messages[{index - 1}].role={role!r} must be user, assistant or system"
        raise RequestError(msg, param=f"messages[{index - 1}].role")


def _blocks(content: Any, where: str) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return content
    msg = f"{where}={content!r:.60} must be text or a list of blocks"
    raise RequestError(msg, param=where)


def _instructions(content: Any, where: str) -> str:
    """A system prompt without Claude Code's billing block, which differs in every request."""
    prose = Prose()
    for i, block in enumerate(_blocks(content, where)):
        place = f"{where}[{i}]"
        if need(block, "type", str, place) != "text":
            raise _unknown(block, place, "only text blocks stand in a system prompt")
        text = need(block, "text", str, place)
        if not text.startswith(_BILLING):
            prose.add(text)
    return prose.text


def _user(blocks: list[Any], where: str) -> Iterator[Message]:
    """Tool results and what stands between them, in the order given."""
    prose = Prose()
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        if need(block, "type", str, place) == "tool_result":
            if not prose.empty:
                yield Message(Role.USER, prose.text, images=tuple(prose.images))
                prose = Prose()
            yield _result(block, place)
        else:
            _read(prose, block, place)
    if not prose.empty or not blocks:
        yield Message(Role.USER, prose.text, images=tuple(prose.images))


def _result(block: dict[str, Any], where: str) -> Message:
    prose = Prose()
    place = f"{where}.content"
    for i, part in enumerate(_blocks(block.get("content") or [], place)):
        _read(prose, part, f"{place}[{i}]")
    return Message(
        Role.TOOL,
        prose.text,
        tool_call_id=need(block, "tool_use_id", str, where),
        images=tuple(prose.images),
        failed=block.get("is_error") is True,
    )


def _read(prose: Prose, block: Any, where: str) -> None:
    """Add what a user, or a tool, says or shows."""
    kind = need(block, "type", str, where)
    if kind == "text":
        prose.add(need(block, "text", str, where))
    elif kind == "image":
        prose.picture(_picture(need(block, "source", dict, where), f"{where}.source"))
    elif kind == "tool_reference":  # Claude Code's search for tools it did not declare at first
        prose.add(f"Tool found: {need(block, 'tool_name', str, where)}")
    elif kind == "document" and _source(block) == "text":
        prose.add(need(block["source"], "data", str, f"{where}.source"))
    else:
        raise _unknown(block, where, "text, images and plain-text documents are understood")


def _picture(source: dict[str, Any], where: str) -> str:
    kind = need(source, "type", str, where)
    if kind == "base64":
        media_type = need(source, "media_type", str, where)
        return f"data:{media_type};base64,{need(source, 'data', str, where)}"
    if kind == "url":
        return need(source, "url", str, where)
    msg = f"{where}.type={kind!r} must be base64 or url"
    raise RequestError(msg, param=f"{where}.type")


def _assistant(blocks: list[Any], where: str) -> Message:
    text: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        kind = need(block, "type", str, place)
        if kind == "text":
            text.append(need(block, "text", str, place))
        elif kind == "thinking":
            thoughts.append(need(block, "thinking", str, place))
        elif kind == "tool_use":
            given = need(block, "input", dict, place)
            name = need(block, "name", str, place)
            calls.append(ToolCall(need(block, "id", str, place), name, _arguments(given)))
        else:
            raise _unknown(block, place, "text, thinking and tool_use are what was answered here")
    reasoning = "".join(thoughts) or None
    return Message(Role.ASSISTANT, "".join(text), tuple(calls), reasoning=reasoning)


def _merged(first: Message, second: Message) -> Message:
    """Successive assistant messages are one turn, as in the original."""
    return Message(
        Role.ASSISTANT,
        first.content + second.content,
        first.tool_calls + second.tool_calls,
        reasoning=(first.reasoning or "") + (second.reasoning or "") or None,
    )


def _source(block: dict[str, Any]) -> Any:
    source = block.get("source")
    return source.get("type") if isinstance(source, dict) else None


def _unknown(block: dict[str, Any], where: str, right: str) -> RequestError:
    msg = f"{where} is a block of type {block.get('type')!r}, which cannot be honoured; {right}"
    return RequestError(msg, param=where)
