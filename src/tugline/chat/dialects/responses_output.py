"""Answers as output items and response objects of the Responses API.

Item ids carry the answer's id and the item's place, so that an echo tells which turn it is of.
A call is told in the form its tool was declared in if that form gives back the very arguments the
model wrote (up to JSON spacing); otherwise as a plain function call, which the client answers with
an error that the model gets to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tugline.chat.dialects import openai
from tugline.chat.dialects.responses_input import SHELL_FIELDS, seal
from tugline.chat.request import Request
from tugline.chat.response import Response, Usage
from tugline.types import Finish, Tool, ToolCall, ToolKind

Item = dict[str, Any]
"""One output item, ready to be encoded."""

_encode = msgspec.json.Encoder().encode


class Echo(msgspec.Struct):
    """What an answer needs of its request: `Request.echo` in JSON."""

    fields: msgspec.Raw = msgspec.Raw(b"{}")
    """An object: what the response repeats."""
    sealed: bool = False
    """Whether reasoning is wanted as ``encrypted_content`` too."""
    compact: list[msgspec.Raw] | None = None
    """For ``/responses/compact``: the user's messages, to be kept; else None."""


_echo = msgspec.json.Decoder(Echo)


def echo_of(request: Request) -> Echo:
    """Read it back."""
    return _echo.decode(request.echo) if request.echo else Echo()


# --------------------------------------------------------------------------- items
class Items:
    """Makes the output items of one answer, in their order."""

    def __init__(self, response_id: str, tools: Sequence[Tool], *, sealed: bool) -> None:
        self._answer, self._sealed = response_id, sealed
        self._tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}

    def reasoning(self, place: int, text: str) -> Item:
        """A finished reasoning item."""
        summary = [{"type": "summary_text", "text": text}] if text else []
        item: Item = {"id": self._id("rs", place), "type": "reasoning", "summary": summary}
        if self._sealed:
            item["encrypted_content"] = seal(text)
        return item

    def message(self, place: int, text: str | None, status: str) -> Item:
        """A message; without `text` it has no content yet."""
        return {
            "id": self._id("msg", place),
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [] if text is None else [text_part(text)],
        }

    def call(self, place: int, call: ToolCall) -> Item:
        """A finished call, in the form its tool was declared in."""
        tool = self._tools.get(call.name)
        kind = tool.kind if tool is not None else ToolKind.FUNCTION
        item: Item = {"status": "completed", "call_id": call.id}
        if kind is ToolKind.LOCAL_SHELL and (action := _action(call)) is not None:
            item |= {"type": "local_shell_call", "id": self._id("lsh", place), "action": action}
            return item
        item["name"] = call.name
        if tool is not None and tool.namespace is not None:
            item["name"] = call.name.removeprefix(f"{tool.namespace}__")
            item["namespace"] = tool.namespace
        text = openai.free_text(call) if kind is ToolKind.CUSTOM else None
        if text is not None:
            return {**item, "type": "custom_tool_call", "id": self._id("ctc", place), "input": text}
        place_id = self._id("fc", place)
        return {**item, "type": "function_call", "id": place_id, "arguments": call.arguments}

    def all(self, answer: Response) -> list[Item]:
        """Reasoning, message and calls of a whole answer."""
        message, items = answer.message, list[Item]()
        if message.reasoning:
            items.append(self.reasoning(0, message.reasoning))
        if message.content or not message.tool_calls:
            status = "completed" if message.tool_calls else final(answer)
            items.append(self.message(len(items), message.content, status))
        for call in message.tool_calls:
            items.append(self.call(len(items), call))
        return items

    def _id(self, prefix: str, place: int) -> str:
        return f"{prefix}_{self._answer}_{place}"


def text_part(text: str) -> Item:
    """The content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def final(answer: Response) -> str:
    """Status of an answer, and of the item that it ends in."""
    return "completed" if answer.finish is Finish.STOP else "incomplete"


def _action(call: ToolCall) -> Item | None:
    try:
        found = msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(found, dict) or not found.keys() <= SHELL_FIELDS or not all(found.values()):
        return None
    command = found.get("command")
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        return None
    return {"type": "exec", "env": {}, **found}


# --------------------------------------------------------------------------- responses
def response(head: Item, fields: msgspec.Raw) -> msgspec.Raw:
    """A ``response`` object: what is known of the answer, then what repeats the request."""
    whole: Item = {
        "object": "response",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "previous_response_id": None,
        "usage": None,
        **head,
    }
    return msgspec.Raw(_encode(whole)[:-1] + b"," + bytes(fields)[1:])


def outcome(answer: Response, output: Sequence[Item]) -> Item:
    """What the response of a finished answer says of it."""
    status = final(answer)
    details = None if status == "completed" else {"reason": "max_output_tokens"}
    return {
        "id": f"resp_{answer.id}",
        "created_at": answer.created,
        "model": answer.model,
        "status": status,
        "incomplete_details": details,
        "output": output,
        "usage": usage(answer.usage),
    }


def compaction(answer: Response, kept: Sequence[msgspec.Raw]) -> bytes:
    """The reply of ``/responses/compact``: the user's words and the sealed summary."""
    summary = seal(answer.message.content or answer.message.reasoning or "")
    item = {"id": f"cmp_{answer.id}", "type": "compaction", "encrypted_content": summary}
    return _encode(
        {
            "id": f"resp_{answer.id}",
            "object": "response.compaction",
            "created_at": answer.created,
            "output": [*kept, item],
            "usage": usage(answer.usage),
        }
    )


def usage(counts: Usage) -> Item:
    """Token counts."""
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.reused, "cache_write_tokens": 0},
        "output_tokens": counts.sampled,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.sampled,
    }
