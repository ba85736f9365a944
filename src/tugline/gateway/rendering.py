"""Messages to token ids and back, for one model: a thin, typed face on the `renderers` library.

`first` renders a whole conversation; `bridge` continues exact ids by a tail of new messages, and
answers None when it cannot do so without touching what is already there (I1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from renderers import create_renderer
from renderers.base import ToolCallParseStatus
from renderers.configs import Qwen3RendererConfig

from tugline.errors import ConfigError
from tugline.tokenizer import Tokenizer
from tugline.types import Ids, Message, Role, Tool, ToolCall

_CONFIGS: dict[str, Any] = {"qwen3": Qwen3RendererConfig}


@dataclass(frozen=True, slots=True)
class Parsed:
    """An answer taken apart; a malformed tool call stays in `content` as it was written."""

    content: str
    reasoning: str | None
    calls: tuple[tuple[str, str], ...]
    """Name and JSON arguments of each well-formed call."""


@dataclass(frozen=True, slots=True)
class Markers:
    """Ids that open and close the parts of an answer; -1 where the vocabulary has none."""

    think: int
    think_end: int
    call: int
    call_end: int


class Rendering:
    """One model's template, bound to its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, renderer: str, *, thinking_retention: str) -> None:
        if renderer not in _CONFIGS:
            msg = f"renderer={renderer!r} is unknown; it must be one of {', '.join(_CONFIGS)}"
            raise ConfigError(msg)
        self.tokenizer = tokenizer
        self.thinking_retention = thinking_retention
        self._renderer: Any = create_renderer(
            tokenizer, _CONFIGS[renderer](thinking_retention=thinking_retention)
        )
        self.stop_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())
        self.markers = Markers(
            *(self._id(text) for text in ("<think>", "</think>", "<tool_call>", "</tool_call>"))
        )

    def first(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids:
        """Ids of the whole conversation, ready for the model's next turn."""
        ids = self._renderer.render_ids(
            [_plain(message) for message in messages],
            tools=_tools(tools),
            add_generation_prompt=True,
        )
        return np.asarray(ids, np.int32)

    def bridge(
        self, prompt: Ids, sampled: Ids, tail: Sequence[Message], tools: Sequence[Tool]
    ) -> Ids | None:
        """``prompt + sampled`` followed by the rendered tail; None if that cannot be had."""
        bridged = self._renderer.bridge_to_next_turn(
            prompt.tolist(), sampled.tolist(), [_plain(m) for m in tail], tools=_tools(tools)
        )
        if bridged is None:
            return None
        ids = np.asarray(bridged.token_ids, np.int32)
        kept = len(prompt) + len(sampled)
        exact = len(ids) > kept and np.array_equal(ids[:kept], np.concatenate((prompt, sampled)))
        return ids if exact else None

    def parse(self, sampled: Sequence[int], prompt: Ids | None = None) -> Parsed:
        """The final word on what an answer says."""
        tail = None if prompt is None else prompt[-64:].tolist()
        parsed = self._renderer.parse_response(list(sampled), prompt_ids=tail)
        content = str(parsed.content).strip()
        calls: list[tuple[str, str]] = []
        for call in parsed.tool_calls:
            if call.status is ToolCallParseStatus.OK and isinstance(call.name, str):
                calls.append((call.name, _arguments(call.arguments)))
            else:
                content = f"{content}\n<tool_call>\n{call.raw}".lstrip("\n")
        return Parsed(content, parsed.reasoning_content, tuple(calls))

    def _id(self, token: str) -> int:
        found = self.tokenizer.convert_tokens_to_ids(token)
        return -1 if found is None else found


def _arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def _plain(message: Message) -> dict[str, Any]:
    """The dictionary the renderer wants; `developer` is `system` to every template we know."""
    role = Role.SYSTEM if message.role is Role.DEVELOPER else message.role
    plain: dict[str, Any] = {"role": role.value, "content": message.content}
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        plain["reasoning_content"] = message.reasoning
    return plain


def _plain_call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except msgspec.DecodeError:
        arguments = call.arguments
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _tools(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """The function tools as the OpenAI API writes them, which is what templates expect."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
            },
        }
        for tool in tools
    ] or None
