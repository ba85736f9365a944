"""OpenAI Chat on top of token ids: render the request, read the answer, word the deltas.

Pure functions and one small state machine; no I/O. The `renderers` library knows the model's
format. A streamed answer, put together again, is the same message as the unstreamed one: text goes
out as soon as it is certain, a tool call when it closes, and the end brings whatever is left.

Invariant I1: the ids are those the engine sampled, beside the text and never derived from it.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

import numpy as np
from renderers import Message, ParsedToolCall, Renderer, Tokenizer, ToolCallParseStatus, ToolSpec

from tugline.errors import RequestError
from tugline.inference.wire import ChatBody, ChatMessage, ids_array
from tugline.types import Ids

_ROLES = {"developer": "system"}
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Chat:
    """A renderer and its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, renderer: Renderer) -> None:
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.stop_ids = tuple(renderer.get_stop_token_ids())

    def prompt(self, body: ChatBody) -> Ids:
        """Prompt ids of a request. Raises `RequestError` for what the renderer cannot render."""
        if not body.messages:
            msg = "messages=[] must hold at least one message"
            raise RequestError(msg, param="messages")
        messages = [_message(one, index) for index, one in enumerate(body.messages)]
        return ids_array(
            self.renderer.render_ids(messages, tools=tool_specs(body), add_generation_prompt=True)
        )

    def message(self, prompt: Ids, sampled: Ids, body: ChatBody) -> dict[str, Any]:
        """The assistant message that `sampled` says; a broken tool call stays in the content."""
        tools = tool_specs(body)
        parsed = self.renderer.parse_response(
            sampled.tolist(), tools=tools, prompt_ids=prompt.tolist()
        )
        good = [call for call in parsed.tool_calls if call.status == ToolCallParseStatus.OK]
        broken = [call.raw for call in parsed.tool_calls if call.status != ToolCallParseStatus.OK]
        wanted = tools is not None
        if not wanted:
            good, broken = [], [call.raw for call in parsed.tool_calls]
        content = "\n".join(filter(None, [parsed.content, *map("<tool_call>\n{}".format, broken)]))
        message: dict[str, Any] = {"role": "assistant", "content": content or None}
        if parsed.reasoning_content:
            message["reasoning"] = parsed.reasoning_content.strip()
        if good:
            message["tool_calls"] = [_call(call) for call in good]
        return message


class Deltas:
    """Turns sampled ids into the deltas of one streamed message."""

    def __init__(self, chat: Chat, prompt: Ids, body: ChatBody) -> None:
        self._chat, self._prompt, self._body = chat, prompt, body
        convert = chat.tokenizer.convert_tokens_to_ids
        self._marks = {
            mark: convert(mark) for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>")
        }
        self._ids: list[int] = []
        opened = self._marks["<think>"] in prompt[-2:].tolist()
        self._channel: str | None = "reasoning" if opened else "content"
        """Where text goes; None while it cannot be known."""
        self._draft = False
        """A tool call within reasoning: real only if the reasoning is never closed."""
        self._pending: list[int] = []
        """Ids of the channel's text that were not decoded yet."""
        self._space = ""
        self._sent = {"content": "", "reasoning": ""}
        self._calls: list[str] = []
        """Ids of tool calls that were sent."""

    def push(self, ids: Ids, *, last: bool) -> dict[str, Any]:
        """The delta for these ids, empty when nothing is certain yet."""
        delta: dict[str, Any] = {}
        for token in ids.tolist():
            self._ids.append(token)
            self._one(token, delta)
        self._flush(delta)
        if last:
            self._settle(delta)
        return delta

    def _one(self, token: int, delta: dict[str, Any]) -> None:
        marks = self._marks
        if token in self._chat.stop_ids:
            return
        if token == marks["<think>"] and not self._sent["content"]:
            self._turn("reasoning", delta)
        elif token == marks["</think>"]:
            self._turn("content", delta)
            self._draft = False
        elif token == marks["<tool_call>"]:
            self._draft = self._draft or self._channel == "reasoning"
            self._turn(None, delta)
        elif token == marks["</tool_call>"] and not self._draft:
            self._send_calls(self._now(), delta)
        elif self._channel:
            self._pending.append(token)

    def _turn(self, channel: str | None, delta: dict[str, Any]) -> None:
        self._flush(delta)
        self._pending.clear()
        self._space, self._channel = "", channel

    def _flush(self, delta: dict[str, Any]) -> None:
        """Send decoded text, but for a half character and for space that may be the last."""
        if not self._channel or not self._pending:
            return
        text = self._chat.tokenizer.decode(self._pending, skip_special_tokens=False)
        if text.endswith(_INCOMPLETE):
            return
        self._pending.clear()
        text = self._space + text
        text = text if self._sent[self._channel] else text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._send(self._channel, kept, delta)

    def _now(self) -> dict[str, Any]:
        return self._chat.message(self._prompt, np.array(self._ids, np.int32), self._body)

    def _settle(self, delta: dict[str, Any]) -> None:
        """Send what the whole answer says beyond what was sent."""
        message = self._now()
        for channel, sent in self._sent.items():
            whole = message.get(channel) or ""
            if whole.startswith(sent):
                self._send(channel, whole[len(sent) :], delta)
        self._send_calls(message, delta)

    def _send(self, channel: str, text: str, delta: dict[str, Any]) -> None:
        if text:
            self._sent[channel] += text
            delta[channel] = delta.get(channel, "") + text

    def _send_calls(self, message: dict[str, Any], delta: dict[str, Any]) -> None:
        calls = message.get("tool_calls", [])
        for index, call in enumerate(calls[len(self._calls) :], len(self._calls)):
            self._calls.append(call["id"])
            delta.setdefault("tool_calls", []).append({"index": index, **call})

    @property
    def called(self) -> bool:
        """Whether a tool call was sent."""
        return bool(self._calls)


def tool_specs(body: ChatBody) -> list[ToolSpec] | None:
    """The tools that the model is told of; None when the request has none or forbids them."""
    if not body.tools or body.tool_choice == "none":
        return None
    return [
        {
            "name": tool.function.name,
            "description": tool.function.description,
            "parameters": tool.function.parameters,
        }
        for tool in body.tools
    ]


def _message(message: ChatMessage, index: int) -> Message:
    content = message.content or ""
    if not isinstance(content, str):
        for part in content:
            if part.type != "text":
                msg = f"messages[{index}].content type={part.type!r} is not served, only 'text'"
                raise RequestError(msg, param="messages")
        content = "".join(part.text for part in content)
    role = _ROLES.get(message.role, message.role)
    if role not in {"system", "user", "assistant", "tool"}:
        msg = f"messages[{index}].role={role!r} must be system, user, assistant or tool"
        raise RequestError(msg, param="messages")
    rendered: Message = {"role": role, "content": content}
    if reasoning := message.reasoning or message.reasoning_content:
        rendered["reasoning_content"] = reasoning
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        rendered["tool_call_id"] = message.tool_call_id
    if message.name:
        rendered["name"] = message.name
    return rendered


def _call(call: ParsedToolCall) -> dict[str, Any]:
    arguments = call.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.id or f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": text},
    }
